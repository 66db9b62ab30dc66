"""What choosing a configuration costs on the host, on this CPU: when a kind of call comes again, and when it comes first. No GPU is needed.

python perf/bench_select.py [--calls 20000] [--entries 300]
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tabulate import tabulate

import tkv
from tkv.ops.attention import Options, config_for
from tkv.tune import select
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key
from tkv.tune.tables import Bucket, Compiled, Entry, Table, dump, table_path
from tkv.tune.versions import installed_triton

KEY = Key(128, 128, "bf16", "fp8_e4m3/tensor", 16, 16)
COMPILED = Compiled(installed_triton() or "", registers=168, spills=0, shared=70000, ctas_per_sm=3)


def timed(call, times: int, batch: int = 1) -> list[float]:
    """Microseconds of a call: the mean of each batch of calls."""
    taken = []
    for _ in range(times // batch):
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        taken.append((time.perf_counter_ns() - start) / 1e3 / batch)
    return taken


def table(num_entries: int) -> Table:
    """Six buckets for each of some keys, `KEY` among them."""
    keys = [KEY._replace(head_dim=16 + 8 * i % 560, rows=16 << i % 4) for i in range(num_entries // 6 - 1)]
    buckets = [Bucket(work, keys) for work in (1, 8, None) for keys in (4096, None)]
    config = AttentionConfig(16, 64, 4, 2)
    return Table.make("paged_decode", "sm90", [Entry(k, b, config, "modelled", COMPILED) for k in {KEY, *keys} for b in buckets])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--entries", type=int, default=300, help="of the table")
    args = parser.parse_args()
    cache = tkv.KVCache.empty(64, 16, 8, 128, KEY.format, device="meta")
    q = torch.empty(64, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    options, rows = Options(scale=0.1, window=1000), []
    plain = Options(scale=0.1)

    def report(name: str, taken: list[float]) -> None:
        rows.append([name, len(taken), min(taken), statistics.median(taken)])

    def call(options: Options = plain) -> None:
        config_for("paged_decode", q, cache, options, "sm90", 4, (512, 100_000))

    def first() -> None:
        select.choices.cache_clear()
        call()

    def cold() -> None:
        select.forget()
        call()

    with tempfile.TemporaryDirectory() as folder:
        written = table(args.entries)
        dump(written, table_path(Path(folder), "sm90", "paged_decode"))
        os.environ[select.CONFIG_DIR] = folder
        select.forget()
        call(), call(options)
        assert select.choices.cache_info().misses == 2
        report("again, the last of six buckets", timed(call, args.calls, 100))
        report("again, no entry: the default", timed(lambda: call(options), args.calls, 100))
        report("first of its kind, table read before", timed(first, 500))
        report(f"first of all, a table of {len(written.entries)} entries", timed(cold, 20))
    print(tabulate(rows, headers=["config of a call", "times", "min us", "median us"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
