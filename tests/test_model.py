"""Predicted times: they rank as GPUs do, and are told apart by what bounds them."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from tkv.errors import RangeError, UnsupportedError
from tkv.ops.decode import plan_decode
from tkv.tune.arch import Part, arch, parts, reference_part
from tkv.tune.cases import launch_of
from tkv.tune.compile import Case, Report, compile_all
from tkv.tune.configs import AttentionConfig
from tkv.tune.model import LAUNCH_US, Shape, plan_of, predict

H100 = next(part for part in parts() if part.name == "H100 SXM")
CONFIG = AttentionConfig(16, 128, num_warps=4, num_stages=2)
# About what the decode kernel of bf16 and of fp8 compiles to.
LOOPS = {"bf16": {"HMMA": 64, "IMAD": 640, "MUFU": 18}, "fp8_e4m3/tensor": {"HMMA": 64, "IMAD": 760, "F2FP": 64, "MUFU": 18}}


def made_up(format: str = "bf16", config: AttentionConfig = CONFIG, op: str = "decode", name: str = "sm90", **more: Any) -> Report:
    known: dict[str, Any] = {"registers": 224, "shared": 72 << 10, "config": config, "num_warps": config.num_warps, "num_stages": 2}
    known |= {"loop": LOOPS[format], "loop_shared_bytes": 24_000}
    return Report(Case(op, format=format), name, "3.7.1", **{**known, **more})


def decode(num_seqs: int, kv_len: int, q_len: int = 1, format: str = "bf16", **more: Any) -> Shape:
    return Shape("paged_decode", num_seqs, q_len, kv_len, 64, 8, 128, 128, format=format, **more)


def us(shape: Shape, config: AttentionConfig = CONFIG, part: Part = H100, **more: Any) -> float:
    return predict(made_up(shape.format, config, **more), shape, part).us


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 512])
def test_longer_is_slower(num_seqs: int) -> None:
    times = [us(decode(num_seqs, 128 << i)) for i in range(11)]
    assert times == sorted(times) and times[-1] > 3 * times[0]


@pytest.mark.parametrize("kv_len", [1000, 30_000])
def test_more_sequences_are_slower(kv_len: int) -> None:
    times = [us(decode(1 << i, kv_len)) for i in range(10)]
    assert times == sorted(times)


def test_splits_help_one_sequence_and_not_a_large_batch() -> None:
    whole = replace(CONFIG, split_len=1 << 20)
    assert us(decode(1, 32_768)) < us(decode(1, 32_768), whole) / 4
    found = predict(made_up(config=replace(CONFIG, split_len=1024)), decode(512, 8192), H100)
    assert found.splits == 8 and found.bounds["merge"] > 0
    assert us(decode(512, 8192), whole) < found.us


def test_eight_bits_are_cheaper_where_memory_bounds() -> None:
    wide, narrow = (predict(made_up(kind), decode(64, 8192, format=kind), H100) for kind in LOOPS)
    assert wide.bound == narrow.bound == "memory"
    assert 0.5 < narrow.us / wide.us < 0.6


def test_eight_bits_are_no_cheaper_where_instructions_bound() -> None:
    slow = {"HMMA": 64, "IMAD": 8000}
    wide, narrow = (predict(made_up(kind, loop=slow), decode(64, 8192, format=kind), H100) for kind in LOOPS)
    assert wide.bound == narrow.bound == "issue slots" and narrow.us > 0.99 * wide.us


@pytest.mark.parametrize("shape", [decode(1, 1000), decode(1, 100_000), decode(64, 8192), decode(512, 2048)])
def test_more_bandwidth_is_never_slower(shape: Shape) -> None:
    assert H100.gbps is not None
    times = [us(shape, part=replace(H100, gbps=H100.gbps * factor)) for factor in (0.5, 1, 2, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.9 * times[1] or shape.num_seqs == 1


def test_a_large_batch_takes_what_its_bytes_take() -> None:
    floor = 64 * 8192 * 8 * 512 / 3350e3
    assert floor < us(decode(64, 8192)) < 3 * floor


def test_the_smallest_call_takes_launches_and_a_few_latencies() -> None:
    found = predict(made_up(), decode(1, 16), H100)
    assert found.splits == 1 and found.bounds["merge"] == 0
    assert LAUNCH_US < found.us < 10


def test_the_last_wave_counts() -> None:
    # 264 programs fill the GPU; one more needs a wave of its own, which a second half fills no more.
    whole = replace(CONFIG, split_len=1 << 20)
    times = [us(decode(num_seqs, 8192), whole) for num_seqs in (33, 34, 66)]
    assert [predict(made_up(config=whole), decode(num_seqs, 8192), H100).waves for num_seqs in (33, 66)] == [1.0, 2.0]
    assert times[1] - times[0] > 0.1 * times[0]
    assert times[2] > 1.9 * times[0]


def test_uneven_work_is_no_faster_than_its_longest_program() -> None:
    report = made_up(
        config=AttentionConfig(128, 128, 8, 2), op="prefill", loop={"HGMMA": 16, "FADD": 600}, shared=160 << 10, loop_shared_bytes=0
    )
    shape = Shape("prefix_prefill", 1, 2048, 2048, 16, 2, 128, 128)
    plan = plan_of(report.config, shape, 132, 512)
    # 128 tiles of 16 tokens; of the last ones all 16 tiles of keys are visible, of the first ones one.
    assert (plan.ctas, plan.longest) == (256, 16) and plan.tiles == 2 * sum(-(-(16 * (i + 1)) // 128) for i in range(128))
    found = predict(report, shape, H100)
    assert found.us - LAUNCH_US > 16 * 600 * 8 / 4 / 1750


def test_prefill_reads_a_sequence_once_and_is_bound_by_its_products() -> None:
    report = made_up(
        config=AttentionConfig(128, 128, 8, 2), op="prefill", loop={"HGMMA": 16, "FADD": 600}, shared=160 << 10, loop_shared_bytes=0
    )
    short, long = (predict(report, Shape("prefix_prefill", 4, 2048, length, 64, 8, 128, 128), H100) for length in (2048, 16_384))
    assert short.bound == long.bound == "tensor cores"
    visible = 4 * 2048 * (16_384 - 1024) * 64
    assert 4 * 128 * visible / 989e6 < long.us < 1.5 * 4 * 128 * visible / 989e6
    assert 6 < long.us / short.us < 18


def test_levels_read_shared_keys_once_for_all_sequences() -> None:
    report = made_up(config=AttentionConfig(64, 64, 8, 2), op="level")
    one, many = (predict(report, Shape("shared_prefix_decode", num_seqs, 1, 32_768, 64, 8, 128, 128), H100) for num_seqs in (1, 64))
    assert many.bounds["memory"] < 20 * one.bounds["memory"] and many.us > one.us


def test_scores_take_no_merge() -> None:
    found = predict(made_up(op="scores"), Shape("key_scores", 4, 1, 30_000, 64, 8, 128, 128), H100)
    assert found.splits == 1 and found.bounds["merge"] == 0
    assert found.us > 4 * 30_000 * 8 * 256 / 3350e3


def test_a_window_costs_the_same_at_any_length() -> None:
    times = [us(decode(8, length, window=1024, flags=("window",))) for length in (2000, 200_000)]
    assert times[0] == times[1] < us(decode(8, 2000))


def test_what_cannot_run_takes_for_ever() -> None:
    for more in ({"shared": 300 << 10}, {"registers": 255, "config": replace(CONFIG, num_warps=16), "num_warps": 16}):
        assert us(decode(8, 1000), **{"config": CONFIG, **more}) == math.inf  # type: ignore[arg-type]


def test_deterministic_splits_do_not_depend_on_the_batch() -> None:
    found = [predict(made_up(), decode(num_seqs, 16_384, deterministic=True), H100).splits for num_seqs in (1, 256)]
    assert found == [16, 16]
    assert predict(made_up(), decode(1, 100, deterministic=True), H100).bounds["merge"] > 0


@pytest.mark.parametrize("num_seqs", [1, 5, 40, 200])
def test_decode_is_planned_as_the_op_plans_it(num_seqs: int) -> None:
    import torch

    from tkv import KVCache
    from tkv.ops.attention import Options

    cache = KVCache.empty(64, 16, 8, 128, "bf16", device="meta")
    q, table = (
        torch.empty(num_seqs, 1, 64, 128, device="meta", dtype=torch.bfloat16),
        torch.empty(num_seqs, 1024, dtype=torch.int32, device="meta"),
    )
    lens, out = torch.empty(num_seqs, dtype=torch.int32, device="meta"), torch.empty_like(q)
    launches = plan_decode(q, cache, table, lens, out, None, "sm90", False, Options(scale=0.1), config=CONFIG)
    plan = plan_of(CONFIG, decode(num_seqs, 16_384), 132, 512)
    grid = launches[0].grid
    assert (len(launches) > 1) == (plan.splits > 1) and plan.ctas == grid[0] * grid[1] == num_seqs * 8 * max(1, plan.splits)
    assert plan.tiles == num_seqs * 8 * 128


def test_unknown_rates_bound_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = predict(made_up(loop_shared_bytes=0), decode(64, 8192), replace(H100, gbps=None, bf16_tflops=None))
    assert found.unknown == ("memory", "tensor cores") and found.bound == "issue slots"
    with pytest.raises(UnsupportedError, match="H100 SXM, whose clock"):
        predict(made_up(), decode(64, 8192), replace(H100, clock_mhz=None))
    monkeypatch.setattr("tkv.tune.analysis.arch_facts", lambda name: replace(arch(name), registers_per_sm=None))
    with pytest.raises(UnsupportedError, match="registers and warps"):
        predict(made_up(), decode(64, 8192), H100)


def test_a_report_of_another_op_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="report: of prefill, shape: of paged_decode"):
        predict(made_up(op="prefill"), decode(1, 100), H100)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"op": "decode"}, UnsupportedError, "op: expected paged_decode"),
        ({"num_seqs": 0}, RangeError, "num_seqs: expected at least 1"),
        ({"num_q_heads": 12}, RangeError, "num_q_heads: expected a multiple of num_kv_heads"),
        ({"op": "prefix_prefill", "q_len": 200}, RangeError, "q_len: expected at most kv_len"),
    ],
)
def test_shapes_that_no_call_has_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(decode(1, 100), **changed)


@lru_cache
def compiled(name: str) -> dict[str, Report]:
    jobs = [(Case("decode", format=kind), name) for kind in ("bf16", "fp8_e4m3/tensor")]
    return {report.case.format: report for report in compile_all(jobs, workers=1)}


@pytest.mark.compile
@pytest.mark.parametrize("name", ["sm90", "gfx942"])
def test_compiled_kernels_rank_as_they_should(name: str) -> None:
    part = reference_part(name)
    assert part is not None and part.gbps is not None
    bf16 = compiled(name)["bf16"]
    times = [predict(bf16, decode(16, 256 << i), part).us for i in range(8)]
    assert times == sorted(times)
    floor = 64 * 8192 * 8 * 512 / part.gbps / 1e3
    assert floor < predict(bf16, decode(64, 8192), part).us < 3 * floor
    fp8 = predict(compiled(name)["fp8_e4m3/tensor"], decode(64, 8192, format="fp8_e4m3/tensor"), part)
    # On AMD it may be bound by its instructions.
    assert fp8.bounds["memory"] < 0.6 * predict(bf16, decode(64, 8192), part).bounds["memory"]
    assert name != "sm90" or (fp8.bound == "memory" and fp8.us < 0.6 * predict(bf16, decode(64, 8192), part).us)


@pytest.mark.compile
def test_a_launch_of_the_case_is_the_one_that_is_modelled() -> None:
    report = compiled("sm90")["bf16"]
    launch = launch_of(report.case, "sm90")
    assert report.config is not None and launch.num_warps == report.config.num_warps
    plan = plan_of(report.config, Shape("paged_decode", 8, 1, 512 * 16, 64, 8, 128, 128), 132, 512)
    assert plan.ctas == math.prod(launch.grid)
