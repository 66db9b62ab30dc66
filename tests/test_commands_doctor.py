"""tkv doctor: what is found on machines of several kinds, and whether tkv can be used there."""

import json
import os
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

from tkv.cli import main
from tkv.commands import doctor

VARIABLES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH", "CC")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine without a GPU, and an environment in which nothing is set."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and not name.startswith("TKV_")}
    monkeypatch.setattr(os, "environ", {**kept, "HOME": str(tmp_path)})
    monkeypatch.setattr(doctor, "DRIVERS", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return os.environ


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs of which tkv has kernels for one."""
    capabilities = [(9, 0), (7, 5)]
    properties = [
        SimpleNamespace(name=name, multi_processor_count=sms, shared_memory_per_block_optin=shared, total_memory=memory << 30)
        for name, sms, shared, memory in (("NVIDIA H200", 132, 232448, 140), ("Tesla T4", 40, 65536, 15))
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[getattr(index, "index", index)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[getattr(index, "index", index)])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    return properties


def look(capsys, *argv):
    status = main(["doctor", "--json", *argv])
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] == (status == 0)
    return status, {finding["name"]: (finding["status"], finding["text"]) for finding in found["findings"]}, found["gpus"]


def test_without_a_gpu_it_says_what_to_set(capsys, machine):
    status, found, gpus = look(capsys)
    assert (status, gpus) == (0, [])
    assert found["gpu"] == ("note", "none: set TRITON_INTERPRET=1 to run in the interpreter")
    assert found["triton"][0] == found["torch"][0] == found["ptxas"][0] == found["cuobjdump"][0] == "ok"
    assert "TRITON_INTERPRET" not in machine
    machine["TRITON_INTERPRET"] = "1"
    assert "kernels run in the interpreter" in look(capsys)[1]["gpu"][1]


def test_table_ends_with_the_verdict(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\ntkv can be used here, in the interpreter\n")
    assert main(["doctor", "--gpu"]) == 1
    assert capsys.readouterr().out.endswith("\ntkv cannot be used here before the problems are solved\n")


def test_a_driver_that_torch_does_not_use_is_a_problem(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DRIVERS", {str(tmp_path): "CUDA"})
    status, found, _ = look(capsys)
    assert status == 1
    assert found["gpu"][0] == "problem"
    assert "install torch for CUDA" in found["gpu"][1]


def test_gpus_are_named_and_one_without_kernels_is_a_problem(capsys, gpu):
    status, found, gpus = look(capsys)
    assert status == 1
    assert found["gpu 0"] == ("ok", "NVIDIA H200, sm90, 132 SMs, 227 KiB of shared memory a program, 140 GiB of memory")
    assert found["gpu 1"][0] == "problem"
    assert found["gpu 1"][1].startswith("Tesla T4: arch 'sm75'")
    assert [(item["arch"], item["sms"]) for item in gpus] == [("sm90", 132), (None, 40)]
    assert found["driver"][0] == "ok"


def test_a_gpu_without_a_compiler_for_launchers_is_a_problem(capsys, gpu, machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    status, found, _ = look(capsys)
    assert (status, found["C compiler"][0]) == (1, "problem")


def test_the_interpreter_beside_a_gpu_is_noted(capsys, gpu, machine):
    machine["TRITON_INTERPRET"] = "1"
    assert look(capsys)[1]["TRITON_INTERPRET"] == (
        "note",
        "1: kernels run in Triton's interpreter, slowly, on the CPU, although there is a GPU",
    )


@pytest.mark.parametrize(
    ("triton", "numpy_version", "has_gpu", "status"),
    [
        (None, "2.3.0", False, "problem"),
        ("3.5.1", "2.3.0", False, "problem"),
        ("3.6.0", "2.3.9", False, "ok"),
        ("3.6.0", "2.4.0", False, "problem"),
        ("3.6.0", "2.4.0", True, "note"),
        ("3.10.0+git1", "2.10.0", False, "ok"),
    ],
)
def test_versions_of_triton_and_numpy(triton, numpy_version, has_gpu, status, monkeypatch):
    monkeypatch.setattr(doctor, "_triton_version", lambda: triton)
    monkeypatch.setattr(numpy, "__version__", numpy_version)
    assert [finding.status for finding in doctor._versions(has_gpu) if finding.name == "triton"] == [status]


def test_a_missing_triton_is_found_without_an_error(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    status, found, _ = look(capsys)
    assert status == 1
    assert (found["triton"][0], found["ptxas"][0], found["cuobjdump"][0]) == ("problem", "note", "note")


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("TKV_CHECK", "1", "ok", "1: synchronous checks of what only the GPU can see: slots, page ids, lengths"),
        ("TKV_CHECK", "0", "ok", "0: off"),
        ("TKV_CHEK", "1", "note", "1: no variable of tkv's that this version knows"),
        ("TKV_CONFIG_DIR", "/nowhere", "problem", "/nowhere: no such folder"),
    ],
)
def test_variables(name, value, status, text, machine, capsys):
    machine[name] = value
    assert look(capsys)[1][name] == (status, text)


def test_a_variable_that_is_empty_is_not_set(machine, capsys):
    machine["TKV_CONFIG_DIR"] = ""
    assert "TKV_CONFIG_DIR" not in look(capsys)[1]


def test_a_table_of_the_users_that_calls_pass_over_is_a_problem(machine, capsys, tmp_path):
    (tmp_path / "sm90").mkdir()
    wrong = tmp_path / "sm90" / "key_scores.json"
    wrong.write_bytes(b'{"op": "\xff"}')
    machine["TKV_CONFIG_DIR"] = str(tmp_path)
    status, found, _ = look(capsys)
    assert (status, found["TKV_CONFIG_DIR"][0]) == (1, "ok")
    assert found["sm90/key_scores"] == ("problem", f"{wrong}: no UTF-8 text: invalid start byte at byte 8")


def test_a_cache_that_cannot_be_written_is_noted(capsys, machine, tmp_path):
    (tmp_path / "file").touch()
    machine["TKV_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    status, text = look(capsys)[1]["cache"]
    assert status == "note"
    assert "set TKV_CACHE_DIR" in text
    machine["TKV_CACHE_DIR"] = str(tmp_path / "new" / "cache")
    assert look(capsys)[1]["cache"][0] == "ok"


@pytest.mark.parametrize(
    ("tables", "status", "text"),
    [
        ((), "note", "none for sm103: analytic defaults; `tkv tune` makes them"),
        (("sm100/paged_decode",), "note", "none for sm103: those of sm100 stand in (paged_decode)"),
        (("sm100/paged_decode", "sm103/prefix_prefill"), "ok", "for sm103: prefix_prefill"),
    ],
)
def test_tables_of_the_gpu_or_its_family(tables, status, text, tmp_path, monkeypatch):
    for table in tables:
        path = tmp_path / f"{table}.json"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys.modules["tkv.tune.arch"], "configs_dir", lambda: tmp_path)
    assert list(doctor._tables([{"arch": "sm103"}])) == [doctor.Finding("tables", status, text)]
