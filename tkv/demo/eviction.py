"""What to keep of a cache when it is full: perplexity of a real model by policy and budget."""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tkv import policies
from tkv.demo import PICTURES, DemoError
from tkv.demo.decode import DTYPES, device, device_name
from tkv.demo.evicting import EvictingModel, Policy
from tkv.demo.eviction_plot import Line, draw_lines
from tkv.demo.model import Tokenizer, describe, find_gguf, load_model, load_tokenizer, says_nothing_about
from tkv.demo.page_map import check_png
from tkv.demo.text import passages
from tkv.demo.workers import Progress, cores, run_tasks

# Of each text, and how many of its last ones are measured: when the largest budget is full, the others are.
TOKENS = 1024
MEASURED_TOKENS = 512
TEXTS = 2
# Keys that a query sees at most -> new tokens at a time; before them so many keys are evicted.
BUDGETS = {256: 32, 128: 32, 512: 128}
SINKS = 4
# Queries that SnapKV looks at.
OBSERVED = 32
# By dtype of the model: the largest difference of an attention's output, as a part of its largest number.
BOUNDS = {"fp32": 1e-5, "bf16": 0.02}
FULL = "all keys"
# What budgets should do, and at which.
GOAL_BUDGET = 256
POOR, LEAST_RATIO = ("window", "random"), 1.5
GOOD, LARGEST_RATIO = ("sinks + window", "H2O"), 1.15
HOW_TO_PLOT = "for a picture of this table install matplotlib, `pip install 'tkv[demo]'`"


@dataclass(frozen=True)
class Task:
    """What one process does: read texts with every policy in a budget, or with all keys if that is None."""

    name: str
    budget: int | None
    dtype: str
    gguf: Path | None
    texts: tuple[tuple[int, ...], ...]
    started: float


@dataclass(frozen=True)
class Measured:
    """A budget on some texts."""

    budget: int | None
    losses: dict[str, torch.Tensor]  # policy -> [texts, tokens] float64: nats, of each token from the keys that it sees
    difference: float  # of the kernels' attention from torch's, as a part of the largest number
    pages: int  # that a sequence has at most
    model: str


@dataclass(frozen=True)
class Goal:
    """What a policy should do, and what was seen."""

    text: str
    reached: bool
    seen: str


def run(dtype: str = "fp32", workers: int | None = None, out: Path | None = None) -> int:
    """Show the scenario: print its tables and goals to stdout, its progress to stderr, and draw the picture.

    Args:
        dtype: of the model and of its cache, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None.
        out: where the picture goes; the file named in `PICTURES` if None.

    Returns:
        0, or 1 if the kernels' attention does not give what torch's gives. Goals that are not reached are no failure.

    Raises:
        tkv.demo.DemoError: the picture cannot be written; there is too little text; a process was killed.
    """
    started = time.monotonic()
    path = Path(PICTURES["eviction"]) if out is None else out
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw:
        check_png(path, "picture")
    progress = Progress("demo", started)
    gguf, name = find_gguf()
    if gguf is None:
        print(says_nothing_about("policies", name))
    progress.stage("reading the texts" if gguf is None else f"reading the texts with the tokenizer of {name}")
    texts = read_texts(load_tokenizer(gguf))
    tasks = [
        Task(f"budget {budget}, text {number}", budget, dtype, gguf, (text,), started)
        for budget in BUDGETS
        for number, text in enumerate(texts, 1)
    ]
    tasks.append(Task(FULL, None, dtype, gguf, texts, started))
    on_gpu = device().type == "cuda"
    *parts, full = run_tasks(run_task, tasks, 1 if on_gpu else workers or cores())
    measured = [joined([part for part in parts if part.budget == budget]) for budget in sorted(BUDGETS)]

    print(f"{full.model}; {dtype}, on {device_name()}\n")
    print_measured(measured, full.losses[FULL])
    wrong = print_checked(measured, dtype)
    if gguf is not None:
        print_goals(goals_of(measured, full.losses[FULL]))
    if can_draw:
        own = _perplexity(full.losses[FULL])
        subtitle = f"{TEXTS} x {MEASURED_TOKENS} tokens of prose, perplexity with all keys {own:.2f}; lower is better"
        draw_lines(lines_of(measured, full.losses[FULL]), f"{full.model.partition(':')[0]}: what to keep of a cache", subtitle, path)
        print(f"As a picture: {path.resolve()}\n")
    else:
        print(f"matplotlib is not installed: {HOW_TO_PLOT}\n")
    print(f"All of this was computed in {time.monotonic() - started:.0f} s.")
    if wrong:
        print("The kernels' attention differs from torch's by more than rounding explains.")
    return 1 if wrong else 0


