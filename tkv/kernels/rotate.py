"""Turn cached keys to other positions."""

import triton
import triton.language as tl

from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.paging import offsets_of
from tkv.kernels.tiles.rope import load_angles, load_rotated


@triton.jit(do_not_specialize=["table_stride", "num_pages", "table_width", "num_positions"])
def rotate_kernel(
    stored, page_table_ptr, lens_ptr, old_ptr, new_ptr, rope,
    old_strides, new_strides, table_stride,
    num_pages, table_width, num_positions, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of one sequence, each a head of a key."""
    seq = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    keys = rows // num_kv_heads
    heads = rows % num_kv_heads
    num_keys = tl.minimum(tl.minimum(tl.load(lens_ptr + seq), num_positions), table_width * PAGE_SIZE)
    mask = keys < num_keys
    old = tl.load(old_ptr + seq * old_strides.token + keys * old_strides.head, mask=mask, other=0).to(tl.int64)
    new = tl.load(new_ptr + seq * new_strides.token + keys * new_strides.head, mask=mask, other=0).to(tl.int64)
    turns = tl.minimum(tl.maximum(new - old, -1073741824), 1073741824).to(tl.int32)
    mask = mask & (turns != 0)
    pages = tl.load(page_table_ptr + seq * table_stride + keys // PAGE_SIZE, mask=mask, other=-1).to(tl.int64)
    mask = mask & (pages >= 0) & (pages < num_pages)
    k_rows = stored.ptr + (offsets_of(pages, keys % PAGE_SIZE, stored.strides) + heads * stored.strides.head)
    dims = tl.arange(0, BLOCK_D)
    in_row = dims < ROPE.DIM
    turned = load_rotated(k_rows, dims, mask, in_row, turns, rope, True, ROPE)
    # A factor on the tables is in the keys already.
    factor, _ = load_angles(rope, dims[None, :], (turns * 0)[:, None], ROPE)
    turned = turned / factor
    # Both numbers of a pair have to be read before either is written.
    tl.debug_barrier()
    tl.store(k_rows[:, None] + dims[None, :], round_to(turned, stored.ptr.dtype.element_ty, TARGET), mask=mask[:, None] & in_row[None, :])
