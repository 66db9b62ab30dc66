"""GPU facts: the table is sane, unknown names are refused, devices map to architectures."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from tkv.errors import DeviceError, UnsupportedError
from tkv.tune import ARCHS, arch, arch_of_device, configs_dir, parts
from tkv.tune import arch as arch_function
from tkv.tune.arch import _cuda_name, part_of_device


def test_every_architecture_is_listed_once():
    expected = "sm80 sm86 sm89 sm90 sm100 sm103 sm120 sm121 gfx90a gfx942 gfx950 gfx1100 gfx1201"
    assert ARCHS == tuple(expected.split())


@pytest.mark.parametrize("name", ARCHS)
def test_values_are_sane(name):
    a = arch(name)
    assert a.name == name
    rates = (a.issue_slots, a.exp_per_cycle, a.shared_bytes_per_cycle, a.latency_cycles)
    if name in ("gfx1100", "gfx1201"):
        assert rates == (4, 32, 128, 800) and "workgroup processor" in (a.nominal or "")
    else:
        assert rates == (1 if a.backend == "hip" else 4, 16, 128, 480 if name == "sm90" else 800) and "latency_cycles" in (a.nominal or "")
    assert a.backend == ("hip" if name.startswith("gfx") else "cuda")
    assert a.warp_size == (64 if name.startswith("gfx9") else 32)
    assert 48 * 1024 < a.shared_per_block <= a.shared_per_sm - a.shared_reserved
    if a.backend == "cuda":
        assert a.capability is not None
        assert name == "sm{}{}".format(*a.capability) == f"sm{a.triton_arch}"
        assert (a.shared_reserved, a.registers_per_sm) == (1024, 65536)
        assert a.shared_per_block == a.shared_per_sm - 1024
        assert a.warps_per_sm in (48, 64) and a.ctas_per_sm in (16, 24, 32)
        assert a.has_e4m3 == (a.capability >= (8, 9))
        assert a.has_tma == (a.capability >= (9, 0))
    else:
        assert a.capability is None and a.triton_arch == name
        assert a.shared_reserved == 0 and not a.has_tma
        assert a.has_e4m3 == (name in ("gfx950", "gfx1201"))


@pytest.mark.parametrize("name", ARCHS)
def test_a_table_of_the_family_fits(name):
    a = arch(name)
    for other in map(arch, a.family):
        assert other.name != name and other.backend == a.backend and other.warp_size == a.warp_size
        assert other.shared_per_block <= a.shared_per_block
        assert set(other.family) < set(a.family), "a family is closed: nobody has to walk it"


def test_families_of_the_design():
    assert arch("sm103").family == ("sm100",)
    assert arch("sm121").family == ("sm120", "sm89", "sm86")
    assert arch("sm120").family == ("sm89", "sm86")


def test_facts_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        arch("sm90").warp_size = 64  # type: ignore[misc]
    assert arch("sm90") is arch("sm90")
    hash(arch("sm90"))


@pytest.mark.parametrize("name", ["sm70", "sm87", "sm_90", "sm90a", "90", "", "gfx1101", "SM90"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedError, match=r"unknown arch .*sm80.*gfx1201") as error:
        arch(name)
    assert repr(name) in str(error.value)


def test_turing_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="no matrix unit that Triton uses"):
        arch("sm75")


def test_parts():
    names = [p.name for p in parts()]
    assert len(set(names)) == len(names) > 15
    for p in parts():
        assert p.arch in ARCHS
        assert 16 <= p.sms <= 512 and 1 <= p.l2_mb <= 512 and 100 <= p.gbps <= 20_000 and 1000 < p.clock_mhz < 3000
        if p.bf16_tflops is not None and p.fp8_tflops is not None:
            # Dense against sparse rates differ by two as well: this finds a part with one of each.
            assert p.fp8_tflops / p.bf16_tflops == pytest.approx(2, rel=0.02)


def test_matrix_rates_are_a_power_of_two_of_operations_a_cycle():
    # Where a clock or a rate is wrong by two or by tens of percent, this number is none.
    for p in parts():
        if p.bf16_tflops is not None:
            per_cycle = p.bf16_tflops * 1e6 / (p.sms * p.clock_mhz)
            nearest = min((512, 1024, 2048, 4096, 8192), key=lambda n: abs(n / per_cycle - 1))
            assert per_cycle == pytest.approx(nearest, rel=0.12), p.name


def test_a_part_of_each_data_sheet_is_found_by_its_own_name_alone():
    drivers = {
        "A100 SXM 80GB": "NVIDIA A100-SXM4-80GB", "A10G": "NVIDIA A10G", "L4": "NVIDIA L4", "L40S": "NVIDIA L40S",
        "RTX 4090": "NVIDIA GeForce RTX 4090", "H100 SXM": "NVIDIA H100 80GB HBM3", "H100 PCIe": "NVIDIA H100 PCIe",
        "H200 SXM": "NVIDIA H200", "GH200 96GB": "NVIDIA GH200 480GB", "B200": "NVIDIA B200", "RTX 5090": "NVIDIA GeForce RTX 5090",
        "GB10": "NVIDIA GB10", "MI210": "AMD Instinct MI210", "MI300X": "AMD Instinct MI300X", "MI355X": "AMD Instinct MI355X",
    }  # fmt: skip
    for part, name in drivers.items():
        assert [p.name for p in parts() if re.search(p.device, name)] == [part]
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "NVIDIA H100 NVL", "AMD Instinct MI300A"):
        assert not [p.name for p in parts() if re.search(p.device, other)]


@pytest.mark.parametrize(
    ("name", "sms", "gbps", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 3350, 989),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, None, 989 * 60 / 132),
        ("NVIDIA H20", 78, None, None),
    ],
)
def test_a_part_has_the_size_that_its_driver_says_and_the_rates_of_its_name(monkeypatch, name, sms, gbps, tflops):
    _pretend(monkeypatch, capability=(9, 0))
    found = SimpleNamespace(name=name, multi_processor_count=sms, L2_cache_size=51 << 20, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
    part = part_of_device(0)
    assert (part.name, part.arch, part.sms, part.l2_mb, part.gbps) == (name, "sm90", sms, 51, gbps)
    assert part.bf16_tflops == (None if tflops is None else pytest.approx(tflops))
    assert part.clock_mhz == (1980 if "H20" in name else 1750)


def test_a_part_of_no_gpu_is_refused():
    with pytest.raises(DeviceError, match="must be a GPU, got cpu"):
        part_of_device("cpu")


def _pretend(monkeypatch, *, capability=None, chip=None):
    asked = []

    def get_device_capability(device=None):
        asked.append(device)
        return capability

    def get_device_properties(device=None):
        asked.append(device)
        return SimpleNamespace(gcnArchName=chip)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None if chip is None else "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    return asked


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm86"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((9, 2), "sm90"), ((10, 0), "sm100"),
        ((10, 1), "sm100"), ((10, 3), "sm103"), ((12, 0), "sm120"), ((12, 1), "sm121"), ((12, 4), "sm121"),
    ],
)  # fmt: skip
def test_cuda_devices(monkeypatch, capability, name):
    _pretend(monkeypatch, capability=capability)
    found = arch_of_device(0)
    assert found.name == name
    assert found.capability is not None and found.capability <= capability


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 0), "unknown arch 'sm70'"), ((7, 5), "matrix unit"), ((11, 0), "unknown arch 'sm110'")],
)
def test_cuda_devices_that_are_refused(monkeypatch, capability, reason):
    _pretend(monkeypatch, capability=capability)
    with pytest.raises(UnsupportedError, match=reason):
        arch_of_device()


@pytest.mark.parametrize("chip", ["gfx942:sramecc+:xnack-", "gfx942"])
def test_amd_devices(monkeypatch, chip):
    _pretend(monkeypatch, chip=chip)
    assert arch_of_device("cuda:0").name == "gfx942"


def test_amd_device_that_is_refused(monkeypatch):
    _pretend(monkeypatch, chip="gfx1030")
    with pytest.raises(UnsupportedError, match="unknown arch 'gfx1030'"):
        arch_of_device()


@pytest.mark.parametrize(
    ("device", "asked_for"),
    [(None, None), (1, torch.device("cuda", 1)), ("cuda", torch.device("cuda")), (torch.device("cuda:2"), torch.device("cuda:2"))],
)
def test_the_device_meant_is_the_one_asked(monkeypatch, device, asked_for):
    asked = _pretend(monkeypatch, capability=(9, 0))
    arch_of_device(device)
    assert asked == [asked_for]


def test_devices_that_are_no_gpu(monkeypatch):
    with pytest.raises(DeviceError, match="must be a GPU, got cpu"):
        arch_of_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no GPU"):
        arch_of_device()


def test_configs_dir_in_a_checkout_and_in_an_installed_package(monkeypatch, tmp_path):
    module = sys.modules[_cuda_name.__module__]
    assert (configs_dir() / "gpus.json").is_file()

    fake = tmp_path / "tkv" / "tune" / "arch.py"
    monkeypatch.setattr(module, "__file__", str(fake))
    with pytest.raises(FileNotFoundError, match="install tkv again"):
        configs_dir()

    for folder in (tmp_path / "autotune_configs", tmp_path / "tkv" / "_autotune_configs"):  # the installed one wins
        folder.mkdir(parents=True)
        (folder / "gpus.json").write_text("{}")
        assert configs_dir() == folder


def test_import_touches_no_gpu():
    code = "import tkv.tune, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_function_is_what_the_package_exports():
    # tkv.tune.arch is a module and a function: the function has to win for `from tkv.tune import arch`.
    assert callable(arch_function) and arch_function("sm90").name == "sm90"
