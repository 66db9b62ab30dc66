"""One long sequence on several GPUs: each rank holds a run of its pages, and one collective a step joins what they see.

    python examples/context_parallel.py
    python examples/context_parallel.py --ranks 3 --format int8/token_head --steps 8

Processes are spawned here, one a rank; under torchrun an engine's own are there already. With a GPU for each they use NCCL, else gloo, and
the kernels run in Triton's interpreter.

A rank does what an engine without ranks does, but asks a `Partition` where it writes the new tokens (nowhere, if another rank holds them),
how many keys it has, and the position of the first. New tokens go to the last rank, here of a prompt that was split evenly. Queries, keys
and values of the new tokens are random, and the same on every rank, as they would be behind replicated layers.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate

PAGE_SIZE, PROMPT, KV_HEADS, HEADS, DIM = 16, 60, 1, 4, 64


def tokens(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the tokens that are new in a step; step 0 is the prompt."""
    numbers = torch.randn(1 if step else PROMPT, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(step))
    q, k, v = numbers.half().to(device).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def run(rank: int, ranks: int, steps: int, kind: str, folder: str) -> None:
    """What a rank does: its part of the prompt, then a token a step."""
    import tkv
    from tkv.integrations.distributed import Partition, context_parallel_decode, context_parallel_prefill

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus(ranks) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

    partition = Partition.even([PROMPT], ranks, PAGE_SIZE)
    cache = tkv.KVCache.empty(16, PAGE_SIZE, KV_HEADS, DIM, kind, device=device)
    pool, kv_start = tkv.PagePool(cache.num_pages), partition.kv_start(rank).to(device)
    pages: list[int] = []
    outs = []
    for step in range(steps + 1):
        q, k, v = tokens(step, device)
        length = PROMPT + step
        held = partition.seq_lens(rank, [length])
        pages += pool.allocate(-(-int(held) // PAGE_SIZE) - len(pages)).tolist()
        table = torch.tensor([pages], dtype=torch.int32).reshape(1, -1)
        slots = partition.slot_mapping(rank, [length], [len(q)], table, PAGE_SIZE)
        tkv.write_kv(k, v, cache, slots.to(device))

        args = q, cache, table.to(device), held.to(device)
        q_start, new = torch.tensor([length - len(q)], device=device), torch.tensor([0, len(q)], device=device)
        if step:
            out = context_parallel_decode(*args, kv_start=kv_start, q_start=q_start)
        else:
            out = context_parallel_prefill(*args, new, kv_start=kv_start, q_start=q_start)
        outs.append(out.cpu())

    first, keys = int(kv_start), int(held)
    positions = f"{first} to {first + keys - 1}" if keys else "none"
    torch.save(((rank, positions, keys, len(pages), len(pages) * cache.nbytes // cache.num_pages), outs), f"{folder}/{rank}")
    dist.destroy_process_group()


def alone(steps: int, kind: str) -> list[torch.Tensor]:
    """The same in one process that holds all pages."""
    import tkv

    device = torch.device("cuda" if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ else "cpu")
    cache = tkv.KVCache.empty(-(-(PROMPT + steps) // PAGE_SIZE), PAGE_SIZE, KV_HEADS, DIM, kind, device=device)
    table, outs = torch.arange(cache.num_pages, device=device)[None], []
    for step in range(steps + 1):
        q, k, v = tokens(step, device)
        length = PROMPT + step
        tkv.write_kv(k, v, cache, torch.arange(length - len(q), length, device=device))
        lens, new = torch.tensor([length - len(q)], device=device), torch.tensor([0, len(q)], device=device)
        outs.append(tkv.prefix_prefill(q, None, None, cache, table, lens, new).cpu())
    return outs


def on_gpus(ranks: int) -> bool:
    return torch.cuda.device_count() >= ranks


def main() -> None:
    parser = argparse.ArgumentParser(description="One long sequence on several GPUs, or on several processes in Triton's interpreter.")
    parser.add_argument("--ranks", type=int, default=2, help="processes, and GPUs if there are as many (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="tokens to decode after the prompt (default: 4)")
    parser.add_argument("--format", default="fp16", help="how the cache stores numbers (default: fp16)")
    args = parser.parse_args()
    if not on_gpus(args.ranks):
        os.environ.setdefault("TRITON_INTERPRET", "1")

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.ranks, args.steps, args.format, folder), nprocs=args.ranks)
        held, outs = zip(*(torch.load(f"{folder}/{rank}") for rank in range(args.ranks)))

    where = "GPUs" if on_gpus(args.ranks) else "a CPU"
    print(f"a prompt of {PROMPT} tokens and {args.steps} more in pages of {PAGE_SIZE}, {args.format}, on {where}\n")
    print(tabulate(held, ["rank", "positions", "keys", "pages", "bytes"]))
    rows = []
    for step, out in enumerate(alone(args.steps, args.format)):
        difference = max((of_rank[step] - out).abs().max().item() for of_rank in outs)
        rows.append((f"token {PROMPT + step - 1}" if step else "prompt", len(out), f"{difference:.1e}"))
    print(f"\n{tabulate(rows, ['call', 'rows', 'largest difference to one process'])}")


if __name__ == "__main__":
    main()
