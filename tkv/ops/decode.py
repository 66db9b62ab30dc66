"""paged_decode: attention of a few new query rows of each sequence over its paged keys."""

from __future__ import annotations

from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import ShapeError, UnsupportedError
from tkv.kernels.args import Lengths
from tkv.ops.attention import (
    NO_RESULTS,
    Options,
    Scratch,
    Work,
    check_options,
    check_queries,
    check_table,
    check_visible,
    check_workspace,
    config_for,
    kernel_for,
    launch_attention,
    launch_merge,
    results_of,
    run_all,
    tree_of,
)
from tkv.ops.checks import FLOATS, INTEGERS, check_cache, check_flag, check_int, check_tensor, checks_on
from tkv.ops.launch import Launch, arch_name, check_launchable, interpreting, num_sms
from tkv.ops.library import operator
from tkv.ops.outputs import check_outputs, outputs, traced_attention
from tkv.rope import Rope
from tkv.tune.configs import AttentionConfig, deterministic_plan, split_plan
from tkv.tune.keys import programs_of

MAX_Q_LEN = 64


@operator(mutates=("out", "lse", "workspace"), needs=("out",), omits=("return_lse",), traced=traced_attention)
def paged_decode(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    pinned: int = 0,
    rope: Rope | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    config: AttentionConfig | dict[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 64 new query rows of each sequence over its keys in a paged cache.

    Query row i at position ``p = q_start + i`` and logical key j at position ``kv_start + j`` have the score
    ``x = softcap(scale * q.k) - slope * (p - position of j)``, with ``softcap(x) = softcap * tanh(x / softcap)``. A key is visible if
    its position is at most p and, with a window, ``p - position < window`` or ``position < sinks``. ``out = sum e^x v / sum e^x`` over
    the visible keys, ``lse = ln sum e^x``; where nothing is visible, 0 and -inf. By ``kv_start`` and ``q_start`` a call may cover a
    part of a sequence; `merge_states` joins the parts. Positions lie below 2^30. The two NaN codes of fp8 may be read as +-480.

    Args:
        q: ``[num_seqs, num_q_heads, head_dim]``, or ``[num_seqs, q_len, num_q_heads, head_dim]`` with q_len from 1 to 64, the newest
            tokens in order. float32 on any cache; float16 or bfloat16 on a native cache of the same dtype, or a quantised cache.
            num_q_heads is a multiple of num_kv_heads; query head h reads KV head ``h // group``, a group being at most 128.
        cache: K and V.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, the physical page of each logical page. Entries that no row can see may be
            anything, and are not followed.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence that the table covers, the new tokens included; 0 is allowed.
        scale: factor of the scores, 0 or from 1e-30 to 1e30; ``1 / sqrt(head_dim)`` if None.
        softcap: bound of the scores, from 1e-30 to 1e30; None for no bound.
        alibi_slopes: ``[num_q_heads]`` float32.
        window: number of visible keys including the token itself, at least 1; None for all.
        sinks: the first `sinks` positions stay visible outside of the window.
        sink_logits: ``[num_q_heads]`` float32, float16 or bfloat16, finite or -inf: a learned sink, ``e^sink_logit`` joins the
            denominator and the LSE.
            Of several parts that are to be merged, exactly one gets it.
        kv_start: ``[num_seqs]`` int32 or int64, at least 0: the position of logical key j is ``kv_start + j``; 0 if None.
        pinned: an int, whole pages: the position of logical key j is j itself where ``j < pinned``. So one table can hold the pages of the
            sink tokens and, after a gap, those of a window.
        q_start: ``[num_seqs]`` int32 or int64, position of query row 0; ``seq_len + kv_start - q_len`` if None.
        mask: ``[num_seqs, M, M]`` bool, M at least q_len: tree verification. Query row c is new token c, whose key stands at
            ``q_start + c`` of the table; it sees new token i iff ``mask[:, c, i]``, and their position, of query and key, is
            ``q_start + (number of new tokens that mask[:, c] has) - 1``. Keys before ``q_start`` are as without a mask. The diagonal
            is set; what lies beyond q_len is ignored.
        rope: q and the keys come unrotated and are rotated here: without a window by their positions, for which the tables need rows;
            with one by positions inside of a cache of the sink tokens and the window (StreamingLLM): a sink token j by j, with the query
            by ``min(p, sinks + window - 1)``, and other keys by what lies between them and the query. Then ``sinks + window + 256`` rows
            are enough for any length. With a `mask` the new tokens must stand behind the sink tokens.
        max_seq_len: a hint for the longest of `seq_lens`, to size the launch; the width of the table if None. Never a condition of
            correctness.
        return_lse: also return the LSE.
        out: where to write: q's shape with V's head_dim, in q's dtype or float32, last dimension contiguous.
        lse: where to write the LSE: ``[*out.shape[:-1]]`` float32, any strides; implies `return_lse`.
        workspace: ``[bytes]`` uint8 or ``[bytes / 4]`` float32: memory for partial results, overwritten; allocated if None. Sequences are
            split as finely as it allows.
        deterministic: each sequence's result is the same, bit for bit, alone and in any batch, with any hint and table width. Splits are
            then of one length, and a batch whose partial results would need too much memory runs in several launches.
        config: launch parameters, a :class:`tkv.tune.configs.AttentionConfig` or a dict of its fields; chosen for the device if None.

    Returns:
        ``out`` in q's dtype (or the given tensor); with ``return_lse`` or ``lse`` also ``lse``, float32, out's shape without the last
        dimension, natural logarithm.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a combination of dtypes, or a size, that there is no kernel for.

    Example:
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> kv = torch.randn(2, 5, 2, 64, dtype=torch.float16)
        >>> cache.k[3, :5], cache.v[3, :5] = kv
        >>> q = torch.randn(1, 8, 64, dtype=torch.float16)             # one sequence of 5 tokens, in page 3
        >>> out, lse = paged_decode(q, cache, torch.tensor([[3]]), torch.tensor([5]), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 64]), torch.Size([1, 8]))
    """
    options, config = check_decode(
        q, cache, page_table, seq_lens, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks,
        sink_logits=sink_logits, kv_start=kv_start, q_start=q_start, mask=mask, pinned=pinned, rope=rope, max_seq_len=max_seq_len,
        return_lse=return_lse, out=out, lse=lse, workspace=workspace, config=config,
    )  # fmt: skip
    check_flag("deterministic", deterministic)
    device = cache.device
    if checks_on():
        first, last = row_positions(q, seq_lens, options)
        check_visible("seq_lens", page_table, seq_lens, first, last, options, cache)
    out, lse = outputs(q, cache, out, lse, return_lse)
    if q.shape[0]:
        launches = plan_decode(
            q, cache, page_table, seq_lens, out, lse, arch_name(device), interpreting(), options,
            max_seq_len=max_seq_len, workspace=workspace, deterministic=deterministic, config=config,
        )  # fmt: skip
        run_all(launches, device)
    return out if lse is None else (out, lse)


def check_decode(
    q: torch.Tensor, cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float | None, softcap: float | None,
    alibi_slopes: torch.Tensor | None, window: int | None, sinks: int, sink_logits: torch.Tensor | None, kv_start: torch.Tensor | None,
    q_start: torch.Tensor | None, mask: torch.Tensor | None, pinned: int, rope: Rope | None, max_seq_len: int | None,
    return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor | None,
    config: AttentionConfig | dict[str, Any] | None,
) -> tuple[Options, AttentionConfig | None]:  # fmt: skip
    """The options and the config of a call of decoding; each argument with its own error."""
    check_cache(cache)
    device = cache.device
    rows = ("num_seqs", "q_len") if isinstance(q, torch.Tensor) and q.dim() == 4 else ("num_seqs",)
    check_tensor("q", q, (*rows, "num_q_heads", cache.head_dim), FLOATS, device)
    check_queries(q, cache)
    num_seqs = q.shape[0]
    q_len = q.shape[1] if q.dim() == 4 else 1
    if not 1 <= q_len <= MAX_Q_LEN:
        raise UnsupportedError(f"q: expected q_len from 1 to {MAX_Q_LEN}, got {q_len}")
    check_table(page_table, num_seqs, cache.page_size, device)
    check_tensor("seq_lens", seq_lens, (num_seqs,), INTEGERS, device)
    options = check_options(
        cache, num_seqs, q.shape[-2], q_len, scale, softcap, alibi_slopes, window, sinks, sink_logits, kv_start, q_start, mask, pinned,
        rope,
    )  # fmt: skip
    if mask is not None and mask.shape[1] < q_len:
        raise ShapeError(f"mask: expected at least {q_len} tokens, q's, got {list(mask.shape)}")
    if max_seq_len is not None:
        check_int("max_seq_len", max_seq_len, 0)
    check_outputs(q, cache, out, lse, return_lse)
    if workspace is not None:
        check_workspace(workspace, device)
    if config is not None:
        config = AttentionConfig.of(config)
    check_launchable(device)
    return options, config


def row_positions(q: torch.Tensor, seq_lens: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of each sequence's first and last query row."""
    q_len = q.shape[1] if q.dim() == 4 else 1
    first = options.q_start
    if first is None:
        first = seq_lens - q_len if options.kv_start is None else seq_lens + options.kv_start - q_len
    return first, first + (q_len - 1)


