"""Decoding from the paged cache: the same tokens as the model's own attention, and what quantised formats change."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tkv.demo.attention import PagedModel
from tkv.demo.model import Tokenizer, describe, find_gguf, load_model, load_tokenizer, says_nothing_about
from tkv.demo.text import passages
from tkv.demo.workers import Progress, cores, run_tasks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTISED = ("fp8_e4m3/token_head", "int8/token_head")
# Tokens of each sequence before the first one that reads the paged cache.
PREFIXES = (14, 38, 66)
NEW_TOKENS = 8
BLOCK, BLOCKS = 16, 2
PAGE_SIZE = 16
# The interpreter pays for a tile, hardly for its size: few large ones.
INTERPRETED_TILE = (64, 128)


@dataclass(frozen=True)
class Task:
    """What one process does: ``greedy`` or ``forced``, on one format."""

    kind: str
    format: str
    dtype: str
    gguf: Path | None
    ids: tuple[tuple[int, ...], ...]  # of each sequence: the prefix and what follows it in the text
    prefixes: tuple[int, ...]
    started: float


@dataclass(frozen=True)
class Usage:
    """Memory of a paged cache, all layers together."""

    bytes_per_token: int
    lens: tuple[int, ...]
    pages: tuple[int, ...]
    unused_slots: int
    page_size: int
    context: int  # most tokens that the model can take

    @property
    def paged(self) -> int:
        """Bytes of the pages in use."""
        return sum(self.pages) * self.page_size * self.bytes_per_token

    def contiguous(self, max_len: int) -> int:
        """Bytes of a cache that keeps room for `max_len` tokens of each sequence."""
        return len(self.lens) * max_len * self.bytes_per_token


@dataclass(frozen=True)
class Greedy:
    """Tokens chosen by the model's own attention and by the paged one."""

    own: list[list[int]]
    paged: list[list[int]]
    largest_difference: float  # of the logits, over the steps up to the first difference
    smallest_margin: float  # between the best logit and the next, the model's own
    pages: tuple[int, ...]
    model: str


@dataclass(frozen=True)
class Forced:
    """What a format does to the next-token distributions of a text."""

    positions: int
    agreements: int
    mean_kl: float
    max_kl: float
    own_nll: float
    nll: float
    usage: Usage


def run(dtype: str = "fp32", workers: int | None = None) -> int:
    """Show the scenario: print its tables to stdout and its progress to stderr.

    Args:
        dtype: of the model and of its unquantised cache, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None.

    Returns:
        0, or 1 if the unquantised cache in float32 does not give the tokens of the model's own attention.

    Raises:
        tkv.demo.DemoError: a process was killed.
    """
    started = time.monotonic()
    progress = Progress("demo", started)
    gguf, name = find_gguf()
    if gguf is None:
        print(says_nothing_about("text", name))
    progress.stage("reading the text" if gguf is None else f"reading the text with the tokenizer of {name}")
    tokenizer = load_tokenizer(gguf)
    ids = text_ids(tokenizer)
    tasks = [Task("forced", format, dtype, gguf, ids, PREFIXES, started) for format in (*QUANTISED, dtype)]
    # The longest first, so that no process is left alone with it at the end.
    tasks.insert(len(QUANTISED), replace(tasks[-1], kind="greedy"))
    on_gpu = device().type == "cuda"
    results = run_tasks(run_task, tasks, 1 if on_gpu else workers or cores())

    greedy = next(result for result in results if isinstance(result, Greedy))
    forced = {task.format: result for task, result in zip(tasks, results) if isinstance(result, Forced)}
    forced = {dtype: forced[dtype], **forced}
    print(f"{greedy.model}; {dtype}, on {device_name()}\n")
    print_greedy(greedy, ids, tokenizer, dtype)
    print_forced(forced)
    print_usage({format: result.usage for format, result in forced.items()})
    print(f"All of this was computed in {time.monotonic() - started:.0f} s.")
    same = greedy.own == greedy.paged
    if not same:
        print("The tokens of the paged cache differ from those of the model's own attention" + ("." if dtype == "fp32" else ": rounding."))
    return 0 if same or dtype != "fp32" else 1


def text_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Tokens of one passage of text for each sequence: its prefix, the positions that are forced, and the token after the last."""
    wanted = [prefix + BLOCK * BLOCKS + 1 for prefix in PREFIXES]
    long_enough = (ids for ids in map(tokenizer.encode, passages()) if len(ids) >= max(wanted))
    return tuple(tuple(ids[:length]) for ids, length in zip(islice(long_enough, len(wanted)), wanted))


def device() -> torch.device:
    """Where the model runs: a GPU if there is one and the kernels are compiled for it."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")


