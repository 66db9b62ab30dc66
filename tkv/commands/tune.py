"""``tkv tune``: find configurations, by measuring on the GPU at hand or by a model of one."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tkv.commands import CommandError, Commands
from tkv.commands.arguments import arch, duration, formats, models, part, positive, positives
from tkv.commands.cases import config_text
from tkv.commands.output import Progress, print_json, print_table
from tkv.tune.keys import OP_KINDS, kernel_hash

if TYPE_CHECKING:
    from tkv.tune.model import Shape
    from tkv.tune.results import Result
    from tkv.tune.tables import Table

SHAPES = "llama3-8b,llama3-70b-tp8,mistral-7b,gemma2-9b,gpt-oss-20b,deepseek-mla"
FORMATS = ("bf16", "fp8_e4m3/tensor", "int8/token_head", "int4/token_head")
OUT = Path("tkv-tuned")
BUDGET = 300.0


def add(commands: Commands) -> None:
    """Add the parser."""
    tune = commands.add_parser(
        "tune",
        help="find configurations: measure on the GPU at hand, or model one without it",
        description="Measures configurations on the GPU at hand and writes tuning tables to a folder, or, with --offline, compiles and "
        "models them for any architecture. Ctrl-C keeps what has been found; --resume goes on from there.",
        epilog="example: tkv tune --op paged_decode --shapes llama3-8b,gemma2-9b --budget 10m --out tuned; "
        "then TKV_CONFIG_DIR=tuned uses the tables",
    )
    tune.add_argument("--op", choices=OP_KINDS, action="append", help="may be repeated (default: all)")
    tune.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="where tables go, <arch>/<op>.json (default: %(default)s)")
    tune.add_argument("--budget", type=duration, metavar="TIME", help="such as 300s, 5m, 1h (default: 300s; --offline: none)")
    tune.add_argument("--resume", action="store_true", help="go on where an earlier run into the folder ended")
    tune.add_argument("--json", action="store_true", help="for machines")
    modelled = tune.add_argument_group("without a GPU")
    modelled.add_argument("--offline", action="store_true", help="compile and model; compiled kernels are remembered from run to run")
    modelled.add_argument("--arch", type=arch, action="append", help="may be repeated")
    modelled.add_argument("--part", type=part, help="the GPU that is modelled (default: the first that is known of the architecture)")
    modelled.add_argument("--like", type=arch, metavar="ARCH", help="try only what won on this related one, whose tables are in --out")
    modelled.add_argument("--workers", type=positive, help="compiling processes (default: one a core)")
    measured = tune.add_argument_group("what is measured on a GPU")
    measured.add_argument("--shapes", type=models, metavar="MODEL,...", help=f"named models (default: {SHAPES})")
    measured.add_argument("--format", type=formats, action="append", help=f"may be repeated (default: {', '.join(FORMATS)})")
    measured.add_argument("--batch", type=positives, metavar="N,...", help="sequences (default: a few, by function)")
    measured.add_argument("--tokens", type=positives, metavar="N,...", help="keys of a sequence (default: a few, by function)")
    measured.add_argument("--page-size", type=positive, help="tokens of a page (default: 16)")
    measured.add_argument("--device", metavar="cuda:N", help="the GPU (default: the current one)")
    tune.set_defaults(run=lambda args: _offline(args, tune) if args.offline else _measure(args, tune))


def _measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    from tkv.ops.launch import interpreting

    _refuse(args, parser, ("arch", "part", "like", "workers"), "only with --offline; measuring is for the GPU at hand")
    if not torch.cuda.is_available():
        raise CommandError("torch sees no GPU to measure on; `tkv tune --offline --arch sm90` needs none")
    if interpreting():
        raise CommandError("TRITON_INTERPRET is set, so kernels would run on the CPU: unset it to measure on the GPU")
    from tkv.tune.runner import Failed
    from tkv.tune.tuner import tune

    shapes = list(dict.fromkeys(_shapes(args)))
    if not shapes:
        parser.error("no shapes: where all layers have a window, sequences must be longer than that")
    _make_folder(args.out)
    with Progress("measuring", len(shapes)) as progress:

        def advance(shape: Shape, result: Result | None) -> None:
            gain = "not measured" if result is None else f"{result.gain:.1f} % faster" if result.best else "default stays"
            progress.step(f"{_name(shape)}: {gain}")

        try:
            tuner = tune(
                shapes, args.out, args.budget or BUDGET, resume=args.resume, device=args.device, progress=advance, note=progress.note
            )
        except Failed as failure:
            raise CommandError(str(failure)) from failure
        except KeyboardInterrupt:
            progress.note(f"what was measured is in {args.out}; --resume goes on from there")
            raise
    if args.json:
        failures = [{"shape": asdict(shape), "reason": reason} for shape, reason in tuner.failures]
        results = [asdict(result) for result in tuner.results]
        print_json({"arch": tuner.arch, "out": str(args.out), "results": results, "failures": failures})
    else:
        print_table([_row(result) for result in tuner.results], right=("gain",))
        measured = f"{len(tuner.results)} of {len(shapes)} shapes measured, {len(tuner.failures)} failed"
        print(f"\n{measured}; TKV_CONFIG_DIR={args.out} uses the tables, `tkv merge` joins them with others")
    return 0 if tuner.results else 1


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out: cannot make the folder {folder}: {error.strerror}") from error


def _refuse(args: argparse.Namespace, parser: argparse.ArgumentParser, names: Sequence[str], reason: str) -> None:
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        parser.error(f"argument --{given[0].replace('_', '-')}: {reason}")


def _shapes(args: argparse.Namespace) -> Iterator[Shape]:
    """What is measured: all sizes of a kind of call before the next kind, for a table's last bucket also holds what was left out."""
    from tkv.tune.shapes import shapes_of

    for format in args.format or FORMATS:
        for op in args.op or OP_KINDS:
            for model in args.shapes or models(SHAPES):
                yield from shapes_of(model, op, args.batch, args.tokens, format=format, page_size=args.page_size or 16)