def plan_decode(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    interpret: bool,
    options: Options,
    *,
    max_seq_len: int | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    config: AttentionConfig | None = None,
) -> list[Launch]:
    """The launches behind `paged_decode`: one, or a split one and its merge, several times if need be. Arguments as there, checked."""
    if q.dim() == 3:
        q, out, lse = q.unsqueeze(1), out.unsqueeze(1), None if lse is None else lse.unsqueeze(1)
    num_seqs, q_len, num_q_heads, _ = q.shape
    rows = q_len * num_q_heads // cache.num_kv_heads
    capacity, seq_bytes = page_table.shape[1] * cache.page_size, q_len * num_q_heads * (cache.v_head_dim + 1) * 4
    keys = options.max_visible(capacity, max_seq_len, q_len)
    if config is None:
        size = programs_of("paged_decode", num_seqs, cache.num_kv_heads, rows), keys
        config = config_for("paged_decode", q, cache, options, arch, rows, None if deterministic else size)
    scratch = Scratch(workspace)
    row_tiles = -(-rows // config.block_m)
    num_programs = num_seqs * cache.num_kv_heads * row_tiles
    if deterministic:
        splits, tiles, at_once = deterministic_plan(config, options.max_visible(capacity, None, q_len), seq_bytes, scratch.limit)
        if workspace is not None and splits * seq_bytes > scratch.limit:
            raise ShapeError(f"workspace: deterministic needs {splits * seq_bytes} bytes a sequence, got {scratch.limit}")
        if num_seqs > at_once:
            launches = []
            for first in range(0, num_seqs, at_once):
                part = slice(first, first + at_once)
                launches += plan_decode(
                    q[part], cache, page_table[part], seq_lens[part], out[part], None if lse is None else lse[part], arch, interpret,
                    options.of(part), workspace=workspace, deterministic=True, config=config,
                )  # fmt: skip
            return launches
    else:
        splits, tiles = split_plan(config, num_programs, keys, num_sms(q.device), num_seqs * seq_bytes, scratch.limit)
    # One rounding more or less would show, so a deterministic result always goes through the merge.
    is_split = splits > 1 or deterministic
    kernel = kernel_for(q.dtype, cache, options, config, arch, interpret, one_position=q_len == 1 and options.mask is None)
    tree, launches = tree_of(options, q_len)
    # Splits come first, so that the other strides do not change with their number.
    parts = scratch.states((splits, num_seqs, q_len, num_q_heads), cache.v_head_dim, q.device) if is_split else None
    work = Work("uniform", (num_programs, splits), num_seqs, q_len, row_tiles, max_splits=splits, min_tiles=tiles)
    lengths = Lengths(seq_lens, options.kv_start, options.q_start)
    results = results_of(out, lse)
    launches.append(
        launch_attention(
            kernel, work, q, cache, page_table, lengths, options, NO_RESULTS if is_split else results, parts, tree=tree
        )
    )
    if parts is not None:
        launches.append(launch_merge(parts, results, kernel.target, q_len, sink_logits=options.sink_logits))
    return launches
