"""Time of the host for one call: a function itself, the function as users call it, and its operator in torch.library.

Kernels are not launched, so that a machine without a GPU measures the same code.

    python perf/bench_operators.py [CALLS]
"""

import os
import sys
import timeit

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from tabulate import tabulate

import tkv
from tkv.ops.launch import Launch


def main() -> None:
    """Print the table."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    torch.set_num_threads(1)
    cache = tkv.KVCache.empty(64, 16, 8, 128, format="bf16")
    table, lens = torch.arange(64, dtype=torch.int32).view(16, 4), torch.full((16,), 50, dtype=torch.int32)
    q, kv = torch.randn(16, 32, 128, dtype=torch.bfloat16), torch.randn(16, 8, 128, dtype=torch.bfloat16)
    slots, out = torch.arange(16), torch.empty(16, 32, 128, dtype=torch.bfloat16)
    stored = (cache.k, cache.v, None, None, "bf16", "bf16", 128)
    cases = {
        "write_kv": ((kv, kv, cache, slots), {}, (kv, kv, *stored, slots)),
        "paged_decode": ((q, cache, table, lens), {"out": out}, (q, *stored, table, lens, out)),
    }
    Launch.run = lambda self, device: None  # type: ignore[method-assign]
    rows = []
    for name, (args, options, flat) in cases.items():
        function, operator = getattr(tkv, name), getattr(torch.ops.tkv, name)
        ways = (
            lambda function=function, args=args, options=options: function.__wrapped__(*args, **options),
            lambda function=function, args=args, options=options: function(*args, **options),
            lambda operator=operator, flat=flat: operator(*flat),
        )
        rows.append([name, *(min(timeit.repeat(way, number=calls, repeat=7)) / calls * 1e6 for way in ways)])
    print(tabulate(rows, ["us a call", "the function alone", "as called", "torch.ops.tkv"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
