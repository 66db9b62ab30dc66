"""A text longer than the model's context, read within a budget of keys: sink tokens and a window, at positions inside the cache."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from tabulate import tabulate

from tkv.demo import PICTURES
from tkv.demo.attention import empty_caches
from tkv.demo.decode import DTYPES, device, device_name
from tkv.demo.model import Tokenizer, describe, find_gguf, load_model, load_tokenizer, says_nothing_about
from tkv.demo.page_map import check_png
from tkv.demo.streaming_plot import Curve, draw_curves
from tkv.demo.text import passages
from tkv.demo.windowed import PAGE_SIZE, StreamingModel
from tkv.demo.workers import Progress, cores, run_tasks

# More than SmolLM2's context of 8,192.
TOKENS = 9216
STRETCH = 1024
# Keys that a query sees at most, sink tokens included.
BUDGET = 256
SINKS = 4
CHUNK = 128
# Tokens that are generated after the text, and how many of them tkv's kernels compute too.
GENERATED = 40
DECODED = 6
# By dtype of the model: the largest difference of a logit, as a part of the largest logit, that rounding in 30 layers explains.
BOUNDS = {"fp32": 1e-4, "bf16": 0.05}
HOW_TO_PLOT = "for a picture of this table install matplotlib, `pip install 'tkv[demo]'`"


@dataclass(frozen=True)
class Scheme:
    """What queries see: all keys if there is no window, else those of the window and the sink tokens."""

    name: str
    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class Task:
    """What one process does: read a text in a scheme."""

    scheme: Scheme
    dtype: str
    gguf: Path | None
    ids: tuple[int, ...]
    started: float


@dataclass(frozen=True)
class Decoded:
    """Logits by tkv's kernels against those by torch's attention, token by token."""

    difference: float
    largest: float
    same_choices: int
    tokens: int

    def agrees(self, dtype: str) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= BOUNDS[dtype] * self.largest


@dataclass(frozen=True)
class Read:
    """A text that was read."""

    scheme: Scheme
    losses: torch.Tensor  # [tokens - 1] float64: nats, of each token from those before it
    pages: tuple[tuple[int, int], ...]  # (tokens read, pages held) after each chunk
    generated: tuple[int, ...]  # what follows by the model
    decoded: Decoded | None
    bytes_per_page: int  # all layers
    model: str

    def perplexity(self, first: int, last: int) -> float | None:
        """Of the tokens at positions first to last - 1, if all of them were read; the first token of the text has none."""
        # The loss of a token stands one place before it.
        return None if last - 1 > len(self.losses) else float(self.losses[max(first - 1, 0) : last - 1].mean().exp())


def run(dtype: str = "fp32", workers: int | None = None, out: Path | None = None) -> int:
    """Show the scenario: print its tables to stdout, its progress to stderr, and draw the picture.

    Args:
        dtype: of the model and of its cache, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None.
        out: where the picture goes; the file named in `PICTURES` if None.

    Returns:
        0, or 1 if the kernels' attention does not give the logits of torch's.

    Raises:
        tkv.demo.DemoError: the picture cannot be written; a process was killed.
    """
    started = time.monotonic()
    path = Path(PICTURES["streaming"]) if out is None else out
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw:
        check_png(path, "picture")
    progress = Progress("demo", started)
    gguf, name = find_gguf()
    if gguf is None:
        print(says_nothing_about("text", name))
    progress.stage("reading the text" if gguf is None else f"reading the text with the tokenizer of {name}")
    tokenizer = load_tokenizer(gguf)
    ids = read_text(tokenizer)
    tasks = [Task(scheme, dtype, gguf, ids, started) for scheme in schemes()]
    on_gpu = device().type == "cuda"
    reads = run_tasks(run_task, tasks, 1 if on_gpu else workers or cores())

    print(f"{reads[0].model}; {dtype}, on {device_name()}\n")
    print_stretches(reads, len(ids))
    print_pages(reads, len(ids))
    print_generated(reads, ids, tokenizer)
    compared = [(read.scheme, read.decoded) for read in reads if read.decoded is not None]
    wrong = [scheme for scheme, decoded in compared if not print_decoded(scheme, decoded, dtype)]
    if can_draw:
        title = f"{reads[0].model.partition(':')[0]}: {len(ids):,} tokens of text within {BUDGET} keys"
        draw_curves([curve_of(read, len(ids)) for read in reads], title, path)
        print(f"As a picture: {path.resolve()}\n")
    else:
        print(f"matplotlib is not installed: {HOW_TO_PLOT}\n")
    print(f"All of this was computed in {time.monotonic() - started:.0f} s.")
    if wrong:
        print("The kernels' logits differ from those of torch's attention by more than rounding explains.")
    return 1 if wrong else 0


def schemes() -> list[Scheme]:
    """What is compared, what takes longest first: each reads as many keys, but for the full cache."""
    return [
        Scheme(f"{SINKS} sinks + window of {BUDGET - SINKS}", BUDGET - SINKS, SINKS),
        Scheme(f"window of {BUDGET}, no sinks", BUDGET),
        Scheme("full cache"),
    ]


def read_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The first `TOKENS` tokens of the language reference's prose, page after page."""
    ids: list[int] = []
    for text in passages():
        ids += tokenizer.encode(text + "\n\n")
        if len(ids) >= TOKENS:
            break
    return tuple(ids[:TOKENS])


