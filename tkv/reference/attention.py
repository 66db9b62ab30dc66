"""Attention over a paged cache, one sequence after the other."""

from __future__ import annotations

import math

import torch

from tkv.cache import KVCache
from tkv.reference.rope import rotate
from tkv.reference.storage import gather
from tkv.rope import Rope


def visible(
    q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None = None, sinks: int = 0
) -> torch.Tensor:
    """Which key each query sees: not after it, and with a window one of the last `window` or of the first `sinks` positions.

    Args:
        q_positions: ``[rows]``.
        k_positions: ``[keys]``.
        window, sinks: as in :func:`tkv.paged_decode`.

    Returns:
        ``[rows, keys]`` bool.

    Example:
        >>> visible(torch.tensor([5]), torch.arange(7), window=2, sinks=1).int().tolist()
        [[1, 0, 0, 0, 1, 1, 0]]
    """
    return _visible(q_positions[:, None] - k_positions[None, :], k_positions[None, :], window, sinks)


def _visible(distance: torch.Tensor, k_positions: torch.Tensor, window: int | None, sinks: int) -> torch.Tensor:
    seen = distance >= 0
    return seen if window is None else seen & ((distance < window) | (k_positions < sinks))


def look(
    q_start: int, q_len: int, k_positions: torch.Tensor, window: int | None = None, sinks: int = 0, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What new tokens see, and how far away it is.

    Args:
        q_start, q_len: position of the first new token, and their number.
        k_positions: ``[keys]``, where keys stand in their sequence.
        window, sinks: as in :func:`tkv.paged_decode`.
        mask: ``[M, M]`` bool, the tree of the new tokens; None for a chain.

    Returns:
        ``[q_len, keys]`` bool, and positions of queries minus positions of keys.

    Example:
        >>> tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()               # two continuations of one token
        >>> seen, distance = look(2, 3, torch.arange(5), mask=tree)
        >>> seen[2].int().tolist(), distance[2].tolist()
        ([1, 1, 1, 0, 1], [3, 2, 1, 0, 0])
    """
    if mask is None:
        q_positions = q_start + torch.arange(q_len, device=k_positions.device)
        return visible(q_positions, k_positions, window, sinks), q_positions[:, None] - k_positions[None, :]
    tree = mask[:q_len, :q_len]
    q_positions = q_start + tree.sum(1) - 1
    new = k_positions - q_start
    k_positions = torch.where((new >= 0) & (new < q_len), q_positions[new.clamp(0, q_len - 1)], k_positions)
    distance = q_positions[:, None] - k_positions[None, :]
    seen = tree[:, new.clamp(0, q_len - 1)] & (new < q_len)
    if window is not None:
        seen = seen & ((distance < window) | (k_positions < sinks))
    return torch.where(new < 0, _visible(distance, k_positions, window, sinks), seen), distance


def products(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of queries and keys with grouped heads, and their magnitudes.

    Args:
        q: ``[rows, num_q_heads, head_dim]``.
        k: ``[keys, num_kv_heads, head_dim]``.

    Returns:
        ``q.k`` and ``sum |q_i k_i|``, both ``[rows, num_q_heads, keys]`` float64.

    Example:
        >>> products(torch.tensor([[[1.0, -1.0]]]), torch.tensor([[[3.0, 2.0]]]))
        (tensor([[[1.]]], dtype=torch.float64), tensor([[[5.]]], dtype=torch.float64))
    """
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("rhd,khd->rhk", q, k), torch.einsum("rhd,khd->rhk", q.abs(), k.abs())


def rotated_products(
    q: torch.Tensor, k: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor, rope: Rope, window: int | None, sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`products` of what comes unrotated, as `tkv.paged_decode` has them with ``rope=``.

    Args:
        q, k: as for `products`.
        q_positions, k_positions: ``[rows]`` and ``[keys]``.
        rope, window, sinks: as in :func:`tkv.paged_decode`.

    Returns:
        As `products`.

    Example:
        >>> rope = Rope.of(8, 2)
        >>> q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
        >>> x, _ = rotated_products(q, k, torch.tensor([1000]), torch.tensor([998]), rope, window=4, sinks=0)
        >>> round(x.item(), 6) == round(math.cos(2.0), 6)
        True
    """
    rows = []
    for of_row, p in zip(q.double(), q_positions.tolist()):
        if window is None:
            rows.append(products(rotate(of_row[None], q_positions.new_tensor([p]), rope), rotate(k, k_positions, rope)))
            continue
        is_sink = k_positions < sinks
        turned = rotate(k, torch.where(is_sink, k_positions, k_positions - p), rope)
        for_sinks, for_others = (rotate(of_row[None], q_positions.new_tensor([turn]), rope) for turn in (min(p, sinks + window - 1), 0))
        (x, size), (other_x, other_size) = products(for_sinks, turned), products(for_others, turned)
        rows.append((torch.where(is_sink, x, other_x), torch.where(is_sink, size, other_size)))
    return torch.cat([x for x, _ in rows]), torch.cat([size for _, size in rows])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    distance: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    qk: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence, with grouped heads.

    Args:
        q: ``[rows, num_q_heads, head_dim]``.
        k: ``[keys, num_kv_heads, head_dim]``; v likewise.
        mask: ``[rows, keys]`` bool, what is visible.
        distance: ``[rows, keys]`` position of the query minus position of the key.
        scale, softcap, alibi_slopes, sink_logits: as in :func:`tkv.paged_decode`.
        qk: what to take instead of ``products(q, k)``.

    Returns:
        out ``[rows, num_q_heads, v_head_dim]``, lse ``[rows, num_q_heads]``, and for error bounds: the magnitude of the output,
        ``sum p |v|``, shaped as out, and the magnitude of the scores, shaped as lse: over visible keys the largest
        ``scale * sum |q_i k_i|`` plus the ALiBi term. All float64.

    Example:
        >>> q, k, v = torch.zeros(1, 2, 16), torch.zeros(3, 1, 16), torch.arange(3.0)[:, None, None].expand(-1, 1, 16)
        >>> out, lse, *_ = attention(q, k, v, torch.tensor([[True, True, False]]), torch.zeros(1, 3), scale=1.0)
        >>> out[0, 0, 0].item(), round(lse[0, 0].exp().item(), 6)
        (0.5, 2.0)
    """
    group = q.shape[1] // k.shape[1]
    q = q.double()
    # What no row sees may hold NaN.
    k, v = (x.double().where(mask.any(0)[:, None, None], 0.0) for x in (k, v))
    v = v.repeat_interleave(group, 1)
    x, size = (scale * part for part in qk or products(q, k))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if alibi_slopes is not None:
        bias = alibi_slopes.double()[None, :, None] * distance.double()[:, None, :]
        x, size = x - bias, size + bias.abs()
    x = x.masked_fill(~mask[:, None, :], -torch.inf)
    size = size.masked_fill(~mask[:, None, :], 0.0)
    terms = x if sink_logits is None else torch.cat([x, sink_logits.double()[None, :, None].expand(x.shape[0], -1, 1)], dim=2)
    if terms.shape[2] == 0:
        zero = q.new_zeros(*q.shape[:2], v.shape[2])
        return zero, zero.sum(-1) - torch.inf, zero, zero.sum(-1)
    lse = torch.logsumexp(terms, dim=2)
    p = torch.exp(x - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("rhk,khd->rhd", p, v)
    out_size = torch.einsum("rhk,khd->rhd", p, v.abs())
    return out, lse, out_size, size.amax(2) if size.shape[2] else size.sum(2)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of new query rows over a paged cache, as :func:`tkv.paged_decode`, one sequence after the other.

    Args:
        q, cache, page_table, seq_lens, scale, ...: as there.

    Returns:
        out, lse, magnitude of the output and of the scores, as :func:`attention`, in float64.

    Example:
        >>> cache = KVCache(torch.zeros(2, 4, 1, 16), torch.ones(2, 4, 1, 16))
        >>> out, lse, *_ = paged_decode(torch.ones(1, 1, 16), cache, torch.tensor([[1, 0]]), torch.tensor([5]))
        >>> out[0, 0, 0].item(), round(lse.exp().item(), 6)
        (1.0, 5.0)
    """
    rows = q.unsqueeze(1) if q.dim() == 3 else q
    num_seqs, q_len = rows.shape[:2]
    starts = torch.zeros_like(seq_lens) if kv_start is None else kv_start
    cu_seqlens = torch.arange(num_seqs + 1) * q_len
    results = _attend(
        rows.flatten(0, 1), None, None, cache, page_table, seq_lens, starts, seq_lens + starts - q_len if q_start is None else q_start,
        cu_seqlens, window, sinks, mask, pinned, rope,
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sink_logits=sink_logits,
    )  # fmt: skip
    out, lse, out_size, score_size = (part.view(*q.shape[:-1], *part.shape[2:]) for part in results)
    return out, lse, out_size, score_size


def prefix_prefill(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: KVCache,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of ragged new tokens over their prefixes and themselves, as :func:`tkv.prefix_prefill`.

    Args:
        q, k, v, cache, page_table, prefix_lens, cu_seqlens, scale, ...: as there.

    Returns:
        out, lse, magnitude of the output and of the scores, as :func:`attention`, in float64.

    Example:
        >>> cache = KVCache(torch.zeros(2, 4, 1, 16), torch.ones(2, 4, 1, 16))
        >>> q, k, v = torch.ones(2, 1, 16), torch.zeros(2, 1, 16), torch.full((2, 1, 16), 4.0)
        >>> out, *_ = prefix_prefill(q, k, v, cache, torch.tensor([[1, 0]]), torch.tensor([2]), torch.tensor([0, 2]))
        >>> out[:, 0, 0].tolist()
        [2.0, 2.5]
    """
    starts = torch.zeros_like(prefix_lens) if kv_start is None else kv_start
    lens = prefix_lens + cu_seqlens.diff() if k is None and q_start is None else prefix_lens
    return _attend(
        q, k, v, cache, page_table, lens, starts, prefix_lens + starts if q_start is None else q_start, cu_seqlens, window, sinks, mask,
        pinned, rope, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sink_logits=sink_logits,
    )  # fmt: skip


def _attend(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: KVCache, page_table: torch.Tensor, lens: torch.Tensor,
    kv_start: torch.Tensor, q_start: torch.Tensor, cu_seqlens: torch.Tensor, window: int | None, sinks: int, mask: torch.Tensor | None,
    pinned: int, rope: Rope | None, *, scale: float | None, softcap: float | None, alibi_slopes: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Ragged rows, one sequence after the other; cached keys first, then new ones. Rows of no sequence see nothing."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = q.new_zeros(*q.shape[:2], cache.v_head_dim, dtype=torch.float64)
    nothing = out.new_tensor(-torch.inf) if sink_logits is None else sink_logits.double()
    lse = nothing.expand(q.shape[:2]).clone()
    out_size, score_size = torch.zeros_like(out), torch.zeros_like(lse)
    for seq in range(page_table.shape[0]):
        begin, end = int(cu_seqlens[seq]), int(cu_seqlens[seq + 1])
        if begin == end:
            continue
        num_keys = min(max(int(lens[seq]), 0), page_table.shape[1] * cache.page_size)
        first, keys = int(q_start[seq]), torch.arange(num_keys, device=q.device)
        tree = None if mask is None else mask[seq]
        seen, distance = look(first, end - begin, keys + int(kv_start[seq]) * (keys >= pinned), window, sinks, tree)
        # Pages that no row sees are not followed, nor are ids outside of the cache.
        pages = page_table[seq, keys // cache.page_size]
        seen &= ((pages >= 0) & (pages < cache.num_pages))[None, :]
        some = seen.any(0)
        seen, distance = seen[:, some], distance[:, some]
        all_k, all_v = gather(cache, page_table[seq], keys[some])
        if k is not None and v is not None:
            new = torch.arange(end - begin, device=q.device)
            new_seen, new_distance = look(first, end - begin, first + new, window, sinks, tree)
            seen, distance = torch.cat([seen, new_seen], 1), torch.cat([distance, new_distance], 1)
            all_k, all_v = torch.cat([all_k, k[begin:end].double()]), torch.cat([all_v, v[begin:end].double()])
        qk = None
        if rope is not None:
            depths = torch.arange(end - begin, device=q.device) if tree is None else tree[: end - begin, : end - begin].sum(1) - 1
            q_positions = first + depths
            qk = rotated_products(q[begin:end], all_k, q_positions, q_positions[0] - distance[0], rope, window, sinks)
        out[begin:end], lse[begin:end], out_size[begin:end], score_size[begin:end] = attention(
            q[begin:end], all_k, all_v, seen, distance, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sink_logits=sink_logits,
            qk=qk,
        )  # fmt: skip
    return out, lse, out_size, score_size


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge stacked partial results, as :func:`tkv.merge_states`.

    Args:
        outs: ``[parts, ..., head_dim]``.
        lses: ``[parts, ...]``.

    Returns:
        out and lse in float64.

    Example:
        >>> out, lse = merge_states(torch.tensor([[[1.0]], [[torch.nan]]]), torch.tensor([[0.0], [-torch.inf]]))
        >>> out.item(), lse.item()
        (1.0, 0.0)
    """
    lses = lses.double()
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))[..., None]
    return (weights * outs.double().where(weights > 0, 0.0)).sum(0), lse
