"""``tkv merge``: one tuning table, or one folder of them, of two."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tkv.commands import CommandError, Commands


def add(commands: Commands) -> None:
    """Add the parser."""
    merge = commands.add_parser(
        "merge",
        help="one tuning table, or one folder of them, of two",
        description="What is measured beats what is modelled, of one GPU's measurements the newer. Conflicts are told on stderr.",
        epilog="example: tkv merge autotune_configs measured -o autotune_configs",
    )
    merge.add_argument("first", type=Path, metavar="A", help="a table, <arch>/<op>.json, or a folder of tables")
    merge.add_argument("second", type=Path, metavar="B", help="another")
    merge.add_argument("-o", "--out", type=Path, metavar="OUT", help="where to write; may be A or B (default of a table: stdout)")
    merge.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from tkv.tune.merging import merge
    from tkv.tune.tables import dump, dumps, load, table_path

    for path in (args.first, args.second):
        if not path.exists():
            raise CommandError(f"no file or folder {path}")
    if args.first.is_dir() != args.second.is_dir():
        raise CommandError(f"one is a folder and one a file: {args.first}, {args.second}")
    if args.out is not None and args.out.exists() and args.out.is_dir() != args.first.is_dir():
        raise CommandError(f"-o {args.out}: expected a {'folder' if args.first.is_dir() else 'file'}, as A and B are")
    if not args.first.is_dir():
        table, conflicts = merge(load(args.first), load(args.second))
        _tell(conflicts)
        if args.out is None:
            print(dumps(table), end="")
        else:
            if table_path(Path(), table.arch, table.op).parts != args.out.absolute().parts[-2:]:
                raise CommandError(f"-o {args.out}: a table of {table.op} on {table.arch} is read from {table.arch}/{table.op}.json only")
            dump(table, args.out)
        return 0
    if args.out is None:
        raise CommandError("two folders need -o FOLDER to write to")
    found = {}
    for name in sorted({path.relative_to(folder) for folder in (args.first, args.second) for path in folder.glob("*/*.json")}):
        tables = [load(folder / name) for folder in (args.first, args.second) if (folder / name).exists()]
        table, conflicts = merge(*tables) if len(tables) == 2 else (tables[0], [])
        found[name] = table
        _tell([f"{name.with_suffix('')}: {line.removeprefix(f'{name.parent}/{name.stem}: ')}" for line in conflicts])
    if not found:
        raise CommandError(f"no tables <arch>/<op>.json in {args.first} and {args.second}")
    # All are read before the first is written: a wrong one leaves everything as it was.
    for name, table in found.items():
        dump(table, args.out / name)
    print(f"{len(found)} table{'s' * (len(found) > 1)}, {sum(len(table.entries) for table in found.values()):,} entries in {args.out}")
    return 0


def _tell(conflicts: list[str]) -> None:
    for line in conflicts:
        print(f"tkv: {line}", file=sys.stderr)
