"""This environment has the newest Triton: what its compiler makes of the loops is held against the baseline too."""

from importlib import metadata

import pytest
from counted import script, worse_than_baseline


@pytest.fixture(autouse=True)
def checker() -> None:
    """Nothing is launched here: kernels are compiled, in processes of their own."""


def test_no_loop_takes_more_instructions_than_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The checker has portable arithmetic; users get packed instructions.
    monkeypatch.delenv("TKV_PORTABLE", raising=False)
    if not script().baseline_of(metadata.version("triton")):
        pytest.skip("no baseline for this version of Triton")
    problems, compared = worse_than_baseline(["sm80", "sm90", "sm100"], ["paged_decode"])
    assert not problems and compared == 18, "\n".join(problems)