def run_task(task: Task) -> Read:
    """Read the text; in a process of its own, or here."""
    # Unwritten slots may hold anything; numpy, which the interpreter computes with, remarks on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    progress = Progress(task.scheme.name, task.started)
    progress.stage("loading the model")
    model = _model(task.gguf, task.dtype)
    window = task.scheme.window
    return read_full(task, model, progress) if window is None else read_streaming(task, window, model, progress)


@lru_cache(maxsize=1)
def _model(gguf: Path | None, dtype: str) -> Any:
    return load_model(gguf, DTYPES[dtype], device())


@torch.no_grad()
def read_full(task: Task, model: Any, progress: Progress) -> Read:
    """By the model's own attention, as far as its context goes."""
    ids = torch.tensor(task.ids[: model.config.max_position_embeddings], device=model.device)
    progress.stage(f"{len(ids):,} tokens at once, the model's own attention")
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    pages = tuple((count, -(-count // PAGE_SIZE)) for count in chunk_ends(len(task.ids)))
    return _read(task, model, losses_of(model, hidden, ids, progress), pages)


@torch.no_grad()
def read_streaming(task: Task, window: int, model: Any, progress: Progress) -> Read:
    """Chunk by chunk through the paged cache, then on by the likeliest tokens."""
    cached = StreamingModel(model, window, task.scheme.sinks, CHUNK, progress.layer)
    ids = torch.tensor(task.ids, device=model.device)
    hidden: list[torch.Tensor] = []
    pages: list[tuple[int, int]] = []
    for end in chunk_ends(len(ids)):
        first = pages[-1][0] if pages else 0
        if first % STRETCH == 0:
            progress.stage(f"tokens {first + 1:,} to {min(first + STRETCH, len(ids)):,} of {len(ids):,}")
        hidden.append(cached.by_torch(cached.step(ids[first:end]), ids[first:end]))
        pages.append((end, cached.pages_held))
    losses = losses_of(model, torch.cat(hidden), ids, progress)
    generated, decoded = generate(cached, model.lm_head(hidden[-1][-1]), progress, DECODED if task.scheme.sinks else 0)
    return _read(task, model, losses, tuple(pages), generated, decoded)


def generate(
    cached: StreamingModel, logits: torch.Tensor, progress: Progress, decoded: int
) -> tuple[tuple[int, ...], Decoded | None]:  # fmt: skip
    """Go on by the likeliest tokens.

    Args:
        cached: what was read.
        logits: ``[vocabulary]``, after the last token.
        progress: lines about it.
        decoded: how many of the tokens the decode kernel computes too, on the same pages.

    Returns:
        `GENERATED` tokens; and the comparison, if there was any.
    """
    progress.stage(f"generating {GENERATED} tokens" + (f", {decoded} of them by torch and by paged_decode" if decoded else ""))
    tokens = [int(logits.argmax())]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    while len(tokens) < GENERATED:
        newest = torch.tensor(tokens[-1:], device=logits.device)
        batch = cached.step(newest)
        by_kernels = cached.by_kernels(batch, newest) if len(pairs) < decoded else None
        # Written a second time, by the pass that the next token follows from.
        logits = cached.model.lm_head(cached.by_torch(batch, newest))[-1].float()
        if by_kernels is not None:
            pairs.append((cached.model.lm_head(by_kernels)[-1].float(), logits))
        tokens.append(int(logits.argmax()))
    if not pairs:
        return tuple(tokens), None
    got, expected = (torch.stack(side) for side in zip(*pairs))
    same = int((got.argmax(-1) == expected.argmax(-1)).sum())
    return tuple(tokens), Decoded(float((got - expected).abs().max()), float(expected.abs().max()), same, len(pairs))


def chunk_ends(count: int) -> list[int]:
    """Where chunks end: after each `CHUNK` tokens, and after the last."""
    return [*range(CHUNK, count, CHUNK), count]


def losses_of(model: Any, hidden: torch.Tensor, ids: torch.Tensor, progress: Progress) -> torch.Tensor:
    """``[tokens - 1]`` float64: the negative log-likelihood of each token from those before it."""
    progress.stage("likelihoods")
    parts = [
        torch.nn.functional.cross_entropy(model.lm_head(rows).float(), tokens, reduction="none")
        for rows, tokens in zip(hidden[:-1].split(STRETCH), ids[1:].split(STRETCH))
    ]
    return torch.cat(parts).double().cpu()


def _read(
    task: Task, model: Any, losses: torch.Tensor, pages: tuple[tuple[int, int], ...], generated: tuple[int, ...] = (),
    decoded: Decoded | None = None,
) -> Read:  # fmt: skip
    native = empty_caches(model, "bf16" if task.dtype == "bf16" else "fp32", 1, PAGE_SIZE)
    size = round(sum(cache.bytes_per_token for cache in native)) * PAGE_SIZE
    name = describe(model.config, task.gguf.stem if task.gguf else "random Llama")
    return Read(task.scheme, losses, pages, generated, decoded, size, name)


def print_stretches(reads: Sequence[Read], tokens: int) -> None:
    """Perplexity along the text."""
    rows = []
    for first in range(0, tokens, STRETCH):
        last = min(first + STRETCH, tokens)
        rows.append((f"{first + 1:,} to {last:,}", *(_number(read.perplexity(first, last)) for read in reads)))
    covered = min(len(read.losses) + 1 for read in reads)
    together = [cast("float", read.perplexity(0, covered)) for read in reads]
    rows.append((f"all up to {covered:,}", *map(_number, together)))
    for read, full in zip(reads, together):
        if read.scheme.window is None:
            rows.append(("of full cache's", *(f"{value / full:.3f}" for value in together)))
    print(f"Perplexity of {tokens:,} tokens of prose (Python's language reference), a token at a time from what it sees")
    headers = ["tokens", *(read.scheme.name for read in reads)]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] + ["right"] * len(reads)))
    print(
        f"With a window: BY TKV the pages (CacheManager), K and V into them (write_kv, keys unrotated) and back (gather_window), {CHUNK} "
        "tokens\n"
        "at a time; BY TORCH the attention, each query to exactly the keys of its own window, at positions inside the cache: none\n"
        f"reaches {BUDGET}, so that no position is new to the model. Full cache: the model's own attention, as far as its context goes\n"
        "(-: past it).\n"
    )


