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
from tkv.formats import KVFormat
from tkv.kernels.args import PagedKV, RopeTables, Rotary, Storage, Stored, Target, TokenStrides
from tkv.rope import Rope

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
    is_rdna = arch.startswith("gfx") and not arch.startswith("gfx9")
    return Target(interpret, portable, E4M3=facts_of(arch).has_e4m3, FLUSHES=arch in FLUSHES_FP16, FEW_REGISTERS=is_rdna)


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension of a matrix product is padded to."""
    return max(16, 1 << (size - 1).bit_length())


def runs_of(words: int) -> tuple[int, int]:
    """The runs that a row of so many words is cut into, powers of two: one, or two where that is less padding; 0 for none.

    A run of 16 words costs more, in a product and loads of its own, than the padding that it saves.

    Example:
        >>> runs_of(128), runs_of(80), runs_of(48), runs_of(576)
        ((128, 0), (64, 32), (64, 0), (512, 64))
    """
    whole = padded(words)
    rest = max(32, padded(words - whole // 2)) if words > whole // 2 else whole
    return (whole // 2, rest) if whole // 2 + rest < whole else (whole, 0)


@lru_cache(maxsize=1024)
def storage_of(kind: KVFormat, dim: int, planes: int, strides: tuple[int, ...], compute: torch.dtype | None = None) -> Storage:
    """How numbers lie in a tensor of words of these strides, `planes` to each; `compute` is the dtype of the dots, for attention."""
    width, rest = runs_of(dim // planes)
    # Float32 products of int4 are exact only in decoded numbers: its minimum may nearly cancel a code.
    folded = not kind.is_rounded and not (kind.dtype == "int4" and compute == torch.float32)
    return Storage(
        CODE="native" if kind.is_native else kind.dtype,
        SCALE=kind.scale or "none",
        GROUP=kind.group_size or 1,
        ASYMMETRIC=kind.is_asymmetric,
        FOLDED=folded,
        DIM=dim,
        PLANES=planes,
        RUNS=2 if rest else 1,
        WIDTH=width,
        REST=rest,
        ALIGN=math.gcd(16, *strides[:3]),
    )


def storages(cache: KVCache, k_dtype: torch.dtype, v_dtype: torch.dtype) -> tuple[Storage, Storage]:
    """K and V as attention reads them, with dots of these dtypes."""
    k, v = cache.words
    return (
        storage_of(cache.k_format, cache.head_dim, planes_of(cache.k_format), k.stride(), k_dtype),
        storage_of(cache.v_format, cache.v_head_dim, planes_of(cache.v_format), v.stride(), v_dtype),
    )


def row_storages(cache: KVCache) -> tuple[Storage, Storage]:
    """K and V as rows are written and gathered: 8-bit numbers as bytes, in the order of their dims, and in one run."""
    k, v = cache.bytes
    sides = ((cache.k_format, cache.head_dim, k), (cache.v_format, cache.v_head_dim, v))
    of_rows = []
    for kind, dim, data in sides:
        planes = 4 if kind.dtype == "int4" else 1
        of_rows.append(storage_of(kind, dim, planes, data.stride())._replace(RUNS=1, WIDTH=padded(dim // planes), REST=0))
    return of_rows[0], of_rows[1]


def planes_of(kind: KVFormat) -> int:
    """Numbers in a word of attention's."""
    return 1 if kind.is_native else 4 if kind.dtype == "int4" else 2


def stored(data: torch.Tensor, scale: torch.Tensor | None, kind: KVFormat) -> Stored:
    """A kernel's view of one of K and V."""
    strides = TokenStrides(0, 0, 0)
    if scale is not None and kind.scale in ("head", "channel"):
        strides = TokenStrides(0, 0, scale.stride(0))
    elif scale is not None and kind.scale == "page_channel":
        strides = TokenStrides(scale.stride(0), 0, scale.stride(1))
    elif scale is not None and kind.is_dynamic:
        strides = TokenStrides(*scale.stride()[:3])
    return Stored(data, TokenStrides(*data.stride()[:3]), scale, strides)


def paged_words(cache: KVCache) -> PagedKV:
    """The cache as attention reads it."""
    return PagedKV(*map(stored, cache.words, cache.scale_words, (cache.k_format, cache.v_format)))


def paged_bytes(cache: KVCache) -> PagedKV:
    """The cache as rows are written and gathered."""
    return PagedKV(*map(stored, cache.bytes, cache.scale_words, (cache.k_format, cache.v_format)))


def rope_args(rope: Rope | None) -> tuple[RopeTables, Rotary]:
    """The tables of a rotation as kernels take them, and what they are compiled for."""
    if rope is None:
        return RopeTables(None, None, 0, 0, 0), Rotary(DIM=0, INTERLEAVED=False)
    tables = RopeTables(rope.cos, rope.sin, rope.cos.stride(0), rope.sin.stride(0), rope.num_rows)
    return tables, Rotary(DIM=rope.rotary_dim, INTERLEAVED=rope.interleaved)
