"""Tuning tables: what is written is read again, what is wrong is named in one line, and two tables make one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key, kernel_hash
from tkv.tune.merging import merge
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, TableError, dump, dumps, load, parse, table_path

KEY = Key(128, 128, "bf16", "fp8_e4m3/tensor", 16, 16, ())
WINDOW = KEY._replace(flags=("window",))
COMPILED = Compiled("3.9.0", registers=168, spills=0, shared=70000, ctas_per_sm=3)
SMALL, LARGE = AttentionConfig(16, 32, 4, 2, max_registers=255), AttentionConfig(16, 128, 8, 3, 4096)
H100 = Run("H100 SXM", 132, "580.1", "3.9.0", "2.13.0", "2026-11-02", "cold L2, p50 of 50", 0.8)
H200 = replace(H100, device="H200 SXM")


def entry(config=SMALL, work=None, keys=None, match=KEY, us=None, run=None):
    origin = "modelled" if us is None else "measured"
    return Entry(match, Bucket(work, keys), config, origin, None if config is None else COMPILED, us, run)


def table(*entries, runs=(), **more):
    return Table.make(more.pop("op", "paged_decode"), "sm90", entries, runs, **more)


def whole():
    """A table with every kind of entry."""
    entries = [entry(LARGE, 1.5, 4096), entry(None, 1.5), entry(SMALL, 8.0), entry(None), entry(LARGE, match=WINDOW, us=12.5, run=0)]
    return table(*entries, runs=[H100])


def test_a_table_is_read_as_it_was_written_one_line_an_entry(tmp_path):
    path = table_path(tmp_path, "sm90", "paged_decode")
    dump(whole(), path)
    assert load(path) == whole()
    assert [p.name for p in path.parent.iterdir()] == ["paged_decode.json"]
    lines = path.read_text().splitlines()
    assert sum('"match"' in line for line in lines) == len(whole().entries) == 5
    assert dumps(parse(json.loads(path.read_text()), "x")) == path.read_text()


def test_entries_are_put_in_order_open_bounds_last():
    entries = whole().entries
    assert table(*reversed(entries), runs=[H100]).entries == entries
    assert [e.bucket for e in entries if e.match == KEY] == [Bucket(1.5, 4096), Bucket(1.5), Bucket(8.0), Bucket()]


def test_key_scores_writes_only_what_its_kernel_heeds():
    scores = table(entry(AttentionConfig(32, 64, 4, 1, max_registers=255)), op="key_scores")
    assert "num_stages" not in json.loads(dumps(scores))["entries"][0]["config"]
    assert scores.entries[0].config == AttentionConfig(32, 64, 4, 1, max_registers=255)
    with pytest.raises(TableError, match=r"sm90/key_scores: entry 1: config: tunables of key_scores are .* unknown \['split_len'\]"):
        table(entry(LARGE), op="key_scores")


def wrong(change):
    """The JSON of a whole table, changed in place."""
    data = json.loads(dumps(whole()))
    change(data, data["entries"])
    return data


WRONG = {
    "an unknown schema": (lambda d, e: d.update(schema=2), "t.json: schema: this version of tkv reads 1, got 2"),
    "a flag for a schema": (lambda d, e: d.update(schema=True), "t.json: schema: this version of tkv reads 1, got True"),
    "functions": (lambda d, e: d.update(op=["key_scores"]), r"t.json: op: expected paged_decode, .* got \['key_scores'\]"),
    "a driver as a number": (lambda d, e: d["runs"][0].update(driver=580), "t.json: run 1: driver: expected text, got 580"),
    "flags in flags": (lambda d, e: e[2]["match"].update(flags=[["tree"]]), "t.json: entry 3: match: flags: expected a list of names"),
    "a bound that no float holds": (
        lambda d, e: e[0]["bucket"].update(keys=10**400),
        "t.json: entry 1: bucket: keys: .* from 0 to",
    ),
    "work that no float holds": (lambda d, e: e[0]["bucket"].update(work=10**400), "t.json: entry 1: bucket: work: expected .* from 0 to"),
    "endless work": (lambda d, e: e[0]["bucket"].update(work=float("inf")), "t.json: entry 1: bucket: work: expected .*, got inf"),
    "splits that no kernel counts": (lambda d, e: e[0]["config"].update(split_len=2**40), "t.json: entry 1: config.split_len: .* at most"),
    "an unknown field": (lambda d, e: d.update(note="x"), r"t.json: unknown \['note'\]; the fields are schema, op, arch,"),
    "no hash": (lambda d, e: d.pop("kernel_hash"), r"t.json: missing \['kernel_hash'\]"),
    "another function": (lambda d, e: d.update(op="write_kv"), "t.json: op: expected paged_decode, .* got 'write_kv'"),
    "another arch": (lambda d, e: d.update(arch="sm75"), "t.json: arch: expected sm80, .* got 'sm75'"),
    "other tunables": (lambda d, e: d["tunables"].append("num_ctas"), "t.json: tunables: the kernel has block_m, .*num_ctas"),
    "no list": (lambda d, e: d.update(entries={}), "t.json: entries: expected a list, got dict"),
    "no table": (lambda d, e: d.clear(), "t.json: missing .*schema"),
    "noise as text": (lambda d, e: d["runs"][0].update(noise="low"), "t.json: run 1: noise: expected a number"),
    "an unknown key": (lambda d, e: e[2]["match"].update(group=8), r"t.json: entry 3: match: unknown \['group'\]"),
    "a key without page": (lambda d, e: e[2]["match"].pop("page"), r"t.json: entry 3: match: missing \['page'\]"),
    "a key of no call": (lambda d, e: e[2]["match"].update(rows=8), "t.json: entry 3: match: rows: expected one of 16"),
    "an unknown tunable": (lambda d, e: e[0]["config"].update(num_ctas=2), r"t.json: entry 1: config: .* unknown \['num_ctas'\]"),
    "a missing tunable": (lambda d, e: e[0]["config"].pop("block_n"), r"t.json: entry 1: config: .* missing \['block_n'\]"),
    "a fraction": (lambda d, e: e[0]["config"].update(block_n=64.0), "t.json: entry 1: config.block_n: expected an integer, got 64.0"),
    "a flag": (lambda d, e: e[0]["config"].update(num_stages=True), "t.json: entry 1: config.num_stages: expected an integer"),
    "no power of two": (lambda d, e: e[0]["config"].update(block_n=48), "t.json: entry 1: config.block_n: .* got 48"),
    "no config": (lambda d, e: e[0].pop("config"), r"t.json: entry 1: missing \['config'\]"),
    "not compiled": (lambda d, e: e[0].update(compiled=None), "t.json: entry 1: compiled: .* if and only if it has a config"),
    "no compiled": (lambda d, e: e[0].pop("compiled"), r"t.json: entry 1: missing \['compiled'\]"),
    "compiled by nobody": (lambda d, e: e[0]["compiled"].pop("triton"), r"t.json: entry 1: compiled: missing \['triton'\]"),
    "an unknown origin": (lambda d, e: e[0].update(origin="guessed"), "t.json: entry 1: origin: expected measured or modelled"),
    "a time of a model": (lambda d, e: e[0].update(us=3.0), "t.json: entry 1: us: .* if and only if its origin is measured"),
    "measured without time": (lambda d, e: e[4].update(us=None), "t.json: entry 5: us: .* if and only if"),
    "measured without run": (lambda d, e: e[4].pop("run"), "t.json: entry 5: run: .* if and only if"),
    "a run that is not there": (lambda d, e: e[4].update(run=1), "t.json: entry 5: run: expected an index below 1"),
    "a negative bound": (lambda d, e: e[0]["bucket"].update(work=-1), "t.json: entry 1: bucket: work: expected a number"),
    "a bound of keys as text": (lambda d, e: e[0]["bucket"].update(keys="4k"), "t.json: entry 1: bucket: keys: expected an integer"),
    "no bound": (lambda d, e: e[0]["bucket"].pop("work"), r"t.json: entry 1: bucket: missing \['work'\]"),
    "a gap at the end": (lambda d, e: e.pop(3), "t.json: entry 3 .*work <= 8.: bucket: a gap above it; .* must be open"),
    "a gap in between": (lambda d, e: e.pop(1), r"t.json: entry 1 \(d128 .*\): bucket: a gap above it; .* open \(null\) in keys"),
    "descending bounds": (lambda d, e: e.insert(0, e.pop(2)), "t.json: entry 1 .*: comes behind one .* must ascend"),
    "an entry twice": (lambda d, e: e.insert(0, e[0]), "t.json: entry 1 .*: comes twice"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_a_wrong_table_gives_one_line_with_file_and_entry(change, message):
    with pytest.raises(TableError, match=f"^{message}") as raised:
        parse(wrong(change), "t.json")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_table_or_stands_in_the_wrong_place_is_named(tmp_path):
    path = table_path(tmp_path, "sm90", "paged_decode")
    dump(whole(), path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TableError, match=r"sm90/paged_decode.json: no JSON: .* line \d+"):
        load(path)
    path = table_path(tmp_path, "sm80", "paged_decode")
    dump(whole(), path)
    with pytest.raises(TableError, match=r"sm80/paged_decode.json: it is the table of paged_decode on sm90"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "sm90" / "key_scores.json")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no JSON: Expecting value"),
        (b'{"op": "\xff"}', "no UTF-8 text: invalid start byte at byte 8"),
        (b"[" * 100_000, "no JSON: maximum recursion depth"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b"\0" * 9, "no JSON: "),
        (b"[]", r"expected an object, got \[\]"),
        (None, "Is a directory"),
    ],
    ids=["empty", "no text", "deep", "digits", "zeros", "list", "folder"],
)
def test_whatever_a_file_holds_the_error_is_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "paged_decode.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TableError, match=f"^{path}: {message}") as raised:
        load(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_table_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def denied(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(TableError, match=r"t\.json: Permission denied"):
        load(Path("t.json"))


def test_a_name_that_stands_twice_in_an_object_is_refused_where_it_stands(tmp_path):
    path = table_path(tmp_path, "sm90", "paged_decode")
    for text, twice, message in (
        ('"block_n": 32', '"block_n": 64, "block_n": 32', r"entry 3: config: .* unknown \['block_n \(twice\)'\]"),
        ('"arch": "sm90"', '"arch": "sm80", "arch": "sm90"', r"unknown \['arch \(twice\)'\]"),
    ):
        dump(whole(), path)
        path.write_text(path.read_text().replace(text, twice, 1))
        with pytest.raises(TableError, match=f"paged_decode.json: {message}"):
            load(path)


def test_measured_beats_modelled_in_both_orders_and_runs_are_counted_anew():
    modelled = table(entry(LARGE), entry(SMALL, match=WINDOW))
    measured = table(entry(SMALL, us=9.0, run=1), runs=[H200, H100])
    for a, b in ((modelled, measured), (measured, modelled)):
        merged, conflicts = merge(a, b)
        assert conflicts == [] and merged.runs == (H100,)
        assert merged.entries == (entry(SMALL, us=9.0, run=0), entry(SMALL, match=WINDOW))


@pytest.mark.parametrize(
    "ours, theirs, us, winner, why",
    [
        (H100, replace(H100, date="2026-11-05"), (5.0, 9.0), SMALL, "the newer stands"),
        (H100, replace(H100, date="2026-10-05"), (9.0, 5.0), LARGE, "the newer stands"),
        (H100, replace(H100, noise=0.1), (9.0, 5.0), SMALL, "the faster stands"),
        (H100, H100, (5.0, 9.0), LARGE, "the faster stands"),
        (H100, H200, (9.0, 5.0), LARGE, "measured on H100 SXM and on H200 SXM, the first stands"),
    ],
)
def test_of_two_measurements_the_better_one_stands_and_the_conflict_is_stated(ours, theirs, us, winner, why):
    a, b = table(entry(LARGE, us=us[0], run=0), runs=[ours]), table(entry(SMALL, us=us[1], run=0), runs=[theirs])
    merged, conflicts = merge(a, b)
    assert merged.entries[0].config == winner and len(merged.runs) == 1
    assert len(conflicts) == 1 and why in conflicts[0] and KEY.name in conflicts[0]


def test_where_buckets_differ_a_key_comes_from_one_table_as_a_whole():
    a = table(entry(LARGE, 2.0), entry(None), entry(LARGE, match=WINDOW))
    b = table(entry(None, None, 1000), entry(SMALL, us=4.0, run=0), runs=[H100])
    for first, second, which in ((a, b, "second"), (b, a, "first")):
        merged, conflicts = merge(first, second)
        assert [e.bucket for e in merged.entries if e.match == KEY] == [Bucket(None, 1000), Bucket()]
        assert conflicts == [f"{KEY.name}: buckets differ, all entries are the {which} table's"]
        assert [e.config for e in merged.entries if e.match == WINDOW] == [LARGE]


def test_entries_of_another_kernel_are_left_out_and_it_is_said():
    now, old = table(entry(SMALL)), table(entry(LARGE), entry(LARGE, match=WINDOW), source="0" * 64)
    for a, b, which in ((now, old, "second"), (old, now, "first")):
        merged, conflicts = merge(a, b)
        assert merged == now and merged.kernel_hash == kernel_hash("paged_decode")
        assert conflicts == [f"sm90/paged_decode: the {which} table's 2 entries are of another kernel and left out"]


def test_tables_of_two_functions_do_not_merge():
    with pytest.raises(TableError, match="merge: tables of paged_decode on sm90 and of prefix_prefill on sm90"):
        merge(table(entry()), table(entry(), op="prefix_prefill"))
