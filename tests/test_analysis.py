"""What a kernel's loop costs, unit by unit: by hand for made-up loops, and against what compilers give."""

from dataclasses import replace
from typing import Any

import pytest

from tkv.errors import UnsupportedError
from tkv.tune import arch, machine_code
from tkv.tune.analysis import UNITS, analyse, token_bytes
from tkv.tune.arch import parts, reference_part
from tkv.tune.compile import Case, Report, compile_all
from tkv.tune.configs import AttentionConfig

H100 = reference_part("sm90")
CONFIG = AttentionConfig(16, 64, num_warps=4, num_stages=2)


def made_up(
    name: str = "sm90", loop: dict[str, int] | None = None, config: AttentionConfig = CONFIG, case: Case | None = None, **more: Any
) -> Report:
    known = {"registers": 128, "shared": 36 << 10, "config": config, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return Report(case or Case("decode"), name, "3.7.1", loop={"HMMA": 1} if loop is None else loop, **{**known, **more})


@pytest.mark.parametrize(
    ("bound", "loop", "more"),
    [
        ("memory", {"HMMA": 32}, {}),
        ("issue slots", {"HMMA": 32, "IMAD": 4000}, {}),
        ("exp unit", {"HMMA": 32, "MUFU": 3000}, {}),
        ("shared memory", {"HMMA": 32, "LDS": 10}, {"loop_shared_bytes": 200_000}),
        ("tensor cores", {"HMMA": 32}, {"config": replace(CONFIG, block_m=128, num_warps=1)}),
    ],
)
def test_each_unit_can_bound_a_loop(bound: str, loop: dict[str, int], more: dict[str, Any]) -> None:
    case = Case("level", format="int4/token_head") if bound == "tensor cores" else Case("decode")
    found = analyse(made_up(loop=loop, case=case, **more))
    assert found.bound == bound
    assert tuple(found.cycles) == UNITS and found.unknown == ()


def test_units_are_counted_as_by_hand() -> None:
    # 4 programs of 4 warps: registers 65536 / (128 x 128), shared memory 233472 / 37888 = 6.
    found = analyse(
        made_up(loop={"HMMA": 40, "MUFU": 8, "LDS": 12, "FFMA": 100, "F2FP": 4, "LDGSTS": 16, "BRA": 1}, loop_shared_bytes=5120), H100
    )
    assert (found.per, found.ctas_per_sm, found.bytes) == ("token", 4, 512)
    expected = {"matrix": 40, "exp": 8, "shared": 12, "float": 100, "conversion": 4, "global": 16, "control": 1}
    assert found.instructions == {kind: count * 4 / 64 for kind, count in expected.items()}
    assert found.num_instructions == pytest.approx(181 / 16)
    per_cycle = 3350e9 / (132 * 1750e6)
    assert found.cycles["memory"] == pytest.approx(512 / per_cycle)
    assert found.cycles["issue slots"] == pytest.approx(181 * 4 / 4 / 64)
    assert found.cycles["exp unit"] == pytest.approx(8 * 4 * 32 / 16 / 64)
    assert found.cycles["shared memory"] == pytest.approx(5120 * 4 / 128 / 64)
    # Instructions of single warps reach half of 989e12 / (132 x 1.75e9) operations a cycle.
    assert found.cycles["tensor cores"] == pytest.approx(2 * 16 * 256 / (989e12 / (132 * 1750e6) / 2))
    assert found.bytes_in_flight == 4 * 64 * 512
    assert found.bytes_needed == pytest.approx(per_cycle * 480)


def test_rows_and_keys_are_the_work_of_prefill() -> None:
    config = AttentionConfig(128, 64, num_warps=8, num_stages=2)
    of_keys = analyse(made_up(config=config, case=Case("prefill", q_len=1024), loop={"HGMMA": 16, "FADD": 84}))
    assert of_keys.per == "row and key"
    assert of_keys.num_instructions == pytest.approx(100 * 8 / (128 * 64))
    assert of_keys.bytes == pytest.approx(512 / 128)
    # The operand that four warps read at a time: 64 keys of 256 dims, twice.
    assert of_keys.cycles["shared memory"] == pytest.approx(2 * 64 * 256 * 2 / 128 / (128 * 64))


def test_few_bytes_in_flight_bound_memory_by_its_latency() -> None:
    little = AttentionConfig(16, 16, num_warps=4, num_stages=2)
    bf16, int4 = (
        analyse(made_up(config=little, case=Case("decode", format=kind), shared=100 << 10)) for kind in ("bf16", "int4/token_head")
    )
    assert bf16.ctas_per_sm == int4.ctas_per_sm == 2
    assert int4.bytes_in_flight is not None and int4.bytes_needed is not None and int4.bytes_in_flight < int4.bytes_needed
    assert int4.cycles["memory"] == pytest.approx(480 / (2 * 16)), "a quarter of the bytes are no faster"
    assert bf16.cycles["memory"] == pytest.approx(512 / (3350e9 / (132 * 1750e6)))
    deeper = analyse(
        made_up(config=replace(little, num_stages=5), case=Case("decode", format="int4/token_head", page_size=64), shared=100 << 10)
    )
    assert deeper.cycles["memory"] == pytest.approx(136 / (3350e9 / (132 * 1750e6))), "now it is the bandwidth that bounds"


def test_a_loop_without_stages_waits_and_computes_by_turns() -> None:
    found = analyse(
        made_up(config=AttentionConfig(16, 16, 4, num_stages=1), loop={"IMAD": 1000}, case=Case("decode", format="int4/token_head"))
    )
    assert found.bytes_in_flight == 0
    # A program alone has one warp for each of four schedulers, which fill half of the slots.
    assert found.cycles["memory"] == pytest.approx((480 + 1000 * 4 / 2) / (4 * 16))


def test_few_warps_do_not_fill_the_issue_slots() -> None:
    loop = {"IMAD": 1000}
    few, many = (analyse(made_up(loop=loop, shared=shared)).cycles["issue slots"] for shared in (200 << 10, 36 << 10))
    assert few == pytest.approx(2 * many)


def test_what_no_data_sheet_says_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    no_matrix_rate = next(part for part in parts() if part.name == "RTX PRO 6000")
    assert analyse(made_up("sm120"), no_matrix_rate).unknown == ("tensor cores",)
    assert analyse(made_up("sm90"), replace(H100, gbps=None)).cycles["memory"] == pytest.approx(480 / (4 * 64))
    no_loop = analyse(made_up(loop={}))
    assert no_loop.bound == "memory" and no_loop.instructions == {} and set(no_loop.unknown) == set(UNITS) - {"memory"}
    unknown = dict.fromkeys(("registers_per_sm", "issue_slots", "exp_per_cycle", "shared_bytes_per_cycle", "latency_cycles"))
    monkeypatch.setattr("tkv.tune.analysis.arch_facts", lambda name: replace(arch(name), **unknown))
    monkeypatch.setattr("tkv.tune.analysis.reference_part", lambda name: None)
    nothing = analyse(made_up("sm90"))
    assert (nothing.unknown, nothing.bound, nothing.ctas_per_sm, nothing.bytes_in_flight) == (UNITS, None, None, None)


def test_on_amd_vector_instructions_take_the_issue_slot() -> None:
    loop = {"v_mfma_f32_16x16x16_bf16": 20, "v_add_f32_e32": 10, "v_exp_f32_e32": 3, "s_waitcnt": 16, "s_add_i32": 5, "ds_read_b128": 7}
    found = analyse(made_up("gfx942", loop=loop, shared=16384))
    assert found.ctas_per_sm == 4 and found.cycles["issue slots"] == pytest.approx(13 * 4 / 64)
    assert found.cycles["exp unit"] == pytest.approx(3 * 4 * 64 / 16 / 64)
    assert found.instructions["scalar"] == 5 * 4 / 64


@pytest.mark.parametrize(
    "report", [Report(Case("decode"), "sm90", "3.7.1", config=CONFIG, error="no"), Report(Case("merge"), "sm90", "3.7.1")]
)
def test_what_is_no_compiled_attention_is_refused(report: Report) -> None:
    with pytest.raises(UnsupportedError, match=r"report: the kernel of (decode|merge)"):
        analyse(report)


def test_bytes_of_a_token() -> None:
    assert token_bytes(Case("decode", format="bf16+int8/token_head", v_head_dim=64)) == 256 + 68
    assert token_bytes(Case("decode", head_dim=576, v_head_dim=512, shared=True)) == 1152
    assert token_bytes(Case("scores", format="int4/group32")) == 64 + 16


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("LDS R1", 4), ("LDS.64 R2", 8), ("LDS.U8 R2", 1), ("STS.128 [R1]", 16), ("LDSM.16.M88 R1", 4), ("LDSM.16.MT88.2 R1", 8),
        ("LDGSTS.E.BYPASS.128 [R1]", 16), ("LDG.E.U16 R1", 2), ("SHFL.BFLY PT, R1", 4), ("LDTM.16 R1", 0), ("FADD.FTZ R1", 0),
    ],
)  # fmt: skip
def test_bytes_of_an_instruction_in_sass(line: str, size: int) -> None:
    assert machine_code.parse_sass(f"        /*0010*/  {line} ;")[0].size == size


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("ds_read_b128", 16), ("ds_read2_b64", 16), ("ds_read2st64_b64", 16), ("ds_write2_b32", 8), ("ds_read_u16_d16", 2),
        ("ds_read_b64_tr_b16", 8), ("ds_load_b128", 16), ("global_load_dwordx4", 16), ("global_load_dword", 4), ("buffer_load_dwordx2", 8),
        ("global_load_b128", 16), ("global_load_ushort", 2), ("ds_bpermute_b32", 4), ("v_add_f32_e32", 0),
    ],
)  # fmt: skip
def test_bytes_of_an_instruction_of_amd(name: str, size: int) -> None:
    assert machine_code.parse_gcn(f"\t{name} v1, v2")[0].size == size


@pytest.mark.compile
def test_compiled_loops_load_one_tile_and_make_one_exponential_a_score() -> None:
    jobs = [(Case("decode", format=kind), name) for kind in ("bf16", "int8/token_head") for name in ("sm80", "sm90", "gfx942")]
    for report in [*compile_all([*jobs, (Case("prefill", q_len=1024), "sm90")], workers=1)]:
        found, config = analyse(report), report.config
        assert config is not None
        work = config.block_n * (1 if found.per == "token" else config.block_m)
        tile = found.bytes * work
        assert tile <= report.loop_global_bytes * config.num_warps, report.case.name
        if report.arch.startswith("sm"):
            # Beside the tile there are page ids and scales.
            assert report.loop_global_bytes * config.num_warps < 1.3 * tile + 2048, report.case.name
        threads = config.num_warps * arch(report.arch).warp_size
        scores = config.block_m * config.block_n
        assert scores <= report.classes["exp"] * threads <= 2.5 * scores + 64 * threads
        assert found.unknown == () and found.ctas_per_sm is not None and found.ctas_per_sm >= 1
        if found.per == "token":
            assert found.bound in ("memory", "issue slots") and 5 < found.num_instructions < 100
