"""Launches: what a kernel is called with, and what the device needs to know about itself."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import DeviceError
from tkv.kernels.args import PagedKV, Storage, Stored, Target, TokenStrides

# The architecture whose default configs the interpreter runs, so that what is tested is what a GPU gets.
INTERPRETED_ARCH = "sm90"

# Architectures whose matrix unit takes subnormal float16 operands for 0.
FLUSHES_FP16 = ("gfx90a",)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the arguments in the order of the kernel's signature, constants included.

    Tensors may be on the meta device: then it cannot be run, but `tkv.tune.compile` can build it for any architecture.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self, backend: str) -> dict[str, int]:
        """The launch's options for Triton's compiler."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None and backend == "cuda":
            options["maxnreg"] = self.max_registers
        return options

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of the device."""
        guard = torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
        with guard:
            self.kernel[self.grid](*self.args, **self.options("hip" if torch.version.hip else "cuda"))


@lru_cache(maxsize=1)
def interpreting() -> bool:
    """Whether the kernels were imported under Triton's interpreter."""
    from tkv.kernels.merge import merge_kernel

    return type(merge_kernel).__name__ == "InterpretedFunction"


def check_launchable(device: torch.device) -> None:
    """Tensors are on a GPU, or on the CPU and Triton's interpreter is on."""
    if device.type == "cuda":
        return
    if device.type != "cpu":
        raise DeviceError(f"tkv launches on CUDA and ROCm devices, got tensors on {device}")
    if not interpreting():
        raise DeviceError(
            "got tensors on cpu: tkv launches on CUDA and ROCm devices; to run on the CPU in Triton's interpreter (slow, for tests), "
            "set the environment variable TRITON_INTERPRET=1 before the first call of tkv and before Triton is imported"
        )


@lru_cache(maxsize=64)
def arch_name(device: torch.device) -> str:
    """The architecture that configs and instructions are chosen for."""
    if device.type != "cuda" or interpreting():
        return INTERPRETED_ARCH
    from tkv.tune.arch import arch_of_device

    return arch_of_device(device).name


@lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device; of an H100 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" and not interpreting() else 132


@lru_cache(maxsize=64)
def target_for(arch: str, interpret: bool) -> Target:
    """The constants that say what a kernel is compiled for. ``TKV_PORTABLE=1`` leaves out inline PTX, for sanitisers."""
    from tkv.tune.arch import arch as facts_of

    portable = interpret or arch.startswith("gfx") or os.environ.get("TKV_PORTABLE", "") not in ("", "0")
    return Target(INTERPRET=interpret, PORTABLE=portable, E4M3=facts_of(arch).has_e4m3, FLUSHES=arch in FLUSHES_FP16)


def storages(cache: KVCache) -> tuple[Storage, Storage]:
    """How K and V are stored, as constants of a kernel."""
    return tuple(  # type: ignore[return-value]
        Storage(
            CODE="native" if kind.is_native else kind.dtype,
            SCALE=kind.scale or "none",
            DIM=dim,
            PLANES=1 if kind.is_native else 2,
            WIDTH=padded(dim if kind.is_native else dim // 2),
            ALIGN=math.gcd(16, *words.stride()[:3]),
        )
        for kind, dim, words in zip(
            (cache.k_format, cache.v_format), (cache.head_dim, cache.v_head_dim), cache.words, strict=True
        )
    )


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension of a matrix product is padded to."""
    return max(16, 1 << (size - 1).bit_length())


def stored(data: torch.Tensor, scale: torch.Tensor | None) -> Stored:
    """A kernel's view of one of K and V."""
    strides = TokenStrides(*scale.stride()) if scale is not None and scale.dim() == 3 else TokenStrides(0, 0, 0)
    return Stored(data, TokenStrides(*data.stride()[:3]), scale, strides)


def paged_words(cache: KVCache) -> PagedKV:
    """The cache as attention reads it."""
    k, v = cache.words
    return PagedKV(stored(k, cache.k_scale), stored(v, cache.v_scale))


def paged_bytes(cache: KVCache) -> PagedKV:
    """The cache as `write_kv` fills it."""
    k, v = cache.bytes
    return PagedKV(stored(k, cache.k_scale), stored(v, cache.v_scale))
