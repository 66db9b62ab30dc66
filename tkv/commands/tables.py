"""``tkv tables``: what the tuning tables hold, and why a call gets its configuration."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tkv.commands import CommandError, Commands, Parser
from tkv.commands.arguments import arch, positive
from tkv.commands.cases import FLAGS, add_call, case_of, config_text, config_with, overrides
from tkv.commands.output import print_json, print_table
from tkv.errors import TkvError
from tkv.tune.arch import configs_dir, parts
from tkv.tune.keys import OP_KINDS, key_of_case, programs_of_case

if TYPE_CHECKING:
    from tkv.tune.cases import Case


def add(commands: Commands) -> None:
    """Add the parser."""
    tables = commands.add_parser(
        "tables",
        help="what the tuning tables hold, and why a call gets its configuration",
        description="Without --explain: entries of every table by architecture, function and format, how they are known, and whether they "
        "are stale. The exit status is 1 if a table is wrong.",
        epilog="example: tkv tables --arch sm90 --explain paged_decode format=int8/token_head group=4 page-size=64 batch=16 tokens=8192",
    )
    tables.add_argument("--arch", type=arch, action="append", help="may be repeated (default: all; with --explain that of the GPU)")
    tables.add_argument("--op", choices=OP_KINDS, action="append", help="may be repeated (default: all)")
    tables.add_argument("--dir", type=Path, metavar="FOLDER", help="tables of this folder instead of tkv's own")
    tables.add_argument(
        "--explain", nargs=argparse.REMAINDER, metavar="OP",
        help="where the configuration of a call comes from; behind OP a model's name, and name=value or --name value for what differs "
        "from the defaults. --explain OP help lists them. It comes last",
    )  # fmt: skip
    tables.add_argument("--json", action="store_true", help="for machines")
    tables.set_defaults(run=lambda args: _coverage(args) if args.explain is None else _explain(args, tables))


def _coverage(args: argparse.Namespace) -> int:
    from tkv.tune.select import coverage

    if args.dir is not None and not args.dir.is_dir():
        raise CommandError(f"--dir: no folder {args.dir}")
    rows = [row for row in coverage(args.dir) if (not args.arch or row.arch in args.arch) and (not args.op or row.op in args.op)]
    wrong = [row.problem for row in rows if row.is_wrong]
    if args.json:
        print_json([asdict(row) for row in rows])
    else:
        print_table(
            [
                {
                    "arch": row.arch,
                    "op": row.op,
                    "format": row.format,
                    "entries": row.entries or None,
                    "measured": row.measured or None,
                    "modelled": row.modelled or None,
                    "Triton": ", ".join(row.triton),
                    "state": "wrong, see below" if row.is_wrong else row.problem or row.stale or "holds",
                }
                for row in rows
            ]
        )
        print(end="", flush=True)
    for line in wrong:
        print(f"tkv: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _explain(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from tkv.ops.attention import default_config
    from tkv.tune.arch import arch_of_device
    from tkv.tune.select import explain

    if args.op or (args.arch and len(args.arch) > 1):
        parser.error("argument --explain: it is about one function, which it names, and one --arch")
    if args.dir is not None:
        parser.error("argument --explain: it looks where calls do; set TKV_CONFIG_DIR instead of --dir")
    op, *words = args.explain or [""]
    if op not in OP_KINDS:
        parser.error(f"argument --explain: expected one of {', '.join(OP_KINDS)}, got {op!r}")
    call = _call(op, words, parser)
    try:
        arch = call.arch or (args.arch[0] if args.arch else arch_of_device().name)
    except TkvError:
        parser.error("this machine has no GPU that tkv knows: give --arch, such as --arch sm90")
    try:
        case = case_of(op, call)
        key = key_of_case(op, case, call.batch)
        work, keys = _size(op, case, call, arch)
        config = config_with(default_config(op, arch, key), call.config, op) if call.config else None
        candidates = explain(op, key, arch, work=work, keys=keys, config=config)
    except TkvError as error:
        parser.error(f"argument --explain: {error}")
    chosen = next(row for row in candidates if row.outcome == "chosen")
    if args.json or call.json:
        bucket = {"work": None if work == math.inf else work, "keys": None if keys == math.inf else keys}
        rows = [asdict(row) for row in candidates]
        print_json({"op": op, "arch": arch, "key": key._asdict(), **bucket, "config": asdict(chosen)["config"], "sources": rows})
        return 0
    print(f"{op} on {arch}: {key.name}, {_size_text(work, keys)}\n")
    print_table(
        [
            {
                "source": _short(row.source),
                "outcome": row.outcome,
                "config": config_text(row.config, op),
                "how known": row.origin + ("" if row.us is None else f", {row.us:g} us"),
                "why": "; ".join(
                    text for text in (row.reason.removeprefix(f"{row.source}: "), row.stale and f"stale: {row.stale}") if text
                ),
            }
            for row in candidates
        ]
    )
    return 0


class _Words(Parser):
    """A parser of the words after --explain, whose mistakes are those of the argument."""

    def __init__(self, op: str, outer: argparse.ArgumentParser) -> None:
        usage = f"tkv tables --explain {op} [MODEL] [NAME=VALUE ...]"
        super().__init__(prog=f"tkv tables --explain {op}", usage=usage)
        self.outer = outer

    def error(self, message: str) -> NoReturn:
        self.outer.error(f"argument --explain: {message}")


def _call(op: str, words: Sequence[str], outer: argparse.ArgumentParser) -> argparse.Namespace:
    """The call that the words after --explain describe."""
    from tkv.tune.shapes import MODELS

    parser = _Words(op, outer)
    parser.add_argument("--arch", type=arch, help="the architecture (default: that of the GPU)")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_call(parser)
    parser.add_argument("--config", type=overrides, default={}, help="the call's own, as in config=block_n=64,num_warps=8")
    parser.set_defaults(window_keys=None)
    size = parser.add_argument_group("its size")
    size.add_argument("--batch", type=positive, help="sequences (default: so many that the last bucket holds them)")
    size.add_argument("--tokens", type=positive, help="keys of the longest sequence (default: as for --batch)")
    size.add_argument("--kv-heads", type=positive, default=8, help="KV heads (default: %(default)s)")
    size.add_argument("--sms", type=positive, help="of the GPU (default: those of the first part of the architecture that is known)")
    shape = MODELS.get(words[0]) if words else None
    if shape is not None:
        words = words[1:]
        parser.set_defaults(
            head_dim=shape.head_dim, v_head_dim=shape.v_head_dim, shared=shape.shares_v, softcap=shape.softcap is not None,
            group=shape.num_q_heads // shape.num_kv_heads, kv_heads=shape.num_kv_heads, window=None not in shape.windows,
            window_keys=shape.window,
        )  # fmt: skip
    elif words and _flag(words[0]) == words[0] and not words[0].startswith("-"):
        parser.error(f"expected a model ({', '.join(MODELS)}) or NAME=VALUE, got {words[0]!r}")
    return parser.parse_args([_flag(word) for word in words])


def _flag(word: str) -> str:
    """``head_dim=64`` and ``window`` as argparse takes them; what has dashes, and the value of an option before it, as it is."""
    name, equals, value = word.partition("=")
    is_bare = not name.startswith("-") and (equals or name in (*FLAGS, "shared", "json", "help"))
    return f"--{name.replace('_', '-')}{equals}{value}" if is_bare else word


def _size(op: str, case: Case, call: argparse.Namespace, arch: str) -> tuple[float, float]:
    """Work per SM and keys of a call, by which a bucket is found; infinite, which is the last bucket, where they are not given."""
    keys = call.tokens or math.inf
    if call.window and call.window_keys and op in ("paged_decode", "prefix_prefill"):
        keys = min(keys, call.window_keys + case.q_len - 1)
    sms = call.sms or next((part.sms for part in parts() if part.arch == arch), 132)
    return math.inf if call.batch is None else programs_of_case(op, case, call.batch, call.kv_heads) / sms, keys


def _size_text(work: float, keys: float) -> str:
    work_text = "any batch" if work == math.inf else f"{work:.3g} programs an SM"
    return f"{work_text}, {'any length' if keys == math.inf else f'{keys:,} keys'}"


def _short(source: str) -> str:
    """A table's file without the folder that all share."""
    path = Path(source)
    return str(Path(*path.parts[-2:])) if path.suffix == ".json" and path.is_relative_to(configs_dir()) else source
