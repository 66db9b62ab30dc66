"""Shapes of models that people serve, by name: what tuning, measuring and sizing a cache take for examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tkv.errors import RangeError, UnsupportedError
from tkv.tune.keys import check_op
from tkv.tune.model import Shape


@dataclass(frozen=True)
class Model:
    """Attention of one model, or of one rank of it.

    Attributes:
        name: what it is called on the command line.
        layers: attention layers.
        num_q_heads, num_kv_heads, head_dim: of a layer, on one GPU.
        v_head_dim: of V; None where it is head_dim.
        window: keys that a token sees in the layers that have a sliding window; None if none have.
        windowed_layers: how many layers have it; None for all of them.
        softcap: bound of the scores.
        sink_logits: the heads have learned sinks.
        shares_v: V is a view of K (latent attention).

    Example:
        >>> MODELS["gemma2-9b"].window, MODELS["gemma2-9b"].windowed_layers, MODELS["gemma2-9b"].layers
        (4096, 21, 42)
    """

    name: str
    layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    windowed_layers: int | None = None
    softcap: float | None = None
    sink_logits: bool = False
    shares_v: bool = False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The kinds of layers: None for those that see all keys, then the window of the others.

        Example:
            >>> MODELS["llama3-8b"].windows, MODELS["mistral-7b"].windows, MODELS["gpt-oss-20b"].windows
            ((None,), (4096,), (None, 128))
        """
        if self.window is None:
            return (None,)
        return (self.window,) if self.windowed_layers is None else (None, self.window)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("llama3-8b", 32, 32, 8, 128),
        Model("llama3-70b-tp8", 80, 8, 1, 128),
        Model("qwen2.5-7b", 28, 28, 4, 128),
        Model("mistral-7b", 32, 32, 8, 128, window=4096),
        Model("gemma2-9b", 42, 16, 8, 256, window=4096, windowed_layers=21, softcap=50.0),
        Model("gpt-oss-20b", 24, 64, 8, 64, window=128, windowed_layers=12, sink_logits=True),
        Model("llama2-7b", 32, 32, 32, 128),
        Model("falcon-7b", 32, 71, 1, 64),
        Model("phi3-mini", 32, 32, 32, 96),
        Model("deepseek-mla", 61, 128, 1, 576, v_head_dim=512, shares_v=True),
    )
}
"""Models by name. ``llama3-70b-tp8`` is one of eight tensor-parallel ranks; ``deepseek-mla`` is latent attention in its absorbed form."""

# New rows of a sequence: decoding has one, a chunk of prefill many, a cascade one for each sequence, scores those of an observation window.
Q_LENS = {"paged_decode": 1, "prefix_prefill": 2048, "shared_prefix_decode": 1, "key_scores": 32}
# What is measured where nothing is named: one sequence, a small and a large batch, short and long.
BATCHES = {"paged_decode": (1, 16, 128), "prefix_prefill": (1, 8), "shared_prefix_decode": (16, 128), "key_scores": (1, 16)}
LENGTHS = {
    "paged_decode": (1024, 8192, 65536),
    "prefix_prefill": (2048, 16384),
    "shared_prefix_decode": (2048, 16384),
    "key_scores": (8192,),
}


def model_of(name: str) -> Model:
    """A model by its name.

    Raises:
        UnsupportedError: there is none, with the names of those that there are.

    Example:
        >>> model_of("llama3-8b").num_kv_heads
        8
    """
    if name not in MODELS:
        raise UnsupportedError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def shapes_of(
    model: str | Model, op: str = "paged_decode", batches: Iterable[int] | None = None, lengths: Iterable[int] | None = None, *,
    format: str = "bf16", dtype: str = "bf16", page_size: int = 16, q_len: int | None = None, max_tokens: int = 1 << 21,
) -> list[Shape]:  # fmt: skip
    """The calls of an op that serving a model makes: every batch with every length, for each kind of its layers.

    Args:
        model: one of `MODELS`, or its name.
        op: one of ``tkv.tune.keys.OP_KINDS``.
        batches: numbers of sequences; those of `BATCHES` if None.
        lengths: keys of each sequence, new ones included, of a cascade the keys that all share; those of `LENGTHS` if None.
        format: of the cache, or of K and of V with a ``+`` between.
        dtype: of q, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        page_size: keys of a page.
        q_len: new rows of a sequence; that of `Q_LENS` if None, and never more than the keys.
        max_tokens: shapes with more keys in all are left out: they would need a very large cache.

    Returns:
        Shapes, each once, short ones first. A layer with a window has none that is no longer than its window: there it does nothing.

    Raises:
        UnsupportedError: an unknown model or op.
        RangeError: a batch, length or q_len below 1.

    Example:
        >>> [(shape.num_seqs, shape.kv_len) for shape in shapes_of("llama3-8b", batches=[1, 64], lengths=[8192, 1024])]
        [(1, 1024), (64, 1024), (1, 8192), (64, 8192)]
        >>> [(shape.flags, shape.window) for shape in shapes_of("gpt-oss-20b", batches=[1], lengths=[1024])]
        [((), None), (('window',), 128)]
    """
    model = model if isinstance(model, Model) else model_of(model)
    check_op(op)
    batches = _counts("batches", BATCHES[op] if batches is None else batches)
    lengths = _counts("lengths", LENGTHS[op] if lengths is None else lengths)
    rows = _counts("q_len", [Q_LENS[op] if q_len is None else q_len])[0]
    found = []
    for length in lengths:
        for window in model.windows:
            if window is not None and length <= window:
                continue
            flags = {"shared": model.shares_v, "softcap": model.softcap is not None, "window": window is not None}
            for num_seqs in batches:
                tokens = length if op == "shared_prefix_decode" else num_seqs * length
                if tokens <= max_tokens:
                    shape = Shape(
                        op, num_seqs, min(rows, length), length, model.num_q_heads, model.num_kv_heads, model.head_dim,
                        model.v_head_dim or model.head_dim, dtype, format, page_size,
                        tuple(name for name, is_set in flags.items() if is_set), window=window,
                    )  # fmt: skip
                    found.append(shape)
    return found


def _counts(name: str, values: Iterable[int]) -> Sequence[int]:
    counts = sorted(set(values))
    if not counts or counts[0] < 1:
        raise RangeError(f"{name}: expected numbers of at least 1, got {list(counts)}")
    return counts
