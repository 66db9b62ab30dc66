"""Which keys sequences share: the levels of a cascade, found on the host by equal leading pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tkv.errors import DTypeError, RangeError, ShapeError


@dataclass(frozen=True)
class SharedLevel:
    """Keys that groups of sequences share, for `shared_prefix_decode`: one level of a tree, with one entry a group.

    Levels are given outermost first (system prompt, few-shot block, conversation). A group's first key follows the last key that an outer
    level covers for its sequences; a level need not have every sequence.

    Args:
        page_table: ``[num_groups, max_pages]`` int32 or int64, physical pages of each group's keys, from its first key on.
        lens: ``[num_groups]`` int32 or int64, keys of each group; any number, not only whole pages.
        starts: ``[num_groups]`` int32 or int64, position of each group's first key.
        cu_seqs: ``[num_groups + 1]`` int32 or int64: group g has ``seqs[cu_seqs[g]:cu_seqs[g + 1]]``.
        seqs: ``[num_members]`` int32 or int64, sequences; each at most once in a level.
        max_group: most sequences of a group.
        max_len: most keys of a group.

    Example:
        >>> table, lens, starts = torch.tensor([[7]]), torch.tensor([16]), torch.tensor([0])    # two sequences share page 7
        >>> SharedLevel(table, lens, starts, torch.tensor([0, 2]), torch.tensor([0, 1]), max_group=2, max_len=16).seqs.tolist()
        [0, 1]
    """

    page_table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    cu_seqs: torch.Tensor
    seqs: torch.Tensor
    max_group: int
    max_len: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SharedLevel:
        """The level with its tensors on a device.

        Example:
            >>> levels = find_shared_levels(torch.tensor([[3, 1], [3, 2]]), torch.tensor([20, 30]), page_size=16)
            >>> levels[0].to("cpu").seqs.tolist()
            [0, 1]
        """
        names = ("page_table", "lens", "starts", "cu_seqs", "seqs")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


def find_shared_levels(
    page_table: Any, seq_lens: Any, page_size: int, kv_start: Any = None, pinned: int = 0
) -> list[SharedLevel]:
    """The levels that sequences share, by equal leading pages. On the host: tensors on a GPU are copied, which waits.

    Sequences with equal pages from some page on, at equal positions, form a group for as long as all of them agree; where they part,
    those that still agree with others form groups of the next level. A page that only one of the sharers has filled ends their level
    inside of it, at the length of the shortest.

    Args:
        page_table: ``[num_seqs, max_pages]`` integers, a tensor or an array.
        seq_lens: ``[num_seqs]`` integers, keys of each sequence.
        page_size: keys of a page.
        kv_start: ``[num_seqs]`` integers, position of logical key 0 (with `pinned`: added to positions from there on); 0 if None.
        pinned: logical keys before this one, whole pages, have their own index as position.

    Returns:
        Levels, outermost first, with int32 tensors (int64 where a page id needs it) on the page table's device; empty if nothing is shared.

    Raises:
        ShapeError, DTypeError, RangeError: the named argument does not fit.

    Example:
        >>> table = torch.tensor([[5, 6, 1, 0], [5, 6, 2, 3], [5, 6, 2, 4]])
        >>> for level in find_shared_levels(table, torch.tensor([40, 60, 56]), page_size=16):
        ...     print(level.page_table.tolist(), level.starts.tolist(), level.lens.tolist(), level.seqs.tolist())
        [[5, 6]] [0] [32] [0, 1, 2]
        [[2]] [32] [16] [1, 2]
    """
    device = page_table.device if isinstance(page_table, torch.Tensor) else torch.device("cpu")
    table = _integers("page_table", page_table, 2)
    lens = _integers("seq_lens", seq_lens, 1)
    starts = np.zeros_like(lens) if kv_start is None else _integers("kv_start", kv_start, 1)
    for name, value, low in (("page_size", page_size, 1), ("pinned", pinned, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise DTypeError(f"{name}: expected an int, got {value!r}")
        if value < low or (name == "pinned" and value % page_size):
            raise RangeError(f"{name}: expected {'whole pages' if name == 'pinned' else 'at least 1'}, got {value}")
    for name, values in (("seq_lens", lens), ("kv_start", starts)):
        if len(values) != len(table):
            raise ShapeError(f"{name}: expected shape [{len(table)}], page_table's sequences, got [{len(values)}]")
    if starts.size and not 0 <= starts.min() <= starts.max() < 2**30:
        raise RangeError(f"kv_start: expected 0 to 2^30 - 1, got {int(starts.min())} to {int(starts.max())}")
    page_size, pinned = int(page_size), int(pinned)
    lens = lens.clip(0, table.shape[1] * page_size)
    # Groups of each level: (sequences, first page, number of keys, position of the first).
    levels: list[list[tuple[np.ndarray, int, int, int]]] = []
    pending = [(np.arange(len(table)), 0, 0)]
    while pending:
        seqs, page, depth = pending.pop()
        for group in _groups(table, lens, starts, seqs, page, page_size, pinned):
            count = _agreeing(table[group, page:], lens[group].min() // page_size - page)
            if page * page_size < pinned and (starts[group] != 0).any():
                count = min(count, pinned // page_size - page)
            keys = count * page_size
            if not count:
                # The next page is whole for one of them at most.
                keys = int(lens[group].min()) - page * page_size
            position = page * page_size + (0 if page * page_size < pinned else int(starts[group[0]]))
            levels.extend([] for _ in range(depth + 1 - len(levels)))
            levels[depth].append((group, page, keys, position))
            if count:
                pending.append((group, page + count, depth + 1))
    return [_level(sorted(level, key=lambda entry: entry[0][0]), table, page_size, device) for level in levels]


def _groups(
    table: np.ndarray, lens: np.ndarray, starts: np.ndarray, seqs: np.ndarray, page: int, page_size: int, pinned: int
) -> list[np.ndarray]:
    """Sequences that have the same page there, at the same positions: two or more of them, all with the whole of it if two have that."""
    seqs = seqs[lens[seqs] > page * page_size]
    if len(seqs) < 2:
        return []
    offsets = starts[seqs] if page * page_size >= pinned else np.zeros_like(seqs)
    _, kinds = np.unique(np.stack([table[seqs, page], offsets]), axis=1, return_inverse=True)
    found = []
    for kind in range(kinds.max() + 1):
        group = seqs[kinds.reshape(-1) == kind]
        whole = group[lens[group] >= (page + 1) * page_size]
        group = whole if len(whole) > 1 else group
        if len(group) > 1:
            found.append(group)
    return found


def _agreeing(pages: np.ndarray, limit: int) -> int:
    """How many leading pages, at most `limit`, are the same in all rows."""
    same = (pages[:, :limit] == pages[:1, :limit]).all(0)
    return int(same.argmin()) if not same.all() else len(same)


def _level(groups: list[tuple[np.ndarray, int, int, int]], table: np.ndarray, page_size: int, device: torch.device) -> SharedLevel:
    width = max(-(-keys // page_size) for _, _, keys, _ in groups)
    pages = np.zeros((len(groups), width), np.int64)
    for row, (seqs, page, keys, _) in zip(pages, groups, strict=True):
        count = -(-keys // page_size)
        row[:count] = table[seqs[0], page : page + count]

    def tensor(values: Any, dtype: Any = np.int32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(device)

    sizes = [len(seqs) for seqs, *_ in groups]
    return SharedLevel(
        # Ids that no int32 holds are ids of no page, and have to stay so.
        page_table=tensor(pages, np.int32 if np.abs(pages).max(initial=0) < 2**31 else np.int64),
        lens=tensor([keys for _, _, keys, _ in groups]),
        starts=tensor([position for *_, position in groups]),
        cu_seqs=tensor(np.cumsum([0, *sizes])),
        seqs=tensor(np.concatenate([seqs for seqs, *_ in groups])),
        max_group=max(sizes),
        max_len=max(keys for _, _, keys, _ in groups),
    )


def _integers(name: str, values: Any, dims: int) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        if values.is_floating_point() or values.is_complex():
            raise DTypeError(f"{name}: expected integers, got {str(values.dtype).removeprefix('torch.')}")
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ShapeError(f"{name}: expected rows of one length") from None
    if array.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} dimension{'s' if dims > 1 else ''}, got shape {list(array.shape)}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"{name}: expected integers, got {array.dtype}")
    return array.astype(np.int64)
