"""How numbers go into a cache and come out of it."""

from __future__ import annotations

import numpy
import torch

from tkv.cache import KVCache
from tkv.formats import KVFormat
from tkv.reference.rope import rotate
from tkv.rope import Rope

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
LARGEST_HALF = 65504.0


def encode(x: torch.Tensor, kind: KVFormat, scale: torch.Tensor | float | None = None) -> torch.Tensor:
    """Numbers as they are stored.

    Args:
        x: float32 ``[..., heads, head_dim]``; of ``page_channel`` formats ``[..., page_size, heads, head_dim]``.
        kind: the format; native ones are a cast.
        scale: static, or what `scales_of` gives; None for native formats, and for numbers in units of their scale.

    Returns:
        A tensor of the format's dtype: ``x / scale`` or ``(x - minimum) / scale`` rounded to nearest even and saturated; NaN stays NaN in
        fp8 and is taken for 0 in integers. int4 has two numbers a byte.

    Example:
        >>> encode(torch.tensor([0.5, 1e6, -2.5]), KVFormat.parse("int8/token_head")).tolist()
        [0, 127, -2]
    """
    if kind.is_native:
        return x.to(kind.torch_dtype)
    if not kind.dtype.startswith("fp8"):
        x = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    step, minimum = _of_dims(scale, kind)
    step = torch.where(step > 0, step, 1.0)
    if not kind.is_asymmetric:
        x = (x / step).clamp(-LARGEST[kind.dtype], LARGEST[kind.dtype])
        return (x.round() if kind.dtype == "int8" else x).to(kind.torch_dtype)
    largest = 15 if kind.dtype == "int4" else 255
    codes = ((x - minimum) / step).clamp(0, largest).round().to(torch.int16)
    return pack_nibbles(codes) if kind.dtype == "int4" else (codes - 128).to(torch.int8)


