"""The counts of instructions that users get stay within 5 % of the committed ones, and the script that makes them says what is worse."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from counted import script, worse_than_baseline

from tkv.tune.compile import Case, Report
from tkv.tune.configs import AttentionConfig

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


@pytest.mark.compile
def test_no_loop_of_decode_takes_more_instructions_than_the_baseline() -> None:
    if not script().baseline_of(metadata.version("triton")):
        pytest.skip("no baseline for this version of Triton")
    problems, compared = worse_than_baseline(["sm80", "sm90", "sm100"], ["paged_decode"])
    assert not problems and compared == 18, "\n".join(problems)


def test_the_triton_that_make_installs_has_a_baseline() -> None:
    pinned = re.search(r"^triton==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None and len(script().baseline_of(pinned[1])) >= 108


def made_up(instructions: int, spills: int = 0) -> Report:
    """A report of a loop with so many instructions for a tile of 128 keys."""
    loop = {"HMMA": 64, "IMAD": instructions - 64}
    return Report(Case("decode"), "sm90", "3.7.1", 128, spills, 65536, AttentionConfig(16, 128, 4, 2), 4, 2, loop)


def test_counts_are_per_token_of_a_kv_head() -> None:
    row = script().row_of(made_up(640))
    assert (row["op"], row["arch"], row["head_dim"], row["format"], row["tile"]) == ("paged_decode", "sm90", 128, "bf16", "16x128")
    assert row["instructions"] == 640 * 4 / 128


@pytest.mark.parametrize(
    ("instructions", "spills", "problem"),
    [(640, 0, ""), (672, 0, ""), (673, 0, "21.03 instructions, 20.0 in the baseline"), (600, 8, "spills 8, 0 in the baseline")],
)
def test_what_is_worse_is_told(tmp_path, monkeypatch, instructions: int, spills: int, problem: str) -> None:
    counts = script()
    monkeypatch.setattr(counts, "BASELINES", tmp_path)
    assert counts.baseline_of("3.7.1") == {}
    before = counts.row_of(made_up(640))
    counts.write_csv(tmp_path / "triton-3.7.1.csv", [{name: before[name] for name in (*counts.KEY, "instructions", "spills")}])
    row, told = counts.compared(counts.row_of(made_up(instructions, spills)), counts.baseline_of("3.7.1"))
    assert row["baseline"] == 20.0 and told == (problem and f"paged_decode sm90 128 bf16: {problem}")


def test_a_row_without_a_baseline_is_no_problem() -> None:
    row, told = script().compared(script().row_of(made_up(640)), {})
    assert row["baseline"] is None and told == ""
