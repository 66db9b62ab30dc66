"""One statement of what a config must keep to: what is refused cannot run, what compilers give is not refused."""

from dataclasses import replace

import pytest

from tkv.errors import UnsupportedError
from tkv.tune import ARCHS, arch
from tkv.tune.analysis import tiles_in_flight
from tkv.tune.compile import Case, Report, compile_all
from tkv.tune.configs import AttentionConfig, default_decode, default_prefill
from tkv.tune.limits import ctas_per_sm, least_in_flight, problems_of, registers_of_warp

GOOD = AttentionConfig(16, 64, num_warps=4, num_stages=2)
BUILT = Report(Case("decode"), "sm90", "3.7.1", registers=128, shared=65536, config=GOOD, num_warps=4, num_stages=2, loop={"HMMA": 64})


@pytest.mark.parametrize("name", ARCHS)
def test_defaults_have_no_problems(name: str) -> None:
    for head_dim in (64, 128, 256, 576):
        for bits, compute in ((16, 16), (8, 16), (4, 16), (32, 32), (8, 32)):
            # Of 576 dims tkv has latent attention, whose V is 512 of them.
            more = {"v_head_dim": 512, "shared": True} if head_dim > 256 else {}
            decode = default_decode(name, head_dim, bits, compute, rows=16, page_size=16, plain=True, shared=bool(more))
            prefill = default_prefill(name, head_dim, bits, compute, rows=4096, plain=True, scaled=bits < 16)
            for config in (decode, prefill):
                assert problems_of(config, name, head_dim, compute, bits=bits, **more) == [], (config, head_dim, bits)


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (replace(GOOD, num_warps=16), "gfx942", "num_warps: 16 of 64 threads"),  # 1024 threads still fit
        (replace(GOOD, num_stages=5, block_n=256), "sm90", "262144 bytes of shared memory for tiles in flight"),
        (replace(GOOD, max_registers=128), "gfx942", "max_registers: only NVIDIA"),
        (replace(GOOD, max_registers=255, num_warps=16), "sm80", "needs 131072 registers"),
        (AttentionConfig(128, 128, num_warps=4, num_stages=1), "sm90", "at least 256 registers a thread"),
        (AttentionConfig(64, 64, num_warps=4, num_stages=1, max_registers=64), "sm90", "at least 96 registers a thread"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_compiled(config: AttentionConfig, name: str, message: str) -> None:
    found = problems_of(config, name, 128, 16)
    if config.num_warps == 16 and name == "gfx942":
        assert found == []
    else:
        assert len(found) == 1 and message in found[0]


def test_tensor_memory_holds_accumulators_that_registers_cannot() -> None:
    wide = AttentionConfig(128, 128, num_warps=4, num_stages=1)
    assert problems_of(wide, "sm90", 128, 16) and not problems_of(wide, "sm100", 128, 16)
    # A tile of few rows does not use it.
    assert problems_of(AttentionConfig(32, 512, num_warps=1, num_stages=1), "sm100", 128, 16)


def test_all_problems_are_named_at_once() -> None:
    found = problems_of(AttentionConfig(128, 512, 1, 8, max_registers=255), "gfx1100", 256, 32)
    assert [text.split()[0] for text in found] == ["max_registers:", "needs", "needs"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"error": "CompilationError: at 3:4"}, "does not compile: CompilationError: at 3:4"),
        ({"shared": 232449}, "needs 232449 bytes of shared memory, sm90 has 232448"),
        ({"spills": 8}, "spills 8 bytes a thread"),
        ({"registers": 168, "num_warps": 16}, "needs 86016 registers"),
    ],
)
def test_a_report_adds_what_the_compiler_saw(changed: dict[str, object], message: str) -> None:
    assert problems_of(GOOD, "sm90", 128, 16, report=BUILT) == []
    (found,) = problems_of(GOOD, "sm90", 128, 16, report=replace(BUILT, **changed))  # type: ignore[arg-type]
    assert message in found


def test_latent_attention_loads_its_rows_once() -> None:
    config = AttentionConfig(16, 64, num_warps=8, num_stages=5)
    assert problems_of(config, "sm90", 576, 16, v_head_dim=512)
    assert not problems_of(config, "sm90", 576, 16, v_head_dim=512, shared=True)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm70"):
        problems_of(GOOD, "sm70", 128, 16)


@pytest.mark.parametrize(
    ("name", "registers", "shared", "warps", "ctas"),
    [
        ("sm90", 64, 1024, 4, 8),  # registers: 16384 / 2048 = 8 warps of each of 4 parts
        ("sm90", 72, 1024, 4, 7),
        ("sm90", 16, 1024, 1, 32),  # the most that it may hold
        ("sm86", 16, 1024, 4, 12),  # 48 warps
        ("sm90", 32, 227 * 1024, 4, 1),
        ("sm90", 32, 113 * 1024, 4, 2),
        ("sm90", 32, 113 * 1024 + 1, 4, 1),
        ("sm90", 255, 1024, 8, 1),
        ("sm90", 255, 1024, 16, 0),
        ("gfx942", 512, 16384, 4, 1),
        ("gfx942", 65, 0, 4, 7),
        ("gfx942", 8, 0, 4, 8),  # 8 waves a SIMD
        ("gfx942", 64, 33000, 4, 1),
        ("gfx1100", 64, 33000, 4, 3),
    ],
)
def test_programs_of_an_sm(name: str, registers: int, shared: int, warps: int, ctas: int | None) -> None:
    assert ctas_per_sm(arch(name), registers, shared, warps) == ctas


def test_registers_come_in_granules() -> None:
    assert [registers_of_warp(arch("sm80"), n) for n in (1, 8, 9, 255)] == [256, 256, 512, 8192]
    assert [registers_of_warp(arch("gfx90a"), n) for n in (8, 9)] == [512, 1024]


@pytest.mark.compile
def test_bounds_before_compiling_are_below_what_compilers_take() -> None:
    jobs = [(Case("decode", page_size=page), "sm90", AttentionConfig(16, 64, 4, stages)) for page in (16, 128) for stages in (2, 3, 5)]
    jobs += [(Case("decode"), name, AttentionConfig(16, 128, 4, 2, max_registers=255)) for name in ("sm80", "sm120", "gfx942")]
    for report in compile_all(jobs, workers=1):
        config = report.config
        assert config is not None and not report.error
        tile = config.block_n * 256 * 2
        assert least_in_flight(config.num_stages) * tile <= report.shared, report.case.name
        # What is not in flight is less than a tile, so none is missing in the count.
        assert tiles_in_flight(report) * tile <= report.shared < (tiles_in_flight(report) + 1) * tile, report.case.name
        threads = config.num_warps * arch(report.arch).warp_size
        assert report.registers >= config.block_m * (128 + config.block_n) // threads
