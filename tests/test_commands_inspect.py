"""tkv inspect: cases from arguments, numbers from reports, and one real compilation in a process of its own."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest

from tkv.cli import build_parser, main
from tkv.commands import cases
from tkv.tune import compile as compiling
from tkv.tune import select, tables
from tkv.tune.arch import ARCHS
from tkv.tune.cases import Case, launch_of
from tkv.tune.compile import Report, config_of
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, key_case, key_of_case
from tkv.tune.versions import installed_triton

LOOP = {"HMMA": 32, "MUFU": 8, "LDSM": 16, "LDGSTS": 8, "IMAD": 64}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A compiler that gives made-up numbers, and the jobs it got."""
    jobs = []

    def compile_all(given, workers=None, progress=None, store=None):
        jobs.extend(given)
        for case, arch, config in given:
            used = config or config_of(launch_of(case, arch))
            warps = used.num_warps if used else 4
            spills = 8 if arch == "sm86" else 0
            done = Report(case, arch, "3.9.0", 168, spills, 40960, used, warps, 2, LOOP if used else None, code=("HMMA",) * 200)
            progress(done)
            yield done

    monkeypatch.setattr(compiling, "compile_all", compile_all)
    monkeypatch.setenv("TKV_CACHE_DIR", str(tmp_path))
    return jobs


def case(op, *argv):
    return cases.case_of(op, build_parser().parse_args(["inspect", op, *argv]))


def inspect(capsys, *argv):
    status = main(["inspect", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_cases_say_what_arguments_say():
    assert case("paged_decode") == Case("decode")
    argv = "--head-dim 192 --v-head-dim 128 --format int8/token_head+int8/group32 --dtype fp16 --group 4 --q-len 3 --page-size 64".split()
    expected = Case("decode", "fp16", "int8/token_head+int8/group32", 192, 4, 3, 64, v_head_dim=128)
    assert case("paged_decode", *argv) == expected
    flags = ("window", "softcap", "alibi", "rope", "pinned", "tree", "shared")
    for flag in flags:
        found = case("paged_decode", f"--{flag}")
        assert [name for name in flags if getattr(found, name)] == [flag]


def test_q_has_the_dtype_that_the_cache_needs():
    assert case("paged_decode", "--format", "fp16").dtype == "fp16"
    assert case("paged_decode", "--format", "fp32").dtype == "fp32"
    assert case("paged_decode", "--format", "int4/group32").dtype == "bf16"
    assert case("paged_decode", "--format", "int8/page_channel+fp16").dtype == "fp16"


def test_every_function_has_a_case():
    kinds = {op: case(op).op for op in cases.INSPECTED_OPS}
    assert kinds == {**OP_KINDS, **cases.OTHER_OPS}
    for op in cases.INSPECTED_OPS:
        assert launch_of(case(op), "sm90").grid
    assert case("prefix_prefill").q_len == 1024
    assert case("quantize_pages", "--format", "int4/page_channel+int4/group32").op == "channels"


@pytest.mark.parametrize("op", OP_KINDS)
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_keys_of_cases_are_those_of_tables(op, rows):
    key = Key(64, 64, "bf16", "int8/token_head", rows, 16, ("softcap", "window"))
    assert key_of_case(op, key_case(op, key)) == key


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "OP"),
        (["attention"], "attention"),
        (["paged_decode"], "give --arch"),
        (["paged_decode", "--arch", "sm91"], "unknown arch 'sm91'"),
        (["paged_decode", "--arch", "sm75"], "Turing"),
        (["paged_decode", "--arch", "sm90", "--all-arch"], "not allowed with"),
        (["paged_decode", "--part", "B300x"], "unknown part"),
        (["paged_decode", "--part", "h100"], "several match 'h100'"),
        (["paged_decode", "--part", "B200", "--arch", "sm90"], "B200 is sm100"),
        (["paged_decode", "--arch", "sm90", "--format", "fp7"], "'fp7'"),
        (["paged_decode", "--arch", "sm90", "--format", "int4/group32", "--head-dim", "40"], "multiple of 32, got 40"),
        (["paged_decode", "--arch", "sm90", "--dtype", "fp16"], "a bf16 cache needs q"),
        (["paged_decode", "--arch", "sm90", "--group", "129"], "at most 128"),
        (["paged_decode", "--arch", "sm90", "--group", "1" + "0" * 20], "argument --group: expected at most 2147483647"),
        (["paged_decode", "--arch", "sm90", "--q-len", "1" + "0" * 5000], "argument --q-len: expected an integer"),
        (["paged_decode", "--arch", "sm90", "--page-size", "1e3"], "argument --page-size: expected an integer of at least 1, got '1e3'"),
        (["paged_decode", "--arch", "sm90", "--shared", "--head-dim", "32", "--v-head-dim", "64"], "a view of K has at most its 32 dims"),
        (
            ["paged_decode", "--arch", "sm90", "--shared", "--v-head-dim", "64", "--format", "int4/token_head"],
            "cannot be a view of some dims",
        ),
        (["paged_decode", "--arch", "sm90", "--shared", "--format", "int8/token_head+bf16"], "--format: a view of K has its format"),
        (["paged_decode", "--arch", "sm90", "--config", "block_n=16,block_n=32"], "block_n: given twice"),
        (["paged_decode", "--arch", "sm90", "--config", "blockn=64"], "unknown tunable 'blockn'"),
        (["paged_decode", "--arch", "sm90", "--config", "block_n=x"], "block_n: expected an integer"),
        (["paged_decode", "--arch", "sm90", "--config", "block_n=48"], "power of two"),
        (["key_scores", "--arch", "sm90", "--config", "num_stages=3"], "key_scores does not have num_stages"),
        (["write_kv", "--arch", "sm90", "--config", "block_n=64"], "write_kv has no tunables"),
        (["write_kv", "--arch", "sm90", "--softcap"], "--softcap: write_kv does not have it"),
        (["rotate_keys", "--arch", "sm90", "--format", "int4/group32"], "native formats"),
    ],
)
def test_mistakes_give_one_line(argv, message, no_gpu, refused):
    assert message in refused("inspect", *argv)