def policies_of(kept: int) -> list[Policy]:
    """What is compared: how each chooses so many keys of a layer; those that look at attention first.

    Args:
        kept: keys that stay, `SINKS` at least.
    """
    generator = torch.Generator().manual_seed(0)

    def first_and_last(sinks: int) -> Callable[..., policies.Kept]:
        return lambda scores, keys, lens: policies.streaming(lens, keys.shape[2], keys.shape[1], sinks, kept - sinks)

    def at_random(scores: torch.Tensor, keys: torch.Tensor, lens: torch.Tensor) -> policies.Kept:
        keep, keep_lens = policies.random(lens.cpu(), keys.shape[2], keys.shape[1], kept, kept // 2, generator)
        return keep.to(lens.device), keep_lens.to(lens.device)

    return [
        Policy("H2O", lambda scores, keys, lens: policies.h2o(scores, lens, kept - kept // 2, kept // 2), newest=None),
        Policy("SnapKV", lambda scores, keys, lens: policies.snapkv(scores, lens, kept, min(OBSERVED, kept)), newest=OBSERVED),
        Policy("sinks + window", first_and_last(SINKS)),
        Policy("window", first_and_last(0)),
        Policy("random", at_random),
    ]


def read_texts(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The starts of the first long pages of the language reference's prose.

    Raises:
        DemoError: there are too few.
    """
    pages = (ids for ids in map(tokenizer.encode, passages()) if len(ids) >= TOKENS)
    texts = tuple(tuple(ids[:TOKENS]) for ids, _ in zip(pages, range(TEXTS)))
    if len(texts) < TEXTS:
        raise DemoError(f"Python's language reference, pydoc_data.topics, has fewer than {TEXTS} pages of {TOKENS} tokens here")
    return texts


def run_task(task: Task) -> Measured:
    """Do a task; in a process of its own, or here."""
    # Unwritten slots may hold anything; numpy, which the interpreter computes with, remarks on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    progress = Progress(task.name, task.started)
    progress.stage("loading the model")
    model = _model(task.gguf, task.dtype)
    return measure_full(task, model, progress) if task.budget is None else measure(task, task.budget, model, progress)


@lru_cache(maxsize=1)
def _model(gguf: Path | None, dtype: str) -> Any:
    return load_model(gguf, DTYPES[dtype], device())


@torch.no_grad()
def measure_full(task: Task, model: Any, progress: Progress) -> Measured:
    """By the model's own attention, which sees all keys."""
    ids = torch.tensor(task.texts, device=model.device)
    progress.stage(f"{ids.numel():,} tokens, the model's own attention")
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return Measured(None, {FULL: losses_of(model, hidden, ids)}, 0.0, 0, _name(task, model))


@torch.no_grad()
def measure(task: Task, budget: int, model: Any, progress: Progress) -> Measured:
    """All policies in one batch: chunk by chunk, with an eviction before each."""
    chunk = BUDGETS[budget]
    chosen = policies_of(budget - chunk)
    # Sequences of a policy stand side by side.
    ids = torch.tensor(task.texts, device=model.device).repeat(len(chosen), 1)
    evicting = EvictingModel(model, chosen, len(task.texts), budget, progress.layer)
    hidden = []
    ends = range(budget, ids.shape[1] + 1, chunk)
    for first, end in zip((0, *ends), ends):
        if first == 0 or first % (4 * chunk) == 0:
            progress.stage(f"tokens {first + 1:,} to {min(first + 4 * chunk, ids.shape[1]) if first else end:,} of {len(ids)} sequences")
        is_last = end == ends[-1]
        hidden.append(evicting.read(ids[:, first:end], keeps=None if is_last else budget - chunk))
    progress.stage("likelihoods")
    losses = losses_of(model, torch.cat(hidden, 1), ids)
    by_policy = {policy.name: part for policy, part in zip(chosen, losses.split(len(task.texts)))}
    return Measured(budget, by_policy, evicting.difference, evicting.most_pages, _name(task, model))


def joined(parts: Sequence[Measured]) -> Measured:
    """A budget on the texts of several tasks, in their order."""
    return replace(
        parts[0],
        losses={name: torch.cat([part.losses[name] for part in parts]) for name in parts[0].losses},
        difference=max(part.difference for part in parts),
        pages=max(part.pages for part in parts),
    )


def losses_of(model: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[sequences, MEASURED_TOKENS]`` float64: the negative log-likelihood of each of the last tokens."""
    first = ids.shape[1] - MEASURED_TOKENS
    losses = [
        torch.nn.functional.cross_entropy(model.lm_head(rows[first - 1 : -1]).float(), tokens[first:], reduction="none")
        for rows, tokens in zip(hidden, ids)
    ]
    return torch.stack(losses).double().cpu()


def goals_of(measured: Sequence[Measured], full: torch.Tensor) -> list[Goal]:
    """What policies should do at `GOAL_BUDGET`, over both texts together."""
    losses = next(result.losses for result in measured if result.budget == GOAL_BUDGET)
    goals = []
    for name in (*POOR, *GOOD):
        ratio = _perplexity(losses[name]) / _perplexity(full)
        each = ", ".join(f"{_perplexity(part) / _perplexity(own):.2f}" for part, own in zip(losses[name], full))
        if name in POOR:
            goals.append(Goal(f"{name}: at least {LEAST_RATIO} times", ratio >= LEAST_RATIO, f"{ratio:.2f} ({each})"))
        else:
            goals.append(Goal(f"{name}: at most {LARGEST_RATIO} times", ratio <= LARGEST_RATIO, f"{ratio:.2f} ({each})"))
    return goals


def print_measured(measured: Sequence[Measured], full: torch.Tensor) -> None:
    """The table of budgets and policies, the best of each budget first."""
    rows = [_row("", FULL, full, full)]
    for result in measured:
        for name, losses in sorted(result.losses.items(), key=lambda item: float(item[1].mean())):
            rows.append(_row(str(result.budget), name, losses, full))
    headers = ["budget", "keeps", *(f"perplexity, text {text + 1}" for text in range(TEXTS)), "both", "of that with all keys", "+-"]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["right", "left"] + ["right"] * (TEXTS + 3)))
    chunks = ", ".join(f"{chunk} at {budget}" for budget, chunk in sorted(BUDGETS.items()))
    print(
        f"Perplexity of the last {MEASURED_TOKENS} of {TOKENS:,} tokens, {TEXTS} texts of prose (Python's language reference).\n"
        f"Budget: keys that a query sees at most, in each layer and KV head. Before new tokens come ({chunks}) as many\n"
        "keys go, so that queries see half of that fewer on average; keys keep the rotation of their place in the text.\n"
        f"H2O and random keep the newest half, SnapKV looks at the last {OBSERVED} queries, sinks are {SINKS}. All policies are\n"
        "one batch.\n"
        "BY TKV: the pages (CacheManager), new keys and values into them (write_kv) and back (gather_window), the attention mass of each\n"
        "key for H2O and SnapKV (key_scores), the choice (tkv.policies) and the eviction (compact_kv, which moves the masses too).\n"
        "BY TORCH: the attention itself, on what was gathered; with all keys, the model's own. +-: standard error of the ratio, from how\n"
        "much tokens differ in it.\n"
    )


def print_checked(measured: Sequence[Measured], dtype: str) -> bool:
    """The comparison of both attentions; returns whether one is wrong."""
    for result in measured:
        print(
            f"Budget {result.budget}: {result.pages} pages a sequence at most; tkv's KERNEL, paged_decode, attends on them after the last "
            f"eviction as torch\ndoes, but for {result.difference:.1e} of the largest number (allowed {BOUNDS[dtype]:.0e})"
        )
    print()
    return any(not result.difference <= BOUNDS[dtype] for result in measured)


def print_goals(goals: Sequence[Goal]) -> None:
    """Which goals were reached, and which were not."""
    print(f"Goals at a budget of {GOAL_BUDGET}: the perplexity, in times of that with all keys, over both texts (each)")
    width = max(len(goal.text) for goal in goals)
    for goal in goals:
        print(f"  {'reached    ' if goal.reached else 'NOT reached'}  {goal.text:<{width}}  {goal.seen}")
    print()


def lines_of(measured: Sequence[Measured], full: torch.Tensor) -> list[Line]:
    """Policies in the picture."""
    own = _perplexity(full)
    return [
        Line(name, tuple((result.budget or 0, _perplexity(result.losses[name]) / own) for result in measured))
        for name in measured[0].losses
    ]


def _perplexity(losses: torch.Tensor) -> float:
    return math.exp(float(losses.mean()))


def _row(budget: str, name: str, losses: torch.Tensor, full: torch.Tensor) -> tuple[str, ...]:
    ratio = _perplexity(losses) / _perplexity(full)
    error = ratio * float((losses - full).std()) / math.sqrt(full.numel())
    of_full, of_error = ("", "") if name == FULL else (f"{ratio:.3f}", f"{error:.3f}")
    return (budget, name, *(f"{_perplexity(part):.2f}" for part in losses), f"{_perplexity(losses):.2f}", of_full, of_error)


def _name(task: Task, model: Any) -> str:
    return describe(model.config, task.gguf.stem if task.gguf else "random Llama")
