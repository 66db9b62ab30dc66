"""Questions to an assistant with a long system prompt: what they share is computed once, stored once, and read once a step."""

from __future__ import annotations

import importlib.util
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tkv.demo import PICTURES
from tkv.demo.attention import Reads, ServedModel
from tkv.demo.decode import DTYPES, device, device_name
from tkv.demo.interpreter import quick_interpreter
from tkv.demo.model import Tokenizer, describe, find_gguf, load_model, load_tokenizer, says_nothing_about
from tkv.demo.page_map import HOW_TO_DRAW, PageMap, check_png, draw_png, text_lines
from tkv.demo.text import QUESTIONS, SYSTEM_PROMPT, chat_start, chat_turn
from tkv.demo.workers import Progress, cores, run_tasks
from tkv.ops.launch import interpreting
from tkv.pages import CacheStats

NEW_TOKENS = 5
PAGE_SIZE = 16
# The random model takes letters for tokens, and fewer of them.
RANDOM_SYSTEM_TOKENS = 700
# The interpreter pays for a tile, hardly for its size: few large ones.
INTERPRETED_TILE_KEYS = 512


@dataclass(frozen=True)
class Task:
    """What one process does: ``served``, by tkv, or ``own``, by the model's own attention."""

    kind: str
    dtype: str
    gguf: Path | None
    system: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    started: float

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of each request."""
        return [[*self.system, *question] for question in self.questions]


@dataclass(frozen=True)
class Answers:
    """The likeliest tokens after each prompt, and the logits that they were chosen from."""

    tokens: list[list[int]]
    logits: torch.Tensor  # [questions, new tokens, vocabulary] float32


@dataclass(frozen=True)
class Served(Answers):
    """And what serving them took."""

    found: list[int]  # tokens of each prompt that were in the cache
    lens: list[int]
    pages: tuple[tuple[int, ...], ...]
    num_pages: int
    stats: CacheStats
    reads: Reads | None
    shared_keys: tuple[int, ...]  # of each level, of its largest group
    bytes_per_token: int
    model: str


def run(dtype: str = "fp32", workers: int | None = None, out: Path | None = None) -> int:
    """Show the scenario: print its tables and its page map to stdout, and its progress to stderr.

    Args:
        dtype: of the model and of its cache, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None.
        out: where the picture of the page map goes; the file named in `PICTURES` if None.

    Returns:
        0, or 1 if a float32 cache does not give the tokens of the model's own attention.

    Raises:
        tkv.demo.DemoError: the picture cannot be written; a process was killed.
    """
    started = time.monotonic()
    path = Path(PICTURES["shared-prefix"]) if out is None else out
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw:
        check_png(path)
    progress = Progress("demo", started)
    gguf, name = find_gguf()
    if gguf is None:
        print(says_nothing_about("text", name))
    progress.stage("reading the text" if gguf is None else f"reading the text with the tokenizer of {name}")
    tokenizer = load_tokenizer(gguf)
    system = tokenizer.encode(chat_start(SYSTEM_PROMPT))
    if gguf is None:
        system = system[:RANDOM_SYSTEM_TOKENS]
    questions = tuple(tuple(tokenizer.encode(chat_turn(question))) for question in QUESTIONS)
    task = Task("served", dtype, gguf, tuple(system), questions, started)
    on_gpu = device().type == "cuda"
    tasks = [task, replace(task, kind="own")]
    processes = min(1 if on_gpu else workers or cores(), len(tasks))
    with _threads_of_numpy(max(1, cores() // processes)):
        served, own = run_tasks(run_task, tasks, processes)

    print(f"{served.model}; {dtype}, on {device_name()}\n")
    print_answers(served, own, task, tokenizer, dtype)
    print_savings(served, task)
    page_map = PageMap(tuple(f"{i + 1}: {question}" for i, question in enumerate(QUESTIONS)), served.pages, PAGE_SIZE, served.num_pages)
    print("\n".join(text_lines(page_map)))
    if can_draw:
        draw_png(page_map, path)
        print(f"As a picture: {path.resolve()}\n")
    else:
        print(f"matplotlib is not installed: {HOW_TO_DRAW}\n")
    print(f"All of this was computed in {time.monotonic() - started:.0f} s.")
    same = served.tokens == own.tokens
    if not same:
        print("The tokens differ from those of the model's own attention" + ("." if dtype == "fp32" else ": rounding."))
    return 0 if same or dtype != "fp32" else 1


@contextmanager
def _threads_of_numpy(count: int) -> Iterator[None]:
    """Threads of numpy's matrix products, in which the interpreter computes, in processes that start here; by itself it takes all cores."""
    before = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update({name: str(count) for name, value in before.items() if value is None})
    try:
        yield
    finally:
        for name in [name for name, value in before.items() if value is None]:
            del os.environ[name]


