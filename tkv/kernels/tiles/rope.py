"""Rotary position embedding: what a dim is multiplied with, and its partner in the pair.

A *turn* is how many positions a vector is rotated by; a negative one rotates backwards. Rows of the tables are found by its magnitude, and
those past the last row are the last row.
"""

import triton
import triton.language as tl


@triton.jit
def partner_of(dims, ROPE: tl.constexpr):
    """The other dim of each dim's pair; of a dim that is not rotated itself."""
    if ROPE.INTERLEAVED:
        partners = dims ^ 1
    else:
        HALF: tl.constexpr = ROPE.DIM // 2
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    return tl.where(dims < ROPE.DIM, partners, dims)


@triton.jit
def load_angles(tables, dims, turns, ROPE: tl.constexpr):
    """(cos, sin), float32, in the shape that dims and turns, int32, broadcast to: a rotated vector is ``x * cos + partner * sin``."""
    if ROPE.INTERLEAVED:
        pairs = dims // 2
        is_first = dims % 2 == 0
    else:
        pairs = dims % (ROPE.DIM // 2)
        is_first = dims < ROPE.DIM // 2
    rows = tl.minimum(tl.abs(turns), tables.num_rows - 1).to(tl.int64)
    rotated = (dims < ROPE.DIM) & (rows >= 0)
    cos = tl.load(tables.cos_ptr + (rows * tables.cos_stride + pairs), mask=rotated, other=1.0)
    sin = tl.load(tables.sin_ptr + (rows * tables.sin_stride + pairs), mask=rotated, other=0.0)
    return cos, tl.where(is_first == (turns >= 0), -sin, sin)


@triton.jit
def load_rotated(row_ptrs, dims, mask, in_row, turns, rope, ROTATED: tl.constexpr, ROPE: tl.constexpr):
    """Some dims of rows, [rows, dims] float32, if ROTATED by `turns`; `row_ptrs`, `mask` and `turns` are those of rows."""
    x = tl.load(row_ptrs[:, None] + dims[None, :], mask=mask[:, None] & in_row[None, :], other=0.0).to(tl.float32)
    if ROTATED:
        in_pair = mask[:, None] & (in_row & (dims < ROPE.DIM))[None, :]
        partner = tl.load(row_ptrs[:, None] + partner_of(dims, ROPE)[None, :], mask=in_pair, other=0.0).to(tl.float32)
        cos, sin = load_angles(rope, dims[None, :], turns[:, None], ROPE)
        x = x * cos + partner * sin
    return x
