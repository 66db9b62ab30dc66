"""What the checked cases share: launches of small tiles, tensors with nothing around them, and what a launch is stopped for."""

import re
from dataclasses import fields, replace

import pytest
import torch
from caches import poison_
from problems import test_device

import tkv
from tkv.errors import ShapeError
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
WHOLE = AttentionConfig(16, 16, 4, 1)
SPLITS = AttentionConfig(16, 16, 4, 1, 16)
# Two pages of 16 to a tile.
ACROSS = AttentionConfig(16, 32, 4, 1, 32)

# Every option alone, for three sequences of two query heads.
OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "sinks": {"window": 6, "sinks": 5},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.0]},
    "sink_logits": {"sink_logits": [1.0, -torch.inf]},
    "kv_start": {"kv_start": [3, 0, 100]},
    "q_start": {"kv_start": [3, 0, 1], "q_start": [50, 2, 0]},
}
ALL_OPTIONS = {name: value for options in OPTIONS.values() for name, value in options.items()}
# What a length, a position or a page id may be instead; those beyond 32 bits would be small numbers if they were cut.
LIES = (2**31 - 1, 2**30, 1000, -1, -(2**31), 2**32 + 1, 2**62, -(2**62))


def lies_of(dtype):
    """Those of LIES that a tensor of indices can hold."""
    return [lie for lie in LIES if torch.iinfo(dtype).min <= lie <= torch.iinfo(dtype).max]


def far_off(dtype):
    """What a start of rows may be instead: near, or the furthest that a tensor of indices can hold."""
    return (1, -1, 2**31 - 1, -(2**31)) if dtype == torch.int32 else (2**32 + 1, 2**62, -(2**62))


def dense(tensor):
    """A copy that has its memory to itself: one element further lies outside of every tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def tight(problem, **launch):
    """The problem with all its tensors dense, but for the cache, whose layout is part of the problem; `launch` is added to how it runs."""
    changes = {f.name: dense(value) for f in fields(problem) if isinstance(value := getattr(problem, f.name), torch.Tensor)}
    changes["options"] = {name: dense(x) if isinstance(x, torch.Tensor) else x for name, x in problem.options.items()}
    changes["launch"] = {**problem.launch, **launch}
    if hasattr(problem, "levels"):
        changes["levels"] = [tight_level(level) for level in problem.levels]
    return replace(problem, **changes, _truth=None)


def tight_level(level):
    """A level of dense tensors."""
    return replace(level, **{f.name: dense(x) for f in fields(level) if isinstance(x := getattr(level, f.name), torch.Tensor)})


def workspace_of(problem, size):
    """A workspace of so many bytes, and not one more."""
    return torch.empty(size, dtype=torch.uint8, device=problem.q.device)


def bytes_of_a_sequence(problem):
    """How much workspace a deterministic call needs for each sequence of a launch, as it says itself."""
    with pytest.raises(ShapeError, match="workspace: deterministic needs") as caught:
        problem.run(deterministic=True, workspace=workspace_of(problem, 0))
    return int(re.search(r"needs (\d+) bytes", str(caught.value))[1])


def view_for_out(like, dtype):
    """(a poisoned tensor, a view of it that an `out` for the queries `like` may be): rows, heads and dims lie in something wider."""
    whole = poison_(torch.empty(*like.shape[:-2], like.shape[-2] + 1, like.shape[-1] + 8, dtype=dtype, device=like.device))
    return whole, whole[..., 1:, 8:]


def only_written_in(whole, view):
    """Whether all of a poisoned tensor but a view of it is as it was."""
    view.fill_(torch.nan)
    return bool(whole.isnan().all())


def lied(tensor, lies):
    """A tensor of numbers or of rows, [seqs, ...], with one lie in each of its first rows, in the last column if it has columns."""
    wrong = dense(tensor)
    (wrong if wrong.dim() == 1 else wrong[:, -1])[: len(lies)] = torch.tensor(lies, dtype=wrong.dtype, device=wrong.device)
    return wrong


def fault_of(launch):
    """What a launch is stopped for. The checker runs as the main module, so its error cannot be imported by name."""
    with pytest.raises(Exception, match=r"kernel `.*`, launch") as caught:
        launch()
    assert type(caught.value).__name__ == "KernelFault", repr(caught.value)
    return caught.value.fault


def stays_inside(launch):
    """Assert that a call touches nothing outside of its tensors. Wrong numbers may give a row to two programs: races are allowed."""
    try:
        launch()
    except Exception as error:
        if type(error).__name__ != "KernelFault" or error.fault.kind != "race":
            raise


def chain_and_forks(num_seqs, size):
    """Masks of trees of new tokens, the first a chain: in tree s a token hangs on the last multiple of s + 1 before it."""
    masks = torch.eye(size, dtype=torch.bool).repeat(num_seqs, 1, 1)
    for seq in range(num_seqs):
        for token in range(1, size):
            masks[seq, token] |= masks[seq, token - 1 - (token - 1) % (seq + 1)]
    return masks.to(DEVICE)


def empty_of(kind, pages, page_size, heads, dim):
    """A cache of `pages` pages, which may be none."""
    return tkv.KVCache.empty(pages, page_size, heads, dim, format=kind, device=DEVICE)
