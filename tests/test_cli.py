"""The tkv command: arguments, exit statuses, and the choice between a GPU and the interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tkv
from tkv import cli
from tkv.commands import CommandError, demo
from tkv.demo import PICTURES, SCENARIOS, DemoError, run_scenario
from tkv.errors import UnsupportedError


@pytest.fixture
def environ(monkeypatch):
    """The environment, given back as it was."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
    return os.environ


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tkv {tkv.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["demo", "--scenario", "nonsense"], "nonsense"),
        (["demo", "--dtype", "fp64"], "fp64"),
        (["demo", "--workers", "0"], "at least 1"),
        (["demo", "--workers", "two"], "two"),
        (["demo", "--out", "map.png"], "only with --scenario shared-prefix"),
    ],
)
def test_wrong_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    names = [command.__name__.rpartition(".")[2] for command in cli.COMMANDS]
    assert set(names) == {"demo", "doctor", "size", "tables", "inspect", "tune", "check", "merge"}
    assert all(f"\n    {name} " in out for name in names)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command.__name__.rpartition(".")[2], "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: tkv ")


def test_demo_passes_its_arguments_on(environ, monkeypatch):
    calls = []
    monkeypatch.setattr(demo, "run_scenario", lambda *args, **kwargs: calls.append((args, kwargs)) or 1)
    assert cli.main(["demo"]) == 1
    assert cli.main(["demo", "--scenario", "decode", "--dtype", "bf16", "--workers", "3"]) == 1
    assert cli.main(["demo", "--scenario", "shared-prefix", "--out", "map.png"]) == 1
    assert calls == [
        (("decode",), dict(dtype="fp32", workers=None, out=None)),
        (("decode",), dict(dtype="bf16", workers=3, out=None)),
        (("shared-prefix",), dict(dtype="fp32", workers=None, out=Path("map.png"))),
    ]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DemoError("no model"), 1, "no model"),
        (CommandError("no GPU"), 1, "tkv: no GPU\n"),
        (UnsupportedError("unknown arch"), 1, "tkv: unknown arch\n"),
        (PermissionError(13, "Permission denied", "map.png"), 1, "tkv: map.png: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "tkv: stdout: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_exit_statuses(error, status, message, environ, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(demo, "run_scenario", fail)
    assert cli.main(["demo"]) == status
    assert message in capsys.readouterr().err


def test_missing_package_is_named(monkeypatch):
    def missing(module):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("tkv.demo.import_module", missing)
    with pytest.raises(DemoError, match=r"transformers: run `make demo`, or `pip install 'tkv\[demo\]'`"):
        run_scenario("decode")


def test_unknown_scenario():
    with pytest.raises(KeyError, match="nonsense"):
        run_scenario("nonsense")
    assert {"decode", "shared-prefix"} <= set(SCENARIOS)


@pytest.mark.parametrize("out", [None, Path("map.png")])
def test_a_scenario_gets_a_picture_only_if_there_is_one(out, monkeypatch):
    calls = []
    module = SimpleNamespace(run=lambda *args, **kwargs: calls.append((args, kwargs)) or 0)
    monkeypatch.setattr("tkv.demo.import_module", lambda name: module)
    assert run_scenario("shared-prefix", workers=2, out=out) == 0
    assert calls == [(("fp32", 2), {} if out is None else {"out": out})]


def test_pictures_are_of_scenarios():
    assert set(PICTURES) <= set(SCENARIOS)


@pytest.mark.parametrize(
    ("gpu", "before", "after"), [(False, None, "1"), (False, "0", "0"), (False, "1", "1"), (True, None, None), (True, "1", "1")]
)
def test_interpreter_where_there_is_no_gpu(gpu, before, after, environ, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if before is not None:
        environ["TRITON_INTERPRET"] = before
    cli.interpret_without_gpu()
    assert environ.get("TRITON_INTERPRET") == after


def test_command_does_not_import_triton_before_it_has_chosen():
    code = "import sys, tkv.cli; tkv.cli.build_parser(); sys.exit(bool({'triton', 'tkv.tune.compile'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "0"}).returncode == 0


def test_a_reader_that_has_read_enough_ends_the_command_quietly():
    code = (
        "import sys; from tkv import cli; from tkv.commands import demo\n"
        "demo.run_scenario = lambda *args, **kwargs: print('x' * 1_000_000) or 0; sys.exit(cli.main(['demo']))"
    )
    ended = subprocess.run(f'"{sys.executable}" -c "{code}" | true', shell=True, capture_output=True, text=True)
    assert ended.stderr == ""


@pytest.mark.parametrize(("target", "status", "error"), [("&-", 0, ""), ("/dev/full", 1, "tkv: stdout: No space left on device\n")])
def test_a_stdout_that_takes_nothing_is_no_traceback(target, status, error):
    command = f'"{sys.executable}" -m tkv.cli size --kv-heads 8 --head-dim 64 >{target}'
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (status, error)


def test_a_name_that_stdout_cannot_encode_is_escaped(tmp_path):
    (tmp_path / "\xfc" / "sm90").mkdir(parents=True)
    (tmp_path / "\xfc" / "sm90" / "key_scores.json").write_text("{")
    argv = [sys.executable, "-m", "tkv.cli", "check", "--dir", str(tmp_path / "\xfc")]
    ended = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 1
    assert ended.stdout.startswith(f"{tmp_path}/\\xfc/sm90/key_scores.json: no JSON") and "Traceback" not in ended.stderr
