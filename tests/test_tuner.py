"""The tuner's logic, with a fake GPU: what may win, what is blocked, what a budget allows, and what is left after an interruption."""

import functools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tkv.errors import DeviceError
from tkv.tune import tables
from tkv.tune.blocklist import Blocklist
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import kernel_hash, key_of_shape
from tkv.tune.results import Result, load_results, tables_of
from tkv.tune.runner import MAX_REPLAYS, Failed, GpuRunner, WatchedRunner, describe_run
from tkv.tune.shapes import Model, shapes_of
from tkv.tune.tables import Bucket, Compiled, Run, TableError
from tkv.tune.timing import Times
from tkv.tune.tuner import FINALISTS, ROUNDS, Tuner, noise_of, winner

DEFAULT = AttentionConfig(16, 64, 4, 2, max_registers=255)
FAST, SLOW, BAD, EVEN = (AttentionConfig(16, block_n, 4, 3) for block_n in (128, 32, 256, 16))
RUN = Run("Fake 9000", 132, "555.1", "3.7.1", "2.9.0", "2026-01-31T12:00:00+00:00", "a fake clock", 0.0)
COMPILED = Compiled("3.7.1", 168, 0, 65536, 3)
SHAPES = shapes_of("llama3-8b", batches=[1, 64], lengths=[1024, 8192])


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class FakeRunner:
    """A GPU on which configs take given microseconds, with some noise, and a clock that its work moves on."""

    def __init__(self, us, clock=None, noise=0.0, faults=None, step=0.01, open_s=0.5, compile_s=0.1, seed=0):
        self.us, self.clock, self.noise, self.faults = us, clock or Clock(), noise, faults or {}
        self.step, self.open_s, self.compile_s, self.random = step, open_s, compile_s, random.Random(seed)
        self.calls, self.is_open, self.is_closed = [], False, False

    def work(self, name, config, seconds, limit):
        assert self.is_open, f"{name} of a runner that has no shape"
        assert limit > 0
        self.calls.append((name, config))
        fault = self.faults.get((name, config))
        if isinstance(fault, Failed) and fault.kind == "hang":
            self.clock.now += limit
        elif isinstance(fault, float):
            seconds = fault
        if isinstance(fault, BaseException):
            self.is_open = not getattr(fault, "is_fatal", False)
            raise fault
        self.clock.now += seconds

    def open(self, shape, limit):
        self.is_open, self.shape = True, shape
        self.work("open", None, self.open_s, limit)
        return DEFAULT

    def prepare(self, configs, limit):
        self.work("prepare", tuple(configs), self.compile_s * len(configs), limit)

    def check(self, config, limit):
        self.work("check", config, self.step, limit)

    def time(self, config, limit):
        self.work("time", config, self.step, limit)
        us = self.us[config] if isinstance(self.us, dict) else self.us(self.shape, config)
        return [us * (1 + self.random.uniform(-self.noise, self.noise)) for _ in range(12)]

    def compiled(self, config, limit):
        self.work("compiled", config, 0.0, limit)
        return COMPILED

    def close(self):
        self.is_closed = True

    def count(self, name, config):
        return self.calls.count((name, config))


def tuner_of(tmp_path, runner, configs=(DEFAULT, SLOW, FAST), **changes):
    notes = []
    tuner = Tuner(runner, lambda op, key, arch: configs, "sm90", RUN, tmp_path, clock=runner.clock, note=notes.append, **changes)
    tuner.notes = notes
    return tuner


def tune_one(tmp_path, runner, configs=(DEFAULT, SLOW, FAST), budget=600.0):
    tuner = tuner_of(tmp_path, runner, configs)
    return tuner, tuner.tune(SHAPES[:1], budget)


def table_of(tmp_path, op="paged_decode"):
    return tables.load(tmp_path / "sm90" / f"{op}.json")


