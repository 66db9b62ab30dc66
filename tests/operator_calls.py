"""A small call of every operator, for the tests of what traces them."""

import torch

import tkv
from tkv.pages import kivi_decode, kivi_prefill

PAGES, PAGE_SIZE, HEADS, DIM = 8, 16, 2, 32
LENS = (21, 30)


def filled(kind, device, seed=0):
    """A cache with a number in every slot."""
    generator = torch.Generator().manual_seed(seed)
    scale = dict(k_scale=0.05, v_scale=0.04) if kind.startswith("int8/") and kind.split("/")[1] in ("tensor", "head", "channel") else {}
    cache = tkv.KVCache.empty(PAGES, PAGE_SIZE, HEADS, DIM, format=kind, device=device, **scale)
    k, v = torch.randn(2, PAGES * PAGE_SIZE, HEADS, DIM, generator=generator).to(device)
    dtype = cache.k.dtype if cache.is_native else torch.float32
    tkv.write_kv(k.to(dtype), v.to(dtype), cache, torch.arange(PAGES * PAGE_SIZE, device=device))
    return cache


def latent(device):
    """A cache whose V is a view of its K, as latent attention has it."""
    k = filled("fp32", device).k
    return tkv.KVCache(k, k[..., :16])


def interleaved(device):
    """A cache whose K and V lie in one buffer."""
    data = torch.stack([filled("fp32", device).k, filled("fp32", device, 1).v], dim=1)
    return tkv.KVCache(data[:, 0], data[:, 1])


class Inputs:
    """What the calls are made of."""

    def __init__(self, device, kind="fp32", make=None):
        self.device = device
        self.cache = filled(kind, device) if make is None else make(device)
        self.other = filled(kind, device, 2) if make is None else make(device)
        self.native = filled("fp32", device, 3)
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(2, 2 * HEADS, DIM, generator=generator).to(device)
        self.k, self.v = torch.randn(2, 2, HEADS, DIM, generator=generator).to(device)
        self.table = self.tensor([[3, 1], [0, 5]])
        self.lens = self.tensor(LENS)
        self.starts = self.tensor([0, 1, 2])
        self.slots = self.tensor([page * PAGE_SIZE + length % PAGE_SIZE - 1 for page, length in zip((1, 5), LENS)])
        self.rope = tkv.Rope.of(64, DIM, device=device)

    def tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def _shared_prefix_decode(x):
    table = torch.zeros(2, 80, dtype=torch.int32)
    levels = [level.to(x.device) for level in tkv.find_shared_levels(table, torch.tensor([1100, 1090]), 16)]
    return (x.q, x.cache, levels, table.to(x.device), x.tensor([1100, 1090])), dict(return_lse=True, level_config=CONFIG | {"block_n": 256})


CONFIG = dict(block_m=16, block_n=32, num_warps=4, num_stages=2)

# Of each operator: its function, and from inputs (arguments, options).
CALLS = {
    "write_kv": (tkv.write_kv, lambda x: ((x.k, x.v[..., : x.cache.v_head_dim], x.cache, x.slots), {})),
    "paged_decode": (
        tkv.paged_decode,
        lambda x: ((x.q, x.cache, x.table, x.lens), dict(return_lse=True, window=9, sinks=2, scale=0.3, max_seq_len=40, config=CONFIG)),
    ),
    "prefix_prefill": (
        tkv.prefix_prefill,
        lambda x: ((x.q, x.k, x.v[..., : x.cache.v_head_dim], x.cache, x.table, x.lens - 1, x.starts), dict(max_q_len=1, softcap=8.0)),
    ),
    "shared_prefix_decode": (tkv.shared_prefix_decode, _shared_prefix_decode),
    "kivi_decode": (kivi_decode, lambda x: ((x.q, x.cache, x.native, x.table, x.lens, x.table, x.lens - 3), dict(return_lse=True))),
    "kivi_prefill": (kivi_prefill, lambda x: ((x.q, x.cache, x.native, x.table, x.lens, x.table, x.lens - 3, x.starts), {})),
    "merge_states": (tkv.merge_states, lambda x: (([x.q, 2 * x.q], [x.q[..., 0], x.q[..., 1]]), {})),
    "gather_window": (tkv.gather_window, lambda x: ((x.cache, x.table, x.lens), dict(window=7, sinks=3))),
    "compact_kv": (
        tkv.compact_kv,
        lambda x: ((x.cache, x.table, x.tensor([[[1, 4, 19]], [[0, 17, 29]]]), x.tensor([3, 2])), dict(scores=x.native.k[..., 0])),
    ),
    "rotate_keys": (
        tkv.rotate_keys,
        lambda x: ((x.native, x.table, x.lens, x.tensor([[9, 4], [7, 1]]), x.tensor([[3, 4], [2, 30]]), x.rope), {}),
    ),
    "key_scores": (
        tkv.key_scores,
        lambda x: ((x.q, x.cache, x.table, x.lens, x.q[..., 0] + 5), dict(reduce="max", rope=x.rope)),
    ),
    "copy_pages": (tkv.copy_pages, lambda x: ((x.cache, x.other, x.tensor([3, 1]), x.tensor([2, 7])), {})),
    "quantize_pages": (tkv.quantize_pages, lambda x: ((x.native, x.cache, x.tensor([3, 1]), x.tensor([2, 7])), {})),
}


def tensors_of(value):
    """All tensors in arguments and results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tkv.KVCache):
        return tensors_of([value.k, value.v, value.k_scale, value.v_scale])
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
