"""What to evict from a paged cache: small functions from scores of keys to the keys that stay.

Each returns what :func:`tkv.compact_kv` takes: ``keep [num_seqs, num_kv_heads, K]`` int32, the logical keys that stay, ascending, with
``K = min(budget, width)``; and ``keep_lens [num_seqs]`` int32, how many of them count: ``min(seq_len, budget)``. Entries behind those are
keys that the sequence does not have. A sequence of at most `budget` keys keeps them all. Where scores are equal the lower key wins, and
NaN is the lowest score. Plain PyTorch on the scores' device: nothing is read back, and shapes alone decide shapes.

A score is larger the more a key is worth; of scores ``[num_seqs, num_kv_heads, width]`` those of keys from a sequence's length on are not
looked at. :func:`dense_scores` brings scores of pages, as :func:`tkv.key_scores` fills them, into that shape.
"""

from __future__ import annotations

import torch

from tkv.errors import RangeError
from tkv.ops.checks import FLOATS, INTEGERS, check_int, check_tensor

Kept = tuple[torch.Tensor, torch.Tensor]


def dense_scores(scores: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Scores of pages in the order of each sequence's keys: ``out[s, h, j] = scores[page_table[s, j // page_size], j % page_size, h]``.

    Args:
        scores: ``[num_pages, page_size, num_kv_heads]`` float32.
        page_table: ``[num_seqs, max_pages]`` int32 or int64.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.

    Returns:
        ``[num_seqs, num_kv_heads, max_pages * page_size]`` float32; 0 from each length on, and for pages that do not exist.

    Raises:
        ShapeError, DTypeError, DeviceError: the named argument does not fit.

    Example:
        >>> paged = torch.arange(4.0).view(2, 2, 1)                                # page p, offset t: 2 p + t
        >>> dense_scores(paged, torch.tensor([[1, 0]]), torch.tensor([3])).tolist()
        [[[2.0, 3.0, 0.0, 0.0]]]
    """
    device = _device(scores)
    check_tensor("scores", scores, ("num_pages", "page_size", "num_kv_heads"), (torch.float32,), device, contiguous_last=False)
    check_tensor("page_table", page_table, ("num_seqs", "max_pages"), INTEGERS, device, contiguous_last=False)
    check_tensor("seq_lens", seq_lens, (page_table.shape[0],), INTEGERS, device, contiguous_last=False)
    num_pages, page_size, _ = scores.shape
    # One page more, of zeros, stands for those that do not exist.
    padded = torch.nn.functional.pad(scores, (0, 0, 0, 0, 0, 1))
    pages = page_table.where((page_table >= 0) & (page_table < num_pages), num_pages)
    dense = padded[pages.long()].flatten(1, 2).transpose(1, 2)
    keys = torch.arange(page_table.shape[1] * page_size, device=device)
    return dense.where(keys < seq_lens[:, None, None], 0.0)


def h2o(scores: torch.Tensor, seq_lens: torch.Tensor, heavy: int, recent: int) -> Kept:
    """H2O (Zhang et al., 2023): the `heavy` highest of ``scores[.., : len - recent]`` and the last `recent` keys.

    Args:
        scores: ``[num_seqs, num_kv_heads, width]`` floats, the attention that each key got so far, summed over all queries.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        heavy: how many keys stay for their score.
        recent: how many of the last keys stay whatever their score.

    Returns:
        keep and keep_lens, with a budget of ``heavy + recent``.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.

    Example:
        >>> keep, keep_lens = h2o(torch.tensor([[[0.1, 3.0, 0.2, 2.0, 0.0]]]), torch.tensor([5]), heavy=1, recent=2)
        >>> keep.tolist(), keep_lens.tolist()
        ([[[1, 3, 4]]], [3])
    """
    _check_scores(scores, seq_lens)
    heavy, recent = check_int("heavy", heavy, 0), check_int("recent", recent, 0)
    return _best(scores, seq_lens, heavy + recent, recent)


def snapkv(scores: torch.Tensor, seq_lens: torch.Tensor, budget: int, window: int, kernel_size: int = 5) -> Kept:
    """SnapKV (Li et al., 2024): the last `window` keys, and the highest of the others by the mean over `kernel_size` neighbours.

    ``pooled[j] = sum(scores[j - r : j + r + 1]) / kernel_size`` with ``r = kernel_size // 2``, over keys before the window.

    Args:
        scores: ``[num_seqs, num_kv_heads, width]`` floats, the attention that each key got from the last `window` queries; NaN counts as 0.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        budget: how many keys stay, those of the window included.
        window: how many of the last keys stay whatever their score, at most `budget`.
        kernel_size: odd; 1 for no mean.

    Returns:
        keep and keep_lens.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.

    Example:
        >>> snapkv(torch.tensor([[[0.0, 0.0, 1.0, 2.0, 0.0, 0.0]]]), torch.tensor([6]), budget=3, window=1, kernel_size=3)[0].tolist()
        [[[2, 3, 5]]]
    """
    _check_scores(scores, seq_lens)
    budget = check_int("budget", budget, 1)
    window, kernel_size = _check_recent("window", window, budget), check_int("kernel_size", kernel_size, 1)
    if kernel_size % 2 == 0:
        raise RangeError(f"kernel_size: expected an odd number of keys, got {kernel_size}")
    width = scores.shape[-1]
    before = torch.arange(width, device=scores.device) < seq_lens[:, None, None] - window
    padded = torch.nn.functional.pad(scores.float().where(before & ~scores.isnan(), 0.0), (kernel_size // 2, kernel_size // 2))
    pooled = torch.stack([padded[..., i : i + width] for i in range(kernel_size)]).sum(0) / kernel_size
    return _best(pooled, seq_lens, budget, window)


def tova(scores: torch.Tensor, seq_lens: torch.Tensor, budget: int) -> Kept:
    """TOVA (Oren et al., 2024): the keys that the last query attends to most, by the mean over heads; the same keys for all heads.

    Args:
        scores: ``[num_seqs, num_kv_heads, width]`` floats, the attention that each key got from the last query.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        budget: how many keys stay.

    Returns:
        keep and keep_lens.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.

    Example:
        >>> scores = torch.tensor([[[0.5, 0.1, 0.4], [0.0, 0.7, 0.3]]])                # means 0.25, 0.4 and 0.35
        >>> tova(scores, torch.tensor([3]), budget=2)[0].tolist()
        [[[1, 2], [1, 2]]]
    """
    _check_scores(scores, seq_lens)
    keep, keep_lens = _best(scores.float().mean(1, keepdim=True), seq_lens, check_int("budget", budget, 1), 0)
    return keep.expand(-1, scores.shape[1], -1).contiguous(), keep_lens


def key_norm(keys: torch.Tensor, seq_lens: torch.Tensor, budget: int) -> Kept:
    """L2 norm (Devoto et al., 2024): the keys of smallest norm, which attention prefers: the score is ``-|k|``.

    Args:
        keys: ``[num_seqs, width, num_kv_heads, head_dim]`` floats, as :func:`tkv.gather_window` gives them with ``dense=True``.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        budget: how many keys stay.

    Returns:
        keep and keep_lens.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.

    Example:
        >>> keys = torch.tensor([3.0, 1.0, 2.0]).view(1, 3, 1, 1).expand(-1, -1, -1, 16)
        >>> key_norm(keys, torch.tensor([3]), budget=2)[0].tolist()
        [[[1, 2]]]
    """
    shape = ("num_seqs", "width", "num_kv_heads", "head_dim")
    check_tensor("keys", keys, shape, FLOATS, _device(keys), contiguous_last=False)
    check_tensor("seq_lens", seq_lens, (keys.shape[0],), INTEGERS, keys.device, contiguous_last=False)
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    return _best(-norms.transpose(1, 2), seq_lens, check_int("budget", budget, 1), 0)


def streaming(seq_lens: torch.Tensor, num_kv_heads: int, width: int, sinks: int, window: int) -> Kept:
    """StreamingLLM (Xiao et al., 2023): the first `sinks` and the last `window` keys.

    Args:
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        num_kv_heads: which all keep the same.
        width: the most keys that a sequence can have: of its page table ``max_pages * page_size``.
        sinks: how many of the first keys.
        window: how many of the last ones.

    Returns:
        keep and keep_lens, with a budget of ``sinks + window``.

    Raises:
        ShapeError, DTypeError, RangeError: the named argument does not fit.

    Example:
        >>> streaming(torch.tensor([7]), num_kv_heads=1, width=8, sinks=1, window=2)[0].tolist()
        [[[0, 5, 6]]]
    """
    _check_sizes(seq_lens, num_kv_heads, width)
    sinks, window = check_int("sinks", sinks, 0), check_int("window", window, 0)
    lens = seq_lens.clamp(0, width)[:, None, None]
    entries = torch.arange(min(sinks + window, width), device=seq_lens.device)
    keep = entries + (lens - (sinks + window)).clamp_min(0) * (entries >= sinks)
    return keep.int().expand(-1, num_kv_heads, -1).contiguous(), _keep_lens(seq_lens, width, sinks + window)


def random(
    seq_lens: torch.Tensor, num_kv_heads: int, width: int, budget: int, recent: int, generator: torch.Generator | None = None
) -> Kept:
    """The last `recent` keys and others at random, of each head its own: what scores have to be better than.

    Args:
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        num_kv_heads: heads.
        width: the most keys that a sequence can have: of its page table ``max_pages * page_size``.
        budget: how many keys stay, the recent ones included.
        recent: how many of the last keys stay, at most `budget`.
        generator: of the random numbers, on the device of `seq_lens`; torch's own if None.

    Returns:
        keep and keep_lens.

    Raises:
        ShapeError, DTypeError, RangeError: the named argument does not fit.

    Example:
        >>> keep, keep_lens = random(torch.tensor([7, 2]), num_kv_heads=2, width=8, budget=4, recent=3)
        >>> keep[0, :, 1:].tolist(), keep[1, 0, :2].tolist(), keep_lens.tolist()
        ([[4, 5, 6], [4, 5, 6]], [0, 1], [4, 2])
    """
    _check_sizes(seq_lens, num_kv_heads, width)
    budget = check_int("budget", budget, 1)
    recent = _check_recent("recent", recent, budget)
    scores = torch.rand(seq_lens.shape[0], num_kv_heads, width, generator=generator, device=seq_lens.device)
    return _best(scores, seq_lens, budget, recent)


def _best(scores: torch.Tensor, seq_lens: torch.Tensor, budget: int, recent: int) -> Kept:
    """The last `recent` keys of each sequence and the highest of the others, `budget` together."""
    width = scores.shape[-1]
    keys = torch.arange(width, device=scores.device)
    lens = seq_lens.clamp(0, width)[:, None, None]
    order = scores.where(~scores.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    # First recent keys, then others by score, then those that are not there; a score of infinity changes nothing of that.
    rank = (keys < lens).int() + ((keys < lens) & (keys >= lens - recent)).int()
    by_rank = rank.expand(scores.shape).gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    keep = order.gather(-1, by_rank)[..., : min(budget, width)].sort(dim=-1).values.int()
    return keep, _keep_lens(seq_lens, width, budget)


def _keep_lens(seq_lens: torch.Tensor, width: int, budget: int) -> torch.Tensor:
    return seq_lens.clamp(0, min(width, budget)).int()


def _device(tensor: object) -> torch.device:
    """What the other arguments have to be on; the check that follows refuses what is no tensor."""
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")


def _check_scores(scores: torch.Tensor, seq_lens: torch.Tensor) -> None:
    check_tensor("scores", scores, ("num_seqs", "num_kv_heads", "width"), FLOATS, _device(scores), contiguous_last=False)
    check_tensor("seq_lens", seq_lens, (scores.shape[0],), INTEGERS, scores.device, contiguous_last=False)


def _check_sizes(seq_lens: torch.Tensor, num_kv_heads: int, width: int) -> None:
    check_tensor("seq_lens", seq_lens, ("num_seqs",), INTEGERS, _device(seq_lens), contiguous_last=False)
    check_int("num_kv_heads", num_kv_heads, 1)
    check_int("width", width, 0)


def _check_recent(name: str, recent: int, budget: int) -> int:
    if check_int(name, recent, 0) > budget:
        raise RangeError(f"{name}: expected at most the budget, {budget}, got {recent}")
    return recent
