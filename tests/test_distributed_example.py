"""The example of context parallelism runs, and its ranks compute what one process does."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "context_parallel.py"


def test_the_example_shows_what_ranks_hold_and_that_results_agree():
    command = [sys.executable, str(EXAMPLE), "--steps", "1", "--format", "int8/token_head"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"0 +0 to 31 +32 +2 .*\n +1 +32 to 60 +29 +2 ", done.stdout), done.stdout
    differences = [float(number) for number in re.findall(r"^(?:prompt|token \d+) .* (\S+)$", done.stdout, re.MULTILINE)]
    assert len(differences) == 2 and max(differences) < 2e-3, done.stdout
