"""Cases: an op and a shape, whose launches the op's own plan makes of tensors on the meta device, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import UnsupportedError
from tkv.formats import parse_pair
from tkv.levels import SharedLevel
from tkv.ops.attention import Options
from tkv.ops.cascade import plan_cascade
from tkv.ops.compact import plan_compact
from tkv.ops.copy import plan_copy
from tkv.ops.decode import plan_decode
from tkv.ops.gather import plan_gather
from tkv.ops.launch import Launch
from tkv.ops.merge import plan_merge
from tkv.ops.prefill import plan_prefill
from tkv.ops.quantize import plan_quantize
from tkv.ops.rotate import plan_rotate
from tkv.ops.scores import plan_scores
from tkv.ops.write import plan_write
from tkv.rope import Rope
from tkv.tune.configs import AttentionConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A batch and a table like an engine's; sizes that reach the kernel as run-time values only.
NUM_SEQS, MAX_PAGES, NUM_KV_HEADS = 8, 512, 8
ATTENTION = ("decode", "prefill", "prefill_cached", "level", "scores")
OPS = (*ATTENTION, "merge", "depth", "write", "copy", "gather", "quantize", "channels", "compact", "rotate")


@dataclass(frozen=True)
class Case:
    """A kernel and what it is compiled for.

    Args:
        op: one of `OPS`. ``"prefill"`` has new keys and values beside the cache, ``"prefill_cached"`` has them in it; ``"level"`` is one
            of a cascade; ``"depth"`` is what a tree mask needs; ``"channels"`` is what `quantize_pages` does to the keys of a
            ``page_channel`` format, and ``"quantize"`` the rest.
        dtype: of q, k, v, the states, or the source of pages: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        format: of the cache, or of K and of V with a ``+`` between.
        head_dim, group, q_len, page_size: the shape.
        v_head_dim: of V if it differs. shared: V is a view of K's first dims.
        window, softcap, alibi, tree, rope, pinned: options that the kernel is compiled for.

    Example:
        >>> Case("decode", dtype="fp16", format="int8/token_head", head_dim=64).name
        'decode fp16 int8/token_head d64 g8 q1 p16'
    """

    op: str
    dtype: str = "bf16"
    format: str = "bf16"
    head_dim: int = 128
    group: int = 8
    q_len: int = 1
    page_size: int = 16
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    tree: bool = False
    v_head_dim: int | None = None
    shared: bool = False
    rope: bool = False
    pinned: bool = False

    @property
    def name(self) -> str:
        """A short name for tables."""
        flags = "".join(f" {flag}" for flag in ("window", "softcap", "alibi", "tree", "shared", "rope", "pinned") if getattr(self, flag))
        if self.op == "depth":
            return "depth"
        kind = "" if self.op == "merge" else f" {self.format}"
        shape = f" g{self.group} q{self.q_len} p{self.page_size}" if self.op in ATTENTION else ""
        v_dim = f"/{self.v_head_dim}" if self.v_head_dim else ""
        return f"{self.op} {self.dtype}{kind} d{self.head_dim}{v_dim}{shape}{flags}"


def launch_of(case: Case, arch: str, **overrides: Any) -> Launch:
    """The launch that an op would make for a case on an architecture.

    Args:
        case: the op and its shape.
        arch: a name of ``tkv.tune.arch.ARCHS``.
        overrides: keyword arguments for the op's plan, such as ``config=``; see `config_override`.

    Returns:
        A launch with meta tensors.

    Raises:
        UnsupportedError: no such op or architecture.

    Example:
        >>> launch_of(Case("merge"), "sm90").grid
        (64,)
    """
    if case.op not in OPS:
        raise UnsupportedError(f"op: expected {', '.join(OPS[:-1])} or {OPS[-1]}, got {case.op!r}")
    empty = partial(torch.empty, dtype=DTYPES[case.dtype], device="meta")
    counts = partial(torch.empty, dtype=torch.int32, device="meta")
    num_q_heads = NUM_KV_HEADS * case.group
    if case.op == "merge":
        outs, lses = empty(4, num_q_heads, case.head_dim), empty(4, num_q_heads, dtype=torch.float32)
        return plan_merge(outs, lses, outs[0], lses[0], arch)
    cache = _cache_of(case)
    v_dim = cache.v_head_dim
    if case.op == "copy":
        return plan_copy(cache, cache, counts(NUM_SEQS), counts(NUM_SEQS))
    if case.op == "write":
        new_k, new_v = empty(NUM_SEQS, NUM_KV_HEADS, case.head_dim), empty(NUM_SEQS, NUM_KV_HEADS, v_dim)
        rope, positions = (_rope_of(case), counts(NUM_SEQS)) if case.rope else (None, None)
        return plan_write(
            new_k, new_v, cache, torch.empty(NUM_SEQS, dtype=torch.int64, device="meta"), arch, rope=rope, positions=positions
        )
    if case.op == "compact":
        scores = empty(cache.num_pages, case.page_size, NUM_KV_HEADS, dtype=torch.float32)
        return plan_compact(cache, counts(NUM_SEQS, MAX_PAGES), counts(NUM_SEQS, NUM_KV_HEADS, 256), counts(NUM_SEQS), scores)[0]
    if case.op == "rotate":
        places = counts(NUM_SEQS, 256)
        return plan_rotate(cache, counts(NUM_SEQS, MAX_PAGES), counts(NUM_SEQS), places, places, _rope_of(case), arch)
    if case.op in ("quantize", "channels"):
        source = KVCache.empty(4096, case.page_size, NUM_KV_HEADS, case.head_dim, case.dtype, device="meta", v_head_dim=v_dim)
        return plan_quantize(source, cache, counts(NUM_SEQS), counts(NUM_SEQS), arch)[case.op == "channels"]
    if case.op == "gather":
        k, v = empty(NUM_SEQS * 1000, NUM_KV_HEADS, case.head_dim), empty(NUM_SEQS * 1000, NUM_KV_HEADS, v_dim)
        positions, lens = counts(NUM_SEQS * 1000), counts(NUM_SEQS + 1)
        rope = _rope_of(case) if case.rope else None
        pages = counts(NUM_SEQS, MAX_PAGES)
        return plan_gather(cache, pages, lens[1:], (k, v), (None, None), positions, lens, arch, window=996, sinks=4, rope=rope)

    options = Options(
        scale=0.1,
        window=1000 if case.window else None,
        sinks=4 if case.window else 0,
        softcap=50.0 if case.softcap else None,
        alibi_slopes=empty(num_q_heads, dtype=torch.float32) if case.alibi else None,
        pinned=case.page_size if case.pinned else 0,
        rope=_rope_of(case) if case.rope else None,
        mask=torch.empty(NUM_SEQS, case.q_len, case.q_len, dtype=torch.bool, device="meta") if case.tree or case.op == "depth" else None,
    )
    table, lengths, cu_seqlens = counts(NUM_SEQS, MAX_PAGES), counts(NUM_SEQS), counts(NUM_SEQS + 1)
    if case.op.startswith("prefill"):
        total = NUM_SEQS * case.q_len
        q, out = empty(total, num_q_heads, case.head_dim), empty(total, num_q_heads, v_dim)
        new = empty(total, NUM_KV_HEADS, case.head_dim), empty(total, NUM_KV_HEADS, v_dim)
        kv, lse = new if case.op == "prefill" else None, empty(total, num_q_heads, dtype=torch.float32)
        launches = plan_prefill(q, kv, cache, table, lengths, cu_seqlens, out, lse, arch, False, options, max_q_len=case.q_len, **overrides)
    else:
        q = empty(NUM_SEQS, case.q_len, num_q_heads, case.head_dim)
        out, lse = empty(*q.shape[:-1], v_dim), empty(q.shape[:-1], dtype=torch.float32)
        if case.op == "scores":
            scores = empty(cache.num_pages, case.page_size, NUM_KV_HEADS, dtype=torch.float32)
            launches = plan_scores(q, cache, table, lengths, lse, scores, arch, False, options, **overrides)
        elif case.op == "level":
            levels = [SharedLevel(table[:1], lengths[:1], lengths[:1], cu_seqlens[:2], lengths, NUM_SEQS, MAX_PAGES * case.page_size)]
            launches = plan_cascade(q, cache, levels, table, lengths, out, lse, arch, False, options, **overrides)
        else:
            launches = plan_decode(q, cache, table, lengths, out, lse, arch, False, options, **overrides)
    return launches[1 if case.tree else 0]


def _rope_of(case: Case) -> Rope:
    """Tables for a case, on the meta device."""
    tables = torch.empty(2, 2048, case.head_dim // 2, device="meta")
    return Rope(tables[0], tables[1])


def _cache_of(case: Case) -> KVCache:
    """The cache of a case, on the meta device."""
    formats = parse_pair(case.format.split("+") if "+" in case.format else case.format)
    cache = KVCache.empty(
        4096, case.page_size, NUM_KV_HEADS, case.head_dim, formats, device="meta", v_head_dim=case.v_head_dim,
        k_scale=1.0 if formats[0].is_static else None, v_scale=1.0 if formats[1].is_static else None,
    )  # fmt: skip
    return KVCache(cache.k, cache.k[..., : cache.v_head_dim], cache.k_scale, format=formats) if case.shared else cache


def config_override(case: Case, config: AttentionConfig | None) -> dict[str, AttentionConfig]:
    """The override of `launch_of` that gives a case's kernel a config; none for None.

    Raises:
        UnsupportedError: the op has no tunables.

    Example:
        >>> list(config_override(Case("level"), AttentionConfig(64, 64, 4, 2)))
        ['level_config']
    """
    if config is None:
        return {}
    if case.op not in ATTENTION:
        raise UnsupportedError(f"config: {case.op} has no tunables; those of {', '.join(ATTENTION)} have")
    return {"level_config" if case.op == "level" else "config": config}
