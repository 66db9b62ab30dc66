"""How fast the ops are on the GPU at hand, over shapes of models and formats of the cache: a table, a CSV and a picture.

python perf/bench_ops.py [--models llama3-8b gpt-oss-20b] [--formats bf16 int8/token_head] [--ops decode write] [--budget 70] [--out FOLDER]

Times are microseconds of a call with a cold cache and warm clocks, measured between events around a CUDA graph. GB/s counts what a call
has to move, each byte once. Without a GPU the exit status is 2.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import tkv
from tkv.errors import TkvError
from tkv.tune.arch import Part, part_of_device
from tkv.tune.problem import TORCH_DTYPES, build
from tkv.tune.select import explain
from tkv.tune.shapes import MODELS, shapes_of
from tkv.tune.timing import CudaTimer, Timer, Times

OPS = {
    "decode": "paged_decode",
    "prefill": "prefix_prefill",
    "cascade": "shared_prefix_decode",
    "write": "write_kv",
    "gather": "gather_window",
}
# (sequences, keys of each) or, of write_kv, (tokens, 1).
SIZES = {
    "decode": ((1, 8192), (64, 8192), (1, 65536)),
    "prefill": ((1, 8192), (8, 2048)),
    "cascade": ((64, 8192),),
    "write": ((128, 1), (8192, 1)),
    "gather": ((8, 8192),),
}
WINDOW, SINKS = 4092, 4
DEFAULT_MODELS = ("llama3-8b", "llama3-70b-tp8", "gpt-oss-20b", "deepseek-mla")
DEFAULT_FORMATS = ("bf16", "fp8_e4m3/tensor", "int8/token_head", "int4/token_head")


@dataclass(frozen=True)
class Job:
    """One row to measure: an op of `OPS`, a model, a format, (sequences, keys)."""

    op: str
    model: str
    format: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Call:
    """What is timed: a function that puts a call on the stream, its bytes and operations, and where its config comes from."""

    run: Callable[[], Any]
    bytes: int
    flops: int
    origin: str


def jobs(ops: Iterable[str], models: Iterable[str], formats: Iterable[str]) -> Iterator[Job]:
    """All rows: every op and format of the first model, then of the second."""
    for model in models:
        for op in ops:
            for format in formats:
                # 4-bit numbers of a row belong together: V cannot be a view of some of its dims.
                if not (MODELS[model].shares_v and format.startswith("int4")):
                    yield from (Job(op, model, format, size) for size in SIZES[op])


def calls_of(job: Job, device: torch.device, part: Part) -> Iterator[tuple[str, Call]]:
    """The calls of a row, one for each kind of layer of the model, with a note of what is special about it."""
    num_seqs, length = job.size
    if job.op in ("write", "gather"):
        yield "", (_write if job.op == "write" else _gather)(job, device)
        return
    for shape in shapes_of(job.model, OPS[job.op], [num_seqs], [length], format=job.format):
        problem = build(shape, device)
        chosen = next(row for row in explain(shape.op, shape, part.arch, num_sms=part.sms) if row.outcome == "chosen")
        note = "" if shape.window is None else f"window {shape.window}"
        yield note, Call(problem.run, problem.bytes_moved, problem.flops, chosen.origin)


def _cache_of(job: Job, num_seqs: int, length: int, device: torch.device) -> Any:
    """A problem of decoding, for its cache and its page table."""
    shape = shapes_of(job.model, "paged_decode", [num_seqs], [length], format=job.format)[0]
    return build(shape, device)


def _write(job: Job, device: torch.device) -> Call:
    tokens = job.size[0]
    cache = _cache_of(job, 1, tokens, device).cache
    shape = (tokens, cache.num_kv_heads)
    k, v = (torch.randn(*shape, dim, device=device).to(TORCH_DTYPES["bf16"]) for dim in (cache.head_dim, cache.v_head_dim))
    slots = torch.randperm(cache.num_slots, device=device)[:tokens]
    read = k.numel() * 2 + (0 if cache.v_is_k else v.numel() * 2)
    return Call(partial(tkv.write_kv, k, v, cache, slots), int(read + tokens * (8 + cache.bytes_per_token)), 0, "fixed")


def _gather(job: Job, device: torch.device) -> Call:
    num_seqs, length = job.size
    problem = _cache_of(job, num_seqs, length, device)
    cache = problem.cache
    rows = num_seqs * min(length, WINDOW + SINKS)
    written = rows * cache.num_kv_heads * (cache.head_dim + cache.v_head_dim) * 2
    run = partial(tkv.gather_window, cache, problem.page_table, problem.lens, window=WINDOW, sinks=SINKS, dtype=TORCH_DTYPES["bf16"])
    return Call(run, int(written + rows * cache.bytes_per_token), 0, "fixed")


def row_of(job: Job, note: str, call: Call, times: Times, part: Part) -> dict[str, Any]:
    """A row of the table."""
    gbps = call.bytes / times.p50 / 1e3
    tflops = call.flops / times.p50 / 1e6
    return {
        "op": job.op,
        "model": job.model,
        "note": note,
        "format": job.format,
        "seqs": job.size[0],
        "keys": job.size[1],
        "us p20": round(times.p20, 1),
        "us p50": round(times.p50, 1),
        "us p80": round(times.p80, 1),
        "GB/s": round(gbps),
        "% of bandwidth": round(100 * gbps / part.gbps, 1) if part.gbps else None,
        "TFLOP/s": round(tflops, 1) if call.flops else None,
        "config": call.origin,
    }


def measure(todo: Iterable[Job], timer: Timer, device: torch.device, part: Part, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Rows of the jobs, and how many jobs there was no time for."""
    rows: list[dict[str, Any]] = []
    end, left = time.monotonic() + seconds, 0
    longest = 0.0
    for job in todo:
        start = time.monotonic()
        if start + longest > end:
            left += 1
            continue
        try:
            for note, call in calls_of(job, device, part):
                rows.append(row_of(job, note, call, Times.of(timer.measure(timer.captured(call.run))), part))
        except (TkvError, torch.OutOfMemoryError) as error:
            print(f"{job.op} {job.model} {job.format} {job.size}: left out, {error}", file=sys.stderr)
        longest = max(longest, time.monotonic() - start)
        print(f"{job.op} {job.model} {job.format} {job.size}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return rows, left


def plot(rows: list[dict[str, Any]], part: Part, title: str, path: Path) -> bool:
    """Draw the bandwidth of each row; False where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["model"], row["note"], row["seqs"], row["keys"]), {})[row["format"]] = row["GB/s"]
    formats = list(dict.fromkeys(row["format"] for row in rows))
    colours = ["#6b6b6b", "#d95f02", "#1f78b4", "#7b3294", "#a6761d", "#1b9e77"]
    height = 0.8 / len(formats)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + len(groups) * (0.12 + 0.09 * len(formats))), layout="constrained")
    for i, format in enumerate(formats):
        found = [(y, values[format]) for y, values in enumerate(groups.values()) if format in values]
        places = [y + (i - (len(formats) - 1) / 2) * height for y, _ in found]
        axes.barh(places, [gbps for _, gbps in found], height, color=colours[i % len(colours)], label=format)
    names = [f"{op}  {model}  {seqs} x {keys:,}{'  ' + note if note else ''}" for op, model, note, seqs, keys in groups]
    axes.set_yticks(range(len(groups)), names, fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    if part.gbps:
        axes.axvline(part.gbps, color="#333333", linewidth=1, linestyle="--", label=f"data sheet, {part.gbps:,.0f} GB/s")
    axes.set_xlabel("GB/s that the call has to move")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def write_out(rows: list[dict[str, Any]], part: Part, title: str, out: Path) -> list[Path]:
    """The CSV and the picture; gives what was written."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "bench_ops.csv"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "measured on"])
        writer.writeheader()
        writer.writerows({**row, "measured on": title} for row in rows)
    if plot(rows, part, title, out / "bench_ops.png"):
        written.append(out / "bench_ops.png")
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}"
    )
    parser.add_argument("--formats", nargs="+", default=list(DEFAULT_FORMATS), metavar="FORMAT", help="of the cache, or K+V")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="start no row that would end later (default: 600)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where bench_ops.csv and bench_ops.png go")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_ops: torch sees no GPU on this machine, and there is nothing to measure without one", file=sys.stderr)
        return 2
    import triton

    device, part = torch.device("cuda", torch.cuda.current_device()), part_of_device()
    rows, left = measure(jobs(args.ops, args.models, args.formats), CudaTimer(device), device, part, args.budget)
    date = datetime.now(timezone.utc).date().isoformat()
    title = f"{part.name}, {part.sms} SMs, Triton {triton.__version__}, torch {torch.__version__}, {date}"
    if not rows:
        print("bench_ops: no row could be measured", file=sys.stderr)
        return 1
    print(tabulate(rows, headers="keys"))
    print(f"\nMeasured on {title}." + (f" {left} rows are missing: the time was over." if left else ""))
    for path in write_out(rows, part, title, args.out) if args.out else ():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
