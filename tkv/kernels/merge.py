"""Merge partial results of attention over disjoint keys."""

import triton
import triton.language as tl

from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.softmax import merge_step


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    outs_strides, lses_strides,
    num_parts,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: the parts of one row. out and lse are contiguous, [rows, DIM] and [rows]."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < DIM
    outs_row = outs_ptr + row * outs_strides.row
    lses_row = lses_ptr + row * lses_strides.row
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        parts = (first + tl.arange(0, BLOCK_PARTS)).to(tl.int64)
        lse = tl.load(lses_row + parts * lses_strides.part, mask=parts < num_parts, other=-float("inf"))
        best, total, acc = merge_step(outs_row + (parts[:, None] * outs_strides.part + dims[None, :]), in_dims, lse, best, total, acc)

    safe_total = tl.where(total != 0, total, 1.0)
    tl.store(out_ptr + row * DIM + dims, round_to(acc / safe_total, out_ptr.dtype.element_ty, TARGET), mask=in_dims)
    tl.store(lse_ptr + row, tl.where(total != 0, best + tl.log(safe_total), -float("inf")))
