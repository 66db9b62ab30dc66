"""What a step of CacheManager costs on the host: the median over many steps, on this CPU. No GPU is needed.

python perf/bench_manager.py [--seqs 256] [--tokens 32768] [--page-size 16] [--steps 200]
"""

import argparse
import statistics
import time

import numpy as np
from tabulate import tabulate

from tkv.pages import CacheManager, PagePool


def timed(call, times: int) -> list[float]:
    """Milliseconds of each of so many calls."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=256, help="sequences of the batch")
    parser.add_argument("--tokens", type=int, default=32768, help="length of each")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    pool = PagePool(args.seqs * ((args.tokens + 3 * args.steps) // args.page_size + 3))
    manager = CacheManager(pool, args.page_size)
    prompts = rng.integers(0, 50_000, (args.seqs, args.tokens))
    # Sequences reach the ends of their pages in different steps, as in a server.
    lengths = args.tokens - rng.integers(0, args.page_size, args.seqs)
    rows: list[list[object]] = []

    def report(name: str, taken: list[float], tokens: int) -> None:
        median = statistics.median(taken)
        rows.append([name, len(taken), median, np.percentile(taken, 80), max(taken), median * 1e3 / tokens])

    seqs: list[int] = []
    todo = iter(zip(prompts, lengths))

    def prefill() -> None:
        prompt, length = next(todo)
        seqs.append(manager.add(prompt[:length]))
        manager.step({seqs[-1]: prompt[:length]})

    report("add and step of a whole prompt", timed(prefill, args.seqs), args.tokens)

    def decode() -> None:
        manager.step(seqs, rng.integers(0, 50_000, args.seqs))

    report(f"step of {args.seqs} sequences, one token each", timed(decode, args.steps), args.seqs)
    report("the same, and tensors", timed(lambda: manager.step(seqs, [1] * args.seqs).tensors(), min(args.steps, 32)), args.seqs)

    def one_by_one() -> None:
        for seq in seqs:
            manager.truncate(seq, manager.length(seq) - 2)

    def at_once() -> None:
        manager.truncate(seqs, manager.lengths(seqs) - 2)

    for way, cut in (("one by one", one_by_one), ("at once", at_once)):
        cuts: list[float] = []
        for _ in range(args.steps // 4):
            manager.step(seqs, rng.integers(0, 50_000, 4 * args.seqs), counts=[4] * args.seqs)
            cuts += timed(cut, 1)
        report(f"truncate by 2 of 4 drafts, {args.seqs} sequences {way}", cuts, args.seqs)

    question = np.concatenate([prompts[0, : args.tokens // 2], [1, 2, 3]])
    found = manager.match(question)
    report(f"match that finds {found} tokens", timed(lambda: manager.match(question), 20), question.size)
    forks: list[int] = []
    report("fork", timed(lambda: forks.append(manager.fork(seqs[0])), 20), args.tokens)
    report("free of a fork", timed(lambda: manager.free(forks.pop()), 20), args.tokens)
    left = iter(seqs)
    report("free", timed(lambda: manager.free(next(left)), args.seqs), args.tokens)
    print(f"{args.seqs} sequences of {args.tokens} tokens, pages of {args.page_size}; milliseconds on this CPU\n")
    print(tabulate(rows, headers=["call", "times", "median", "p80", "max", "us/token"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
