"""quantize_pages: whole pages from a native cache into a quantised one."""

from __future__ import annotations

import torch

from tkv.cache import KVCache
from tkv.errors import DeviceError, UnsupportedError
from tkv.ops.checks import INTEGERS, check_cache, check_tensor, check_writable, checks_on
from tkv.ops.copy import check_pairs
from tkv.ops.launch import (
    Launch,
    arch_name,
    check_launchable,
    interpreting,
    padded,
    paged_bytes,
    row_storages,
    target_for,
)
from tkv.ops.library import operator


@operator(mutates=("dst",))
def quantize_pages(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Store whole pages of a native cache in another format: ``dst[dst_pages[i]] = encode(src[src_pages[i]])``.

    What `write_kv` does to the tokens of a page, and the only way to fill a cache whose keys are ``page_channel``: there a channel d of a
    page and head has ``minimum = min over the page's tokens``, ``scale = (max - minimum) / largest code``, both rounded to float16 over
    finite numbers, and codes ``round((x - minimum) / scale)`` (KIVI's keys). All tokens of a page count, so it should be full.

    Args:
        src: a native cache (fp32, fp16, bf16).
        dst: a cache of any format on the same device, with src's page_size, heads and head_dims.
        src_pages: ``[num_pairs]`` int32 or int64.
        dst_pages: ``[num_pairs]`` int32 or int64. A pair with a page outside of its cache, such as -1, is skipped. No page may be written
            twice.

    Raises:
        ShapeError, DTypeError, DeviceError: the named argument does not fit.
        UnsupportedError: src is quantised, or the page geometries differ.
        RangeError: under ``TKV_CHECK=1``: a page is out of range, or written twice.

    Example:
        >>> native = KVCache(torch.arange(64.0).view(1, 32, 1, 2).repeat(2, 1, 1, 16), torch.ones(2, 32, 1, 32))
        >>> cache = KVCache.empty(4, 32, 1, 32, format=("int4/page_channel", "int4/group32"))
        >>> quantize_pages(native, cache, torch.tensor([0]), torch.tensor([3]))
        >>> scale, minimum = cache.k_scale[3, 0, 1].tolist()              # channel 1 goes from 1 to 63
        >>> round(scale, 2), minimum
        (4.13, 1.0)
    """
    check_cache(src, "src")
    check_cache(dst, "dst")
    if not src.is_native:
        raise UnsupportedError(f"src: expected a native cache, got {src.k_format} and {src.v_format}; pages are quantised once")
    for name in ("page_size", "num_kv_heads", "head_dim", "v_head_dim"):
        if getattr(src, name) != getattr(dst, name):
            raise UnsupportedError(f"dst: expected the {name} of src, {getattr(src, name)}, got {getattr(dst, name)}")
    if src.device != dst.device:
        raise DeviceError(f"dst: expected the device of src, {src.device}, got {dst.device}")
    check_writable(dst, "dst")
    check_tensor("src_pages", src_pages, ("num_pairs",), INTEGERS, src.device, contiguous_last=False)
    check_tensor("dst_pages", dst_pages, (src_pages.shape[0],), INTEGERS, dst.device, contiguous_last=False)
    check_launchable(src.device)
    if checks_on():
        check_pairs(src, dst, src_pages, dst_pages)
    if src_pages.shape[0]:
        for launch in plan_quantize(src, dst, src_pages, dst_pages, arch_name(src.device), interpreting()):
            launch.run(src.device)


def plan_quantize(
    src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor, arch: str, interpret: bool = False
) -> list[Launch]:
    """The launches behind `quantize_pages`: rows, and channels where keys have scales of pages."""
    from tkv.kernels.quantize import quantize_channels_kernel, quantize_kernel

    block_r = max(1, 1024 // padded(max(src.head_dim, src.v_head_dim)))
    k, v = row_storages(dst)
    by_page = dst.k_format.scale == "page_channel"
    source, target = paged_bytes(src), paged_bytes(dst)
    pairs = (src_pages, dst_pages, src_pages.stride(0), dst_pages.stride(0), src.num_pages, dst.num_pages)
    launches = [
        Launch(
            quantize_kernel,
            (src_pages.shape[0], -(-src.page_size * src.num_kv_heads // block_r)),
            (source, target, *pairs, src.num_kv_heads, src.page_size, block_r)
            + (not by_page, not dst.v_is_k, k, v, target_for(arch, interpret)),
            num_warps=4,
            num_stages=1,
        )
    ]
    if by_page:
        # 16 numbers a thread.
        block_w = 64 // k.PLANES
        launches.append(
            Launch(
                quantize_channels_kernel,
                (src_pages.shape[0], src.num_kv_heads, -(-src.head_dim // k.PLANES // block_w)),
                (source.k, target.k, *pairs, src.page_size, min(32, src.page_size), block_w, k),
                num_warps=4,
                num_stages=1,
            )
        )
    return launches
