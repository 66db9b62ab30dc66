"""Processes that are the ranks of a process group, what tests let them do, and what part of a problem each one gets."""

import io
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from unittest.mock import patch

import torch
import torch.distributed as dist
from caches import empty_cache, on_device, poison_

import tkv
from tkv.integrations import distributed

SIZE = 3
# Groups of the ranks that a test can name.
GROUPS = {"all": (0, 1, 2), "pair": (0, 1), "outer": (0, 2)}


class Ranks:
    """Processes that stay, each with a pipe for what it shall do. A rank that fails or hangs ends them all; the next call starts others."""

    def __init__(self, folder):
        self.folder, self.count, self.processes, self.pipes = folder, 0, [], []

    def start(self):
        self.count += 1
        context = multiprocessing.get_context("spawn")
        # With a GPU for each they use NCCL, else gloo and the interpreter.
        env = {} if torch.cuda.device_count() >= SIZE else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        with patch.dict(os.environ, env):
            for rank in range(SIZE):
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(rank, f"file://{self.folder}/store{self.count}", there), daemon=True)
                process.start()
                there.close()
                self.processes.append(process)
                self.pipes.append(here)

    def stop(self):
        for process, pipe in zip(self.processes, self.pipes):
            pipe.close()
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def run(self, function, payloads, timeout=60.0):
        """[function(device, groups, **payload) on each rank]; an AssertionError with its traceback if one fails."""
        if not self.processes:
            self.start()
        try:
            for pipe, payload in zip(self.pipes, payloads, strict=True):
                pipe.send_bytes(packed((function, payload)))
            results, deadline = {}, time.monotonic() + timeout
            while len(results) < SIZE:
                waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
                ready = wait(waiting, deadline - time.monotonic())
                assert ready, f"no answer in {timeout} s from ranks {[self.pipes.index(pipe) for pipe in waiting]}"
                for pipe in ready:
                    is_good, result = unpacked(pipe.recv_bytes())
                    assert is_good, f"rank {self.pipes.index(pipe)} failed:\n{result}"
                    results[self.pipes.index(pipe)] = result
        except BaseException:
            self.stop()
            raise
        return [results[rank] for rank in range(SIZE)]


def serve(rank, store, pipe):
    """What the process of a rank does until its pipe is closed."""
    from tkv.demo.interpreter import quick_interpreter

    torch.set_num_threads(1)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", init_method=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=30))
    groups = {name: dist.new_group(list(ranks)) if len(ranks) < SIZE else None for name, ranks in GROUPS.items()}
    torch.empty = partial(_poisoned_empty, torch.empty)
    with nullcontext() if is_gpu else quick_interpreter():
        while True:
            try:
                function, payload = unpacked(pipe.recv_bytes())
            except EOFError:
                return
            try:
                reply = True, function(device, groups, **payload)
            except Exception:
                reply = False, traceback.format_exc()
            pipe.send_bytes(packed(reply))


def packed(message):
    """A message as bytes; pickle alone cannot read fp8 tensors back."""
    memory = io.BytesIO()
    torch.save(message, memory)
    return memory.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _poisoned_empty(empty, *args, **kwargs):
    tensor = empty(*args, **kwargs)
    inside = sys._getframe(1).f_globals.get("__name__", "").startswith("tkv.")
    return poison_(tensor) if inside and tensor.device.type != "meta" else tensor


def moved(value, device):
    """Tensors and caches on a device."""
    if isinstance(value, tkv.KVCache):
        # It still says that it is where its sender had it.
        return on_device(tkv.KVCache(value.k, value.v, *scales_of(value), format=formats_of(value)), device)
    if isinstance(value, tkv.Rope):
        return tkv.Rope(value.cos.to(device), value.sin.to(device), value.interleaved)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def attend(device, groups, name, group, args, options):
    """A function of the integration, by its name; None on ranks that are not in the group."""
    if dist.get_rank() not in GROUPS[group]:
        return None
    args, options = [moved(value, device) for value in args], {key: moved(value, device) for key, value in options.items()}
    return on_cpu(getattr(distributed, name)(*args, group=groups[group], **options))


def refused(device, groups, name, group, args, options, check=False):
    """The error that a call raises, also on ranks that are not in the group: its type and its text."""
    args, options = [moved(value, device) for value in args], {key: moved(value, device) for key, value in options.items()}
    with patch.dict(os.environ, {"TKV_CHECK": str(int(check))}):
        try:
            getattr(distributed, name)(*args, group=groups.get(group, group), **options)
        except tkv.errors.TkvError as error:
            return type(error), str(error)
    return None


def gather_and_attend(device, groups, call):
    """A rank of a tensor-parallel group whose ranks have different heads of q and the same KV head."""
    q = call["args"][0]
    own = q[..., distributed.q_heads(q.shape[-2], dist.get_rank(), SIZE), :].to(device)
    gathered = distributed.gather_heads(own)
    assert torch.equal(gathered.cpu(), q)
    return attend(device, groups, **{**call, "args": [gathered, *call["args"][1:]]})