def device_name() -> str:
    """What the kernels run on, for people."""
    return torch.cuda.get_device_name() if device().type == "cuda" else "CPU, kernels in Triton's interpreter"


def run_task(task: Task) -> Greedy | Forced:
    """Do a task; in a process of its own, or here."""
    # Unwritten slots may hold anything; numpy, which the interpreter computes with, remarks on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    progress = Progress(f"{task.format}, {'greedy' if task.kind == 'greedy' else 'teacher-forced'}", task.started)
    progress.stage("loading the model")
    model = _model(task.gguf, task.dtype)
    return (greedy if task.kind == "greedy" else teacher_forced)(task, model, progress)


@lru_cache(maxsize=1)
def _model(gguf: Path | None, dtype: str) -> Any:
    return load_model(gguf, DTYPES[dtype], device())


def greedy(task: Task, model: Any, progress: Progress) -> Greedy:
    """Continue every prefix by the likeliest tokens, with the model's own attention and with the paged one."""
    prefixes = [list(ids[:length]) for ids, length in zip(task.ids, task.prefixes)]
    progress.stage("the model's own attention")
    own = [own_continuation(model, prefix, NEW_TOKENS) for prefix in prefixes]
    paged = paged_model(task, model, progress, NEW_TOKENS)
    # The last token of a prefix is the first that decodes from the cache.
    prefill(paged, [prefix[:-1] for prefix in prefixes], progress)
    newest = [[prefix[-1]] for prefix in prefixes]
    tokens: list[list[int]] = [[] for _ in prefixes]
    difference = 0.0
    for step in range(NEW_TOKENS):
        progress.stage(f"token {step + 1} of {NEW_TOKENS} of {len(prefixes)} sequences")
        logits = paged.forward(range(len(prefixes)), newest)[:, -1].float()
        for seq, (reference, row) in enumerate(zip(own, logits)):
            if tokens[seq] == reference[0][:step]:
                difference = max(difference, float((row - reference[1][step]).abs().max()))
            tokens[seq].append(int(row.argmax()))
        newest = [[sequence[-1]] for sequence in tokens]
    best = torch.stack([logits for _, logits in own]).topk(2).values
    return Greedy(
        own=[reference for reference, _ in own],
        paged=tokens,
        largest_difference=difference,
        smallest_margin=float((best[..., 0] - best[..., 1]).min()),
        pages=tuple(map(len, paged.pages)),
        model=describe(model.config, task.gguf.stem if task.gguf else "random Llama"),
    )


