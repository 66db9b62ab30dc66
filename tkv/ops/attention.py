"""What the attention functions share: their options, the constants of the kernel, memory for partial results, and the launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, ShapeError, UnsupportedError
from tkv.formats import KVFormat
from tkv.kernels.args import Attend, Lengths, Level, Limits, PagedKV, Results, RowStrides, Storage, Stored, Target, TokenStrides, Tree
from tkv.ops.checks import FLOATS, INTEGERS, MAX_POSITION, check_int, check_number, check_pages, check_pinned, check_rope, check_tensor
from tkv.ops.launch import FLUSHES_FP16, Launch, num_sms, padded, paged_words, rope_args, storages, target_for
from tkv.rope import Rope
from tkv.tune import configs, select
from tkv.tune.configs import AttentionConfig, default_decode, default_prefill, with_rope, with_tree
from tkv.tune.keys import DTYPES, Key, facts_of
from tkv.tune.versions import triton_is_at_least

MAX_GROUP = 128


@dataclass(frozen=True)
class Options:
    """The options of attention that change what is computed, checked; see `paged_decode`."""

    scale: float
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    window: int | None = None
    sinks: int = 0
    sink_logits: torch.Tensor | None = None
    kv_start: torch.Tensor | None = None
    q_start: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    pinned: int = 0
    rope: Rope | None = None

    @property
    def limits(self) -> Limits:
        """What the kernel takes of them."""
        return Limits(softcap=self.softcap or 0.0, window=self.window or 0, sinks=self.sinks, pinned=self.pinned)

    def of(self, seqs: slice) -> Options:
        """The options of some of the sequences."""
        per_seq = {name: getattr(self, name) for name in ("kv_start", "q_start", "mask")}
        return Options(**{**self.__dict__, **{name: None if x is None else x[seqs] for name, x in per_seq.items()}})

    def max_visible(self, capacity: int, hint: int | None, q_len: int) -> int:
        """Most keys that a block of rows visits, as far as the hint says."""
        keys = capacity if hint is None else min(capacity, hint)
        return keys if self.window is None else min(keys, self.window + q_len - 1 + self.sinks)


def check_queries(q: torch.Tensor, cache: KVCache) -> int:
    """q's dtype and heads fit the cache; gives the group."""
    for kind in (cache.k_format, cache.v_format):
        if kind.is_native and q.dtype not in (torch.float32, kind.torch_dtype):
            raise UnsupportedError(f"q: a {kind} cache needs q in {kind.torch_dtype} or torch.float32, got {q.dtype}")
    num_q_heads = q.shape[-2]
    group = num_q_heads // cache.num_kv_heads
    if num_q_heads < 1 or num_q_heads % cache.num_kv_heads or group > MAX_GROUP:
        raise UnsupportedError(
            f"q: expected a multiple of num_kv_heads ({cache.num_kv_heads}) heads, at most {MAX_GROUP} for each, got {num_q_heads}"
        )
    return group


def check_table(page_table: torch.Tensor, num_seqs: int | str, page_size: int, device: torch.device, name: str = "page_table") -> None:
    """A page table whose keys have positions below 2^30."""
    check_tensor(name, page_table, (num_seqs, "max_pages"), INTEGERS, device)
    if page_table.shape[1] * page_size > MAX_POSITION:
        raise RangeError(f"{name}: expected at most 2^30 keys a sequence, got {page_table.shape[1]} pages of {page_size}")


