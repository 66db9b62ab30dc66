"""Depths of the new tokens of a tree."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "q_len"])
def depth_kernel(mask_ptr, depth_ptr, cu_seqlens_ptr, strides, depth_stride, num_tokens, q_len, BLOCK: tl.constexpr):
    """One program: how many tokens one new token of a sequence sees in its tree, itself left out."""
    seq = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = tl.program_id(0) % num_tokens
    if cu_seqlens_ptr is not None:
        q_len = (tl.load(cu_seqlens_ptr + seq + 1) - tl.load(cu_seqlens_ptr + seq)).to(tl.int32)
    seen = tl.full([], -1, tl.int32)
    if token < q_len:
        row = mask_ptr + seq * strides.seq + token.to(tl.int64) * strides.row
        for first in range(0, tl.minimum(q_len, num_tokens), BLOCK):
            others = first + tl.arange(0, BLOCK)
            seen += tl.sum((tl.load(row + others, mask=others < tl.minimum(q_len, num_tokens), other=0) != 0).to(tl.int32), axis=0)
    tl.store(depth_ptr + seq * depth_stride + token, seen)