def teacher_forced(task: Task, model: Any, progress: Progress) -> Forced:
    """Next-token distributions along the text, block by block: the new tokens' K and V are written, then all of them decode at once."""
    seqs = range(len(task.ids))
    progress.stage("the model's own attention")
    expected = torch.stack([own_logits(model, ids[:-1])[length:] for ids, length in zip(task.ids, task.prefixes)])
    paged = paged_model(task, model, progress, BLOCK * BLOCKS)
    prefill(paged, [list(ids[:length]) for ids, length in zip(task.ids, task.prefixes)], progress)
    blocks = []
    for first in range(0, BLOCK * BLOCKS, BLOCK):
        progress.stage(f"tokens {first + 1} to {first + BLOCK} of {BLOCK * BLOCKS} of {len(seqs)} sequences")
        new = [ids[length + first : length + first + BLOCK] for ids, length in zip(task.ids, task.prefixes)]
        blocks.append(paged.forward(seqs, new))
    logits = torch.cat(blocks, dim=1)

    # float64: the unquantised cache differs by less than float32 resolves.
    own, got = (tensor.double().log_softmax(-1) for tensor in (expected, logits))
    kl = (own.exp() * (own - got)).sum(-1)
    text = torch.tensor([ids[length + 1 :] for ids, length in zip(task.ids, task.prefixes)], device=kl.device)[..., None]
    progress.stage("done")
    return Forced(
        positions=kl.numel(),
        agreements=int((expected.argmax(-1) == logits.argmax(-1)).sum()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        own_nll=float(-own.gather(-1, text).mean()),
        nll=float(-got.gather(-1, text).mean()),
        usage=Usage(
            bytes_per_token=paged.bytes_per_token,
            lens=tuple(paged.lens),
            pages=tuple(map(len, paged.pages)),
            unused_slots=paged.unused_slots,
            page_size=paged.page_size,
            context=model.config.max_position_embeddings,
        ),
    )


def paged_model(task: Task, model: Any, progress: Progress, new_tokens: int) -> PagedModel:
    """A pool with a quarter more pages than the sequences of a task will need."""
    needed = sum(-(-(length + new_tokens) // PAGE_SIZE) for length in task.prefixes)
    tile = INTERPRETED_TILE if model.device.type == "cpu" else None
    return PagedModel(model, task.format, needed + needed // 4, PAGE_SIZE, tile, progress.layer)


def prefill(paged: PagedModel, prefixes: list[list[int]], progress: Progress) -> None:
    """Fill the cache with the prefixes, one at a time: nothing is padded."""
    for prefix in prefixes:
        progress.stage(f"prefill of {len(prefix)} tokens, written to {paged.format} pages")
        paged.forward([paged.add_sequence()], [prefix])


@torch.no_grad()
def own_logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """The model's logits at every token, with its own attention in torch and no cache: ``[len(ids), vocabulary]``."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits
    return logits[0]


@torch.no_grad()
def own_continuation(model: Any, ids: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest continuation by transformers' own ``generate``: tokens, and the logits that they were chosen from."""
    tokens = torch.tensor([ids], device=model.device)
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits).float()


def print_greedy(greedy: Greedy, ids: tuple[tuple[int, ...], ...], tokenizer: Tokenizer, dtype: str) -> None:
    """The tokens, and the text that they are."""
    print(f"Greedy decoding, a batch of {len(ids)} sequences, {dtype} pages of {PAGE_SIZE} tokens")
    rows = []
    for prefix, sequence, pages, own, paged in zip(PREFIXES, ids, greedy.pages, greedy.own, greedy.paged):
        same = sum(a == b for a, b in zip(own, paged))
        text = f"...{_printable(tokenizer.decode(sequence[prefix - 9 : prefix]))} -> {_printable(tokenizer.decode(paged))}"
        rows.append((prefix, prefix + NEW_TOKENS, pages, f"{same} of {len(own)}", text))
    print(tabulate(rows, headers=["prefix", "tokens", "pages", "same as own attention", "text -> continuation"]))
    print(
        f"Largest difference of a logit from the model's own attention: {greedy.largest_difference:.1e}; "
        f"smallest margin of a chosen token: {greedy.smallest_margin:.1e}\n"
    )


def print_forced(forced: dict[str, Forced]) -> None:
    """What each format does to the distributions."""
    positions = next(iter(forced.values())).positions
    print(f"Teacher-forced over {positions} positions, against the model's own attention in torch (KL divergence in nats)")
    headers = ["format", "top-1 agreement", "mean KL", "largest KL", "perplexity", "with own attention"]
    rows = [
        (
            format,
            f"{result.agreements}/{result.positions} = {result.agreements / result.positions:.1%}",
            f"{result.mean_kl:.1e}",
            f"{result.max_kl:.1e}",
            f"{math.exp(result.nll):.3f}",
            f"{math.exp(result.own_nll):.3f}",
        )
        for format, result in forced.items()
    ]
    print(_table(rows, headers) + "\n")


def print_usage(usages: dict[str, Usage]) -> None:
    """What each format takes."""
    native, first = next(iter(usages.items()))
    longest, slots = max(first.lens), sum(first.pages) * first.page_size
    print(
        f"Memory after that: {len(first.lens)} sequences of {', '.join(map(str, first.lens))} tokens in {sum(first.pages)} pages of "
        f"{first.page_size} ({' + '.join(map(str, first.pages))});\n{first.unused_slots} of their {slots} slots are unused, in the "
        f"last page of each sequence ({first.unused_slots / slots:.1%})"
    )
    headers = ["format", "bytes a token", "unused", "paged", f"contiguous, {longest}", f"contiguous, {first.context:,}", "saves"]
    rows = [
        (
            format,
            f"{usage.bytes_per_token:,}",
            _mib(usage.unused_slots * usage.bytes_per_token),
            _mib(usage.paged),
            _mib(usage.contiguous(longest)),
            _mib(usage.contiguous(usage.context)),
            f"{1 - usage.paged / first.contiguous(longest):.0%}",
        )
        for format, usage in usages.items()
    ]
    print(_table(rows, headers))
    print(
        "All layers, scales included. Contiguous: room for as many tokens of every sequence as the longest has, or as the model can take.\n"
        f"Saves: paged against {native}, contiguous for the longest.\n"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _table(rows: Sequence[tuple[str, ...]], headers: list[str]) -> str:
    align = ["left"] + ["right"] * (len(headers) - 1)
    return str(tabulate(rows, headers=headers, disable_numparse=True, colalign=align))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
