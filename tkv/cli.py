"""The ``tkv`` command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tkv
from tkv.demo import PICTURES, SCENARIOS, DemoError, run_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``tkv`` command.

    Args:
        argv: the arguments after the command's name; those of the process if None.

    Returns:
        The exit status: 0, 1 if the command failed or what it shows did not come true, 130 after Ctrl-C.

    Raises:
        SystemExit: after ``--help`` and ``--version`` with 0, after wrong arguments with 2.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    args = build_parser().parse_args(argv)
    interpret_without_gpu()
    try:
        return int(args.run(args))
    except DemoError as error:
        print(f"tkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tkv: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command; every subcommand sets ``run``, a function of the parsed arguments that returns the exit status."""
    parser = argparse.ArgumentParser(prog="tkv", description=tkv.__doc__)
    parser.add_argument("--version", action="version", version=f"tkv {tkv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    return parser


def interpret_without_gpu() -> None:
    """Turn Triton's interpreter on where there is no GPU. It must come before the first import of Triton, which decides there and then."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="a real model on real text, served from the paged cache")
    about = (
        "decode: tokens and memory; shared-prefix: one prompt for many questions; formats: perplexity of every cache format; "
        "streaming: a text longer than the context in a few pages; eviction: perplexity of what to keep, by budget"
    )
    demo.add_argument("--scenario", choices=SCENARIOS, default="decode", help=f"what to show (default: %(default)s). {about}")
    demo.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of model and unquantised cache (default: %(default)s)")
    demo.add_argument("--workers", type=_positive, help="processes at a time on a CPU (default: one a core, at most one a task)")
    drawings = ", ".join(f"of {scenario} (default: {file})" for scenario, file in PICTURES.items())
    demo.add_argument("--out", type=Path, metavar="FILE.png", help=f"the picture {drawings}")

    def run(args: argparse.Namespace) -> int:
        if args.out is not None and args.scenario not in PICTURES:
            demo.error(f"argument --out: only with --scenario {' or '.join(PICTURES)}")
        return run_scenario(args.scenario, dtype=args.dtype, workers=args.workers, out=args.out)

    demo.set_defaults(run=run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
