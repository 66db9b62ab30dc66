"""tkv check and tkv merge: what they say of good and of wrong tables, and what they write."""

import json

import pytest

from tkv.cli import main
from tkv.tune import check as checking
from tkv.tune.check import Problem
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, dump, load, table_path

KEY = Key(128, 128, "bf16", "bf16", 16, 16)
COMPILED = Compiled("3.7.1", registers=100, spills=0, shared=30000, ctas_per_sm=3)
SMALL, LARGE = AttentionConfig(16, 32, 4, 2), AttentionConfig(16, 64, 4, 3)
RUN = Run("H100", 132, "570", "3.7.1", "2.13", "2026-01-01", "cold L2", 1.0)


def modelled(config, key=KEY):
    return Entry(key, Bucket(), config, "modelled", COMPILED)


def measured(config, us, key=KEY):
    return Entry(key, Bucket(), config, "measured", COMPILED, us=us, run=0)


def write(folder, *entries, op="paged_decode", arch="sm90", runs=()):
    path = table_path(folder, arch, op)
    dump(Table.make(op, arch, entries, runs), path)
    return path


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """A check that finds what the test says, and the arguments that it got."""
    calls, problems = [], []

    def check(archs=None, ops=None, *, progress, store, **options):
        calls.append((archs, ops, options))
        for done in range(4):
            progress(done, 3)
        return problems

    monkeypatch.setattr(checking, "check", check)
    monkeypatch.setenv("TKV_CACHE_DIR", str(tmp_path))
    return calls, problems


def test_no_problems(checked, capsys):
    assert main(["check"]) == 0
    assert capsys.readouterr().out == "3 kernels compiled, no problems\n"
    assert checked[0] == [(None, None, dict(folder=None, strict=False, since=None, seed=0, workers=None))]


def test_arguments_are_passed_on(checked, tmp_path, capsys):
    argv = ["--arch", "sm90", "--arch", "sm80", "--op", "key_scores", "--strict", "--sample", "0", "--seed", "7", "--workers", "2"]
    assert main(["check", *argv, "--dir", str(tmp_path), "--changed"]) == 0
    assert main(["check", "--changed", "v1.0"]) == 0
    options = dict(folder=tmp_path, strict=True, since="HEAD", seed=7, workers=2, sample=0)
    assert checked[0][0] == (["sm90", "sm80"], ["key_scores"], options)
    assert checked[0][1][2]["since"] == "v1.0"


def test_problems_are_lines_with_file_and_entry(checked, capsys):
    checked[1].append(Problem("sm90/paged_decode.json", 3, "d128 bf16 bf16 r16 p16; any", "spills 8 bytes a thread"))
    assert main(["check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "sm90/paged_decode.json: entry 3 (d128 bf16 bf16 r16 p16; any): spills 8 bytes a thread",
        "3 kernels compiled, 1 problem",
    ]
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["compiled"], [problem["entry"] for problem in found["problems"]]) == (3, [3])


