"""Facts about GPU architectures and parts, read from ``autotune_configs/gpus.json``.

Limits that decide whether a kernel can run at all belong to the architecture (:class:`Arch`); sizes and rates differ between the parts
that share one (:class:`Part`). The number of SMs of the GPU at hand, its L2 and its shared memory come from the driver, not from here.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tkv.errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    import torch

_FACTS_FILE = "gpus.json"


@dataclass(frozen=True)
class Arch:
    """Limits of one GPU architecture; ``None`` is unknown. NVIDIA's SM, CTA and warp are AMD's compute unit, workgroup and wavefront.

    Attributes:
        name: ``"sm90"``, ``"gfx942"``.
        backend: ``"cuda"`` or ``"hip"``.
        capability: CUDA compute capability ``(major, minor)``; None on AMD.
        warp_size: threads a warp.
        shared_per_block: bytes of shared memory (LDS) that one CTA may ask for.
        shared_per_sm: bytes of shared memory of one SM.
        shared_reserved: bytes that the driver takes for itself from ``shared_per_sm`` for each resident CTA.
        registers_per_sm: 32-bit vector registers of one SM.
        warps_per_sm: most resident warps of one SM.
        ctas_per_sm: most resident CTAs of one SM.
        has_e4m3: the hardware converts OCP float8 e4m3 numbers (AMD's FNUZ numbers are others).
        has_tma: the hardware has a tensor memory accelerator.
        family: architectures whose tables may stand in for a missing one, nearest first.
        issue_slots: warp instructions a cycle that one SM issues; on AMD vector instructions of a wave.
        exp_per_cycle: results a cycle of one SM's unit for exponentials.
        shared_bytes_per_cycle: bytes a cycle of one SM's shared memory.
        latency_cycles: cycles from asking DRAM for a byte to having it, where nothing else is asked for.
        nominal: which of these values no primary source confirms; None where all are.

    >>> arch("sm90").shared_per_block
    232448
    """

    name: str
    backend: str
    capability: tuple[int, int] | None
    warp_size: int
    shared_per_block: int
    shared_per_sm: int
    shared_reserved: int
    registers_per_sm: int | None
    warps_per_sm: int | None
    ctas_per_sm: int | None
    has_e4m3: bool
    has_tma: bool
    family: tuple[str, ...]
    issue_slots: int | None
    exp_per_cycle: int | None
    shared_bytes_per_cycle: int | None
    latency_cycles: int | None
    nominal: str | None

    @property
    def triton_arch(self) -> int | str:
        """The architecture as Triton's ``GPUTarget`` wants it.

        >>> arch("sm90").triton_arch, arch("gfx942").triton_arch
        (90, 'gfx942')
        """
        if self.capability is None:
            return self.name
        major, minor = self.capability
        return major * 10 + minor


@dataclass(frozen=True)
class Part:
    """One GPU product: data-sheet values, for cost models. Rates are dense; ``None`` is unknown, or for ``fp8_tflops`` no such unit.

    Attributes:
        name: the product's name.
        arch: name of its :class:`Arch`.
        sms: SMs (compute units) as torch counts them.
        l2_mb: L2 cache in MB.
        l3_mb: cache behind the L2 in MB; None where there is none.
        gbps: memory bandwidth in GB/s.
        bf16_tflops: 10^12 bf16 operations a second on the matrix units.
        fp8_tflops: the same for 8-bit floats.
        clock_mhz: boost clock in MHz, nominal for every part: what a GPU holds depends on its power and its load.
        device: a regular expression that finds the part in the driver's name of it; None for a part made of a driver's values.
        nominal: which of these values no primary source confirms, and what is seen in practice; None where all are plain data-sheet values.

    >>> {p.name: p.sms for p in parts()}["H200 SXM"]
    132
    """

    name: str
    arch: str
    sms: int
    l2_mb: float
    l3_mb: float | None
    gbps: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    clock_mhz: float | None
    device: str | None
    nominal: str | None


def configs_dir() -> Path:
    """The folder that holds ``gpus.json`` and the tuning tables: inside an installed package, else beside the package in a checkout.

    Returns:
        An existing directory.

    Raises:
        FileNotFoundError: neither place has it, so the installation is incomplete.

    >>> (configs_dir() / "gpus.json").is_file()
    True
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_autotune_configs", package.parent / "autotune_configs")
    for path in candidates:
        if (path / _FACTS_FILE).is_file():
            return path
    looked = " and ".join(str(path) for path in candidates)
    raise FileNotFoundError(f"tkv's tuning tables are missing: no {_FACTS_FILE} in {looked}; install tkv again")


@functools.cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((configs_dir() / _FACTS_FILE).read_text(encoding="utf-8"))
    return facts


ARCHS: tuple[str, ...] = tuple(_facts()["archs"])
"""Names of all architectures that tkv compiles for."""


@functools.cache
def arch(name: str) -> Arch:
    """Facts about one architecture.

    Args:
        name: one of :data:`ARCHS`.

    Returns:
        The :class:`Arch`, the same object for every call with this name.

    Raises:
        UnsupportedError: tkv has no facts about this architecture.

    >>> arch("gfx942").warp_size
    64
    """
    if name == "sm75":
        raise UnsupportedError("arch 'sm75' (Turing) has no matrix unit that Triton uses; tkv needs sm80 or later")
    entry = _facts()["archs"].get(name)
    if entry is None:
        raise UnsupportedError(f"unknown arch {name!r}; known are {', '.join(ARCHS)}")
    capability = None if entry["capability"] is None else tuple(entry["capability"])
    return Arch(name=name, **{**entry, "capability": capability, "family": tuple(entry["family"])})


@functools.cache
def parts() -> tuple[Part, ...]:
    """All GPU products whose data-sheet values are known, by architecture.

    Returns:
        A tuple of :class:`Part`.

    >>> [p.name for p in parts() if p.arch == "gfx950"]
    ['MI355X']
    """
    return tuple(Part(**entry) for entry in _facts()["parts"])


def reference_part(name: str) -> Part | None:
    """The part that stands for an architecture in models: the first listed one, else that of its family; None if neither is listed.

    Args:
        name: one of :data:`ARCHS`.

    Returns:
        A :class:`Part`, whose ``arch`` may be one of the family.

    Raises:
        UnsupportedError: tkv has no facts about this architecture.

    >>> reference_part("sm90").name, reference_part("sm103").name, reference_part("gfx1100").name
    ('H100 SXM', 'B200', 'RX 7900 XTX')
    """
    of_arch = {part.arch: part for part in reversed(parts())}
    return next((of_arch[one] for one in (name, *arch(name).family) if one in of_arch), None)


def arch_of_device(device: int | str | torch.device | None = None) -> Arch:
    """The architecture of a GPU of this machine.

    A compute capability that is not in :data:`ARCHS` takes the nearest lower one of the same major version, whose code it runs and whose
    limits it has at least: 8.7 is ``sm86``, 10.1 is ``sm100``. An AMD chip has to be listed itself.

    Args:
        device: index, name or ``torch.device``; the current device if None.

    Returns:
        The :class:`Arch`.

    Raises:
        DeviceError: ``device`` is no GPU, or torch sees none.
        UnsupportedError: tkv has no kernels for this GPU.

    >>> arch_of_device("cpu")
    Traceback (most recent call last):
    ...
    tkv.errors.DeviceError: device must be a GPU, got cpu
    """
    import torch

    device = _gpu(device)
    if torch.version.hip:
        chip: str = torch.cuda.get_device_properties(device).gcnArchName
        return arch(chip.split(":")[0])  # "gfx942:sramecc+:xnack-": the features behind the name change no limit
    return arch(_cuda_name(torch.cuda.get_device_capability(device)))


def part_of_device(device: int | str | torch.device | None = None) -> Part:
    """What a GPU of this machine is: its size from the driver, its rates from the data sheet of the part of that name.

    Args:
        device: as for :func:`arch_of_device`.

    Returns:
        A :class:`Part`. ``sms`` and ``l2_mb`` are the driver's, and matrix rates go with the SMs: a slice of a GPU has a part of them.
        Rates of a part that is not listed, and the bandwidth of a slice, are None.

    Raises:
        DeviceError: ``device`` is no GPU, or torch sees none.
        UnsupportedError: tkv has no kernels for this GPU.

    >>> part_of_device("cpu")
    Traceback (most recent call last):
    ...
    tkv.errors.DeviceError: device must be a GPU, got cpu
    """
    import torch

    device = _gpu(device)
    found = torch.cuda.get_device_properties(device)
    chip = arch_of_device(device).name
    sms, l2_mb = found.multi_processor_count, found.L2_cache_size / 2**20
    name, _, is_slice = found.name.partition(" MIG")
    for part in parts():
        if part.arch == chip and part.device is not None and re.search(part.device, name):
            bf16, fp8 = (None if rate is None else rate * sms / part.sms for rate in (part.bf16_tflops, part.fp8_tflops))
            gbps = None if is_slice else part.gbps
            return replace(part, name=found.name, sms=sms, l2_mb=l2_mb, gbps=gbps, bf16_tflops=bf16, fp8_tflops=fp8)
    clock = getattr(found, "clock_rate", None)
    return Part(
        name=found.name, arch=chip, sms=sms, l2_mb=l2_mb, l3_mb=None, gbps=None, bf16_tflops=None, fp8_tflops=None,
        clock_mhz=clock / 1000 if clock else None, device=None, nominal=None,
    )  # fmt: skip


def _gpu(device: int | str | torch.device | None) -> torch.device | None:
    """The GPU that is meant, once it is known that there is one."""
    import torch

    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise DeviceError(f"device must be a GPU, got {device}")
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no GPU on this machine; name an architecture instead, for example tkv.tune.arch('sm90')")
    return device


def _cuda_name(capability: tuple[int, int]) -> str:
    major, minor = capability
    listed = [entry["capability"] for entry in _facts()["archs"].values() if entry["backend"] == "cuda"]
    lower = [m for of_major, m in listed if of_major == major and m <= minor]
    return f"sm{major}{max(lower, default=minor)}"
