"""Merge partial results of attention over disjoint keys."""

import triton
import triton.language as tl

from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.rows import between
from tkv.kernels.tiles.softmax import add_sink, merge_step


@triton.jit(do_not_specialize=["part_stride", "part_lse_stride", "num_parts", "max_q_len", "num_rows"])
def merge_kernel(
    parts, cu_seqlens_ptr, sink_logits_ptr, results,
    part_stride, part_lse_stride, num_parts, num_heads, max_q_len, num_rows,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: the parts of one query row and head. Of ragged rows, sequences of more than `max_q_len` have no parts."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    row = (tl.program_id(0) // num_heads % max_q_len).to(tl.int64)
    seq = (tl.program_id(0) // num_heads // max_q_len).to(tl.int64)
    out_row = row
    if cu_seqlens_ptr is not None:
        first, q_len = between(tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1), num_rows)
        if (row >= q_len) | (q_len > max_q_len):
            return
        out_row = first + row

    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < DIM
    part_row = parts.out_ptr + seq * parts.out_strides.seq + row * parts.out_strides.row + head * parts.out_strides.head
    part_lse_row = parts.lse_ptr + seq * parts.lse_strides.seq + row * parts.lse_strides.row + head * parts.lse_strides.head
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first_part in range(0, num_parts, BLOCK_PARTS):
        indices = (first_part + tl.arange(0, BLOCK_PARTS)).to(tl.int64)
        lse = tl.load(part_lse_row + indices * part_lse_stride, mask=indices < num_parts, other=-float("inf"))
        outs = part_row + ((indices * part_stride)[:, None] + dims[None, :])
        best, total, acc = merge_step(outs, in_dims, lse, best, total, acc)

    safe_total = tl.where(total != 0, total, 1.0)
    lse = tl.where(total != 0, best + tl.log(safe_total), -float("inf"))
    out = acc / safe_total
    if sink_logits_ptr is not None:
        lse, shrink = add_sink(lse, tl.load(sink_logits_ptr + head).to(tl.float32))
        out = out * shrink
    strides = results.out_strides
    out_ptrs = results.out_ptr + seq * strides.seq + out_row * strides.row + head * strides.head + dims
    tl.store(out_ptrs, round_to(out, results.out_ptr.dtype.element_ty, TARGET), mask=in_dims)
    if results.lse_ptr is not None:
        strides = results.lse_strides
        tl.store(results.lse_ptr + seq * strides.seq + out_row * strides.row + head * strides.head, lse)