def check_options(
    cache: KVCache, num_seqs: int, num_q_heads: int, rows: int, scale: float | None, softcap: float | None,
    alibi_slopes: torch.Tensor | None, window: int | None, sinks: int, sink_logits: torch.Tensor | None, kv_start: torch.Tensor | None,
    q_start: torch.Tensor | None, mask: torch.Tensor | None, pinned: int, rope: Rope | None,
) -> Options:  # fmt: skip
    """The options, each with its own error; a block of query rows spans up to `rows` positions."""
    for name, starts in (("kv_start", kv_start), ("q_start", q_start)):
        if starts is not None:
            check_tensor(name, starts, (num_seqs,), INTEGERS, cache.device)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, (num_q_heads,), (torch.float32,), cache.device)
    if sink_logits is not None:
        check_tensor("sink_logits", sink_logits, (num_q_heads,), FLOATS, cache.device)
    if mask is not None:
        check_tensor("mask", mask, (num_seqs, "M", "M"), (torch.bool,), cache.device)
        if mask.shape[1] != mask.shape[2] or not mask.shape[1]:
            raise ShapeError(f"mask: expected shape [{num_seqs}, M, M] with M at least 1, got {list(mask.shape)}")
    window = None if window is None else check_int("window", window, 1)
    sinks = check_int("sinks", sinks, 0)
    if rope is not None:
        check_rope(rope, cache)
        if window is not None and rope.num_rows < sinks + window + rows - 1:
            raise ShapeError(
                f"rope: expected tables for {sinks + window + rows - 1} positions or more (sinks + window + 256 are always enough), "
                f"got {rope.num_rows}"
            )
    return Options(
        scale=1.0 / math.sqrt(cache.head_dim) if scale is None else check_number("scale", scale, zero=True),
        softcap=None if softcap is None else check_number("softcap", softcap, zero=False),
        alibi_slopes=alibi_slopes,
        window=window,
        sinks=sinks,
        sink_logits=sink_logits,
        kv_start=kv_start,
        q_start=q_start,
        mask=mask,
        pinned=check_pinned(pinned, cache.page_size),
        rope=rope,
    )


def check_workspace(workspace: torch.Tensor, device: torch.device) -> None:
    """A tensor whose memory may hold partial results."""
    check_tensor("workspace", workspace, ("bytes",), (torch.uint8, torch.float32), device)
    if workspace.numel() and workspace.data_ptr() % 16:
        raise ShapeError("workspace: its memory must begin at a multiple of 16 bytes")