def test_instructions_are_counted_for_a_token_or_for_a_row_and_key(compiled, capsys):
    status, found = inspect(capsys, "paged_decode", "--arch", "sm90", "--config", "block_n=64,num_warps=8")
    assert status == 0
    assert found["config"] == dict(block_m=16, block_n=64, num_warps=8, num_stages=2, split_len=None, max_registers=255)
    assert found["config_from"] == "--config"
    assert found["loop"]["per"] == "token"
    assert found["loop"]["warp_instructions"] == 128 * 8 / 64
    assert found["loop"]["classes"] == {"int": 8.0, "matrix": 4.0, "shared": 2.0, "exp": 1.0, "global": 1.0}
    assert found["loop"]["bytes"] == 2 * 128 * 2
    assert (found["loop"]["bound"], found["loop"]["part"], found["loop"]["unknown"]) == ("memory", "H100 SXM", [])
    _, found = inspect(capsys, "prefix_prefill", "--arch", "sm90", "--config", "block_m=64,block_n=32,num_warps=4")
    assert (found["loop"]["per"], found["loop"]["warp_instructions"]) == ("row and key", 128 * 4 / (64 * 32))


def test_what_a_compiler_passes_over_is_a_problem(compiled, capsys):
    status, found = inspect(capsys, "paged_decode", "--arch", "gfx942", "--config", "max_registers=64")
    assert (status, found["problems"]) == (1, ["max_registers: only NVIDIA's compiler takes it, not that of gfx942"])
    status, found = inspect(capsys, "paged_decode", "--arch", "sm90", "--config", "max_registers=64")
    assert (status, found["problems"]) == (0, [])


def test_the_config_is_the_one_that_the_function_takes(compiled, capsys):
    _, found = inspect(capsys, "paged_decode", "--part", "h200")
    assert (found["arch"], found["config_from"]) == ("sm90", "analytic default")
    assert compiled == [(Case("decode"), "sm90", None)]
    assert AttentionConfig(**found["config"]) == config_of(launch_of(Case("decode"), "sm90"))