def _name(shape: Shape) -> str:
    return f"{shape.op} {shape.format} d{shape.head_dim} {shape.num_seqs} x {shape.kv_len}"


def _row(result: Result) -> dict[str, object]:
    """A line of the table of results."""
    from tkv.tune.keys import key_of_shape

    shape, best = result.shape, result.best_us
    return {
        "op": shape.op,
        "call": key_of_shape(shape).name,
        "batch": shape.num_seqs,
        "keys": shape.kv_len,
        "default us": result.default_us.p50,
        "best us": None if best is None else best.p50,
        "gain": f"{result.gain:.1f}%" if result.best else "",
        "noise %": result.noise,
        "tried": result.tried,
        "failed": result.failed,
        "left": result.left,
        "config": config_text(result.best, shape.op) or "default",
    }


class _OutOfTime(Exception):
    """The budget has ended."""


def _offline(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from tkv.tune.arch import reference_part
    from tkv.tune.offline import tune_offline
    from tkv.tune.store import Store
    from tkv.tune.tables import dump, dumps, load, table_path

    _refuse(args, parser, ("shapes", "format", "batch", "tokens", "page_size", "device"), "not with --offline, which has keys of its own")
    archs = list(dict.fromkeys(args.arch or ([args.part.arch] if args.part else ())))
    if not archs:
        parser.error("argument --offline: needs --arch, such as --arch sm90")
    if args.part and archs != [args.part.arch]:
        parser.error(f"argument --part: {args.part.name} is {args.part.arch}")
    for name in archs:
        if args.part is None and reference_part(name) is None:
            raise CommandError(f"no GPU of {name} is known well enough to model")
    end = math.inf if args.budget is None else time.monotonic() + args.budget
    places = [(name, op) for name in archs for op in args.op or OP_KINDS]
    # What is wrong with the folder or a table in it is found before hours of compiling, not behind them.
    for name in archs:
        _make_folder(args.out / name)
    before = {place: load(path) for place in places if (path := table_path(args.out, *place)).exists()}
    like = {op: load(table_path(args.out, args.like, op)) for op in args.op or OP_KINDS} if args.like else {}
    if args.resume:
        places = [place for place in places if place not in before or before[place].kernel_hash != kernel_hash(place[1])]
    written: list[Table] = []
    for name, op in places:
        with Progress(f"{name} {op}", None) as progress:

            def advance(done: int, total: int, progress: Progress = progress) -> None:
                progress.expect(total)
                if done:
                    progress.step()
                if time.monotonic() >= end:
                    raise _OutOfTime

            try:
                (table,) = tune_offline(name, [op], advance, Store(), args.workers, part=args.part, like=[like[op]] if like else ())
            except (_OutOfTime, KeyboardInterrupt) as ended:
                progress.note(f"{len(written)} of {len(places)} tables are in {args.out}; another run goes on from what is compiled")
                if isinstance(ended, KeyboardInterrupt):
                    raise
                break
        written.append(_with_measured(before.get((name, op)), table))
        dump(written[-1], table_path(args.out, name, op))
    if args.json:
        print_json({"out": str(args.out), "tables": [json.loads(dumps(table)) for table in written]})
    else:
        print_table(
            [
                {
                    "arch": table.arch,
                    "op": table.op,
                    "entries": len(table.entries),
                    "measured": sum(entry.origin == "measured" for entry in table.entries),
                    "beat the default": sum(entry.config is not None for entry in table.entries),
                }
                for table in written
            ]
        )
        print(f"\n{len(written)} of {len(places)} tables written to {args.out}")
    return 0 if written or not places else 1


def _with_measured(before: Table | None, table: Table) -> Table:
    """A new table of what is modelled, and what the old one had measured."""
    from tkv.tune.merging import merge
    from tkv.tune.tables import Table

    measured = {entry.match for entry in before.entries if entry.origin == "measured"} if before else set()
    if before is None or not measured:
        return table
    entries = [entry for entry in before.entries if entry.match in measured]
    joined, conflicts = merge(Table.make(before.op, before.arch, entries, before.runs, before.kernel_hash), table)
    for line in conflicts:
        print(f"tkv: {line}", file=sys.stderr)
    return joined