def test_planted_entries_fail_the_check(tmp_path, capsys):
    path = write(tmp_path, modelled(LARGE))
    text = path.read_text()
    path.write_text(text.replace('"block_n": 64', '"block_n": 512').replace('"num_stages": 3', '"num_stages": 5'))
    assert main(["check", "--dir", str(tmp_path), "--sample", "0"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: entry 1 ({KEY.name}; any): ")
    assert "shared memory" in first
    assert last == "0 kernels compiled, 1 problem"
    path.write_text(text.replace('"num_warps": 4', '"num_wraps": 4'))
    assert main(["check", "--dir", str(tmp_path), "--sample", "0"]) == 1
    assert f"{path}: entry 1" in capsys.readouterr().out


def test_merged_tables_go_to_stdout_or_to_a_file(tmp_path, capsys):
    a = write(tmp_path / "a", modelled(SMALL), modelled(SMALL, KEY._replace(head_dim=64)))
    b = write(tmp_path / "b", measured(LARGE, 12.5), runs=[RUN])
    assert main(["merge", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "c" / "sm90" / "paged_decode.json"
    assert main(["merge", str(a), str(b), "-o", str(out)]) == 0
    assert out.read_text() == printed
    assert {entry.match.head_dim: (entry.origin, entry.config) for entry in load(out).entries} == {
        64: ("modelled", SMALL),
        128: ("measured", LARGE),
    }


def test_a_table_is_not_written_where_nothing_reads_it(tmp_path, capsys, monkeypatch):
    a, out = write(tmp_path / "a", modelled(SMALL)), tmp_path / "out.json"
    assert main(["merge", str(a), str(a), "-o", str(out)]) == 1
    assert capsys.readouterr().err == f"tkv: -o {out}: a table of paged_decode on sm90 is read from sm90/paged_decode.json only\n"
    assert not out.exists()
    monkeypatch.chdir(a.parent)
    assert main(["merge", str(a), str(a), "-o", a.name]) == 0


def test_conflicts_are_told_on_stderr(tmp_path, capsys):
    a = write(tmp_path / "a", measured(SMALL, 10.0), runs=[RUN])
    b = write(tmp_path / "b", measured(LARGE, 9.0), runs=[RUN])
    assert main(["merge", str(a), str(b), "-o", str(a)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "the faster stands" in said.err
    assert load(a).entries[0].config == LARGE


def test_folders_are_merged_table_by_table(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, modelled(SMALL))
    write(a, modelled(SMALL), arch="sm80")
    write(b, measured(LARGE, 12.5), runs=[RUN])
    write(b, modelled(LARGE), op="prefix_prefill")
    (b / "results.json").write_text("not a table")
    assert main(["merge", str(a), str(b), "-o", str(a)]) == 0
    assert capsys.readouterr().out == f"3 tables, 3 entries in {a}\n"
    assert load(table_path(a, "sm90", "paged_decode")).entries[0].config == LARGE
    assert load(table_path(a, "sm80", "paged_decode")).entries[0].config == SMALL
    assert load(table_path(a, "sm90", "prefix_prefill")).entries[0].config == LARGE


def test_a_wrong_table_leaves_everything_as_it_was(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    first, wrong = write(a, modelled(SMALL)), write(b, modelled(LARGE), op="prefix_prefill")
    write(b, measured(LARGE, 12.5), runs=[RUN])
    before = first.read_text()
    wrong.write_text("{}")
    assert main(["merge", str(a), str(b), "-o", str(a)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"tkv: {wrong}: ")
    assert error.count("\n") == 1
    assert first.read_text() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "--dir", "nowhere"], "no folder nowhere"),
        (["check", "--changed", "no-such-revision"], "no-such-revision"),
        (["merge", "nowhere", "."], "no file or folder nowhere"),
        (["merge", ".", "table"], "one is a folder and one a file"),
        (["merge", ".", "."], "-o FOLDER"),
        (["merge", ".", ".", "-o", "out"], "no tables"),
        (["merge", "table", "table"], "no JSON"),
        (["merge", "/dev/null/x", "table"], "no file or folder"),
        (["merge", "table", "table", "-o", "."], "-o .: expected a file, as A and B are"),
        (["merge", ".", ".", "-o", "table"], "-o table: expected a folder, as A and B are"),
    ],
)
def test_what_cannot_be_done_is_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table").write_text("nonsense")
    if "--changed" in argv:
        write(tmp_path, modelled(SMALL))
        argv = [*argv, "--dir", str(tmp_path), "--sample", "0"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "--arch", "sm91"], "unknown arch 'sm91'"),
        (["check", "--op", "attention"], "attention"),
        (["check", "--sample", "-1"], "at least 0"),
        (["merge", "one"], "B"),
    ],
)
def test_mistakes_give_one_line(argv, message, refused):
    assert message in refused(*argv)