def run_task(task: Task) -> Any:
    """Do a task; in a process of its own, or here."""
    # Unwritten slots may hold anything; numpy, which the interpreter computes with, remarks on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    progress = Progress("tkv" if task.kind == "served" else "own attention", task.started)
    progress.stage("loading the model")
    model = _model(task.gguf, task.dtype)
    return serve(task, model, progress) if task.kind == "served" else own_answers(task, model, progress)


@lru_cache(maxsize=1)
def _model(gguf: Path | None, dtype: str) -> Any:
    return load_model(gguf, DTYPES[dtype], device())


def serve(task: Task, model: Any, progress: Progress) -> Served:
    """The system prompt, then all questions at once on what it left in the cache, then their answers, token by token in one batch."""
    on_cpu = model.device.type == "cpu"
    tile_keys = INTERPRETED_TILE_KEYS if on_cpu else None
    whole = len(task.system) // PAGE_SIZE
    longest = [-(-(len(prompt) + NEW_TOKENS - 1) // PAGE_SIZE) for prompt in task.prompts]
    # A page more for the end of the system prompt, which each of them copies.
    num_pages = whole + 1 + sum(pages - whole for pages in longest)
    served = ServedModel(model, task.dtype, num_pages, PAGE_SIZE, tile_keys, progress.layer)
    manager = served.manager
    with quick_interpreter() if on_cpu else nullcontext():
        progress.stage(f"system prompt, {len(task.system)} tokens")
        system = manager.add(task.system)
        served.prefill({system: task.system})
        seqs = [manager.add(prompt) for prompt in task.prompts]
        found = [manager.length(seq) for seq in seqs]
        manager.free(system)
        new = {seq: prompt[known:] for seq, prompt, known in zip(seqs, task.prompts, found)}
        progress.stage(f"{len(seqs)} questions, {sum(map(len, new.values()))} tokens")
        logits = [served.prefill(new)]
        reads = Reads() if interpreting() else None
        for step in range(1, NEW_TOKENS):
            counts = reads is not None and step == 1
            progress.stage(f"answers, token {step + 1} of {NEW_TOKENS}" + (", its loads counted" if counts else ""))
            logits.append(served.decode(seqs, logits[-1].argmax(-1).tolist(), reads if counts else None))
    progress.stage("done")
    answers = torch.stack(logits, 1).float().cpu()
    return Served(
        tokens=answers.argmax(-1).tolist(),
        logits=answers,
        found=found,
        lens=[manager.length(seq) for seq in seqs],
        pages=tuple(tuple(manager.pages(seq).tolist()) for seq in seqs),
        num_pages=num_pages,
        stats=manager.stats(),
        reads=reads,
        shared_keys=served.shared_keys,
        bytes_per_token=round(sum(cache.bytes_per_token for cache in served.caches)),
        model=describe(model.config, task.gguf.stem if task.gguf else "random Llama"),
    )


@torch.no_grad()
def own_answers(task: Task, model: Any, progress: Progress) -> Answers:
    """The same by torch's attention and without any cache: every token from all tokens before it."""
    logits = []
    for number, prompt in enumerate(task.prompts):
        progress.stage(f"question {number + 1} of {len(task.prompts)}, {NEW_TOKENS} times {len(prompt)} tokens or more")
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens = torch.tensor([ids], device=model.device)
            logits.append(model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu())
            ids.append(int(logits[-1].argmax()))
    progress.stage("done")
    answers = torch.stack(logits).unflatten(0, (len(task.prompts), NEW_TOKENS))
    return Answers(answers.argmax(-1).tolist(), answers)


def print_answers(served: Served, own: Answers, task: Task, tokenizer: Tokenizer, dtype: str) -> None:
    """The tokens, and the text that they are."""
    print(f"{len(task.questions)} questions on a system prompt of {len(task.system)} tokens, {dtype} pages of {PAGE_SIZE} tokens")
    rows = []
    for question, prompt, found, got, expected in zip(QUESTIONS, task.prompts, served.found, served.tokens, own.tokens):
        same = sum(a == b for a, b in zip(got, expected))
        shown = question if len(question) <= 44 else question[:41] + "..."
        rows.append((shown, len(prompt), found, len(prompt) - found, f"{same} of {len(got)}", repr(tokenizer.decode(got))))
    headers = ["question", "prompt", "cached", "computed", "same as own attention", "answer begins"]
    print(tabulate(rows, headers=headers))
    # Behind its first difference an answer has another text before it.
    alike = torch.tensor([[a[:i] == b[:i] for i in range(len(a))] for a, b in zip(served.tokens, own.tokens)])
    difference = float((served.logits - own.logits)[alike].abs().max())
    best = own.logits.topk(2).values
    print(
        f"Own attention: torch's, without a cache, all tokens anew for every token. Largest difference of a logit: {difference:.1e};\n"
        f"smallest margin of a chosen token: {float((best[..., 0] - best[..., 1]).min()):.1e}. "
        "A token that differs counts as a failure, however near the two were.\n"
    )


def print_savings(served: Served, task: Task) -> None:
    """What was saved: tokens, pages and bytes."""
    stats, prompts = served.stats, [len(prompt) for prompt in task.prompts]
    asked, computed = sum(prompts), stats.tokens_asked - stats.tokens_saved
    unshared = sum(map(len, served.pages))
    page_bytes = PAGE_SIZE * served.bytes_per_token
    rows = [
        ("prompt tokens to compute, in all", asked, computed),
        ("prompt tokens before a first token, on average", asked / len(prompts), (asked - sum(served.found)) / len(prompts)),
        ("pages in use, of each layer", unshared, stats.pages_used),
        ("MiB of K and V in them, all layers", unshared * page_bytes / 2**20, stats.pages_used * page_bytes / 2**20),
    ]
    if served.reads is not None:
        rows.append(("MiB of K and V read in a decode step, all layers", served.reads.plain / 2**20, served.reads.shared / 2**20))
    table = [(name, _number(without), _number(shared), f"{without / shared:.1f}") for name, without, shared in rows]
    headers = ["", "without sharing", "with", "times less"]
    print(tabulate(table, headers=headers, disable_numparse=True, colalign=["left"] + ["right"] * 3))
    print(
        f"Prompt tokens: with sharing, the system prompt once, then what is new of {len(prompts)} prompts of {min(prompts)} to "
        f"{max(prompts)} tokens.\n"
        "Time to the first token goes with those before it, once the system prompt is cached: tokens are counted, nothing is timed.\n"
        f"Pages: {stats.pages_shared} are shared; the one in which the system prompt ends was copied {stats.copies} times, to write on."
    )
    if served.reads is None:
        print("K and V read: not counted, because the kernels are compiled here; TRITON_INTERPRET=1 counts them.\n")
    else:
        shared = " + ".join(map(str, served.shared_keys)) or "no"
        print(
            f"K and V read: counted in the kernels' loads, at the first decode step; {shared} keys are read once for all.\n"
            f"Without sharing is paged_decode on the same queries; results differ by at most {served.reads.difference:.1e}.\n"
        )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