def test_a_faster_config_wins_and_stands_in_a_table_with_its_evidence(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0}, noise=0.01)
    _, (result,) = tune_one(tmp_path, runner)
    assert result.best == FAST and result.tried == 2 and result.left == result.failed == 0
    assert 78 < result.best_us.p50 < 82 and 98 < result.default_us.p50 < 102 and 15 < result.gain < 25
    (entry,) = table_of(tmp_path).entries
    assert (entry.config, entry.origin, entry.bucket, entry.compiled) == (FAST, "measured", Bucket(None, None), COMPILED)
    assert entry.match == key_of_shape(SHAPES[0]) and entry.us == pytest.approx(result.best_us.p50, abs=0.01)
    (run,) = table_of(tmp_path).runs
    assert replace(run, noise=0.0) == RUN and 0 < run.noise < 2 and runner.is_closed


def test_with_noise_alone_the_default_stays(tmp_path):
    for seed in range(30):
        others = [AttentionConfig(16, 32, 4, stages) for stages in range(1, 8)]
        runner = FakeRunner(lambda shape, config: 100.0, noise=0.3, seed=seed)
        _, (result,) = tune_one(tmp_path / str(seed), runner, others)
        assert result.best is None and result.gain == 0.0 and result.noise > 0
    (entry,) = table_of(tmp_path / "0").entries
    assert (entry.config, entry.compiled, entry.origin, entry.us) == (None, None, "measured", pytest.approx(result.default_us.p50, rel=0.2))


@pytest.mark.parametrize(("us", "wins"), [(96.0, True), (97.5, False), (100.0, False), (130.0, False)])
def test_a_config_has_to_be_faster_by_more_than_three_percent(tmp_path, us, wins):
    _, (result,) = tune_one(tmp_path, FakeRunner({DEFAULT: 100.0, FAST: us, SLOW: 200.0}))
    assert (result.best == FAST) is wins


def test_a_config_has_to_be_faster_by_more_than_twice_the_noise_of_both():
    default, steady = [98.0, 99.0, 100.0, 101.0, 102.0, 100.0, 100.0], [94.0] * 7
    assert 0.01 < noise_of(default) < 0.03
    assert winner(default, {FAST: steady}) == FAST
    assert winner([90.0, 95.0, 100.0, 105.0, 110.0, 100.0, 100.0], {FAST: steady}) is None
    assert winner([100.0] * 7, {FAST: [84.0, 88.0, 94.0, 98.0, 104.0, 94.0, 94.0]}) is None
    # A steady second takes the place of a faster one that cannot be trusted.
    assert winner([100.0] * 7, {FAST: [70.0, 80.0, 93.0, 110.0, 120.0, 93.0, 93.0], SLOW: steady}) == SLOW


def test_a_fast_config_with_a_wrong_output_never_wins_and_is_not_even_timed(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, FAST: 80.0, BAD: 10.0}, faults={("check", BAD): Failed("wrong output", "out[0]: 3 for 1")})
    tuner, (result,) = tune_one(tmp_path, runner, (DEFAULT, BAD, FAST))
    assert result.best == FAST and result.failed == 1 and runner.count("time", BAD) == 0
    assert tuner.blocklist.reason("sm90", "paged_decode", key_of_shape(SHAPES[0]), BAD) == "wrong output: out[0]: 3 for 1"
    assert any("wrong output" in note for note in tuner.notes)


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("check", Failed("compile", "ptxas: out of registers")),
        ("check", Failed("hang", "no answer", True)),
        ("time", Failed("hang", "no answer", True)),
        ("check", Failed("launch", "an illegal memory access", True)),
        ("check", Failed("crash", "the process ended with -11", True)),
    ],
)
def test_what_fails_or_hangs_is_blocked_with_its_reason_the_others_are_measured_and_the_next_run_skips_it(tmp_path, step, fault):
    us = {DEFAULT: 100.0, FAST: 80.0, BAD: 10.0}
    runner = FakeRunner(us, faults={(step, BAD): fault})
    _, (result,) = tune_one(tmp_path, runner, (DEFAULT, BAD, FAST))
    assert result.best == FAST and result.failed == 1 and runner.count("open", None) == 1 + fault.is_fatal
    (blocked,) = json.loads((tmp_path / "blocklist.json").read_text())["entries"]
    assert (blocked["kind"], blocked["reason"], blocked["key"]) == (fault.kind, fault.reason, "d128 bf16 bf16 r16 p16")

    again = FakeRunner(us)
    _, (result,) = tune_one(tmp_path, again, (DEFAULT, BAD, FAST))
    assert result.best == FAST and all(config not in (BAD, (BAD, FAST)) for _, config in again.calls)


