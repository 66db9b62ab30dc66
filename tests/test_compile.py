"""What the GPUs will run, compiled here for every architecture and read from the machine code.

The spill rule: shared memory always fits; nothing spills, but for what stands in spills.json, which may only shrink. It holds for the
Triton that the file names; with another one only what does not depend on register allocation is checked.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tkv.errors import UnsupportedError
from tkv.formats import supported_formats
from tkv.ops.attention import default_config
from tkv.tune import machine_code
from tkv.tune.arch import ARCHS
from tkv.tune.compile import ATTENTION, Case, compile_all, launch_of
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, key_of_case

pytestmark = pytest.mark.compile

SPILLS = json.loads(Path(__file__).with_name("spills.json").read_text())
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8/token_head")]
PAIRS += [("bf16", kind) for kind in ("fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head")]
PREFILL_PAIRS = [("bf16", kind) for kind in ("bf16", "fp8_e4m3/tensor", "int8/token_head")]
SOURCES = {"fp32": "fp32", "fp16": "fp16"}


# Formats with unpacking or scales of their own.
MORE = ("fp8_e5m2/token_head", "int8/channel", "int8/group32", "int4/token_head", "int4/group32")
BY_PAGE = ("int8/page_channel+int8/token_head", "int4/page_channel+int4/group32")
WRITABLE = [kind for kind in supported_formats() if "page_channel" not in kind]


def paged(op: str, kind: str, head_dim: int = 128, **more: Any) -> Case:
    """A case in bf16 with pages that suit the format."""
    return Case(op, "bf16", kind, head_dim, page_size=128 if "page_channel" in kind else 16, **more)


def default_cases() -> list[Case]:
    """Every kernel, each format, at their default configs."""
    cases = [Case("decode", dtype, kind, head_dim) for head_dim in (64, 128, 256) for dtype, kind in PAIRS]
    cases += [paged("decode", kind) for kind in (*MORE, *BY_PAGE)]
    cases += [Case("write", SOURCES.get(kind, "bf16"), kind) for kind in WRITABLE]
    cases += [Case("copy", format=kind) for kind in ("bf16", "int8/token_head", "int4/page_channel+int4/group32")]
    cases += [Case("gather", "bf16", kind) for kind in ("bf16", "fp8_e4m3/head", "int4/group32")]
    cases += [Case("gather", "fp32", "int4/page_channel+int4/token_head", page_size=32)]
    cases += [Case("quantize", "bf16", "int4/page_channel+int4/group32", page_size=32), Case("quantize", "fp32", "int8/token_head")]
    cases += [Case("channels", "bf16", kind, page_size=32) for kind in BY_PAGE]
    cases += [Case("prefill", dtype, kind, head_dim, q_len=1024) for head_dim in (64, 128, 256) for dtype, kind in PREFILL_PAIRS]
    cases += [Case("prefill", "fp32", kind, q_len=1024) for kind in ("fp32", "int8/token_head")]
    cases += [paged("prefill", kind, q_len=1024) for kind in ("int4/token_head", "int4/page_channel+int4/group32")]
    cases += [Case("prefill_cached", "bf16", kind, q_len=1024) for kind in ("bf16", "int8/token_head")]
    cases += [Case("level", "bf16", kind) for kind in ("bf16", "fp8_e4m3/tensor", "int4/group32")]
    # Latent attention, whose V is a view of its K, and heads of two sizes.
    cases += [Case("decode", "bf16", kind, 576, group=16, v_head_dim=512, shared=True) for kind in ("bf16", "fp8_e4m3/tensor")]
    cases += [Case(op, "bf16", "bf16", 192, v_head_dim=128, q_len=1024 if op == "prefill" else 1) for op in ("decode", "prefill")]
    # Rows whose words are cut in two.
    cases += [Case("decode", "bf16", "bf16", 96), Case("prefill", "bf16", "int8/token_head", 192, q_len=1024)]
    # Bounded memory: pinned pages, rotation at read and on the way in and out, scores, eviction.
    cases += [Case("decode", "bf16", kind, window=True, rope=True) for kind in ("bf16", "int8/token_head")]
    cases += [Case("decode", window=True, pinned=True), Case("prefill", q_len=1024, window=True, rope=True)]
    cases += [Case("scores", "bf16", kind) for kind in ("bf16", "int8/token_head")] + [Case("scores", window=True, rope=True)]
    cases += [Case("write", "bf16", kind, rope=True) for kind in ("bf16", "int4/group32")] + [Case("gather", rope=True), Case("rotate")]
    cases += [Case("compact", format=kind) for kind in ("bf16", "int4/page_channel+int4/group32")]
    return cases + [Case("merge"), Case("merge", "fp32", head_dim=256), Case("depth", q_len=64)]


def format_cases() -> list[Case]:
    """What `default_cases` leaves out of: each format x decode, prefill and levels of a cascade x head_dim; latent attention."""
    cases = [
        paged(op, kind, head_dim, q_len=1024 if op == "prefill" else 1)
        for kind in (*(kind for kind in WRITABLE if "/" in kind), *BY_PAGE, "int8/page_channel+int4/group32", "bf16+int8/token_head")
        for op in ("decode", "prefill", "level")
        for head_dim in (64, 128, 256)
    ]
    wide = {"head_dim": 576, "v_head_dim": 512, "group": 16}
    for op in ("decode", "prefill", "level"):
        for dtype, kind in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp8_e4m3/tensor"), ("bf16", "fp8_e4m3/token_head")):
            cases += [Case(op, dtype, kind, q_len=1024 if op == "prefill" else 1, shared=shared, **wide) for shared in (True, False)]
        for kind in ("fp8_e4m3/tensor", "int8/token_head", "int4/group32"):
            cases += [Case(op, "bf16", kind, 192, v_head_dim=128, q_len=1024 if op == "prefill" else 1)]
    known = set(default_cases())
    return [case for case in cases if case not in known]


def option_cases() -> list[Case]:
    """Blocks of rows, windows, options, pages that a tile lies in, other head dims."""
    kinds = [("bf16", "bf16"), ("bf16", "fp8_e4m3/token_head"), ("bf16", "int8/token_head")]
    cases = []
    for head_dim in (64, 128):
        for flags in ({"q_len": 8}, {"q_len": 8, "window": True}, {"window": True}, {"page_size": 256}):
            cases += [Case("decode", dtype, kind, head_dim, **flags) for dtype, kind in kinds]
    cases += [Case("decode", dtype, kind, head_dim) for head_dim in (16, 80, 96) for dtype, kind in kinds]
    cases += [Case("decode", dtype, kind, softcap=True, alibi=True) for dtype, kind in kinds]
    cases += [Case("decode", dtype, kind, q_len=32, tree=True, window=True) for dtype, kind in kinds]
    cases += [Case("prefill", "fp32", kind, head_dim, q_len=1024) for head_dim in (64, 256) for kind in ("fp32", "int8/token_head")]
    rotated = [("bf16", kind) for kind in ("bf16", "fp8_e4m3/token_head", "int8/token_head", "int4/token_head", "int4/group32")]
    for op, head_dim in ((op, head_dim) for op in ("decode", "prefill", "scores") for head_dim in (64, 128, 256)):
        q_len = 1024 if op == "prefill" else 1
        cases += [Case(op, dtype, kind, head_dim, q_len=q_len, window=True, rope=True) for dtype, kind in (*rotated, ("fp32", "fp32"))]
    for op in ("prefill", "prefill_cached", "level"):
        for head_dim in (64, 128):
            for flags in ({"window": True}, {"softcap": True, "alibi": True}, {"tree": True}, {"page_size": 256}, {"q_len": 2}):
                cases += [Case(op, dtype, kind, head_dim, **{"q_len": 1 if op == "level" else 512, **flags}) for dtype, kind in kinds]
        cases += [Case(op, dtype, kind, head_dim, q_len=8) for head_dim in (16, 80, 96) for dtype, kind in kinds]
    known = set(default_cases())
    return [case for case in cases if case not in known]


def job(case: Case, arch: str) -> tuple[Case, str, AttentionConfig | None]:
    """A case at its analytic default, whatever the tuning tables say."""
    op = next((op for op, kind in OP_KINDS.items() if case.op.removesuffix("_cached") == kind), None)
    return case, arch, None if op is None else default_config(op, arch, key_of_case(op, case))


def check(arch: str, cases: list[Case]) -> None:
    problems = []
    allowed = SPILLS["spills"].get(arch, {})
    for report in compile_all([job(case, arch) for case in cases], workers=1):
        name = report.case.name
        if report.error:
            problems.append(f"{name}: {report.error}")
            continue
        if not report.fits:
            problems.append(f"{name}: needs {report.shared} bytes of shared memory")
        if report.tf32:
            problems.append(f"{name}: multiplies in TF32")
        if report.case.op in ATTENTION and report.case.dtype != "fp32" and not report.loop_matrix:
            problems.append(f"{name}: no matrix instructions in the main loop")
        if report.triton == SPILLS["triton"] and report.spills != allowed.get(name, 0):
            more = "more" if report.spills > allowed.get(name, 0) else "fewer: write it down"
            problems.append(f"{name}: spills {report.spills}, {allowed.get(name, 0)} in spills.json, {more}")
    assert not problems, "\n".join(problems)


# Architectures that stand for the others: on those a third of the cases is compiled, each case on some of them.
FIRST = ("sm80", "sm90", "sm100", "gfx942", "gfx1100")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_fits_and_does_not_spill_at_its_default_config(arch: str) -> None:
    check(arch, default_cases() if arch in FIRST else default_cases()[ARCHS.index(arch) % 3 :: 3])


@pytest.mark.deep
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in FIRST])
def test_the_other_kernels_compile_fit_and_do_not_spill_at_their_default_config(arch: str) -> None:
    left = [i for i in range(len(default_cases())) if i % 3 != ARCHS.index(arch) % 3]
    check(arch, [default_cases()[i] for i in left])


@pytest.mark.deep
@pytest.mark.parametrize("arch", ARCHS)
def test_every_option_compiles_fits_and_does_not_spill_at_its_default_config(arch: str) -> None:
    check(arch, option_cases())


@pytest.mark.deep
@pytest.mark.parametrize("arch", ARCHS)
def test_every_format_compiles_fits_and_does_not_spill_at_its_default_config(arch: str) -> None:
    check(arch, format_cases())


def test_spills_are_allowed_only_where_registers_cannot_hold_the_tiles() -> None:
    for arch, spills in SPILLS["spills"].items():
        for name in spills:
            wide, rdna = " d256 " in f"{name} " or " d576/512 " in name, arch.startswith(("gfx11", "gfx12"))
            assert rdna or (wide and " fp32 " in name), f"{arch} {name}"


def test_rows_that_move_are_read_by_all_warps_before_any_is_written() -> None:
    names = {"sm90": ("LDG", "BAR", "STG"), "gfx942": ("global_load", "s_barrier", "global_store")}
    for report in compile_all([(Case(op), arch) for op in ("compact", "rotate") for arch in names], workers=1):
        load, barrier, store = names[report.arch]
        last = ""
        for name in report.code:
            if name.startswith(store):
                assert last in (barrier, store), f"{report.arch} {report.case.name}: stored right behind a load"
            last = next((kind for kind in (load, barrier, store) if name.startswith(kind)), last)
        assert last, f"{report.arch} {report.case.name}: {report.error or 'moves nothing'}"


def test_packed_instructions_are_used_where_the_hardware_has_them() -> None:
    jobs = [(Case("decode", "bf16", kind), arch) for kind in ("fp8_e4m3/tensor", "int8/token_head") for arch in ("sm80", "sm90")]
    loops = {(report.case.format, report.arch): report.loop for report in compile_all([job(*pair) for pair in jobs], workers=1)}
    assert loops["fp8_e4m3/tensor", "sm90"]["F2FP"] >= 64 and "I2F" not in loops["fp8_e4m3/tensor", "sm90"]
    assert "I2F" not in loops["int8/token_head", "sm80"] and loops["int8/token_head", "sm80"]["PRMT"] >= 64
    assert loops["fp8_e4m3/tensor", "sm80"]["LOP3"] >= 128
    assert all("LDSM" in loop for loop in loops.values())


def test_each_format_is_unpacked_by_the_instructions_meant_for_it() -> None:
    kinds = ("fp8_e5m2/tensor", "int4/token_head", "int4/group32", "int8/group32")
    jobs = [(Case("decode", "bf16", kind), arch) for kind in kinds for arch in ("sm80", "sm90", "sm100")]
    for report in compile_all([job(*pair) for pair in jobs], workers=1):
        loop, name = report.loop, f"{report.case.format} {report.arch}"
        assert not {"I2F", "I2FP", "F2F"} & set(loop), f"{name}: numbers are converted one by one"
        assert "LDSM" in loop, f"{name}: words are not read as matrices"
        tokens = report.config.block_n
        # Two numbers an instruction: 32 threads x 4 warps, 2 x 128 dims a token.
        pairs = tokens * 2 * 128 // 2 // 128
        if report.case.format == "fp8_e5m2/tensor":
            assert loop["PRMT"] >= pairs // 2 and not loop.get("F2FP", 0) > pairs // 2, name
        elif report.case.format.startswith("int4"):
            # A mask for each pair, and its bias off; decoded ones a product more.
            assert loop["LOP3"] >= pairs, name
            assert loop.get("HADD2", 0) + loop.get("HFMA2", 0) >= (2 if "group" in report.case.format else 1) * pairs, name
        else:
            assert loop.get("HMUL2", 0) >= pairs, name


def test_e4m3_is_decoded_by_its_bits_where_the_hardware_has_none_of_it() -> None:
    jobs = [(Case("decode", "bf16", "fp8_e4m3/tensor"), arch) for arch in ("sm80", "sm86", "gfx90a", "gfx1100")]
    for report in compile_all([job(*pair) for pair in jobs], workers=1):
        # The few conversions of an NVIDIA loop are those of the probabilities.
        assert not [name for name in report.loop if "fp8" in name] and report.loop.get("F2FP", 0) <= 16, report.arch
        shifts = sum(count for name, count in report.loop.items() if "lsh" in name or name in ("SHF", "LOP3"))
        assert shifts >= 48, f"{report.arch}: {report.loop}"


@pytest.mark.parametrize(("arch", "instruction"), [("sm90", "HGMMA"), ("sm100", "UTCHMMA"), ("sm103", "UTCHMMA")])
def test_prefill_uses_the_matrix_unit_of_the_architecture(arch: str, instruction: str) -> None:
    cases = [Case(op, "bf16", kind, q_len=1024) for op in ("prefill", "prefill_cached") for kind in ("bf16", "fp8_e4m3/tensor")]
    for report in compile_all([job(case, arch) for case in cases], workers=1):
        assert report.loop and report.loop[instruction] >= 8, f"{report.case.name}: {report.loop or report.error}"


def test_a_loop_is_found_in_sass_and_in_amd_assembly() -> None:
    first, second = ["HMMA.16816.F32 R0, R1, R2, R3", "@P0 BRA 0x8"], ["FADD R1, R2, R3", "HMMA.16816 R1", "HMMA.16816 R2", "@!P1 BRA 0x18"]
    sass = "\n".join(f"        /*{8 * i:04x}*/      {text} ;" for i, text in enumerate(["MOV R1, R2", *first, *second, "EXIT"]))
    instructions = machine_code.parse_sass(sass)
    assert [i.name for i in machine_code.main_loop(instructions)] == ["FADD", "HMMA", "HMMA", "BRA"]
    assembly = "start:\n.LBB0_1:\n\tv_mfma_f32_16x16x16_f16 v[0:3], v1, v2\n\ts_cbranch_scc0 .LBB0_1\n\ts_endpgm"
    assert [i.name for i in machine_code.main_loop(machine_code.parse_gcn(assembly))] == ["v_mfma_f32_16x16x16_f16", "s_cbranch_scc0"]
    assert machine_code.main_loop(machine_code.parse_sass("")) == []


def test_a_case_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="op: expected decode, prefill"):
        launch_of(Case("attention"), "sm90")
    with pytest.raises(UnsupportedError, match="sm75"):
        launch_of(Case("merge"), "sm75")


def record(archs: list[str], deep: bool) -> None:
    """Write what these architectures spill into spills.json: ``python -m tests.test_compile [--deep] [arch ...]``."""
    jobs = [job(case, arch) for arch in archs for case in default_cases() + (option_cases() + format_cases() if deep else [])]
    spills = {arch: known for arch, known in SPILLS["spills"].items() if arch not in archs}
    for report in compile_all(jobs, progress=lambda done: print(done.arch, done.case.name, done.spills, done.error, flush=True)):
        if report.spills:
            spills.setdefault(report.arch, {})[report.case.name] = report.spills
    text = json.dumps({"triton": triton.__version__, "spills": spills}, indent=1, sort_keys=True)
    Path(__file__).with_name("spills.json").write_text(text + "\n")


if __name__ == "__main__":
    record([name for name in sys.argv[1:] if name != "--deep"] or list(ARCHS), "--deep" in sys.argv)
