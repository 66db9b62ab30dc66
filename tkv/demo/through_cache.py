"""A model that attends to keys and values as a cache gives them back: by torch, or by tkv's kernels on the same pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from tkv import KVCache, gather_window, paged_decode, quantize_pages, write_kv
from tkv.cache import MAX_HEAD_DIM, MIN_HEAD_DIM
from tkv.demo.attention import Step, attention_by_tkv
from tkv.demo.interpreter import quick_interpreter
from tkv.demo.model import head_dim
from tkv.formats import KVFormat
from tkv.ops.kivi import kivi_decode
from tkv.ops.launch import Launch, interpreting

PAGE_SIZE = 32
# Numbers of a program's tile in the interpreter, which pays for a program and hardly for its size; half of what Triton allows.
INTERPRETED_TILE = 2**19
INTERPRETED_CONFIG = dict(block_m=128, block_n=64, num_warps=4, num_stages=2, split_len=2**20)

Scales = dict[int, tuple[torch.Tensor | None, torch.Tensor | None]]


@dataclass(frozen=True)
class Scheme:
    """How the keys and values of a model are stored.

    Args:
        k, v: names of formats.
        scales: of static formats: ``"1.0"`` or ``"calibrated"``.
        newest: None if all tokens are read from k and v; else how many of the newest tokens are not, but as the model made them. Whole
            pages of `PAGE_SIZE` tokens move from the one to the other, so that up to a page more is read so.
    """

    k: str
    v: str
    scales: str = ""
    newest: int | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        formats = self.k if self.k == self.v else f"{self.k} + {self.v}"
        newest = "" if self.newest is None else f", newest {self.newest} native"
        return formats + (f" ({self.scales})" if self.scales else "") + newest

    @property
    def by_page(self) -> bool:
        """Whether keys are stored a page at a time."""
        return KVFormat.parse(self.k).scale == "page_channel"

    def bytes_per_token(self, config: Any) -> float:
        """Bytes of a token in all layers of a model, K, V and scales; of one that is not among the newest."""
        heads, dim = config.num_key_value_heads, head_dim(config)
        size = sum(KVFormat.parse(kind).bytes_per_token(heads, dim, PAGE_SIZE) for kind in (self.k, self.v))
        return float(size * config.num_hidden_layers)


@dataclass
class CachedModel:
    """A model, and the pages of some sequences of equal length in all its layers.

    Args:
        model: of transformers.
        scheme: how K and V are stored.
        num_seqs, num_tokens: of the sequences; whole pages where keys are stored by page.
        scales: of each layer's K and V, for static formats that are calibrated.
        keeps: whether the pages are kept as a server would have them, for `by_kernels`; else the interpreter may have them in another
            arrangement that takes less time.
        on_layer: called with (layer, number of layers) before each layer's attention.
    """

    model: Any
    scheme: Scheme
    num_seqs: int
    num_tokens: int
    scales: Scales | None = None
    keeps: bool = False
    on_layer: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        native = str(self.model.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        width = -(-self.num_tokens // PAGE_SIZE)
        order = torch.randperm(self.num_seqs * width, generator=torch.Generator().manual_seed(0))
        self.page_table = order.view(self.num_seqs, width).to(torch.int32).to(device)
        shape = (order.numel(), PAGE_SIZE, config.num_key_value_heads, head_dim(config))
        stored = []
        for layer in range(config.num_hidden_layers):
            k_scale, v_scale = (self.scales or {}).get(layer, (None, None))
            stored.append(KVCache.empty(*shape, (self.scheme.k, self.scheme.v), device=device, k_scale=k_scale, v_scale=v_scale))
        self.stored = stored
        self.folds = self.scheme.by_page and interpreting() and not self.keeps
        # What the newest tokens are read from, and pages converted from; without either, new tokens are written in their format at once.
        self.has_native = self.scheme.by_page or self.scheme.newest is not None
        formats = (native, self.scheme.v if self.folds else native)
        self.written = [KVCache.empty(*shape, formats, device=device) for _ in stored] if self.has_native else stored
        self.layers = {id(cache): layer for layer, cache in enumerate(self.written)}
        self.old = None if self.scheme.newest is None else old_keys(self.num_tokens, self.scheme.newest, device)

    def by_torch(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model: new K and V go into the pages, and torch attends to what comes back from there.

        Args:
            ids: ``[num_seqs, num_tokens]``.

        Returns:
            The last hidden states, ``[num_seqs, num_tokens, hidden_size]``.
        """
        positions = torch.arange(self.num_tokens, device=ids.device).expand(ids.shape)
        pages = self.page_table.long().gather(1, positions // PAGE_SIZE)
        return self._run(ids, (pages * PAGE_SIZE + positions % PAGE_SIZE).flatten(), self._attend_by_torch)

    def by_kernels(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model again on the pages that `by_torch` has filled, and left as they are here; tkv's decode kernels attend.

        Args:
            ids: those of `by_torch`, at most 64 of each sequence.

        Returns:
            The last hidden states, ``[num_seqs, num_tokens, hidden_size]``.
        """
        # Slots of -1 are not written: a rounding that falls out otherwise would hide what the kernels add.
        return self._run(ids, torch.full((ids.numel(),), -1, device=ids.device), self._attend_by_kernels)

    @torch.no_grad()
    def _run(self, ids: torch.Tensor, slots: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        positions = torch.arange(self.num_tokens, device=ids.device).expand(ids.shape)
        step = Step(self.written, slots, positions, attend, self.on_layer)
        with ExitStack() as stack:
            if interpreting():
                stack.enter_context(quick_interpreter())
                stack.enter_context(few_programs())
            stack.enter_context(attention_by_tkv(self.model))
            output = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, paged=step)
        return cast("torch.Tensor", output.last_hidden_state)

    def _attend_by_torch(
        self, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:  # fmt: skip
        stored = self.stored[self.layers[id(cache)]]
        if self.folds:
            read = by_folded_pages(k, self.scheme.k), gather_all(cache, self.page_table, self.num_tokens)[1]
        else:
            if self.scheme.by_page:
                pages = self.page_table.flatten()
                quantize_pages(cache, stored, pages, pages)
            elif self.has_native:
                positions = torch.arange(self.num_tokens, device=q.device).expand(self.num_seqs, -1)
                slots = self.page_table.long().gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
                write_kv(k.flatten(0, 1), v.flatten(0, 1), stored, slots.flatten())
            read = gather_all(stored, self.page_table, self.num_tokens)
        return attend(q, read, (k, v), self.old, scale)

    def _attend_by_kernels(
        self, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:  # fmt: skip
        def lens(count: int) -> torch.Tensor:
            return torch.full((self.num_seqs,), count, dtype=torch.int32, device=q.device)

        stored = self.stored[self.layers[id(cache)]]
        config = INTERPRETED_CONFIG if interpreting() else None
        if self.old is None:
            return cast("torch.Tensor", paged_decode(q, stored, self.page_table, lens(self.num_tokens), scale=scale, config=config))
        # Rows with the same number of keys in `stored` are one call.
        out = torch.empty_like(q)
        counts, sizes = self.old.sum(1).unique_consecutive(return_counts=True)
        end = 0
        for count, size in zip(counts.tolist(), sizes.tolist()):
            rows, end = slice(end, end + size), end + size
            if count:
                tail = self.page_table[:, count // PAGE_SIZE :]
                result = kivi_decode(
                    q[:, rows], stored, cache, self.page_table, lens(count), tail, lens(end - count), scale=scale
                )  # fmt: skip
            else:
                result = paged_decode(q[:, rows], cache, self.page_table, lens(end), scale=scale, config=config)
            out[:, rows] = cast("torch.Tensor", result)
        return out


def old_keys(num_tokens: int, newest: int, device: torch.device | None = None) -> torch.Tensor:
    """Which keys each query reads from the quantised cache, where the newest tokens stay native: those of whole pages without any of them.

    Args:
        num_tokens: of the sequence.
        newest: tokens that are native at least, the query's own included.
        device: of the result.

    Returns:
        ``[num_tokens, num_tokens]`` bool, a row for each query.

    Example:
        >>> old_keys(70, newest=5)[[35, 36, 68]].sum(1).tolist()             # pages of 32
        [0, 32, 64]
    """
    tokens = torch.arange(num_tokens, device=device)
    page_ends = (tokens // PAGE_SIZE + 1) * PAGE_SIZE
    return page_ends[None, :] <= tokens[:, None] + 1 - newest


def attend(
    q: torch.Tensor,
    read: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    old: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention by torch, in float32.

    Args:
        q: ``[num_seqs, num_tokens, num_q_heads, head_dim]``.
        read: K and V as they came back from the cache, ``[num_seqs, num_tokens, num_kv_heads, head_dim]``.
        new: the same as the model made them.
        old: ``[num_tokens, num_tokens]`` bool: which keys each query takes from `read`, the others from `new`; None for all from `read`.
        scale: factor of the scores.

    Returns:
        The shape and dtype of q.
    """
    if old is None:
        k, v = read
        mask = None
    else:
        k, v = (torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(read, new))
        causal = torch.ones_like(old).tril()
        mask = torch.cat([old & causal, ~old & causal], 1)
    rows, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )  # fmt: skip
    return out.transpose(1, 2).to(q.dtype)


def gather_all(cache: KVCache, page_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of sequences of equal length, decoded: K and V ``[num_seqs, num_tokens, num_kv_heads, head_dim]`` float32."""
    lens = torch.full((page_table.shape[0],), num_tokens, dtype=torch.int32, device=page_table.device)
    k, v, _, _ = gather_window(cache, page_table, lens, window=None, dense=True, dtype=torch.float32)
    return k[:, :num_tokens], v[:, :num_tokens]


def by_folded_pages(k: torch.Tensor, format: str) -> torch.Tensor:
    """Store whole pages of keys by `quantize_pages` and read them back, with several pages and all heads side by side as dims of one head.

    The scale of a channel does not look at its neighbours: the numbers are those of pages as they are, for fewer programs.

    Args:
        k: ``[num_seqs, num_tokens, num_kv_heads, head_dim]``, num_tokens a multiple of `PAGE_SIZE`.
        format: a ``page_channel`` format.

    Returns:
        k decoded, float32, in its shape.
    """
    fold = max(1, MAX_HEAD_DIM // (k.shape[2] * k.shape[3]))
    num_pages = k.shape[0] * k.shape[1] // PAGE_SIZE
    rows = -(-num_pages // fold)
    # Pages of nothing fill the last row up.
    pages = k.new_zeros(rows * fold, PAGE_SIZE, *k.shape[2:])
    pages[:num_pages] = k.reshape(num_pages, PAGE_SIZE, *k.shape[2:])
    folded = pages.view(rows, fold, PAGE_SIZE, -1).transpose(1, 2).reshape(rows, PAGE_SIZE, 1, -1)
    native = KVCache(folded, folded.new_zeros(rows, PAGE_SIZE, 1, MIN_HEAD_DIM))
    cache = KVCache.empty(rows, PAGE_SIZE, 1, native.head_dim, (format, native.v_format), device=k.device, v_head_dim=MIN_HEAD_DIM)
    order = torch.arange(rows, device=k.device)
    quantize_pages(native, cache, order, order)
    read, _ = gather_all(cache, order[None], rows * PAGE_SIZE)
    return read.view(rows, PAGE_SIZE, fold, -1).transpose(1, 2).reshape(pages.shape)[:num_pages].reshape(k.shape)


@contextmanager
def few_programs() -> Iterator[None]:
    """Let kernels that write, convert and gather rows take as many rows in one program as Triton allows, while the context is open."""
    run = Launch.run

    def run_few(launch: Launch, device: torch.device) -> None:
        run(with_large_blocks(launch), device)

    Launch.run = run_few  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Launch.run = run  # type: ignore[method-assign]


def with_large_blocks(launch: Launch) -> Launch:
    """The launch with the work of the last dimension of its grid in larger blocks, if its kernel takes blocks of rows or of words."""
    for name in ("BLOCK_R", "BLOCK_W"):
        if name in launch.kernel.arg_names:
            index = launch.kernel.arg_names.index(name)
            work = launch.grid[-1] * launch.args[index]
            width = max(kind.WIDTH for kind in launch.args if hasattr(kind, "WIDTH")) if name == "BLOCK_R" else PAGE_SIZE
            block = min(1 << (work - 1).bit_length(), INTERPRETED_TILE // width)
            args = (*launch.args[:index], block, *launch.args[index + 1 :])
            return replace(launch, grid=(*launch.grid[:-1], -(-work // block)), args=args)
    return launch