@dataclass(frozen=True)
class Scratch:
    """Memory for partial results: the caller's workspace, or allocated within `configs.MAX_SCRATCH_BYTES`."""

    workspace: torch.Tensor | None

    @property
    def limit(self) -> int:
        """Bytes that may be used."""
        return configs.MAX_SCRATCH_BYTES if self.workspace is None else self.workspace.numel() * self.workspace.element_size()

    def states(self, shape: tuple[int, ...], dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 tensors, of `shape` with `dim` behind, and of `shape`."""
        count = math.prod(shape)
        if self.workspace is None:
            memory = torch.empty(count * (dim + 1), dtype=torch.float32, device=device)
        else:
            size = self.workspace.element_size()
            memory = self.workspace[: self.limit // 4 * 4 // size].view(torch.float32)
        return memory[: count * dim].view(*shape, dim), memory[count * dim : count * (dim + 1)].view(shape)


@dataclass(frozen=True)
class Kernel:
    """What the attention kernel is compiled for."""

    config: AttentionConfig
    attend: Attend
    k: Storage
    v: Storage
    target: Target


def kernel_for(
    q_dtype: torch.dtype, cache: KVCache, options: Options, config: AttentionConfig, arch: str, interpret: bool, one_position: bool = False
) -> Kernel:
    """The constants of a call."""
    k_dtype, v_dtype = compute_dtypes(q_dtype, (cache.k_format, cache.v_format), arch)
    k, v = storages(cache, k_dtype, v_dtype)
    if options.rope is not None and k.ASYMMETRIC:
        # A minimum is the same for all dims only until they are rotated.
        k = k._replace(FOLDED=False)
    attend = Attend(
        PAGE_SIZE=cache.page_size,
        BLOCK_N=config.block_n,
        DTYPE=triton_dtype(k_dtype),
        P_DTYPE=triton_dtype(v_dtype),
        V_IS_K=cache.v_is_k and v.WIDTH * v.PLANES == v.DIM and k.WIDTH == v.WIDTH,
        LIFT=15 if v_dtype == torch.float16 else 0,
        HAS_WINDOW=options.window is not None,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_ALIBI=options.alibi_slopes is not None,
        HAS_TREE=options.mask is not None,
        HAS_PINNED=options.pinned > 0,
        PARTS=2 if options.rope is not None and options.window is not None else 1,
        ONE_POSITION=one_position,
    )
    return Kernel(config, attend, k, v, target_for(arch, interpret))


@dataclass(frozen=True)
class Work:
    """How a launch's programs find their rows and keys; see `attention_kernel`."""

    rows: str
    grid: tuple[int, ...]
    num_seqs: int
    q_len: int
    num_tiles: int
    num_rows: int = 0
    rest_end: int = 0
    add_new: bool = False
    max_splits: int = 1
    min_tiles: int = 1
    split_q_len: int = -1
    split_tiles: int = 1


NO_LEVEL = Level(None, None, None, None)
_NOTHING = Stored(None, TokenStrides(0, 0, 0), None, TokenStrides(0, 0, 0))
NO_FRESH = PagedKV(_NOTHING, _NOTHING)


def launch_attention(
    kernel: Kernel, work: Work, q: torch.Tensor, cache: KVCache, page_table: torch.Tensor, lengths: Lengths, options: Options,
    results: Results, parts: tuple[torch.Tensor, torch.Tensor] | None, *, tree: Tree, cu_seqlens: torch.Tensor | None = None,
    level: Level = NO_LEVEL, fresh: tuple[PagedKV, Attend, Storage, Storage] | None = None,
) -> Launch:  # fmt: skip
    """A launch of `attention_kernel`. q, results and parts are [seq, row, head, ...], ragged ones [token, head, ...]."""
    from tkv.kernels.attention import attention_kernel

    group = q.shape[-2] // cache.num_kv_heads
    rope, rotary = rope_args(options.rope)
    fresh_kv, *fresh_constants = fresh or (NO_FRESH, kernel.attend, kernel.k, kernel.v)
    return Launch(
        attention_kernel,
        work.grid,
        (q, paged_words(cache), fresh_kv, page_table, lengths, cu_seqlens, level, tree, options.alibi_slopes, options.sink_logits)
        + (rope, results, parts_of(parts), row_strides(q), page_table.stride(0), *part_strides(parts))
        + (cache.num_pages, page_table.shape[1], work.num_seqs, work.num_rows, work.rest_end, cache.num_kv_heads, group, work.q_len)
        + (work.num_tiles, work.max_splits, work.min_tiles, work.split_q_len, work.split_tiles, options.scale, options.limits, 0)
        + (kernel.config.block_m, work.rows, work.add_new, kernel.attend, kernel.k, kernel.v, *fresh_constants, rotary, kernel.target),
        num_warps=kernel.config.num_warps,
        num_stages=kernel.config.num_stages,
        max_registers=kernel.config.max_registers,
    )


def launch_merge(
    parts: tuple[torch.Tensor, torch.Tensor], results: Results, target: Target, q_len: int, *,
    sink_logits: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None, num_rows: int = 0,
) -> Launch:  # fmt: skip
    """A launch of `merge_kernel` over parts [part, seq, row, head, dim]."""
    from tkv.kernels.merge import merge_kernel

    num_parts, num_seqs, _, num_heads, dim = parts[0].shape
    block_d = padded(dim)
    return Launch(
        merge_kernel,
        (num_seqs * q_len * num_heads,),
        (parts_of(parts), cu_seqlens, sink_logits, results, *part_strides(parts), num_parts, num_heads, q_len, num_rows)
        + (dim, block_d, max(1, min(16, 2048 // block_d)), target),
        num_warps=1 if block_d <= 128 else 2,
        num_stages=1,
    )


def row_strides(x: torch.Tensor) -> RowStrides:
    """Strides of [seq, row, head, ...], or of ragged [token, head, ...]."""
    return RowStrides(*x.stride()[:3]) if x.dim() == 4 else RowStrides(0, *x.stride()[:2])


def results_of(out: torch.Tensor, lse: torch.Tensor | None) -> Results:
    """Where results go: out [seq, row, head, dim] or ragged [token, head, dim], and its LSE."""
    lse_strides = (0, 0, 0) if lse is None else lse.stride() if out.dim() == 4 else (0, *lse.stride())
    return Results(out, row_strides(out), lse, RowStrides(*lse_strides))


NO_RESULTS = Results(None, RowStrides(0, 0, 0), None, RowStrides(0, 0, 0))


def parts_of(parts: tuple[torch.Tensor, torch.Tensor] | None) -> Results:
    """Parts [part, seq, row, head, ...] as the kernels take them; what lies between parts goes apart, for it changes from call to call."""
    if parts is None:
        return NO_RESULTS
    return Results(parts[0], RowStrides(*parts[0].stride()[1:4]), parts[1], RowStrides(*parts[1].stride()[1:4]))


def part_strides(parts: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, int]:
    """What lies between parts, of their outs and their LSE."""
    return (0, 0) if parts is None else (parts[0].stride(0), parts[1].stride(0))


NO_TREE = Tree(None, RowStrides(0, 0, 0), None, 0)


def tree_of(options: Options, q_len: int, cu_seqlens: torch.Tensor | None = None) -> tuple[Tree, list[Launch]]:
    """The tree of a mask, and the launch that computes its depths."""
    from tkv.kernels.tree import depth_kernel

    if options.mask is None:
        return NO_TREE, []
    mask = options.mask.view(torch.uint8)
    num_seqs, num_tokens, _ = mask.shape
    depth = torch.empty(num_seqs, num_tokens, dtype=torch.int32, device=mask.device)
    strides = RowStrides(mask.stride(0), mask.stride(1), 0)
    launch = Launch(
        depth_kernel,
        (num_seqs * num_tokens,),
        (mask, depth, cu_seqlens, strides, depth.stride(0), num_tokens, q_len, min(1024, padded(num_tokens))),
        num_warps=1,
        num_stages=1,
    )
    return Tree(mask, strides, depth, depth.stride(0)), [launch]


def compute_dtypes(q_dtype: torch.dtype, kinds: tuple[KVFormat, KVFormat], arch: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the operands of q @ k and of p @ v: float32 for a float32 q, q's own where numbers are native, else float16.

    float32 also where the matrix unit would flush subnormal float16 numbers, and the format has them.
    """
    if q_dtype == torch.float32:
        return torch.float32, torch.float32
    dtypes = []
    for kind in kinds:
        has_subnormals = kind.dtype in ("fp16", "fp8_e5m2") or kind.is_rounded
        dtypes.append(torch.float32 if arch in FLUSHES_FP16 and has_subnormals else q_dtype if kind.is_native else torch.float16)
    return dtypes[0], dtypes[1]


def check_visible(
    name: str, page_table: torch.Tensor, lens: torch.Tensor, first: torch.Tensor, last: torch.Tensor, options: Options, cache: KVCache,
    cover: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Synchronous: what rows at positions first..last see is in the cache, see `check_pages`, and their rotation is in the tables."""
    check_pages(
        name, page_table, lens, options.kv_start, first, last, options.window, options.sinks, cache, cover, pinned=options.pinned
    )
    rope = options.rope
    if rope is not None and options.window is None and bool((last >= rope.num_rows).any()):
        raise RangeError(f"rope: expected tables for positions up to {int(last.max())}, got {rope.num_rows} rows")


def default_config(op: str, arch: str, key: Key) -> AttentionConfig:
    """The analytic default of a function for a key: `default_prefill` where rows of many tokens share keys, else `default_decode`.

    Tiles are smaller where an option needs the registers.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        arch: the architecture.
        key: of the call.

    Example:
        >>> default_config("paged_decode", "sm90", Key(128, 128, "bf16", "bf16", rows=16, page=16)).block_n
        128
    """
    kinds = key.formats
    compute = compute_dtypes(_DTYPES[key.dtype], kinds, arch)
    bits = min(4 if kind.dtype == "int4" else 8 * kind.torch_dtype.itemsize for kind in kinds)
    head_dim, compute_bits = max(key.head_dim, key.v_head_dim), 8 * max(dtype.itemsize for dtype in compute)
    plain = not {"alibi", "softcap", "tree", "window"} & set(key.flags)
    decoded = any(kind.is_rounded for kind in kinds)
    scaled = any(kind.is_dynamic for kind in kinds)
    if op in ("prefix_prefill", "shared_prefix_decode"):
        config = default_prefill(arch, head_dim, bits, compute_bits, key.rows, plain, scaled, decoded)
    else:
        by_page = kinds[0].scale == "page_channel"
        config = default_decode(
            arch, head_dim, bits, compute_bits, key.rows, key.page, plain, "shared" in key.flags, decoded, by_page, scaled,
            triton_is_at_least(3, 9),
        )  # fmt: skip
    config = with_tree(config) if "tree" in key.flags else config
    return with_rope(config, head_dim) if "rope" in key.flags else config


_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def config_for(
    op: str, q: torch.Tensor, cache: KVCache, options: Options, arch: str, rows: int, size: tuple[int, int] | None
) -> AttentionConfig:
    """The config of a call: a table's or the analytic default; see `tkv.tune.select`.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        q, cache, options, arch: of the call.
        rows: query rows x heads of a group that share their keys.
        size: (programs, as `tkv.tune.keys.programs_of` counts them; visible keys of the longest sequence, as far as hints say). None takes
            one config whatever they are.
    """
    found = select.choices(op, arch, facts_of(q.dtype, cache, options, rows), default_config)
    if not found.sources:
        return found.default
    return found.pick(math.inf, math.inf) if size is None else found.pick(size[0] / num_sms(q.device), size[1])


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a float dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Launch one after the other."""
    for launch in launches:
        launch.run(device)