def print_pages(reads: Sequence[Read], tokens: int) -> None:
    """What is held at the end of each stretch."""
    ends = sorted({min(first + STRETCH, tokens) for first in range(0, tokens, STRETCH)})
    rows = [(f"{end:,}", *(_pages(_held(read, end), read.bytes_per_page) for read in reads)) for end in ends]
    rows.append(("most", *(_pages(max(count for _, count in read.pages), read.bytes_per_page) for read in reads)))
    print(f"Pages of {PAGE_SIZE} tokens held after so many tokens, and their bytes in all layers")
    headers = ["tokens", *(read.scheme.name for read in reads)]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["right"] * (1 + len(reads))))
    print(f"The {CHUNK} new tokens of a chunk are in the pages too. Full cache: what it takes; its attention ran without pages.\n")


def print_generated(reads: Sequence[Read], ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """How the text goes on."""
    print(f"The text ends: ...{_printable(tokenizer.decode(ids[-30:]))}")
    for read in reads:
        if read.generated:
            print(f"Likeliest next {len(read.generated)} tokens, {read.scheme.name}: {_printable(tokenizer.decode(read.generated))}")
    print()


def print_decoded(scheme: Scheme, decoded: Decoded, dtype: str) -> bool:
    """The comparison of both attentions; returns whether they agree."""
    agrees = decoded.agrees(dtype)
    print(
        f"{scheme.name}: {decoded.tokens} tokens after the text decoded one by one BY TKV'S KERNEL, paged_decode with window, sinks "
        "and\n"
        f"rope (rotation at read), and by torch on the same pages: largest difference of a logit {decoded.difference:.1e} (largest logit "
        f"{decoded.largest:.1f},\nallowed {BOUNDS[dtype] * decoded.largest:.1e}), same likeliest token {decoded.same_choices} of "
        f"{decoded.tokens}: {'agrees' if agrees else 'DOES NOT AGREE'}\n"
    )
    return agrees


def curve_of(read: Read, tokens: int) -> Curve:
    """A scheme in the picture: perplexity in quarters of stretches."""
    step = max(1, STRETCH // 4)
    ends = [end for end in range(step, tokens + 1, step) if end - 1 <= len(read.losses)]
    points = tuple((end, cast("float", read.perplexity(end - step, end))) for end in ends)
    return Curve(read.scheme.name, points, read.pages)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _held(read: Read, end: int) -> int:
    """Pages after the chunk that has the last of so many tokens."""
    return next(count for tokens, count in read.pages if tokens >= end)


def _pages(count: int, size: int) -> str:
    return f"{count:,} ({count * size / 2**20:,.1f} MiB)"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