def test_a_finalist_that_fails_later_is_blocked_and_another_wins(tmp_path):
    class Late(FakeRunner):
        def time(self, config, limit):
            if config == BAD and self.count("time", BAD) == 3:
                self.is_open = False
                raise Failed("hang", "no answer", True)
            return super().time(config, limit)

    _, (result,) = tune_one(tmp_path, Late({DEFAULT: 100.0, FAST: 80.0, BAD: 70.0}), (BAD, FAST))
    assert result.best == FAST and result.failed == 1 and BAD not in dict(result.finalists)


def test_where_compiling_in_parallel_hangs_configs_are_compiled_one_by_one(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, FAST: 80.0, SLOW: 120.0}, faults={("prepare", (SLOW, FAST)): Failed("hang", "no answer", True)})
    tuner, (result,) = tune_one(tmp_path, runner)
    assert result.best == FAST and result.tried == 2 and result.failed == 0
    assert any("compiling in parallel failed" in note for note in tuner.notes)


def test_compiling_in_parallel_is_not_tried_again_for_a_shape_where_it_crashed(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]

    class Crashing(FakeRunner):
        def prepare(self, configs, limit):
            self.calls.append(("prepare", None))
            self.is_open = False
            raise Failed("crash", "the process ended with -11", True)

    runner = Crashing(lambda shape, config: 100.0)
    _, (result,) = tune_one(tmp_path, runner, configs)
    assert result.tried == len(configs) and runner.count("prepare", None) == 1


def test_finalists_take_turns_with_the_default_and_each_round_begins_with_another(tmp_path):
    configs = [AttentionConfig(16, 32, 4, stages) for stages in range(1, 9)]
    runner = FakeRunner({DEFAULT: 100.0, **{config: 80.0 + 2 * config.num_stages for config in configs}})
    _, (result,) = tune_one(tmp_path, runner, configs)
    assert result.best == configs[0] and [config for config, _ in result.finalists] == configs[:FINALISTS]
    timed = [config for name, config in runner.calls if name == "time"][1 + len(configs) :]
    width = 1 + FINALISTS
    rounds = [timed[i : i + width] for i in range(0, len(timed), width)]
    assert len(rounds) == ROUNDS and all(set(turn) == {DEFAULT, *configs[:FINALISTS]} for turn in rounds)
    assert [turn[0] for turn in rounds[:width]] == rounds[0] and len({turn[0] for turn in rounds}) == width


def test_a_config_that_looks_slow_is_not_timed_again(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, FAST: 80.0, SLOW: 120.0})
    tune_one(tmp_path, runner)
    assert runner.count("time", SLOW) == 1 and runner.count("time", FAST) == 1 + ROUNDS


@pytest.mark.parametrize("step", [0.05, 0.4, 3.0])
@pytest.mark.parametrize("budget", [10.0, 37.0, 200.0])
def test_the_budget_is_kept_whatever_a_step_takes(tmp_path, step, budget):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]
    runner = FakeRunner(lambda shape, config: 100.0 - config.num_stages, step=step, compile_s=step)
    start, tuner = runner.clock(), tuner_of(tmp_path, runner, configs)
    results = tuner.tune(SHAPES, budget)
    # A step is known to take `step`, twice for a candidate; the first of its kind is a guess.
    assert runner.clock() - start <= budget + 2 * step + runner.open_s
    assert all(result.tried + result.left == len(configs) for result in results)
    if budget == 200.0 and step == 0.05:
        assert len(results) == len(SHAPES) and not any(result.left for result in results)


