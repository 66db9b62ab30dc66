"""Warp instructions of attention's main loop, at the config that a user gets, counted in the machine code. No GPU is needed.

Of paged_decode per token and KV head, of prefix_prefill per query row (token x head) and key. Counts are compared with those of the same
version of Triton in perf/baselines; --check ends with 1 where one is more than 5 % worse, or spills more.

python perf/instructions.py [--op paged_decode] [--arch sm90] [--head-dim 128] [--check] [--write-baseline] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from tkv.commands.output import Progress, print_table
from tkv.tune.analysis import analyse
from tkv.tune.arch import ARCHS
from tkv.tune.compile import Case, Report, compile_all
from tkv.tune.keys import OP_KINDS
from tkv.tune.store import Store

BASELINES = Path(__file__).with_name("baselines")
FORMATS = ("bf16", "fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head", "int4/token_head", "int4/group32")
DEFAULT_ARCHS = ("sm80", "sm90", "sm100", "gfx942")
OPS = {"paged_decode": 1, "prefix_prefill": 1024}
WORSE = 1.05
KEY = ("op", "arch", "head_dim", "format")


def cases(ops: list[str], head_dims: list[int]) -> list[Case]:
    """The ops over head dims and formats: group 8, pages of 16."""
    return [Case(OP_KINDS[op], "bf16", kind, head_dim, q_len=OPS[op]) for op in ops for head_dim in head_dims for kind in FORMATS]


def row_of(report: Report) -> dict[str, Any]:
    """One line of the table."""
    if report.error or report.config is None:
        sys.exit(f"{report.arch} {report.case.name}: {report.error}")
    return {
        "op": next(op for op, kind in OP_KINDS.items() if kind == report.case.op),
        "arch": report.arch,
        "head_dim": report.case.head_dim,
        "format": report.case.format,
        "tile": f"{report.config.block_m}x{report.config.block_n}",
        "warps": report.num_warps,
        "instructions": round(analyse(report).num_instructions, 2 if report.case.op == "decode" else 3),
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
    }


def baseline_of(triton: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The committed rows of a version of Triton, by `KEY`; none if there are none."""
    file = BASELINES / f"triton-{triton}.csv"
    if not file.is_file():
        return {}
    with file.open(newline="") as lines:
        return {tuple(line[name] for name in KEY): line for line in csv.DictReader(lines)}


def compared(row: dict[str, Any], baseline: dict[tuple[str, ...], dict[str, str]]) -> tuple[dict[str, Any], str]:
    """The row with its baseline beside it, and what is worse than there."""
    before = baseline.get(tuple(str(row[name]) for name in KEY))
    if before is None:
        return {**row, "baseline": None}, ""
    wanted, problem = float(before["instructions"]), ""
    if row["instructions"] > WORSE * wanted:
        problem = f"{row['instructions']} instructions, {wanted} in the baseline"
    elif row["spills"] > int(before["spills"]):
        problem = f"spills {row['spills']}, {before['spills']} in the baseline"
    return {**row, "baseline": wanted}, problem and f"{' '.join(str(row[name]) for name in KEY)}: {problem}"


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    """The rows as a CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(file: Path, rows: list[dict[str, Any]], title: str) -> bool:
    """Bars of decode's instructions by format, one picture a head_dim; False where matplotlib is missing or nothing is to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    decode = [row for row in rows if row["op"] == "paged_decode" and row["arch"].startswith("sm")]
    head_dims = sorted({row["head_dim"] for row in decode})
    if not decode:
        return False
    archs = list(dict.fromkeys(row["arch"] for row in decode))
    figure, axes = pyplot.subplots(len(head_dims), 1, figsize=(9, 2.6 * len(head_dims)), squeeze=False, layout="constrained")
    for head_dim, axis in zip(head_dims, axes[:, 0], strict=True):
        for i, name in enumerate(archs):
            found = {row["format"]: row["instructions"] for row in decode if (row["head_dim"], row["arch"]) == (head_dim, name)}
            places = [n + (i - (len(archs) - 1) / 2) * 0.8 / len(archs) for n, kind in enumerate(FORMATS) if kind in found]
            bars = axis.bar(places, [found[kind] for kind in FORMATS if kind in found], 0.8 / len(archs), label=name)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(FORMATS)), FORMATS, fontsize=8)
        axis.set_ylabel(f"head_dim {head_dim}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(ncols=len(archs), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=130)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS, help="default: all of them")
    parser.add_argument("--arch", action="append", choices=ARCHS, help=f"default: {', '.join(DEFAULT_ARCHS)}")
    parser.add_argument("--head-dim", action="append", type=int, help="default: 64, 128, 256")
    parser.add_argument("--check", action="store_true", help="end with 1 where a count is worse than the baseline's")
    parser.add_argument("--write-baseline", action="store_true", help="make these counts the baseline of this version of Triton")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where instructions.csv and instructions.png go")
    parser.add_argument("--workers", type=int, help="processes that compile (default: one a core)")
    args = parser.parse_args()
    archs, head_dims = args.arch or list(DEFAULT_ARCHS), args.head_dim or [64, 128, 256]
    jobs = [(case, name) for name in archs for case in cases(args.op or list(OPS), head_dims)]
    reports = []
    with Progress("compiling", len(jobs)) as progress:
        for report in compile_all(jobs, args.workers, store=Store()):
            reports.append(report)
            progress.step()
    rows, triton = [row_of(report) for report in reports], reports[0].triton
    baseline = baseline_of(triton)
    lines, problems = zip(*(compared(row, baseline) for row in rows))
    print_table(lines, right=("tile",))
    print(f"\nCounted with Triton {triton}: warp instructions per token and KV head, of prefill per query row and key.")
    print("Group 8, pages of 16.", end=" ")
    print(f"The baseline is {'that of this version' if baseline else 'missing for this version'}; warps have 32 threads, on gfx9 64.")
    if args.write_baseline:
        write_csv(BASELINES / f"triton-{triton}.csv", [{name: row[name] for name in (*KEY, "instructions", "spills")} for row in rows])
    if args.out is not None:
        write_csv(args.out / "instructions.csv", rows)
        title = f"Warp instructions of paged_decode per token and KV head, counted (Triton {triton}, group 8, pages of 16)"
        drawn = plot(args.out / "instructions.png", rows, title)
        print(f"Written to {args.out}: instructions.csv{' and instructions.png' if drawn else ' (no picture without matplotlib)'}")
    worse = [problem for problem in problems if problem]
    print("".join(f"worse: {problem}\n" for problem in worse), end="", file=sys.stderr)
    sys.exit(1 if args.check and worse else 0)


if __name__ == "__main__":
    main()
