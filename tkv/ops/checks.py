"""Checks that the ops share. A message names the argument, what came and what is needed."""

from __future__ import annotations

import os
from numbers import Integral, Real

import torch

from tkv.cache import KVCache
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.rope import Rope

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_POSITION = 2**30


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *,
    contiguous_last: bool = True,
) -> torch.Tensor:
    """A tensor of that shape (a string stands for any size, and names it), one of the dtypes, and on the device."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(shape) or any(
        isinstance(want, int) and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        raise ShapeError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise DTypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise DeviceError(f"{name}: expected device {device}, as its partners, got {tensor.device}")
    if contiguous_last and shape and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ShapeError(f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}; call .contiguous()")
    return tensor


def check_cache(cache: object, name: str = "cache") -> KVCache:
    """A KVCache."""
    if not isinstance(cache, KVCache):
        raise DTypeError(f"{name}: expected a tkv.KVCache, got {type(cache).__name__}")
    if checks_on():
        for side, kind, scale in (("k", cache.k_format, cache.k_scale), ("v", cache.v_format, cache.v_scale)):
            if kind.is_static and scale is not None and not bool(((scale >= 1e-30) & (scale <= 1e30)).all()):
                raise RangeError(f"{name}.{side}_scale: expected positive numbers from 1e-30 to 1e30, got {scale.flatten()[:8].tolist()}")
    return cache


def check_writable(cache: KVCache, name: str = "cache") -> None:
    """K and V have memory of their own, or are one."""
    if cache.shares_memory and not cache.v_is_k:
        raise UnsupportedError(f"{name}: v is a view of k with scales of its own, and only one of the two can be stored; share the scales")


def check_rope(rope: object, cache: KVCache) -> Rope:
    """The tables of a rotation that the cache's keys can take."""
    if not isinstance(rope, Rope):
        raise DTypeError(f"rope: expected a tkv.Rope, got {type(rope).__name__}")
    if rope.rotary_dim > cache.head_dim:
        raise ShapeError(f"rope: expected tables for at most head_dim ({cache.head_dim}) dims, got rotary_dim {rope.rotary_dim}")
    if rope.cos.device != cache.device:
        raise DeviceError(f"rope: expected tables on {cache.device}, the cache's device, got {rope.cos.device}")
    return rope


def check_int(name: str, value: object, low: int) -> int:
    """A Python int of at least `low`; more than any position is cut to the largest, which means the same."""
    # Asking for an abstract class takes a microsecond.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise DTypeError(f"{name}: expected an int, got {value!r}")
    if value < low:
        raise RangeError(f"{name}: expected at least {low}, got {value}")
    return min(int(value), MAX_POSITION)


def check_pinned(pinned: object, page_size: int) -> int:
    """A number of logical keys that are whole pages."""
    pinned = check_int("pinned", pinned, 0)
    if pinned % page_size:
        raise RangeError(f"pinned: expected whole pages of {page_size} keys, got {pinned}")
    return pinned


def check_flag(name: str, value: object) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise DTypeError(f"{name}: expected True or False, got {value!r}")
    return value


def check_number(name: str, value: object, *, zero: bool) -> float:
    """A positive number that float32 arithmetic can take, or zero where that is allowed."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise DTypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    if not (1e-30 <= number <= 1e30 or (number == 0 and zero)):
        raise RangeError(f"{name}: expected a positive number{' or 0' if zero else ''}, from 1e-30 to 1e30, got {value}")
    return number


def checks_on() -> bool:
    """Whether ``TKV_CHECK=1`` asks for checks that read from the device and so wait for it."""
    return os.environ.get("TKV_CHECK", "") not in ("", "0")


def check_slots(name: str, slots: torch.Tensor, num_slots: int) -> None:
    """Synchronous: every slot is -1 or in the cache, and none is written twice."""
    wrong = (slots < -1) | (slots >= num_slots)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise RangeError(f"{name}: expected slots from -1 to {num_slots - 1}, got {int(slots[index])} at [{index}]")
    used = slots[slots >= 0]
    if used.unique().numel() < used.numel():
        raise RangeError(f"{name}: expected every slot at most once, got {used.numel() - used.unique().numel()} repeated")


def check_ragged(name: str, starts: torch.Tensor, total: int) -> None:
    """Synchronous: starts of ragged rows begin at 0, never fall and end within `total`."""
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()) or int(starts[-1]) > total:
        raise RangeError(f"{name}: expected to rise from 0 to at most {total}, got {starts.tolist()[:16]}")


def check_pages(
    name: str,
    page_table: torch.Tensor,
    lens: torch.Tensor,
    kv_start: torch.Tensor | None,
    first: torch.Tensor,
    last: torch.Tensor,
    window: int | None,
    sinks: int,
    cache: KVCache,
    cover: torch.Tensor | None = None,
    pinned: int = 0,
) -> None:
    """Synchronous: lengths fit the table, and every page that some row at positions first..last can see is in the cache.

    Keys at positions before `cover` are not asked for.
    """
    capacity = page_table.shape[1] * cache.page_size
    wrong = (lens < 0) | (lens > capacity)
    if bool(wrong.any()):
        seq = int(wrong.nonzero()[0])
        raise RangeError(f"{name}: expected 0 to {capacity} keys (table width x page_size), got {int(lens[seq])} for sequence {seq}")
    for start, given, low in (("kv_start", kv_start, 0), ("q_start", first, -MAX_POSITION)):
        if given is not None and bool((wrong := (given < low) | (given >= MAX_POSITION)).any()):
            seq = int(wrong.nonzero()[0])
            raise RangeError(f"{start}: expected {low} to 2^30 - 1, got {int(given[seq])} for sequence {seq}")
    starts = torch.zeros_like(lens) if kv_start is None else kv_start
    keys = torch.arange(capacity, device=page_table.device)[None, :]
    positions = torch.where(keys < pinned, keys, keys + starts[:, None])
    seen = (keys < lens[:, None]) & (positions <= last[:, None]) & (first <= last)[:, None]
    if window is not None:
        seen &= (first[:, None] - positions < window) | (positions < sinks)
    if cover is not None:
        seen &= positions >= cover[:, None]
    seen_pages = seen.view(*page_table.shape, cache.page_size).any(-1)
    wrong = seen_pages & ((page_table < 0) | (page_table >= cache.num_pages))
    if bool(wrong.any()):
        seq, page = (int(i) for i in wrong.nonzero()[0])
        raise RangeError(
            f"page_table: expected pages from 0 to {cache.num_pages - 1} where keys are visible, "
            f"got {int(page_table[seq, page])} at [{seq}, {page}]"
        )