def test_no_shape_takes_the_time_of_those_behind_it(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]
    results = tuner_of(tmp_path, FakeRunner(lambda shape, config: 100.0, step=0.1), configs).tune(SHAPES, 40.0)
    assert len(results) == len(SHAPES) and all(0 < result.left < 28 for result in results)


def test_of_many_shapes_in_a_small_budget_the_first_are_measured_well(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]
    results = tuner_of(tmp_path, FakeRunner(lambda shape, config: 100.0, step=0.02), configs).tune(SHAPES, 8.0)
    assert 1 <= len(results) < len(SHAPES) and results[0].tried > 20


def test_rounds_count_up_to_the_last_in_which_all_were_timed(tmp_path):
    class Late(FakeRunner):
        def time(self, config, limit):
            if config == DEFAULT and self.count("time", DEFAULT) == ROUNDS:
                raise Failed("launch", "busy")
            return super().time(config, limit)

    _, (result,) = tune_one(tmp_path, Late({DEFAULT: 100.0, FAST: 80.0}), (FAST,))
    assert result.default_us.runs == result.best_us.runs == ROUNDS - 1 and result.failed == 0


def test_time_that_a_shape_leaves_over_goes_to_the_next(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]
    few = {key_of_shape(SHAPES[0])}
    runner = FakeRunner(lambda shape, config: 100.0, step=0.1)
    shapes = [replace(SHAPES[0], format="int8/token_head"), SHAPES[0]]
    tuner = Tuner(runner, lambda op, key, arch: configs[: 28 if key in few else 1], "sm90", RUN, tmp_path, clock=runner.clock)
    assert [result.left for result in tuner.tune(shapes, 20.0)] == [0, 0]


def test_a_hang_that_the_budget_cut_short_blocks_nothing(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, FAST: 80.0, BAD: 10.0}, faults={("check", BAD): Failed("hang", "no answer", True)})
    tuner, results = tune_one(tmp_path, runner, (BAD, FAST), budget=8.0)
    assert not tuner.blocklist.entries and results[0].best is None


def test_with_too_few_rounds_nothing_wins(tmp_path):
    runner = FakeRunner({DEFAULT: 100.0, FAST: 10.0}, faults={("time", FAST): 1.0}, step=0.01)
    _, (result,) = tune_one(tmp_path, runner, (FAST,), budget=5.0)
    assert result.best is None and result.tried == 1 and result.default_us.runs == 2


def test_time_for_the_rounds_is_kept_back_so_that_a_winner_is_found_among_too_many_candidates(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(28)]
    runner = FakeRunner({DEFAULT: 100.0, **{config: 90.0 - i for i, config in enumerate(configs)}}, step=0.2, compile_s=0.01)
    _, (result,) = tune_one(tmp_path, runner, configs, budget=15.0)
    assert result.left > 5 and result.best == configs[result.tried - 1] and result.default_us.runs == ROUNDS