@pytest.mark.parametrize("op", OP_KINDS)
@pytest.mark.parametrize("group", ["8", "128"])
def test_without_tables_every_function_takes_the_analytic_default(op, group, compiled, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(select, "configs_dir", lambda: tmp_path)
    select.forget()
    _, found = inspect(capsys, op, "--arch", "sm90", "--group", group)
    assert found["config_from"] == "analytic default"
    select.forget()


def test_the_config_of_a_table_is_named(compiled, monkeypatch, tmp_path, capsys):
    config, entry = AttentionConfig(16, 32, 4, 3), tables.Compiled(str(installed_triton()), 100, 0, 30000, 3)
    key = Key(128, 128, "bf16", "bf16", 16, 16)
    entries = [
        tables.Entry(key, tables.Bucket(0.2), replace(config, num_warps=2), "modelled", entry),
        tables.Entry(key, tables.Bucket(1.0), config, "modelled", entry),
        tables.Entry(key, tables.Bucket(), None, "modelled", None),
    ]
    path = tables.table_path(tmp_path, "sm90", "paged_decode")
    tables.dump(tables.Table.make("paged_decode", "sm90", entries), path)
    monkeypatch.setenv("TKV_CONFIG_DIR", str(tmp_path))
    select.forget()
    try:
        _, found = inspect(capsys, "paged_decode", "--arch", "sm90")
        assert (AttentionConfig(**found["config"]), found["config_from"]) == (config, f"{path} (modelled)")
        _, found = inspect(capsys, "paged_decode", "--arch", "sm90", "--head-dim", "40")
        assert found["config_from"] == "analytic default"
    finally:
        select.forget()


def test_one_table_for_all_architectures(compiled, capsys):
    assert main(["inspect", "paged_decode", "--all-arch"]) == 1, "sm86 spills"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paged_decode: decode bf16 bf16 d128 g8 q1 p16, Triton 3.9.0"
    assert [line.split()[0] for line in lines[4:17]] == list(ARCHS)
    assert lines[-1].endswith("warp instructions of the main loop per token; in flight: bytes that an SM asks for ahead")
    assert [line.split()[0] for line in lines if "spills 8 bytes" in line] == ["sm86"]


def test_one_architecture_in_words(compiled, capsys):
    assert main(["inspect", "paged_decode", "--arch", "sm86"]) == 1
    out = capsys.readouterr().out
    assert "168 a thread, 8 spilled" in out
    assert "40,960 bytes a program, of 101,376" in out
    assert out.endswith("problem: spills 8 bytes a thread\n")
    assert main(["inspect", "copy_pages", "--arch", "sm90"]) == 0
    assert capsys.readouterr().out.endswith("instructions   200\n")


def test_a_part_changes_what_bounds_the_loop(compiled, capsys):
    cycles = {}
    for part in ("H100 SXM", "H200 SXM"):
        _, found = inspect(capsys, "paged_decode", "--part", part)
        assert found["loop"]["part"] == part
        cycles[part] = found["loop"]["cycles"]
    assert cycles["H200 SXM"]["memory"] == pytest.approx(cycles["H100 SXM"]["memory"] * 3350 / 4800)
    assert cycles["H200 SXM"]["issue slots"] == cycles["H100 SXM"]["issue slots"]


def test_a_kernel_that_does_not_compile_is_a_problem(monkeypatch, capsys):
    def failing(jobs, workers, progress, store):
        return [Report(case, arch, "3.9.0", config=config_of(launch_of(case, arch)), error="no such instruction") for case, arch, _ in jobs]

    monkeypatch.setattr(compiling, "compile_all", failing)
    status, found = inspect(capsys, "paged_decode", "--arch", "sm90")
    assert (status, found["loop"], found["ctas_per_sm"]) == (1, None, None)
    assert found["problems"] == ["does not compile: no such instruction"]
    assert main(["inspect", "paged_decode", "--all-arch"]) == 1
    assert capsys.readouterr().out.count("does not compile: no such instruction") == len(ARCHS)


@pytest.mark.compile
def test_a_real_kernel_of_two_architectures(tmp_path):
    """In a process of its own, as a user runs it: no GPU, and the interpreter chosen by the command line."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TKV_CACHE_DIR": str(tmp_path)}
    argv = [sys.executable, "-m", "tkv.cli", "inspect", "paged_decode", "--arch", "sm90", "--arch", "gfx942", "--head-dim", "64", "--json"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    nvidia, amd = json.loads(done.stdout)
    for found in (nvidia, amd):
        assert found["spills"] == 0
        assert 32 < found["registers"] <= 256
        assert found["ctas_per_sm"] >= 1
        assert found["loop"]["classes"]["matrix"] > 0
        assert 0 < found["loop"]["warp_instructions"] < 200
    assert set(nvidia["loop"]["names"]) & {"HMMA", "HGMMA"}
    assert any(name.startswith("v_mfma") for name in amd["loop"]["names"])
    again = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert again.stdout == done.stdout
    assert len(list(tmp_path.rglob("*.gz"))) == 2


def test_configs_read_what_they_print():
    config = AttentionConfig(16, 64, 4, 2, split_len=1024)
    text = cases.config_text(config, "paged_decode")
    assert cases.config_with(AttentionConfig(128, 128, 8, 1), cases.overrides(text), "paged_decode") == config
    assert cases.config_text(config, "key_scores") == "block_m=16,block_n=64,num_warps=4"
    assert cases.config_text(None, "key_scores") == ""
    assert isinstance(build_parser().parse_args(["inspect", "write_kv"]), Namespace)
