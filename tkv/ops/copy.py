"""copy_pages: copy-on-write within a cache, host offload between caches."""

from __future__ import annotations

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, UnsupportedError
from tkv.formats import KVFormat
from tkv.ops.checks import INTEGERS, check_cache, check_tensor, checks_on
from tkv.ops.launch import Launch, check_launchable, padded, paged_words
from tkv.ops.library import operator


@operator(mutates=("dst",))
def copy_pages(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Copy pages with their scales, bit for bit: ``dst[dst_pages[i]] = src[src_pages[i]]``.

    On one device it is a single launch and reads nothing back. Between devices the pages are gathered, moved and scattered, and the call
    waits for them.

    Args:
        src: where from.
        dst: where to; the same cache for copy-on-write, or one of the same format, page_size, heads and head_dim, also on another device.
            Static scales are not copied: they must be the same.
        src_pages: ``[num_pairs]`` int32 or int64, on src's device.
        dst_pages: ``[num_pairs]`` int32 or int64, on dst's device. A pair with a page outside of its cache, such as -1, is skipped. A page
            that is written must not be read or written by another pair.

    Raises:
        ShapeError, DTypeError, DeviceError: the named argument does not fit.
        UnsupportedError: the caches are not of the same format and page geometry.
        RangeError: under ``TKV_CHECK=1``: a page is out of range, or written and named again.

    Example:
        >>> cache = KVCache(torch.arange(3.0)[:, None, None, None].repeat(1, 4, 1, 16), torch.zeros(3, 4, 1, 16))
        >>> copy_pages(cache, cache, torch.tensor([2]), torch.tensor([0]))
        >>> cache.k[:, 0, 0, 0].tolist()
        [2.0, 1.0, 2.0]
    """
    check_cache(src, "src")
    check_cache(dst, "dst")
    ours, theirs = _geometry(src), _geometry(dst)
    for name, value in theirs.items():
        if value != ours[name]:
            raise UnsupportedError(f"dst: expected the {name} of src, {ours[name]}, got {value}")
    check_tensor("src_pages", src_pages, ("num_pairs",), INTEGERS, src.device, contiguous_last=False)
    check_tensor("dst_pages", dst_pages, (src_pages.shape[0],), INTEGERS, dst.device, contiguous_last=False)
    if checks_on():
        check_pairs(src, dst, src_pages, dst_pages)
    if not src_pages.shape[0]:
        return
    if src.device == dst.device:
        check_launchable(src.device)
        plan_copy(src, dst, src_pages, dst_pages).run(src.device)
    else:
        _move(src, dst, src_pages, dst_pages)


def plan_copy(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> Launch:
    """The launch behind `copy_pages` on one device."""
    from tkv.kernels.copy import copy_kernel

    k, v = src.words
    block_d = padded(max(k.shape[3], v.shape[3]))
    scales = [scale_words(scale, kind) for scale, kind in zip(src.scale_words, (src.k_format, src.v_format))]
    block_s = padded(max(*scales, 1))
    block_r = max(1, 2048 // max(block_d, block_s))
    return Launch(
        copy_kernel,
        (src_pages.shape[0], -(-src.page_size * src.num_kv_heads // block_r)),
        (paged_words(src), paged_words(dst), src_pages, dst_pages, src_pages.stride(0), dst_pages.stride(0))
        + (src.num_pages, dst.num_pages, src.num_kv_heads, src.page_size, k.shape[3], v.shape[3], block_r, block_d)
        + (*scales, block_s, src.k_format.scale == "page_channel", not src.v_is_k),
        num_warps=4,
        num_stages=1,
    )


def scale_words(scale: torch.Tensor | None, kind: KVFormat) -> int:
    """Words of scales that belong to a row: a head of a token, or of a page."""
    if scale is None or not kind.is_dynamic:
        return 0
    return 1 if kind.scale == "token_head" else scale.shape[-1]


def _geometry(cache: KVCache) -> dict[str, object]:
    return {
        "format": f"{cache.k_format} and {cache.v_format}",
        "page_size": cache.page_size,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": (cache.head_dim, cache.v_head_dim),
    }


def _move(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Between devices, through one buffer a tensor; pinned where a GPU is to read it."""
    host_src, host_dst = src_pages.cpu().long(), dst_pages.cpu().long()
    exist = (host_src >= 0) & (host_src < src.num_pages) & (host_dst >= 0) & (host_dst < dst.num_pages)
    take, put = host_src[exist].to(src.device), host_dst[exist].to(dst.device)
    pairs = [*zip(src.words, dst.words, strict=True)]
    dynamic = ((src.k_format, src.k_scale, dst.k_scale), (src.v_format, src.v_scale, dst.v_scale))
    pairs += [(a, b) for kind, a, b in dynamic if kind.is_dynamic and a is not None and b is not None]
    for a, b in pairs:
        pages = a[take]
        if dst.device.type == "cuda" and pages.device.type == "cpu":
            pages = pages.pin_memory()
        b[put] = pages.to(dst.device)


def check_pairs(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    for name, pages, cache in (("src_pages", src_pages, src), ("dst_pages", dst_pages, dst)):
        wrong = (pages < -1) | (pages >= cache.num_pages)
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            raise RangeError(f"{name}: expected pages from -1 to {cache.num_pages - 1}, got {int(pages[index])} at [{index}]")
    read, written = src_pages.cpu(), dst_pages.cpu()
    both = (read >= 0) & (written >= 0)
    read, written = read[both], written[both]
    if written.unique().numel() < written.numel():
        raise RangeError("dst_pages: expected every page at most once")
    if src.k.data_ptr() == dst.k.data_ptr() and bool(torch.isin(written, read).any()):
        raise RangeError("dst_pages: expected no page that src_pages names too")