def scales_of(x: torch.Tensor, kind: KVFormat) -> torch.Tensor:
    """The dynamic scales of new keys or values, over their finite numbers.

    Args:
        x: ``[..., heads, head_dim]``; of ``page_channel`` formats ``[..., page_size, heads, head_dim]``, whole pages.
        kind: a format with dynamic scales.

    Returns:
        Scales in the dtype of the format. Symmetric ones are the largest magnitude over the largest code: ``[..., heads]``, of groups
        ``[..., heads, head_dim / group_size]``. Asymmetric ones have the minimum beside them in a last dimension of 2, and the scale
        is the range over 15 or 255: of pages ``[..., heads, head_dim, 2]``.

    Example:
        >>> scales_of(torch.tensor([[[254.0, -1.0, torch.inf]]]), KVFormat.parse("int8/token_head"))
        tensor([[2.]])
        >>> scales_of(torch.tensor([[-1.0, 29.0]]), KVFormat.parse("int4/token_head"))
        tensor([[ 2., -1.]], dtype=torch.float16)
    """
    x = x.float()
    axis = -1
    if kind.group_size:
        x = x.unflatten(-1, (-1, kind.group_size))
    elif kind.scale == "page_channel":
        axis = -3
    finite = x.isfinite()
    if not kind.is_asymmetric:
        scale = x.abs().where(finite, 0.0).amax(axis) / LARGEST[kind.dtype]
        # 127 times a larger one would be infinite in float16.
        return scale.clamp_max(515.5).half() if kind.is_rounded else scale
    some = finite.any(axis)
    low = x.where(finite, torch.inf).amin(axis).where(some, 0.0).clamp(-LARGEST_HALF, LARGEST_HALF)
    high = x.where(finite, -torch.inf).amax(axis).where(some, 0.0).clamp(-LARGEST_HALF, LARGEST_HALF)
    largest = 15.0 if kind.dtype == "int4" else 255.0
    minimum, step = low.half(), ((high - low) / largest).half()
    # One step of float16 less where the largest code would decode to infinity.
    below = (step.view(torch.int16) - 1).view(torch.float16)
    step = torch.where(step.float() * largest + minimum.float() >= 65520.0, below, step)
    return torch.stack([step, minimum], dim=-1)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int4 codes ``[..., head_dim]`` as bytes ``[..., head_dim / 2]``: dims of the four quarters in a little-endian 16-bit word.

    Example:
        >>> pack_nibbles(torch.arange(8, dtype=torch.int16)).tolist()              # word 0 has dims 0, 2, 4, 6
        [32, 100, 49, 117]
    """
    first, second, third, fourth = codes.to(torch.uint8).chunk(4, -1)
    return torch.stack([first | second << 4, third | fourth << 4], dim=-1).flatten(-2)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """The codes of `pack_nibbles`.

    Example:
        >>> unpack_nibbles(torch.tensor([32, 100, 49, 117], dtype=torch.uint8)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    low, high = data[..., 0::2], data[..., 1::2]
    return torch.cat([low & 15, low >> 4, high & 15, high >> 4], dim=-1)


def _of_dims(scale: torch.Tensor | float | None, kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) in their own dtypes, in shapes that broadcast to ``[..., heads, head_dim]``."""
    scale = torch.as_tensor(1.0 if scale is None else scale)
    if scale.dim() == 0:
        return scale, scale * 0
    step, minimum = scale.unbind(-1) if kind.is_asymmetric else (scale, scale * 0)
    if kind.scale in ("head", "token_head"):
        return step.unsqueeze(-1), minimum.unsqueeze(-1)
    if kind.group_size:
        return step.repeat_interleave(kind.group_size, -1), minimum.repeat_interleave(kind.group_size, -1)
    if kind.scale == "page_channel":
        return step.unsqueeze(-3), minimum.unsqueeze(-3)
    return step, minimum


def dequantize(data: torch.Tensor, scale: torch.Tensor | None, kind: KVFormat) -> torch.Tensor:
    """Stored numbers in float64.

    Args:
        data: ``[..., heads, stored dim]`` as stored; of ``page_channel`` formats ``[..., page_size, heads, stored dim]``.
        scale: what goes with it, as `scales_of` gives it, or static; None for native formats.
        kind: the format.

    Returns:
        float64 ``[..., heads, head_dim]``: ``code * scale + minimum``, of groups and channels rounded to float16.

    Example:
        >>> dequantize(torch.tensor([[[2, 4]]], dtype=torch.int8), torch.tensor([[0.5]]), KVFormat.parse("int8/token_head")).tolist()
        [[[1.0, 2.0]]]
    """
    if kind.is_native:
        return data.double()
    codes = unpack_nibbles(data).double() if kind.dtype == "int4" else data.to(torch.float32).double()
    if kind.dtype == "int8" and kind.is_asymmetric:
        codes = codes + 128
    step, minimum = _of_dims(scale, kind)
    numbers = codes * step.double() + minimum.double()
    if not kind.is_rounded:
        return numbers
    # torch would round to float32 before, NumPy rounds once.
    return torch.from_numpy(numbers.cpu().numpy().astype(numpy.float16)).to(data.device).double()


def write_kv(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor, *, rope: Rope | None = None,
    positions: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Store new keys and values in their slots, as :func:`tkv.write_kv`.

    Args:
        k, v, cache, slot_mapping, rope, positions: as there.

    Example:
        >>> cache = KVCache.empty(1, 4, 1, 16, format="fp32")
        >>> write_kv(torch.ones(2, 1, 16), torch.ones(2, 1, 16), cache, torch.tensor([3, -1]))
        >>> cache.k[0, 3].sum().item()
        16.0
    """
    if rope is not None and positions is not None:
        k = rotate(k, positions.clamp_min(0), rope)
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < cache.num_slots:
            _store(k[token], v[token], cache, divmod(slot, cache.page_size))


def quantize_pages(src: KVCache, dst: KVCache, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """Store whole native pages in another format, as :func:`tkv.quantize_pages`.

    Args:
        src, dst, src_pages, dst_pages: as there.

    Example:
        >>> src, dst = KVCache(torch.ones(1, 4, 1, 16), torch.ones(1, 4, 1, 16)), KVCache.empty(2, 4, 1, 16, format="int8/token_head")
        >>> quantize_pages(src, dst, torch.tensor([0]), torch.tensor([1]))
        >>> dst.k[1].unique().tolist()
        [127]
    """
    for old, new in zip(src_pages.tolist(), dst_pages.tolist()):
        if 0 <= old < src.num_pages and 0 <= new < dst.num_pages:
            _store(src.k[old], src.v[old], dst, new)


def _store(k: torch.Tensor, v: torch.Tensor, cache: KVCache, where: int | tuple[int, int]) -> None:
    parts = [(k, cache.k, cache.k_scale, cache.k_format), (v, cache.v, cache.v_scale, cache.v_format)]
    for x, data, scale, kind in parts[: 1 if cache.v_is_k else 2]:
        x = x.float()
        if kind.is_dynamic and scale is not None:
            scale[where] = scales_of(x, kind)
            scale = scale[where]
        data[where] = encode(x, kind, scale)


def gather(cache: KVCache, pages: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence in float64.

    Args:
        cache: the cache.
        pages: the sequence's row of the page table.
        keys: ``[num_keys]``, which logical keys.

    Returns:
        k ``[num_keys, num_kv_heads, head_dim]`` and v.

    Example:
        >>> k = torch.arange(8.0)[:, None, None, None].repeat(1, 2, 1, 16)
        >>> cache = KVCache(k, torch.zeros(8, 2, 1, 16))
        >>> gather(cache, torch.tensor([7, 3]), torch.arange(3))[0][:, 0, 0].tolist()
        [7.0, 7.0, 3.0]
    """
    page, row = pages[keys // cache.page_size].long(), keys % cache.page_size

    def read(data: torch.Tensor, scale: torch.Tensor | None, kind: KVFormat) -> torch.Tensor:
        if scale is None or not kind.is_dynamic:
            return dequantize(data[page, row], scale, kind)
        if kind.scale == "page_channel":
            return dequantize(data[page, row][:, None], scale[page], kind)[:, 0]
        return dequantize(data[page, row], scale[page, row], kind)

    return read(cache.k, cache.k_scale, cache.k_format), read(cache.v, cache.v_scale, cache.v_format)


def gather_window(
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int | None,
    sinks: int = 0,
    kv_start: torch.Tensor | None = None,
    pinned: int = 0,
    rope: Rope | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What is kept of each sequence, as :func:`tkv.gather_window`.

    Args:
        cache, page_table, seq_lens, window, sinks, kv_start, pinned, rope: as there.

    Returns:
        Of each sequence k ``[num_kept, num_kv_heads, head_dim]`` and v in float64, and positions ``[num_kept]``.

    Example:
        >>> cache = KVCache(torch.zeros(2, 4, 1, 16), torch.ones(2, 4, 1, 16))
        >>> [(k, v, positions)] = gather_window(cache, torch.tensor([[1, 0]]), torch.tensor([7]), window=2, sinks=1)
        >>> v.shape, positions.tolist()
        (torch.Size([3, 1, 16]), [0, 5, 6])
    """
    kept = []
    for seq, length in enumerate(seq_lens.clamp(0, page_table.shape[1] * cache.page_size).tolist()):
        keys = torch.arange(length, device=page_table.device)
        positions = keys + (0 if kv_start is None else int(kv_start[seq]) * (keys >= pinned))
        if window is not None and length:
            keep = (positions[-1] - positions < window) | (positions < sinks)
            keys, positions = keys[keep], positions[keep]
        k, v = gather(cache, page_table[seq], keys)
        if rope is not None:
            k = rotate(k, positions if window is None else torch.arange(len(keys), device=keys.device), rope)
        kept.append((k, v, positions))
    return kept
