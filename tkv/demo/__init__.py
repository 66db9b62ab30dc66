"""What ``tkv demo`` runs: tkv's kernels in a real model on real text.

Scenarios are imported when they run: they need the extra ``demo``, and Triton must not be imported before the command line has chosen
between a GPU and the interpreter.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

# Name of a scenario -> the module whose ``run(dtype, workers)`` shows it and returns the exit status.
SCENARIOS = {
    "decode": "tkv.demo.decode",
    "shared-prefix": "tkv.demo.shared_prefix",
    "formats": "tkv.demo.formats",
    "streaming": "tkv.demo.streaming",
    "eviction": "tkv.demo.eviction",
}
# Those that draw -> the picture's file, unless their ``run`` is given another as ``out``.
PICTURES = {
    "shared-prefix": "tkv-page-map.png",
    "formats": "tkv-formats.png",
    "streaming": "tkv-streaming.png",
    "eviction": "tkv-eviction.png",
}


class DemoError(RuntimeError):
    """The demo cannot go on; the message says what to do."""


def run_scenario(name: str, *, dtype: str = "fp32", workers: int | None = None, out: Path | None = None) -> int:
    """Run a scenario and print what it finds.

    Args:
        name: one of `SCENARIOS`.
        dtype: of the model and of its unquantised cache, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None, at most one for each task.
        out: the file of the picture, of a scenario of `PICTURES`; the one named there if None.

    Returns:
        0, or 1 if what the scenario shows did not come true.

    Raises:
        DemoError: a package is missing, the picture cannot be written, or a process ended before its work was done.
        KeyError: there is no such scenario.
    """
    module = SCENARIOS[name]
    options = {} if out is None else {"out": out}
    try:
        return int(import_module(module).run(dtype, workers, **options))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("transformers", "tokenizers"):
            raise
        raise DemoError(f"the demo needs the package {error.name}: run `make demo`, or `pip install 'tkv[demo]'`") from error