def test_candidates_that_turn_out_to_be_slow_are_not_started_when_they_would_not_fit(tmp_path):
    configs = [AttentionConfig(16, 16 << i % 4, 4, 1 + i // 4) for i in range(12)]
    runner = FakeRunner(lambda shape, config: 100.0, faults={("check", config): 2.0 for config in configs}, compile_s=0.0)
    start = runner.clock()
    _, (result,) = tune_one(tmp_path, runner, configs, budget=10.0)
    assert runner.clock() - start <= 10.0 and 3 <= result.tried < 5 and result.left == len(configs) - result.tried


def test_a_shape_whose_default_fails_is_told_and_the_others_are_measured(tmp_path):
    class Small(FakeRunner):
        def open(self, shape, limit):
            if shape == SHAPES[1]:
                raise Failed("launch", "its cache needs 90.0 GB, 80.0 GB are free")
            return super().open(shape, limit)

    tuner, seen = tuner_of(tmp_path, Small({DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0})), []
    results = tuner.tune(SHAPES, 600.0, progress=lambda shape, result: seen.append((shape, result is not None)))
    assert [result.shape for result in results] == [SHAPES[0], *SHAPES[2:]]
    assert seen == [(shape, shape != SHAPES[1]) for shape in SHAPES]
    assert tuner.failures == [(SHAPES[1], "launch: its cache needs 90.0 GB, 80.0 GB are free")]


def test_a_runner_that_does_not_come_up_ends_the_run_at_once(tmp_path):
    runner = FakeRunner({}, faults={("open", None): Failed("start", "DeviceError: torch sees no GPU", True)})
    with pytest.raises(Failed, match="torch sees no GPU"):
        tuner_of(tmp_path, runner).tune(SHAPES, 600.0)
    assert runner.is_closed and runner.count("open", None) == 1


def test_ctrl_c_keeps_what_was_measured_and_resume_measures_the_rest(tmp_path):
    class Interrupted(FakeRunner):
        def open(self, shape, limit):
            if shape == SHAPES[2]:
                raise KeyboardInterrupt
            return super().open(shape, limit)

    us = {DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0}
    runner = Interrupted(us)
    with pytest.raises(KeyboardInterrupt):
        tuner_of(tmp_path, runner).tune(SHAPES, 600.0)
    assert runner.is_closed and [result.shape for result in load_results(tmp_path / "results.json")[0]] == SHAPES[:2]
    assert len(table_of(tmp_path).entries) == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["paged_decode.json", "results.json"]

    again, tuner = FakeRunner(us), tuner_of(tmp_path, FakeRunner(us))
    tuner.runner, tuner.clock = again, again.clock
    assert [result.shape for result in tuner.tune(SHAPES, 600.0, resume=True)] == SHAPES[2:]
    results, runs = load_results(tmp_path / "results.json")
    assert [result.shape for result in results] == SHAPES and [result.run for result in results] == [0, 0, 1, 1] and len(runs) == 2
    assert tuner_of(tmp_path, FakeRunner(us)).tune(SHAPES, 600.0, resume=True) == []


@pytest.mark.parametrize("changes", [{"triton": "3.9.0"}, {"device": "Fake 8000"}, {"sms": 78}, {}])
def test_results_of_another_gpu_version_or_kernel_are_measured_anew(tmp_path, changes, monkeypatch):
    us = {DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0}
    tune_one(tmp_path, FakeRunner(us))
    tuner = tuner_of(tmp_path, FakeRunner(us))
    tuner.run = replace(RUN, **changes)
    if not changes:
        tuner.hashes = {op: "another" for op in tuner.hashes}
        tuner.blocklist.kernel_hashes = tuner.hashes
    assert len(tuner.tune(SHAPES[:1], 600.0, resume=True)) == 1
    results, runs = load_results(tmp_path / "results.json")
    assert len(results) == len(runs) == 2


def test_results_of_another_kernel_are_kept_in_the_file_but_in_no_table(tmp_path):
    us = {DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0}
    old = tuner_of(tmp_path, FakeRunner(us))
    old.hashes = {op: "another" for op in old.hashes}
    old.tune([replace(SHAPES[0], format="int8/token_head")], 600.0)
    tuner_of(tmp_path, FakeRunner(us)).tune(SHAPES[:1], 600.0, resume=True)
    assert len(load_results(tmp_path / "results.json")[0]) == 2
    assert [entry.match.format for entry in table_of(tmp_path).entries] == ["bf16"]


def test_without_resume_old_results_are_not_mixed_in(tmp_path):
    us = {DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0}
    tuner_of(tmp_path, FakeRunner(us)).tune(SHAPES, 600.0)
    tune_one(tmp_path, FakeRunner(us))
    assert len(load_results(tmp_path / "results.json")[0]) == 1


@pytest.mark.parametrize("text", ["[", "[]", '{"schema": 2, "results": [], "runs": []}', '{"schema": 1, "runs": []}'])
def test_a_damaged_file_is_refused_in_one_line_with_its_name(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(TableError, match=r"results\.json: no results of tkv tune: [^\n]*$"):
        tuner_of(tmp_path, FakeRunner({})).tune(SHAPES, 600.0, resume=True)
    (tmp_path / "blocklist.json").write_text(text)
    with pytest.raises(TableError, match=r"blocklist\.json: no list of failed configs: [^\n]*$"):
        tuner_of(tmp_path, FakeRunner({}))


def test_the_blocklist_counts_for_the_same_key_architecture_triton_and_kernel_only(tmp_path):
    key, path, hashes = key_of_shape(SHAPES[0]), tmp_path / "blocklist.json", {"paged_decode": "1", "key_scores": "2"}
    Blocklist(path, "3.7.1", hashes).add("sm90", "paged_decode", key, BAD, "compile", "one\n  line", "2026-01-31")
    blocklist = Blocklist(path, "3.7.1", hashes)
    assert blocklist.reason("sm90", "paged_decode", key, BAD) == "compile: one line"
    assert blocklist.reason("sm90", "paged_decode", key, FAST) is None
    assert blocklist.reason("sm80", "paged_decode", key, BAD) is blocklist.reason("sm90", "key_scores", key, BAD) is None
    assert blocklist.reason("sm90", "paged_decode", key._replace(rows=32), BAD) is None
    assert Blocklist(path, "3.9.0", hashes).reason("sm90", "paged_decode", key, BAD) is None
    assert Blocklist(path, "3.7.1", {**hashes, "paged_decode": "9"}).reason("sm90", "paged_decode", key, BAD) is None


def result_of(shape, best, us=50.0):
    """A result that needs no measuring."""
    times, won = Times(us, us, us, 7), best is not None
    compiled = COMPILED if won else None
    return Result(shape, DEFAULT, times, best, times if won else None, compiled, 0.1, 1, 0, 0, (), 0, kernel_hash(shape.op))


def test_buckets_of_a_key_are_cut_between_the_measured_sizes_and_the_last_is_open():
    best = {(1, 1024): None, (1, 8192): FAST, (1, 65536): FAST, (16, 1024): SLOW, (16, 8192): SLOW, (16, 65536): SLOW}
    shapes = shapes_of("llama3-8b", batches=[1, 16], lengths=[1024, 8192, 65536])
    (table,) = tables_of("sm90", [result_of(shape, best[shape.num_seqs, shape.kv_len]) for shape in shapes], [RUN])
    # 8 and 128 programs on 132 SMs; the geometric means of neighbours lie between them.
    work = pytest.approx((8 * 128) ** 0.5 / 132, rel=0.01)
    assert [(entry.bucket.work, entry.bucket.keys, entry.config) for entry in table.entries] == [
        (work, 2896, None), (work, None, FAST), (None, None, SLOW),
    ]  # fmt: skip
    for shape in shapes:
        size = (shape.num_seqs * 8 / 132, shape.kv_len)
        entry = next(entry for entry in table.entries if entry.bucket.holds(*size))
        assert entry.config == best[shape.num_seqs, shape.kv_len]


def test_amounts_of_work_with_the_same_winners_are_one_bucket():
    shapes = shapes_of("llama3-8b", batches=[1, 4, 16], lengths=[1024, 8192])
    results = [result_of(shape, FAST if shape.kv_len == 8192 and shape.num_seqs < 16 else None) for shape in shapes]
    (table,) = tables_of("sm90", results, [RUN])
    work = pytest.approx((32 * 128) ** 0.5 / 132, rel=0.01)
    assert [(e.bucket.work, e.bucket.keys, e.config) for e in table.entries] == [(work, 2896, None), (work, None, FAST), (None, None, None)]


def test_a_winner_whose_registers_could_not_be_read_is_in_no_table():
    assert tables_of("sm90", [replace(result_of(SHAPES[0], FAST), compiled=None)], [RUN]) == []


def test_each_op_has_a_table_of_its_own_with_the_runs_that_it_needs():
    decode, prefill = result_of(SHAPES[0], FAST), result_of(shapes_of("llama3-8b", "prefix_prefill")[0], FAST)
    first, second = tables_of("sm90", [replace(decode, run=1), prefill], [RUN, replace(RUN, date="2026-02-01")])
    assert (first.op, len(first.runs), first.runs[0].date) == ("paged_decode", 1, "2026-02-01") and first.entries[0].run == 0
    assert (second.op, second.runs) == ("prefix_prefill", (RUN,))


def fake(faults=None):
    """Made in another process: a runner whose faults really happen."""
    return Real({DEFAULT: 100.0, SLOW: 120.0, FAST: 80.0, BAD: 10.0}, faults=faults)


class Real(FakeRunner):
    """A fake runner in a process of its own, whose clock is nobody's."""

    def check(self, config, limit):
        if config == BAD:
            fault = self.faults["kind"]
            if fault == "hang":
                time.sleep(60)
            if fault == "crash":
                os._exit(3)
            raise {"error": RuntimeError("an illegal memory access"), "wrong": Failed("wrong output", "out")}[fault]
        super().check(config, limit)


def broken():
    raise DeviceError("torch sees no GPU")


@pytest.fixture
def watched():
    runners = []

    def make(factory):
        runners.append(WatchedRunner(factory, start_limit=30.0, context="fork"))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.mark.parametrize(
    ("kind", "failed", "is_lost"),
    [("hang", "hang", True), ("crash", "crash", True), ("error", "launch", True), ("wrong", "wrong output", False)],
)
def test_a_process_that_hangs_or_dies_is_replaced_by_another(watched, kind, failed, is_lost):
    runner = watched(functools.partial(fake, {"kind": kind}))
    assert runner.open(SHAPES[0], 20.0) == DEFAULT
    pid, start = runner.process.pid, time.perf_counter()
    with pytest.raises(Failed) as caught:
        runner.check(BAD, 0.3)
    assert (caught.value.kind, caught.value.is_fatal) == (failed, is_lost) and time.perf_counter() - start < 10
    assert (runner.process is None) is is_lost
    assert runner.open(SHAPES[1], 20.0) == DEFAULT and (runner.process.pid == pid) is not is_lost
    runner.check(FAST, 20.0)
    assert len(runner.time(FAST, 20.0)) == 12 and runner.compiled(FAST, 20.0) == COMPILED


def test_a_process_that_does_not_come_up_says_why(watched):
    with pytest.raises(Failed, match="start: DeviceError: torch sees no GPU"):
        watched(broken).open(SHAPES[0], 20.0)


def test_a_hanging_config_is_killed_blocked_and_the_winner_found_all_the_same(watched, tmp_path, monkeypatch):
    monkeypatch.setattr("tkv.tune.tuner.COMPILED_LIMIT", 0.3)
    runner = watched(functools.partial(fake, {"kind": "hang"}))
    tuner = Tuner(runner, lambda op, key, arch: (BAD, FAST), "sm90", RUN, tmp_path)
    (result,) = tuner.tune(SHAPES[:1], 60.0)
    assert result.best == FAST and [entry.kind for entry in tuner.blocklist.entries] == ["hang"] and runner.process is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs where there is no GPU")
def test_without_a_gpu_there_is_nothing_to_measure_on():
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        describe_run()
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        GpuRunner()


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_what_compiling_gave_is_read_from_the_machine_code(arch):
    code = f"""
from tkv.tune.cases import Case, launch_of
from tkv.tune.compile import compile_launch, report
from tkv.tune.runner import compiled_of
case = Case("merge")
launch = launch_of(case, "{arch}")
found, wanted = compiled_of(compile_launch(launch, "{arch}"), "{arch}", launch.num_warps), report(case, "{arch}")
assert (found.registers, found.spills, found.shared) == (wanted.registers, wanted.spills, wanted.shared), found
assert found.registers > 16 and found.ctas_per_sm > 0
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.compile
def test_configs_are_compiled_in_parallel_by_the_very_path_of_a_launch():
    code = """
import torch
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tkv.tune.problem import build
from tkv.tune.runner import GpuRunner
from tkv.tune.shapes import shapes_of

class Driver:
    get_current_device = get_current_stream = lambda *args: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
runner = GpuRunner("cpu", timer=object())
runner.problem = build(shapes_of("gpt-oss-20b", batches=[2], lengths=[1024])[0], "meta")
configs = [replace(runner.problem.default, block_n=block_n) for block_n in (32, 64)]
runner.prepare(configs)
kernels = runner.problem.launches(configs[0])[0][0].kernel.device_caches[0][0]
assert len(kernels) == 2 and all(type(kernel).__name__ == "CompiledKernel" for kernel in kernels.values()), kernels
small, large = map(runner.compiled, configs)
assert 0 < small.shared < large.shared and small.registers <= large.registers and not small.spills
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Stopwatch:
    """A timer that runs each call once, and notes what it was to capture."""

    def __init__(self):
        self.captures = []

    def captured(self, call):
        self.captures.append(call)
        return call

    def measure(self, call, quick=False):
        call()
        return [5.0, 6.0, 7.0]


SMALL = Model("small", layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture
def small():
    """A runner of real kernels and a shape that they take a moment for."""
    runner = GpuRunner("cuda" if torch.cuda.is_available() else "cpu", Stopwatch())
    shape = shapes_of(SMALL, batches=[2], lengths=[70], dtype="fp32", format="fp32")[0]
    return runner, shape, runner.open(shape)


def test_real_kernels_are_checked_against_the_default_and_timed(small):
    runner, _, default = small
    config = replace(default, block_n=32, split_len=32)
    runner.check(config)
    assert runner.time(config) == [5.0, 6.0, 7.0] and runner.problem.default == default


def test_calls_are_captured_once_while_few_configs_take_turns_and_not_kept_for_another_shape(small):
    runner, shape, default = small
    configs = [default, *(replace(default, block_n=block_n, num_stages=stages) for block_n in (16, 32) for stages in (1, 3, 4, 5))]
    for config in configs[:5] * 3:
        runner.time(config)
    assert len(runner.timer.captures) == 5
    for config in configs:
        runner.time(config)
    assert len(runner.timer.captures) == len(configs) and len(runner.replays) == MAX_REPLAYS
    runner.open(shape)
    runner.time(configs[-1])
    assert len(runner.timer.captures) == len(configs) + 1


def test_a_config_that_writes_nothing_is_wrong_even_where_memory_holds_the_right_result(small, monkeypatch):
    runner, _, default = small
    runner.check(default)
    monkeypatch.setattr("tkv.tune.problem.run_all", lambda launches, device: None)
    with pytest.raises(Failed, match=r"wrong output: out\[0, 0, 0, 0\]: 10000 where the default gives"):
        runner.check(default)


def test_a_config_that_the_op_refuses_fails_and_the_runner_goes_on(small, monkeypatch):
    runner, _, default = small

    def refuse(*args, **kwargs):
        raise DeviceError("config: too large")

    with monkeypatch.context() as patch:
        patch.setattr("tkv.tune.problem.plan_decode", refuse)
        with pytest.raises(Failed, match="config: too large") as caught:
            runner.check(default)
    assert not caught.value.is_fatal
    runner.check(default)
