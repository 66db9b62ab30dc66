"""``tkv check``: every entry of the tuning tables compiles, fits and does not spill."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from tkv.commands import CommandError, Commands
from tkv.commands.arguments import arch, at_least_0, positive
from tkv.commands.output import Progress, print_json
from tkv.tune.keys import OP_KINDS


def add(commands: Commands) -> None:
    """Add the parser."""
    check = commands.add_parser(
        "check",
        help="every entry of the tuning tables compiles, fits and does not spill",
        description="Reads the tuning tables and compiles what they choose, without their GPUs: entries of kernels that have changed, "
        "and a sample of the rest. The exit status is 1 if anything is wrong; each line says what, with file and entry.",
        epilog="example: tkv check --arch sm90 --strict",
    )
    check.add_argument("--arch", type=arch, action="append", help="may be repeated (default: all)")
    check.add_argument("--op", choices=OP_KINDS, action="append", help="may be repeated (default: all)")
    check.add_argument("--dir", type=Path, metavar="FOLDER", help="tables of this folder instead of tkv's own")
    check.add_argument("--strict", action="store_true", help="compile all entries, and take a stale table for wrong")
    check.add_argument(
        "--changed", nargs="?", const="HEAD", metavar="REVISION", help="also compile entries that the git revision does not have (HEAD)"
    )
    check.add_argument("--sample", type=at_least_0, metavar="N", help="compile so many kernels of the rest; 0 for none")
    check.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    check.add_argument("--workers", type=positive, help="compiling processes (default: one a core)")
    check.add_argument("--json", action="store_true", help="for machines")
    check.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from tkv.tune.check import check
    from tkv.tune.store import Store

    if args.dir is not None and not args.dir.is_dir():
        raise CommandError(f"--dir: no folder {args.dir}")
    sample = {} if args.sample is None else {"sample": args.sample}
    with Progress("compiling", None) as progress:

        def advance(done: int, total: int) -> None:
            progress.expect(total)
            if done:
                progress.step()

        problems = check(
            args.arch, args.op, folder=args.dir, strict=args.strict, since=args.changed, seed=args.seed, store=Store(),
            workers=args.workers, progress=advance, **sample,
        )  # fmt: skip
    compiled = progress.done
    if args.json:
        print_json({"compiled": compiled, "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        print(f"{compiled:,} kernel{'s' * (compiled != 1)} compiled, {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    return 1 if problems else 0
