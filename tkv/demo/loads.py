"""How many bytes kernels load from given tensors: counted in Triton's interpreter, load by load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tkv.errors import DeviceError, UnsupportedError
from tkv.ops.launch import interpreting


@dataclass
class Loads:
    """What was counted so far.

    Attributes:
        bytes: of the lanes that loads read from the tensors; a lane that is masked out reads nothing, what is read twice counts twice.
    """

    bytes: int = 0


@contextmanager
def count_loads(*tensors: torch.Tensor) -> Iterator[Loads]:
    """Count what kernels load from the memory of some tensors while the context is open.

    Every ``tl.load`` counts, lane by lane, as what a GPU without any cache would fetch. An element that several of the tensors hold
    counts once a load.

    Args:
        tensors: on the CPU, of any strides; what lies between their elements does not count.

    Yields:
        The counts, which grow with each kernel.

    Raises:
        UnsupportedError: kernels are compiled, not interpreted, so that nothing can be counted.
        DeviceError: a tensor is not on the CPU: the interpreter would load from a copy of it.

    Example:
        >>> import tkv
        >>> cache = tkv.KVCache(torch.zeros(2, 16, 1, 64), torch.zeros(2, 16, 1, 64))
        >>> with count_loads(cache.k, cache.v) as counted:
        ...     _ = tkv.paged_decode(torch.zeros(1, 1, 64), cache, torch.tensor([[1, 0]]), torch.tensor([20]))
        >>> counted.bytes == 20 * 2 * 64 * 4                       # K and V of 20 tokens
        True
    """
    if not interpreting():
        raise UnsupportedError(
            "count_loads: kernels are compiled here, and only those in Triton's interpreter can be counted; set the environment variable "
            "TRITON_INTERPRET=1 before Triton is imported"
        )
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise DeviceError(f"count_loads: expected tensors on the CPU, got one on {tensor.device}")
    from triton.runtime.interpreter import interpreter_builder as builder

    counted, memories = Loads(), [_Memory(tensor) for tensor in tensors if tensor.numel()]
    # The instance's own attribute, if a counter is open around this one.
    outer = vars(builder).get("create_masked_load")
    load = builder.create_masked_load

    # All loads come here, unmasked ones with a mask of ones; what else they pass differs between versions of Triton.
    def counting(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(ptrs, mask, *args, **kwargs)
        addresses = np.broadcast_to(ptrs.data, loaded.data.shape)[np.broadcast_to(mask.data, loaded.data.shape)]
        lanes = np.zeros(addresses.shape, bool)
        for memory in memories:
            lanes |= memory.holds(addresses)
        counted.bytes += int(lanes.sum()) * (ptrs.get_element_ty().primitive_bitwidth // 8)
        return loaded

    builder.create_masked_load = counting
    try:
        yield counted
    finally:
        if outer is None:
            del builder.create_masked_load
        else:
            builder.create_masked_load = outer


class _Memory:
    """Which addresses belong to a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start, self.itemsize = tensor.data_ptr(), tensor.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        owned = torch.zeros(span, dtype=torch.bool)
        owned.as_strided(tensor.shape, tensor.stride()).fill_(True)
        self.owned = owned.numpy()

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        """Which of the addresses, uint64, lie in an element."""
        # Addresses in front of the tensor wrap to huge ones.
        elements = (addresses - np.uint64(self.start)) // np.uint64(self.itemsize)
        inside = elements < np.uint64(len(self.owned))
        return inside & self.owned[np.where(inside, elements, np.uint64(0)).astype(np.int64)]
