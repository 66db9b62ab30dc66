"""tkv tables: coverage, wrong tables, and why a call gets its configuration."""

import json
import sys

import pytest

from tkv.cli import main
from tkv.tune import select
from tkv.tune.arch import ARCHS
from tkv.tune.configs import AttentionConfig, default_decode
from tkv.tune.keys import OP_KINDS, Key
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, dump, table_path
from tkv.tune.versions import installed_triton

KEY = Key(128, 128, "bf16", "int8/token_head", 16, 16)
# Another version of Triton, but of the same minor one, whose kernels are taken for the same.
OLD = ".".join([*str(installed_triton()).split(".")[:2], "99"])
SMALL, LARGE = AttentionConfig(16, 32, 4, 2), AttentionConfig(16, 64, 4, 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Tables of sm90's paged_decode: one key, measured where there is little work and modelled above."""
    compiled = Compiled(OLD, registers=100, spills=0, shared=30000, ctas_per_sm=3)
    run = Run("H100", 132, "570", OLD, "2.9", "2026-01-01", "cold L2", 1.0)
    entries = [
        Entry(KEY, Bucket(1.0, 4096), SMALL, "measured", compiled, us=12.5, run=0),
        Entry(KEY, Bucket(1.0, None), LARGE, "modelled", compiled),
        Entry(KEY, Bucket(None, None), None, "modelled", None),
        Entry(KEY._replace(format="bf16"), Bucket(None, None), LARGE, "modelled", compiled),
    ]
    dump(Table.make("paged_decode", "sm90", entries, [run]), table_path(tmp_path, "sm90", "paged_decode"))
    monkeypatch.delenv("TKV_CONFIG_DIR", raising=False)
    for module in ("tkv.tune.arch", "tkv.tune.select", "tkv.commands.tables"):
        monkeypatch.setattr(sys.modules[module], "configs_dir", lambda: tmp_path)
    select.forget()
    yield tmp_path
    select.forget()


def explain(capsys, *argv):
    assert main(["tables", "--json", *argv]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_coverage_of_all_architectures_and_functions(folder, capsys):
    assert main(["tables", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["arch"], row["op"]) for row in rows} == {(arch, op) for arch in ARCHS for op in OP_KINDS}
    found = {row["format"]: (row["entries"], row["measured"], row["modelled"]) for row in rows if not row["problem"]}
    assert found == {"bf16": (1, 0, 1), "int8/token_head": (3, 1, 2)}


def test_coverage_says_what_is_stale_and_what_stands_in(folder, capsys):
    table_path(folder, "sm100", "paged_decode").parent.mkdir()
    dump(Table.make("paged_decode", "sm100", []), table_path(folder, "sm100", "paged_decode"))
    assert main(["tables", "--arch", "sm90", "--arch", "sm103", "--op", "paged_decode"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["arch", "op", "format", "entries", "measured", "modelled", "Triton", "state"]
    assert [line.split()[:2] for line in lines] == [["sm90", "paged_decode"]] * 2 + [["sm103", "paged_decode"]]
    assert all(f"compiled by Triton {OLD}" in line for line in lines[:2])
    assert lines[2].endswith("that of sm100 stands in")


def test_another_folder(folder, capsys):
    assert main(["tables", "--dir", str(folder), "--op", "paged_decode", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(ARCHS) + 1
    assert main(["tables", "--dir", str(folder / "nowhere")]) == 1
    assert "no folder" in capsys.readouterr().err


def test_a_wrong_table_is_one_line_with_file_and_entry(folder, capsys):
    path = table_path(folder, "sm90", "paged_decode")
    path.write_text(path.read_text().replace('"block_n": 32', '"block_k": 32'))
    assert main(["tables", "--arch", "sm90"]) == 1
    said = capsys.readouterr()
    assert "wrong, see below" in said.out
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"tkv: {path}: entry ")
    assert "block_k" in said.err


@pytest.mark.parametrize(
    ("size", "config", "origin"),
    [
        (["batch=4", "tokens=4096"], SMALL, "measured"),
        (["batch=4", "tokens=4097"], LARGE, "modelled"),
        (["batch=4"], LARGE, "modelled"),
        (["batch=17", "tokens=100"], None, "modelled"),
        (["batch=17", "tokens=100", "sms=1000"], SMALL, "measured"),
        (["batch=17", "kv_heads=1", "tokens=100"], SMALL, "measured"),
        (["tokens=100"], None, "modelled"),
    ],
)
def test_a_call_is_explained_by_its_size(size, config, origin, folder, capsys):
    found = explain(capsys, "--arch", "sm90", "--explain", "paged_decode", "format=int8/token_head", "group=4", *size)
    assert found["key"] == {**KEY._asdict(), "flags": []}
    default = default_decode("sm90", 128, 8, 16, 16, 16, plain=True)
    assert AttentionConfig(**found["config"]) == (config or default)
    (row,) = [row for row in found["sources"] if row["outcome"] == "chosen"]
    assert row["origin"] == origin
    assert row["source"].endswith("sm90/paged_decode.json")
    assert row["us"] == (12.5 if origin == "measured" else None)


def test_a_call_outside_of_the_tables_gets_the_default(folder, capsys):
    found = explain(capsys, "--arch", "sm103", "--explain", "paged_decode", "head-dim=64", "window", "rope")
    assert found["key"]["flags"] == ["rope", "window"]
    assert [(row["source"].split("/")[-2:][0], row["outcome"]) for row in found["sources"]] == [
        ("config=", "no match"),
        ("TKV_CONFIG_DIR", "no match"),
        ("sm103", "no match"),
        ("sm100", "no match"),
        ("default", "chosen"),
    ]


def test_a_call_may_be_described_as_for_inspect(folder, capsys):
    words = ["format=int8/token_head", "group=4", "page_size=64", "window", "batch=4"]
    flags = ["--format", "int8/token_head", "--group", "4", "--page-size", "64", "--window", "--batch=4", "--json", "--arch", "sm90"]
    assert main(["tables", "--explain", "paged_decode", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == explain(capsys, "--arch", "sm90", "--explain", "paged_decode", *words)


def test_a_wrong_table_is_explained_without_its_name_again(folder, capsys):
    path = table_path(folder, "sm90", "paged_decode")
    path.write_text("{")
    assert main(["tables", "--arch", "sm90", "--explain", "paged_decode"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no JSON" in line]
    assert line.startswith("sm90/paged_decode.json") and str(path) not in line


def test_explain_lists_what_describes_a_call(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tables", "--explain", "paged_decode", "help"])
    assert ended.value.code == 0
    assert "--page-size" in capsys.readouterr().out


def test_the_calls_own_config_comes_first(folder, capsys):
    found = explain(capsys, "--arch", "sm90", "--explain", "paged_decode", "format=int8/token_head", "config=block_n=16,num_warps=2")
    assert (found["config"]["block_n"], found["config"]["num_warps"]) == (16, 2)
    assert [row["source"] for row in found["sources"] if row["outcome"] == "chosen"] == ["config="]


@pytest.mark.parametrize(
    ("words", "key", "keys"),
    [
        (["llama3-8b", "tokens=9000"], Key(128, 128, "bf16", "bf16", 16, 16), 9000),
        (["mistral-7b", "tokens=9000"], Key(128, 128, "bf16", "bf16", 16, 16, ("window",)), 4096),
        (["gemma2-9b", "tokens=9000", "page_size=48"], Key(256, 256, "bf16", "bf16", 16, 16, ("softcap",)), 9000),
        (["gemma2-9b", "tokens=9000", "window"], Key(256, 256, "bf16", "bf16", 16, 16, ("softcap", "window")), 4096),
        (["deepseek-mla"], Key(576, 512, "bf16", "bf16", 128, 16, ("shared",)), None),
    ],
)
def test_a_model_gives_the_shape(words, key, keys, folder, capsys):
    found = explain(capsys, "--arch", "sm90", "--explain", "paged_decode", *words)
    assert found["key"] == {**key._asdict(), "flags": list(key.flags)}
    assert found["keys"] == keys


def test_the_explanation_as_a_table(folder, capsys):
    argv = ["--arch", "sm90", "--explain", "paged_decode", "format=int8/token_head", "batch=4", "tokens=4096"]
    assert main(["tables", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paged_decode on sm90: d128 bf16 int8/token_head r16 p16, 0.242 programs an SM, 4,096 keys"
    (chosen,) = [line for line in lines if "chosen" in line]
    assert chosen.split()[0] == "sm90/paged_decode.json"
    assert "block_m=16,block_n=32,num_warps=4,num_stages=2" in chosen
    assert "measured, 12.5 us" in chosen
    assert f"stale: compiled by Triton {OLD}" in chosen


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arch", "sm91"], "unknown arch 'sm91'"),
        (["--op", "attention"], "attention"),
        (["--explain"], "expected one of paged_decode"),
        (["--explain", "paged_decode", "head_dim=64", "nonsense"], "nonsense"),
        (["--explain", "attention"], "expected one of paged_decode"),
        (["--explain", "paged_decode"], "give --arch"),
        (["--dir", ".", "--explain", "paged_decode"], "set TKV_CONFIG_DIR instead of --dir"),
        (["--arch", "sm90", "--op", "key_scores", "--explain", "paged_decode"], "one function"),
        (["--arch", "sm90", "--explain", "paged_decode", "llama9"], "expected a model (llama3-8b"),
        (["--arch", "sm90", "--explain", "paged_decode", "heads=8"], "--heads=8"),
        (["--arch", "sm90", "--explain", "paged_decode", "head_dim=20"], "multiple of 8"),
        (["--arch", "sm90", "--explain", "paged_decode", "format=fp7"], "'fp7'"),
        (["--arch", "sm90", "--explain", "key_scores", "config=num_stages=2"], "key_scores does not have num_stages"),
    ],
)
def test_mistakes_give_one_line(argv, message, no_gpu, refused):
    assert message in refused("tables", *argv)
