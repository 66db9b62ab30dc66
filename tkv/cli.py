"""The ``tkv`` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

import torch

import tkv
from tkv.commands import CommandError, Parser, check, demo, doctor, inspect, merge, size, tables, tune
from tkv.demo import DemoError
from tkv.errors import TkvError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (demo, doctor, size, tables, inspect, tune, check, merge)
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``tkv`` command.

    Args:
        argv: the arguments after the command's name; those of the process if None.

    Returns:
        The exit status: 0, 1 if the command failed or found a problem, 130 after Ctrl-C.

    Raises:
        SystemExit: after ``--help`` and ``--version`` with 0, after wrong arguments with 2.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding does not have is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    if args.interpret:
        interpret_without_gpu()
    try:
        status = int(args.run(args))
        # Without stdout, as under `>&-`, print does nothing.
        print(end="", flush=True)
        return status
    except (CommandError, DemoError, TkvError) as error:
        print(f"tkv: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read has read enough; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"tkv: {'stdout' if error.filename is None else error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tkv: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command.

    Every subcommand sets ``run``, a function of the parsed arguments that returns the exit status, and ``interpret=False`` where it wants
    the environment as it is.
    """
    parser = Parser(prog="tkv", description=tkv.__doc__)
    parser.add_argument("--version", action="version", version=f"tkv {tkv.__version__}")
    parser.set_defaults(interpret=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


def interpret_without_gpu() -> None:
    """Turn Triton's interpreter on where there is no GPU. It must come before the first import of Triton, which decides there and then."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


if __name__ == "__main__":
    sys.exit(main())
