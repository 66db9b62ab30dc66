"""Instructions of the main loops, counted by ``perf/instructions.py`` and held against its baseline of the installed Triton."""

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from tkv.tune.compile import compile_all

SCRIPT = Path(__file__).parents[1] / "perf" / "instructions.py"


def script() -> ModuleType:
    """``perf/instructions.py`` as a module; skips where the repository's other folders are missing."""
    if not SCRIPT.is_file():
        pytest.skip("perf/instructions.py is not here")
    spec = importlib.util.spec_from_file_location("instructions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worse_than_baseline(archs: list[str], ops: list[str]) -> tuple[list[str], int]:
    """(what is worse than the baseline, how many rows were compared), for head_dim 128 in all formats."""
    instructions = script()
    baseline = instructions.baseline_of(metadata.version("triton"))
    jobs = [(case, arch) for arch in archs for case in instructions.cases(ops, [128])]
    rows = [instructions.row_of(report) for report in compile_all(jobs, workers=1)]
    compared = [instructions.compared(row, baseline) for row in rows]
    return [problem for _, problem in compared if problem], sum(row["baseline"] is not None for row, _ in compared)
