"""Tensors for a shape, and the call that a config is measured on: a paged cache in random page order, full of random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError
from tkv.formats import parse_pair
from tkv.levels import SharedLevel
from tkv.ops.attention import Options, default_config, run_all
from tkv.ops.cascade import plan_cascade
from tkv.ops.decode import plan_decode
from tkv.ops.launch import Launch, arch_name, interpreting
from tkv.ops.prefill import plan_prefill, prefix_prefill
from tkv.ops.quantize import quantize_pages
from tkv.ops.scores import plan_scores
from tkv.ops.write import write_kv
from tkv.rope import Rope
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import DTYPES, Key, key_of, rows_of
from tkv.tune.model import Shape

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
# Keys of each sequence's own behind those that a cascade shares.
SUFFIX = 64
# Rows of random numbers; longer caches repeat them, in other pages.
CHUNK = 8192
# What results may differ by from exact ones, of the contract of numbers: out in units of sum p |v|, a score in units of its terms.
BOUND = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
UNIT = 2.0**-20
# No result is like it.
POISON = 1e4
ROUNDED_UNIT = {"fp32": UNIT, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Problem:
    """A call of an op, to be run with any config.

    Attributes:
        shape: what it was built for.
        cache, q, page_table, lens: the tensors. lens counts the keys in the cache, of a cascade with those that are shared.
        options: of attention.
        new: k and v beside the cache, `prefix_prefill` only. cu_seqlens: of its rows.
        levels: of a cascade.
        lse: of the rows, `key_scores` only.
        score_size: a bound of what the terms of a score add up to in magnitude.
    """

    shape: Shape
    cache: KVCache
    q: torch.Tensor
    page_table: torch.Tensor
    lens: torch.Tensor
    options: Options
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    cu_seqlens: torch.Tensor | None = None
    levels: tuple[SharedLevel, ...] = ()
    lse: torch.Tensor | None = None
    score_size: float = 0.0

    @property
    def key(self) -> Key:
        """The key of the call in tuning tables."""
        return key_of(self.q.dtype, self.cache, self.options, rows_of(self.shape))

    @cached_property
    def default(self) -> AttentionConfig:
        """The analytic default."""
        return default_config(self.shape.op, arch_name(self.q.device), self.key)

    def launches(self, config: AttentionConfig | None = None) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
        """The launches of the op with a config, and the tensors that they write: out and its LSE, or the scores.

        Args:
            config: launch parameters, of a cascade those of its levels; what the op chooses if None.
        """
        shape, q, device = self.shape, self.q, self.q.device
        target = (arch_name(device), interpreting(), self.options)
        if self.lse is not None:
            scores = torch.zeros(self.cache.k.shape[:3], dtype=torch.float32, device=device)
            args = (q, self.cache, self.page_table, self.lens, self.lse, scores, *target)
            return plan_scores(*args, accumulate=False, max_seq_len=shape.kv_len, config=config), (scores,)
        out = torch.empty(*q.shape[:-1], self.cache.v_head_dim, dtype=q.dtype, device=device)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=device)
        if self.cu_seqlens is not None:
            launches = plan_prefill(
                q, self.new, self.cache, self.page_table, self.lens, self.cu_seqlens, out, lse, *target, max_q_len=shape.q_len,
                max_seq_len=shape.kv_len, deterministic=shape.deterministic, config=config,
            )  # fmt: skip
        elif self.levels:
            launches = plan_cascade(
                q, self.cache, self.levels, self.page_table, self.lens, out, lse, *target, max_seq_len=shape.kv_len + SUFFIX,
                level_config=config,
            )  # fmt: skip
        else:
            args = (q, self.cache, self.page_table, self.lens, out, lse, *target)
            launches = plan_decode(*args, max_seq_len=shape.kv_len, deterministic=shape.deterministic, config=config)
        return launches, (out, lse)

    def run(self, config: AttentionConfig | None = None, *, poison: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the op with a config, without waiting for it; gives what `launches` says.

        With `poison` the results are overwritten before: memory that was used before may hold a right result.
        """
        launches, results = self.launches(config)
        for result in results if poison else ():
            result.fill_(POISON)
        run_all(launches, self.q.device)
        return results

    def mismatch(self, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> str | None:
        """Where two results differ by more than numbers can: None, or what is wrong.

        Each may be off by the library's contract, so they may differ by twice that. V has one sign in each dim, which makes
        ``sum p |v|`` the magnitude of the output.
        """
        dtype = self.shape.dtype
        is_rounded = self.options.rope is not None or any(kind.scale == "channel" for kind in (self.cache.k_format, self.cache.v_format))
        score_error = (ROUNDED_UNIT[dtype] if is_rounded else UNIT) * self.score_size
        for name, a, b in zip(("scores",) if self.lse is not None else ("out", "lse"), got, wanted, strict=True):
            a, b = a.float(), b.float()
            if name == "out":
                allowed = 2 * (BOUND[dtype] + score_error) * b.abs() + 2.0**-24
            elif name == "lse":
                allowed = 2 * (1e-5 + score_error + 2.0**-23 * b.abs())
            else:
                allowed = 2 * math.expm1(1e-5 + score_error) * b.abs() + 1e-37
            error = (a - b).abs()
            # NaN is not within any bound.
            wrong = ~(error <= allowed)
            if bool(wrong.any()):
                at = tuple(wrong.nonzero()[0].tolist())
                return f"{name}{list(at)}: {a[at].item():.6g} where the default gives {b[at].item():.6g}, {allowed[at].item():.2g} allowed"
        return None

    @property
    def visible(self) -> tuple[int, int]:
        """(keys that the call has to read, the sum over query rows of the keys that each sees); new keys beside the cache included."""
        shape, options = self.shape, self.options
        window, sinks = options.window, options.sinks
        keys = pairs = 0
        for length in self.lens.tolist():
            end = length + (shape.q_len if self.new is not None else 0)
            first = end - shape.q_len + 1
            seen = [n if window is None else min(n, window + sinks) for n in range(first, end + 1)]
            keys += end if window is None else min(end, window + shape.q_len - 1 + sinks)
            pairs += sum(seen)
        if self.levels:
            keys -= (shape.num_seqs - 1) * self.levels[0].max_len
        return keys, pairs

    @property
    def bytes_moved(self) -> int:
        """Bytes that the call has to move: keys and values that rows see, once each, queries and results."""
        shape, cache = self.shape, self.cache
        keys, _ = self.visible
        rows = self.q.numel() // cache.head_dim
        moved = self.q.numel() * self.q.element_size()
        if self.lse is not None:
            of_k = cache.k_format.bytes_per_token(cache.num_kv_heads, cache.head_dim, cache.page_size)
            return int(moved + rows * 4 + keys * (of_k + 4 * cache.num_kv_heads))
        moved += rows * (cache.v_head_dim * self.q.element_size() + 4)
        fresh = 0
        if self.new is not None:
            fresh = shape.num_seqs * shape.q_len
            moved += sum(x.numel() * x.element_size() for x in self.new)
        return int(moved + max(0, keys - fresh) * cache.bytes_per_token)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products (of one for scores), a multiplication and an addition counting two."""
        dims = self.shape.head_dim + (0 if self.lse is not None else self.cache.v_head_dim)
        return 2 * self.visible[1] * self.shape.num_q_heads * dims


def cache_bytes(shape: Shape) -> int:
    """Bytes of the cache that `build` makes for a shape.

    Example:
        >>> from tkv.tune.shapes import shapes_of
        >>> cache_bytes(shapes_of("llama3-8b", batches=[16], lengths=[8192])[0]) >> 20
        512
    """
    formats = parse_pair(shape.format.split("+") if "+" in shape.format else shape.format)
    return KVCache.nbytes_for(_num_pages(shape), shape.page_size, shape.num_kv_heads, shape.head_dim, formats, v_head_dim=shape.v_head_dim)


def _pages_of(shape: Shape) -> int:
    """Pages of the longest sequence, in the cache."""
    keys = shape.kv_len - shape.q_len if shape.op == "prefix_prefill" else shape.kv_len
    return max(1, -(-(keys + (SUFFIX if shape.op == "shared_prefix_decode" else 0)) // shape.page_size))


def _num_pages(shape: Shape) -> int:
    if shape.op != "shared_prefix_decode":
        return shape.num_seqs * _pages_of(shape)
    shared = shape.kv_len // shape.page_size
    return shared + shape.num_seqs * (_pages_of(shape) - shared)


def build(shape: Shape, device: torch.device | str, *, uneven: bool = False, seed: int = 0) -> Problem:
    """The tensors of a shape on a device.

    Args:
        shape: the op and its sizes. kv_len counts each sequence's keys, new ones included; of a cascade those that all sequences share, in
            front of 64 of their own.
        device: a GPU; the CPU under the interpreter; ``"meta"`` for shapes alone.
        uneven: lengths from half of kv_len on; the longest is kv_len.
        seed: of the random numbers.

    Returns:
        A :class:`Problem`. The keys' scores differ enough that some count much more than others: results of wrong keys are seen.

    Raises:
        RangeError: more new rows than keys, or than the op takes.
        UnsupportedError, ShapeError: no kernel for such a shape.

    Example:
        >>> from tkv.tune.shapes import shapes_of
        >>> problem = build(shapes_of("llama3-8b", batches=[2], lengths=[100])[0], "meta")
        >>> problem.key.name, problem.q.shape
        ('d128 bf16 bf16 r16 p16', torch.Size([2, 1, 32, 128]))
    """
    if not 1 <= shape.q_len <= shape.kv_len or (shape.op in ("paged_decode", "shared_prefix_decode") and shape.q_len > 64):
        raise RangeError(f"q_len: expected 1 to {shape.kv_len}, of decoding at most 64, got {shape.q_len}")
    device = torch.device(device)
    is_meta = device.type == "meta"
    generator = None if is_meta else torch.Generator(device).manual_seed(seed)
    cache, key_norm = _cache_of(shape, device, generator)
    dtype, num_seqs, q_len = TORCH_DTYPES[shape.dtype], shape.num_seqs, shape.q_len

    # Scores with a standard deviation of 3.
    q = 3 * torch.randn(num_seqs, q_len, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device, generator=generator)
    lens = torch.full((num_seqs,), shape.kv_len, dtype=torch.int32, device=device)
    if uneven and not is_meta:
        low = max(shape.q_len, shape.kv_len // 2)
        lens[1:] = torch.randint(low, shape.kv_len + 1, (num_seqs - 1,), device=device, generator=generator).int()
    options = _options_of(shape, device)
    score_size = 0.0
    if not is_meta:
        score_size = options.scale * float(q.float().norm(dim=-1).max()) * key_norm
        score_size += 0 if options.alibi_slopes is None else float(options.alibi_slopes.max()) * shape.kv_len
    table = _table_of(shape, device, generator)
    found: dict[str, Any] = {"score_size": score_size, "options": options}
    if shape.op == "prefix_prefill":
        total = num_seqs * q_len
        k = torch.randn(total, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device, generator=generator)
        v = _values(total, shape.num_kv_heads, shape.v_head_dim, device, generator).to(dtype)
        cu_seqlens = torch.arange(0, total + 1, q_len, dtype=torch.int32, device=device)
        return Problem(shape, cache, q.flatten(0, 1), table, lens - q_len, new=(k, v), cu_seqlens=cu_seqlens, **found)
    if shape.op == "shared_prefix_decode":
        suffix = SUFFIX - lens.new_tensor([i % 16 if uneven else 0 for i in range(num_seqs)])
        return Problem(shape, cache, q, table, shape.kv_len + suffix, levels=(_level_of(shape, table),), **found)
    problem = Problem(shape, cache, q, table, lens, **found)
    return problem if shape.op == "paged_decode" else Problem(shape, cache, q, table, lens, lse=_lse_of(problem), **found)


def _values(tokens: int, heads: int, dim: int, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Random values of magnitudes from 0.25 to 1.75, in each dim of a head of one sign."""
    signs = torch.where((torch.arange(heads, device=device)[:, None] + torch.arange(dim, device=device)) % 3 == 0, -1.0, 1.0)
    return signs * (torch.rand(tokens, heads, dim, device=device, generator=generator) * 1.5 + 0.25)


def _cache_of(shape: Shape, device: torch.device, generator: torch.Generator | None) -> tuple[KVCache, float]:
    """A full cache, and a bound of the norm of a key."""
    formats = parse_pair(shape.format.split("+") if "+" in shape.format else shape.format)
    shared = "shared" in shape.flags
    # 127 steps of it cover the numbers' range.
    scales = [0.04 if kind.is_static and kind.dtype == "int8" else None for kind in formats]
    cache = KVCache.empty(
        _num_pages(shape), shape.page_size, shape.num_kv_heads, shape.head_dim, formats, device=device,
        v_head_dim=shape.v_head_dim, k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    if shared:
        cache = KVCache(cache.k, cache.k[..., : shape.v_head_dim], cache.k_scale, format=formats)
    if device.type == "meta":
        return cache, 0.0
    chunk = min(-(-CHUNK // shape.page_size) * shape.page_size, cache.num_slots)
    dtype = TORCH_DTYPES[shape.dtype]
    v = _values(chunk, shape.num_kv_heads, shape.v_head_dim, device, generator)
    k = torch.randn(chunk, shape.num_kv_heads, shape.head_dim, device=device, generator=generator)
    if shared:
        k[..., : shape.v_head_dim] = v
    k, v = k.to(dtype), v.to(dtype)
    _fill(cache, k, v)
    # Rounding to 4 bits makes no number larger by more than that.
    return cache, 1.25 * float(k.float().norm(dim=-1).max())


def _fill(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write rows into all slots, again and again."""
    by_page = any(kind.scale == "page_channel" for kind in (cache.k_format, cache.v_format))
    source = cache
    if by_page:
        name = DTYPES[k.dtype]
        source = KVCache.empty(
            k.shape[0] // cache.page_size, cache.page_size, k.shape[1], k.shape[2], name, device=k.device, v_head_dim=v.shape[2]
        )
        write_kv(k, v, source, torch.arange(k.shape[0], device=k.device))
    for start in range(0, cache.num_slots, k.shape[0]):
        slots = torch.arange(start, min(start + k.shape[0], cache.num_slots), device=k.device)
        if by_page:
            pages = (slots[:: cache.page_size] // cache.page_size).int()
            quantize_pages(source, cache, pages - pages[0], pages)
        else:
            write_kv(k[: len(slots)], v[: len(slots)], cache, slots)


def _table_of(shape: Shape, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Pages in random order; of a cascade the first ones are the same for all sequences."""
    width = _pages_of(shape)
    if device.type == "meta":
        return torch.empty(shape.num_seqs, width, dtype=torch.int32, device=device)
    order = torch.randperm(_num_pages(shape), device=device, generator=generator).int()
    if shape.op != "shared_prefix_decode":
        return order.view(shape.num_seqs, width)
    shared = shape.kv_len // shape.page_size
    return torch.cat([order[:shared].expand(shape.num_seqs, shared), order[shared:].view(shape.num_seqs, width - shared)], dim=1)


def _level_of(shape: Shape, table: torch.Tensor) -> SharedLevel:
    """What all sequences share: the whole pages of kv_len keys."""
    shared, num_seqs = shape.kv_len // shape.page_size, shape.num_seqs
    keys = shared * shape.page_size
    return SharedLevel(
        table[:1, : max(1, shared)].contiguous(), table.new_full((1,), keys), table.new_zeros(1), table.new_tensor([0, num_seqs]),
        torch.arange(num_seqs, dtype=torch.int32, device=table.device), max_group=num_seqs, max_len=keys,
    )  # fmt: skip


def _options_of(shape: Shape, device: torch.device) -> Options:
    """The options that the flags name."""
    flags, rope = shape.flags, None
    window = shape.window if "window" in flags else None
    sinks = 4 if window is not None and ("rope" in flags or "pinned" in flags) else 0
    if "rope" in flags:
        positions = shape.kv_len + SUFFIX if window is None else sinks + window + 256
        angles = torch.arange(positions, device=device)[:, None] * 10_000.0 ** -torch.linspace(0, 1, shape.head_dim // 2, device=device)
        rope = Rope(angles.cos(), angles.sin())
    return Options(
        scale=1 / math.sqrt(shape.head_dim),
        softcap=50.0 if "softcap" in flags else None,
        alibi_slopes=2.0 ** -torch.arange(1.0, shape.num_q_heads + 1, device=device).remainder(8) if "alibi" in flags else None,
        window=window,
        sinks=sinks,
        pinned=shape.page_size if "pinned" in flags else 0,
        rope=rope,
        mask=torch.ones(shape.num_seqs, shape.q_len, shape.q_len, dtype=torch.bool, device=device).tril() if "tree" in flags else None,
    )


def _lse_of(problem: Problem) -> torch.Tensor:
    """The LSE of a problem's rows over all their keys."""
    q, options, num_seqs = problem.q, problem.options, problem.shape.num_seqs
    if q.device.type == "meta":
        return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    cu_seqlens = torch.arange(0, num_seqs + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    _, lse = prefix_prefill(
        q.flatten(0, 1), None, None, problem.cache, problem.page_table, problem.lens - q.shape[1], cu_seqlens, return_lse=True,
        max_q_len=q.shape[1], **options.__dict__,
    )  # fmt: skip
    return lse.view(q.shape[:-1])
