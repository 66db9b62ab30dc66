"""``tkv demo``: a real model on real text, served from the paged cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from tkv.commands import Commands
from tkv.commands.arguments import positive
from tkv.demo import PICTURES, SCENARIOS, run_scenario


def add(commands: Commands) -> None:
    """Add the parser."""
    demo = commands.add_parser("demo", help="a real model on real text, served from the paged cache")
    about = (
        "decode: tokens and memory; shared-prefix: one prompt for many questions; formats: perplexity of every cache format; "
        "streaming: a text longer than the context in a few pages; eviction: perplexity of what to keep, by budget"
    )
    demo.add_argument("--scenario", choices=SCENARIOS, default="decode", help=f"what to show (default: %(default)s). {about}")
    demo.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of model and unquantised cache (default: %(default)s)")
    demo.add_argument("--workers", type=positive, help="processes at a time on a CPU (default: one a core, at most one a task)")
    drawings = ", ".join(f"of {scenario} (default: {file})" for scenario, file in PICTURES.items())
    demo.add_argument("--out", type=Path, metavar="FILE.png", help=f"the picture {drawings}")

    def run(args: argparse.Namespace) -> int:
        if args.out is not None and args.scenario not in PICTURES:
            demo.error(f"argument --out: only with --scenario {' or '.join(PICTURES)}")
        return run_scenario(args.scenario, dtype=args.dtype, workers=args.workers, out=args.out)

    demo.set_defaults(run=run)
