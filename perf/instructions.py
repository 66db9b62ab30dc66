"""Warp instructions of attention's main loop at its default configs, counted in the machine code. No GPU is needed.

Of paged_decode per token and KV head, of prefix_prefill per query row (token x head) and key.

python perf/instructions.py [--op prefill] [--arch sm90 --arch sm80] [--csv]
"""

import argparse
import csv
import sys

from tabulate import tabulate

from tkv.tune.arch import ARCHS, arch
from tkv.tune.compile import Case, Report, compile_all, launch_of

KINDS = ("bf16", "fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head")


def cases(op: str) -> list[Case]:
    """The op over head dims and formats."""
    q_len = 1 if op == "decode" else 1024
    return [Case(op, "bf16", kind, head_dim, q_len=q_len) for head_dim in (64, 128, 256) for kind in KINDS]


def row(report: Report) -> dict[str, object]:
    """One line of the table. A loop's instructions are a warp's, for one tile of keys."""
    launch = launch_of(report.case, report.arch)
    attend = next(value for value in launch.args if hasattr(value, "BLOCK_N") and hasattr(value, "PAGE_SIZE"))
    block_m = next(value for param, value in zip(launch.kernel.params, launch.args, strict=True) if param.name == "BLOCK_M")
    is_decode = report.case.op == "decode"
    loop = sum((report.loop or {}).values()) * launch.num_warps / attend.BLOCK_N
    return {
        "arch": report.arch,
        "format": report.case.format,
        "head_dim": report.case.head_dim,
        "tile": f"{block_m}x{attend.BLOCK_N}",
        "warps": launch.num_warps,
        "per token" if is_decode else "per row and key": round(loop, 1) if is_decode else round(loop / block_m, 3),
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        "triton": report.triton,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", default="decode", choices=("decode", "prefill", "prefill_cached", "level"))
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: sm80, sm90, sm100, gfx942")
    parser.add_argument("--csv", action="store_true", help="for machines")
    args = parser.parse_args()
    jobs = [(case, name) for name in args.arch or ["sm80", "sm90", "sm100", "gfx942"] for case in cases(args.op)]
    rows = []
    for report in compile_all(jobs, progress=lambda done: print(f"{done.arch} {done.case.name}", file=sys.stderr)):
        if report.error:
            sys.exit(f"{report.arch} {report.case.name}: {report.error}")
        rows.append(row(report))
    if args.csv:
        writer = csv.DictWriter(sys.stdout, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    else:
        print(tabulate(rows, headers="keys"))
        warps = ", ".join(f"{name} {arch(name).warp_size}" for name in dict.fromkeys(name for _, name in jobs))
        print(f"\nGroup 8, pages of 16. Threads of a warp: {warps}.")


if __name__ == "__main__":
    main()