def generate(device, groups, partition, lens, k, v, q):
    """Write the new tokens that are this rank's and decode, step after step."""
    rank, page_size = dist.get_rank(), 4
    cache = tkv.KVCache.empty(24, page_size, k.shape[2], k.shape[3], "int8/token_head", device=device)
    table = (torch.arange(24) * 7 % 24).view(3, 8)
    outs = []
    for step in range(len(k)):
        new = [1] * len(lens) if step else lens
        lens = [n + 1 for n in lens] if step else lens
        slots = partition.slot_mapping(rank, lens, new, table, page_size)
        tkv.write_kv(k[step, : len(slots)].to(device), v[step, : len(slots)].to(device), cache, slots.to(device))
        own = {"kv_start": partition.kv_start(rank).to(device), "q_start": torch.tensor(lens, device=device) - 1}
        args = q[step, : len(lens)].to(device), cache, table.to(device), partition.seq_lens(rank, lens).to(device)
        outs.append(distributed.context_parallel_decode(*args, **own).cpu())
    return outs


def cascade(device, groups, args, options):
    """shared_prefix_decode of this rank's keys."""
    q, cache, table, seq_lens = (moved(value, device) for value in args)
    options = {key: moved(value, device) for key, value in options.items()}
    levels = tkv.find_shared_levels(table, seq_lens, cache.page_size, kv_start=options["kv_start"])
    with patch("tkv.ops.cascade.MIN_KEYS_SAVED", 0):
        part = tkv.shared_prefix_decode(q, cache, levels, table, seq_lens, return_lse=True, **options)
    return len(levels), *on_cpu(distributed.merge_ranks(*part))


def kivi(device, groups, args, options, tail, tail_start):
    """This rank's quantised pages, and its tail."""
    q, *args = (moved(value, device) for value in args)
    options = {key: moved(value, device) for key, value in options.items()}
    tail, in_tail = [moved(value, device) for value in tail], options | {"kv_start": tail_start.to(device)}
    parts = tkv.paged_decode(q, *args, **options), tkv.paged_decode(q, *tail, **in_tail)
    return on_cpu(distributed.merge_ranks(*tkv.merge_states(*zip(*parts))))


def misbehave(device, groups, how):
    """Fail, or wait for longer than anybody waits."""
    if how == "fail":
        raise KeyError("no such function")
    time.sleep(600.0 if how == "wait" else 0.0)


def on_cpu(results):
    return tuple(t.cpu() for t in results) if isinstance(results, tuple) else results.cpu()


def part_of(cache, page_table, starts, lens, rank, *, page_size=None, kv_start=None, seed=0):
    """What a rank holds of a problem: its keys in pages of its own, and poison. Gives cache, page_table, seq_lens and kv_start."""
    page_size, rng = page_size or cache.page_size, torch.Generator().manual_seed(seed + rank)
    table, cpu = page_table.long().cpu(), torch.device("cpu")
    counts, firsts = [], []
    for row, n in zip(starts, lens):
        end = row[rank + 1] if rank + 1 < len(row) else n
        firsts.append(row[rank])
        counts.append(max(0, min(end, n) - row[rank]))
    pages = [-(-n // page_size) for n in counts]
    order = torch.randperm(sum(pages) + 1, generator=rng)[: sum(pages)].split(pages)
    scales = [x.cpu() if x is not None and form.is_static else None for x, form in zip(scales_of(cache), formats_of(cache))]
    part = empty_cache(
        formats_of(cache), "nhd", sum(pages) + 1, page_size, cache.num_kv_heads, cache.head_dim, *scales, cpu, cache.v_head_dim
    )
    part_table = torch.full((len(lens), max(pages, default=0)), -7, dtype=torch.int32)
    for seq, (first, count) in enumerate(zip(firsts, counts)):
        keys = torch.arange(count)
        there = table[seq, (keys + first) // cache.page_size]
        keys, there = keys[(there >= 0) & (there < cache.num_pages)], there[(there >= 0) & (there < cache.num_pages)]
        there_row, here, row = (keys + first) % cache.page_size, order[seq][keys // page_size], keys % page_size
        part_table[seq, keys // page_size] = here.int()
        sides = ((part.k, cache.k), (part.v, cache.v), *zip(scales_of(part), scales_of(cache)))
        for (mine, whole), form in zip(sides, formats_of(cache) * 2):
            if whole is None or (form.is_static and whole.dim() < 3):
                continue
            if form.scale == "page_channel" and whole.dtype == torch.float16:
                mine[here] = whole.cpu()[there]
            else:
                mine[here, row] = whole.cpu()[there, there_row]
    kv_start = [0] * len(lens) if kv_start is None else kv_start.tolist()
    return part, part_table, torch.tensor(counts, dtype=torch.int32), torch.tensor([a + b for a, b in zip(firsts, kv_start)])


def formats_of(cache):
    return cache.k_format, cache.v_format


def scales_of(cache):
    return cache.k_scale, cache.v_scale
