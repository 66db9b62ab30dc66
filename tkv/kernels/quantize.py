"""Turn whole pages of a native cache into pages of a quantised one."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.paging import load_pair, offsets_of
from tkv.kernels.tiles.store import encode_piece, least_finite, pair_of_range, store_scales, write_rows


@triton.jit(do_not_specialize=["src_num_pages", "dst_num_pages"])
def quantize_kernel(
    src, dst, src_pages_ptr, dst_pages_ptr,
    src_pages_stride, dst_pages_stride,
    src_num_pages, dst_num_pages, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    WITH_K: tl.constexpr, WITH_V: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows, each a head of a token, of K and V of one pair of pages. A pair with a page outside is skipped."""
    src_page, dst_page, exists = load_pair(
        src_pages_ptr, dst_pages_ptr, src_pages_stride, dst_pages_stride, src_num_pages, dst_num_pages
    )
    if not exists:
        return
    rows = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    mask = tokens < PAGE_SIZE
    if WITH_K:
        k_rows = src.k.ptr + (offsets_of(src_page, tokens, src.k.strides) + heads * src.k.strides.head)
        write_rows(k_rows, dst.k, heads, dst_page, tokens, mask, tokens, None, K, False, None, TARGET)
    if WITH_V:
        v_rows = src.v.ptr + (offsets_of(src_page, tokens, src.v.strides) + heads * src.v.strides.head)
        write_rows(v_rows, dst.v, heads, dst_page, tokens, mask, tokens, None, V, False, None, TARGET)


@triton.jit(do_not_specialize=["src_num_pages", "dst_num_pages"])
def quantize_channels_kernel(
    src, dst, src_pages_ptr, dst_pages_ptr,
    src_pages_stride, dst_pages_stride,
    src_num_pages, dst_num_pages,
    PAGE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_W stored elements of every token of one pair of pages and KV head, with a scale and a minimum a channel."""
    PLANES: tl.constexpr = K.PLANES
    src_page, dst_page, exists = load_pair(
        src_pages_ptr, dst_pages_ptr, src_pages_stride, dst_pages_stride, src_num_pages, dst_num_pages
    )
    if not exists:
        return
    head = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_row = words < K.DIM // K.PLANES
    src_ptr = src.ptr + (src_page * src.strides.page + head * src.strides.head)
    lows = ()
    for _ in tl.static_range(PLANES):
        lows = lows + (tl.full([BLOCK_W], float("inf"), tl.float32),)
    negated_highs = lows
    for block in range(PAGE_SIZE // BLOCK_T):
        tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
        new_lows = ()
        new_highs = ()
        for plane in tl.static_range(PLANES):
            x, in_tile = load_channels(src_ptr, tokens, words, in_row, src.strides, plane, K)
            new_lows = new_lows + (tl.minimum(lows[plane], least_finite(x, in_tile, 0)),)
            new_highs = new_highs + (tl.minimum(negated_highs[plane], least_finite(-x, in_tile, 0)),)
        lows = new_lows
        negated_highs = new_highs
    scale_ptr = dst.scale_ptr + (dst_page * dst.scale_strides.page + head * dst.scale_strides.head)
    scales = ()
    minima = ()
    for plane in tl.static_range(PLANES):
        scale, minimum = pair_of_range(lows[plane], negated_highs[plane], K)
        store_scales(scale_ptr + (plane * (K.DIM // K.PLANES) + words), scale, minimum, in_row, K)
        scales = scales + (scale,)
        minima = minima + (minimum,)
    dst_ptr = dst.ptr + (dst_page * dst.strides.page + head * dst.strides.head)
    for block in range(PAGE_SIZE // BLOCK_T):
        tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
        codes = ()
        for plane in tl.static_range(PLANES):
            x, in_tile = load_channels(src_ptr, tokens, words, in_row, src.strides, plane, K)
            codes = codes + (encode_piece(x, scales[plane][None, :], minima[plane][None, :], K),)
        offsets = (tokens.to(tl.int64) * dst.strides.token)[:, None] + words[None, :]
        tl.store(dst_ptr + offsets, codec.pack(codes, K), mask=(tokens < PAGE_SIZE)[:, None] & in_row[None, :])


@triton.jit
def load_channels(src_ptr, tokens, words, in_row, strides, PLANE: tl.constexpr, K: tl.constexpr):
    """(a plane of native keys in float32, [BLOCK_T, BLOCK_W], which of it exists)."""
    offsets = (tokens.to(tl.int64) * strides.token)[:, None] + (PLANE * (K.DIM // K.PLANES) + words)[None, :]
    exists = (tokens >= 0)[:, None] & in_row[None, :]
    return tl.load(src_ptr + offsets, mask=exists, other=0.0).to(tl.float32), exists
