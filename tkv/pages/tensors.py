"""Arrays of the host as tensors on a device: one copy for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from tkv.errors import RangeError
from tkv.ops.checks import check_int

# Triton compiles a kernel apart for tensors that do not start at a multiple of so many bytes.
ALIGNMENT = 16

# The arrays that are filled up: the name of each dimension's size, and with what. What follows on the last sequence has no tokens.
PADDING = {
    "page_table": (("num_seqs", "width"), -1),
    "tail_page_table": (("num_seqs", "tail_width"), -1),
    "seq_lens": (("num_seqs",), 0),
    "prefix_lens": (("num_seqs",), 0),
    "kv_start": (("num_seqs",), 0),
    "tail_lens": (("num_seqs",), 0),
    "slot_mapping": (("num_tokens",), -1),
    "positions": (("num_tokens",), 0),
}


def as_tensors(source: object, kind: type, device: torch.device | str | None, **sizes: int | None) -> dict[str, Any]:
    """What a class has fields for: arrays as tensors where it wants tensors, all else as it is."""
    found = {field.name: getattr(source, field.name) for field in fields(kind)}
    arrays = {field.name: found[field.name] for field in fields(kind) if field.type == "torch.Tensor"}
    return found | to_device(padded(arrays, sizes), device)


def padded(arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int | None]) -> dict[str, np.ndarray]:
    """The arrays filled up to these sizes; None leaves a size as it is.

    Raises:
        RangeError, DTypeError: a size is smaller than what is there, or no int.
    """
    result = dict(arrays)
    for name, array in arrays.items():
        names, fill = PADDING.get(name, ((), 0))
        shape = tuple(at_least(size, sizes.get(size), there) for size, there in zip(names, array.shape))
        if names and shape != array.shape:
            result[name] = np.full(shape, fill, array.dtype)
            result[name][tuple(map(slice, array.shape))] = array
    num_seqs = sizes.get("num_seqs")
    if num_seqs is not None:
        # All that is filled up starts where the last sequence's tokens end.
        starts = arrays["cu_seqlens"]
        result["cu_seqlens"] = np.concatenate([starts, np.full(num_seqs + 1 - starts.size, starts[-1], starts.dtype)])
    return result


def at_least(name: str, size: int | None, there: int) -> int:
    """A size that has room for what is there."""
    if size is not None and check_int(name, size, 0) < there:
        raise RangeError(f"{name}: expected {there} or more, as this batch has, got {size}")
    return there if size is None else size


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device | str | None) -> dict[str, torch.Tensor]:
    """Arrays as tensors: on the CPU (None) in the arrays' own memory, elsewhere views of one buffer.

    The copy to a GPU is queued on the current stream, and the host does not wait for it.
    """
    device = torch.device("cpu" if device is None else device)
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    # Copies from other memory make the host wait. Torch keeps this until the copy is done.
    is_pinned = device.type == "cuda" and torch.cuda.is_available()
    return unpack(pack(arrays, is_pinned).to(device, non_blocking=is_pinned), arrays)


def pack(arrays: Mapping[str, np.ndarray], is_pinned: bool = False) -> torch.Tensor:
    """``[bytes]`` uint8, the arrays one after the other, each from a multiple of :data:`ALIGNMENT` on."""
    spans = spans_of(arrays)
    buffer = torch.empty(max((end for _, end in spans), default=0), dtype=torch.uint8, pin_memory=is_pinned)
    room = buffer.numpy()
    for (start, end), array in zip(spans, arrays.values()):
        room[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return buffer


def unpack(buffer: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """What :func:`pack` made of these arrays, as views of it with their dtypes and shapes."""
    return {
        name: buffer[start:end].view(torch.from_numpy(array).dtype).view(array.shape)
        for (start, end), (name, array) in zip(spans_of(arrays), arrays.items())
    }


def spans_of(arrays: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """Where each array's bytes are."""
    spans, end = [], 0
    for array in arrays.values():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        spans.append((start, end))
    return spans
