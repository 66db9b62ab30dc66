"""Every cache format on a real model: perplexity of two texts against bytes a token."""

from __future__ import annotations

import importlib.util
import inspect
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tkv.calibration import calibrate
from tkv.demo import PICTURES, DemoError
from tkv.demo.decode import DTYPES, device, device_name
from tkv.demo.formats_plot import HOW_TO_PLOT, Point, draw_plot
from tkv.demo.model import Tokenizer, describe, find_gguf, load_model, load_tokenizer, says_nothing_about
from tkv.demo.page_map import check_png
from tkv.demo.text import passages
from tkv.demo.through_cache import PAGE_SIZE, CachedModel, Scales, Scheme
from tkv.demo.workers import Progress, cores, run_tasks
from tkv.formats import KVFormat, supported_formats

# Of each text: whole pages.
TOKENS = 31 * PAGE_SIZE
# Of each other text, of the same two kinds, that static scales are calibrated on.
CALIBRATION_TOKENS = 512
CALIBRATION = "mse"
# What KIVI keeps as it is.
NEWEST = 128
# Text for the kernels' own attention: a whole page and some of the next.
CHECKED_TOKENS = 40
TEXTS = ("prose", "code")
# Modules of Python whose source is the code: one measured, one for calibration.
MODULES = ("textwrap", "shlex")

KIVI = ("int4/page_channel", "int4/group32")
KIVI8 = ("int8/page_channel", "int8/group32")
CHECKED = (
    Scheme(*KIVI, newest=1),
    *(Scheme(kind, kind) for kind in ("int4/token_head", "int4/group32", "int8/group32", "int8/token_head", "fp8_e4m3/token_head")),
    *(Scheme(kind, kind, "calibrated") for kind in ("int8/channel", "int8/head", "fp8_e5m2/tensor")),
)
# By dtype of the model: the largest difference of a logit, as a part of the largest logit, that rounding in 30 layers explains.
BOUNDS = {"fp32": 1e-4, "bf16": 0.05}


@dataclass(frozen=True)
class Task:
    """What one process does: ``own``, the model's own attention; ``measure`` a scheme; or ``check`` the kernels' attention on one."""

    kind: str
    scheme: Scheme
    dtype: str
    gguf: Path | None
    texts: tuple[tuple[int, ...], ...]
    calibration: tuple[tuple[int, ...], ...]
    started: float


@dataclass(frozen=True)
class Measured:
    """A scheme on the texts."""

    scheme: Scheme
    losses: torch.Tensor  # [texts, tokens] float64: nats, of each token from those before it
    bytes_per_token: float  # all layers
    model: str

    @property
    def perplexities(self) -> list[float]:
        """Of each text, and of both together: they have equally many tokens."""
        return [*self.losses.mean(1).exp().tolist(), float(self.losses.mean().exp())]

    def excess(self, own: Measured) -> list[float]:
        """By how many percent the perplexities exceed those of another scheme."""
        return [100 * (mine / other - 1) for mine, other in zip(self.perplexities, own.perplexities)]

    def error(self, own: Measured) -> float:
        """Standard error of the excess over both texts, in percent: how much tokens differ in what the scheme does to them."""
        difference = self.losses - own.losses
        return float(100 * difference.std() / math.sqrt(difference.numel()))


@dataclass(frozen=True)
class Checked:
    """Logits by the kernels' attention against those by torch's, on the same pages."""

    scheme: Scheme
    difference: float
    largest: float
    same_choices: int
    positions: int

    def agrees(self, dtype: str) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= BOUNDS[dtype] * self.largest


@dataclass(frozen=True)
class Goal:
    """What a format should reach, and what was seen."""

    text: str
    reached: bool
    seen: str


def run(dtype: str = "fp32", workers: int | None = None, out: Path | None = None) -> int:
    """Show the scenario: print its tables and goals to stdout, its progress to stderr, and draw the plot.

    Args:
        dtype: of the model, ``"fp32"`` or ``"bf16"``.
        workers: processes at a time on a CPU; one for each core if None.
        out: where the plot goes; the file named in `PICTURES` if None.

    Returns:
        0, or 1 if the kernels' attention does not give the logits of torch's. Goals that are not reached are no failure.

    Raises:
        tkv.demo.DemoError: the plot cannot be written; there is no text; a process was killed.
    """
    started = time.monotonic()
    path = Path(PICTURES["formats"]) if out is None else out
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw:
        check_png(path, "plot")
    progress = Progress("demo", started)
    gguf, name = find_gguf()
    if gguf is None:
        print(says_nothing_about("formats", name))
    progress.stage("reading the text" if gguf is None else f"reading the text with the tokenizer of {name}")
    texts, calibration = read_texts(load_tokenizer(gguf))
    common = (dtype, gguf, texts, calibration, started)
    own = Scheme(dtype, dtype)
    # What takes long first, so that no process is left alone with it at the end.
    tasks = [Task("measure", scheme, *common) for scheme in sorted(schemes(dtype), key=lambda scheme: not scheme.by_page)]
    tasks += [Task("check", scheme, *common) for scheme in CHECKED] + [Task("own", own, *common)]
    on_gpu = device().type == "cuda"
    results = run_tasks(run_task, tasks, 1 if on_gpu else workers or cores())

    measured = [result for result in results if isinstance(result, Measured)]
    baseline = measured.pop()
    checked = [result for result in results if isinstance(result, Checked)]
    print(f"{baseline.model}; {dtype}, on {device_name()}\n")
    print_measured(measured, baseline)
    print_checked(checked, dtype)
    if gguf is not None:
        print_goals(goals_of(measured, baseline))
    if can_draw:
        name = baseline.model.partition(":")[0]
        subtitle = f"{len(TEXTS)} x {TOKENS - 1} tokens of {' and '.join(TEXTS)}; lower and further left is better"
        draw_plot([point_of(result, baseline) for result in measured], f"{name}: what a cache format costs", subtitle, path)
        print(f"As a picture: {path.resolve()}\n")
    else:
        print(f"matplotlib is not installed: {HOW_TO_PLOT}\n")
    print(f"All of this was computed in {time.monotonic() - started:.0f} s.")
    wrong = [result.scheme.name for result in checked if not result.agrees(dtype)]
    if wrong:
        print(f"The kernels' logits differ from those of torch's attention by more than rounding explains: {', '.join(wrong)}.")
    return 1 if wrong else 0


def schemes(dtype: str) -> list[Scheme]:
    """All that is measured: every format for both K and V, then pairs, KIVI's and what to compare them with.

    Args:
        dtype: of the model, whose own format is the baseline.
    """
    found = []
    for kind in supported_formats():
        scale = KVFormat.parse(kind).scale
        if kind in ("fp32", dtype) or scale == "page_channel":
            continue
        if kind.startswith("fp8") and scale == "tensor":
            found.append(Scheme(kind, kind, "1.0"))
        found.append(Scheme(kind, kind, "calibrated" if KVFormat.parse(kind).is_static else ""))
    found += [Scheme(*KIVI), Scheme(*KIVI, newest=NEWEST), Scheme(*KIVI8, newest=NEWEST)]
    return [*found, Scheme("int4/token_head", "int4/token_head", newest=NEWEST)]


def read_texts(tokenizer: Tokenizer) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Tokens of the texts that are measured, and of others that scales are calibrated on: of each, prose and code.

    Raises:
        DemoError: Python's own source is not there.
    """
    pages = (ids for ids in map(tokenizer.encode, passages()) if len(ids) >= max(TOKENS, CALIBRATION_TOKENS))
    texts = []
    for module, length in zip(MODULES, (TOKENS, CALIBRATION_TOKENS)):
        try:
            code = tokenizer.encode(inspect.getsource(import_module(module)))
        except OSError as error:
            raise DemoError(f"the source of Python's module {module}, one of the texts, is not installed: {error}") from error
        texts.append((tuple(next(pages)[:length]), tuple(code[:length])))
    return texts[0], texts[1]


def run_task(task: Task) -> Measured | Checked:
    """Do a task; in a process of its own, or here."""
    # Unwritten slots may hold anything; numpy, which the interpreter computes with, remarks on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    labels = {"own": "own attention", "measure": task.scheme.name, "check": f"kernels, {task.scheme.name}"}
    progress = Progress(labels[task.kind], task.started)
    progress.stage("loading the model")
    model = _model(task.gguf, task.dtype)
    scales = None
    if task.scheme.scales == "calibrated":
        progress.stage("calibrating")
        scales = _calibrated(task.gguf, task.dtype, task.scheme, task.calibration)
    ids = torch.tensor(task.texts, device=model.device)
    if task.kind == "check":
        return check(task, model, ids[:1, :CHECKED_TOKENS], scales, progress)
    return measure(task, model, ids, scales, progress)


@lru_cache(maxsize=1)
def _model(gguf: Path | None, dtype: str) -> Any:
    return load_model(gguf, DTYPES[dtype], device())


@lru_cache(maxsize=1)
@torch.no_grad()
def _observed(gguf: Path | None, dtype: str, texts: tuple[tuple[int, ...], ...]) -> Any:
    """The model's own cache after the texts for calibration."""
    model = _model(gguf, dtype)
    output = model.model(input_ids=torch.tensor(texts, device=model.device), use_cache=True)
    # The name depends on the version of transformers.
    return output["cache"] if "cache" in output else output["past_key_values"]


def _calibrated(gguf: Path | None, dtype: str, scheme: Scheme, texts: tuple[tuple[int, ...], ...]) -> Scales:
    return calibrate([_observed(gguf, dtype, texts)], (scheme.k, scheme.v), CALIBRATION)


@torch.no_grad()
def measure(task: Task, model: Any, ids: torch.Tensor, scales: Scales | None, progress: Progress) -> Measured:
    """The negative log-likelihood of each token."""
    if task.kind == "own":
        progress.stage(f"{ids.numel():,} tokens")
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    else:
        progress.stage(f"{ids.numel():,} tokens through the cache")
        hidden = CachedModel(model, task.scheme, ids.shape[0], ids.shape[1], scales, on_layer=progress.layer).by_torch(ids)
    progress.stage("likelihoods")
    losses = [
        torch.nn.functional.cross_entropy(model.lm_head(row[:-1]).float(), tokens[1:], reduction="none")
        for row, tokens in zip(hidden, ids)
    ]  # fmt: skip
    name = describe(model.config, task.gguf.stem if task.gguf else "random Llama")
    return Measured(task.scheme, torch.stack(losses).double().cpu(), task.scheme.bytes_per_token(model.config), name)


@torch.no_grad()
def check(task: Task, model: Any, ids: torch.Tensor, scales: Scales | None, progress: Progress) -> Checked:
    """Logits by torch's attention on what the pages give back, and by tkv's kernels on the same pages."""
    cached = CachedModel(model, task.scheme, ids.shape[0], ids.shape[1], scales, keeps=True, on_layer=progress.layer)
    progress.stage(f"{ids.numel()} tokens, attention by torch")
    expected = model.lm_head(cached.by_torch(ids)).float()
    progress.stage(f"{ids.numel()} tokens, attention by tkv's kernels")
    got = model.lm_head(cached.by_kernels(ids)).float()
    # The first token sees itself alone, and its activations are so large that bfloat16 keeps little of them.
    expected, got = expected[:, 1:], got[:, 1:]
    same = got.argmax(-1) == expected.argmax(-1)
    return Checked(task.scheme, float((got - expected).abs().max()), float(expected.abs().max()), int(same.sum()), same.numel())


def goals_of(measured: Sequence[Measured], own: Measured) -> list[Goal]:
    """What formats should reach, over both texts together."""
    excess = {result.scheme: result.excess(own) for result in measured}
    goals = []
    for kind, limit in (("fp8_e4m3/token_head", 1.5), ("int8/token_head", 0.5), ("int8/group32", 0.3)):
        seen = excess[Scheme(kind, kind)]
        goals.append(Goal(f"{kind} within {limit} %", seen[-1] <= limit, _each(seen)))
    whole = Scheme("int4/token_head", "int4/token_head")
    pairs = (
        ("at most half of int4/token_head's", Scheme(*KIVI, newest=NEWEST), whole),
        ("the same with all tokens quantised in both", Scheme(*KIVI), whole),
        (f"the same with the newest {NEWEST} native in both", Scheme(*KIVI, newest=NEWEST), Scheme(whole.k, whole.v, newest=NEWEST)),
    )
    for text, kivi, other in pairs:
        seen, limit = excess[kivi], max(0.0, excess[other][-1]) / 2
        label = f"KIVI in 4 bits, {text}" if text.startswith("the same") else f"KIVI in 4 bits, newest {NEWEST} native: {text}"
        goals.append(Goal(label, seen[-1] <= limit, f"{_each(seen)} against {_each(excess[other])}"))
    return goals


def print_measured(measured: Sequence[Measured], own: Measured) -> None:
    """The table of formats, largest first."""
    rows = [_row("unquantised, own attention", own, "", "")]
    for result in sorted(measured, key=lambda result: (-result.bytes_per_token, result.excess(own)[-1])):
        rows.append(_row(result.scheme.name, result, _percent(result.excess(own)[-1]), f"{result.error(own):.2f}"))
    headers = ["K / V", "bytes a token", *(f"perplexity {text}" for text in TEXTS), "both", "excess", "+-"]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] + ["right"] * 6))
    print(
        f"Perplexity of {TOKENS - 1:,} tokens each of prose (Python's language reference) and code (the source of Python's module "
        f"{MODULES[0]}).\n"
        "These numbers come from TORCH's attention, in float32, on keys and values that went through tkv: stored layer by layer by "
        "write_kv\n"
        f"(page_channel keys by quantize_pages, pages of {PAGE_SIZE} tokens) and read back by gather_window, a query's own token "
        "included.\n"
        f"Bytes a token: K, V and scales, all layers. Calibrated: {CALIBRATION} over {len(TEXTS) * CALIBRATION_TOKENS:,} tokens of other "
        "prose and code.\n"
        "+-: standard error of the excess, from how much tokens differ in it; what lies within two of them may be chance.\n"
        f"Newest {NEWEST} native: a query reads the newest {NEWEST} tokens, and what does not fill a page yet, as the model made them. "
        "This takes memory\n"
        f"of a fixed size, which is not in the column; and the first {NEWEST} tokens of each text then see nothing that is quantised.\n"
    )


def print_checked(checked: Sequence[Checked], dtype: str) -> None:
    """The comparison of both attentions."""
    print(
        f"Logits by tkv's KERNELS (paged_decode, kivi_decode) and by torch's attention on the same pages, {CHECKED_TOKENS} tokens of prose"
    )
    rows = [
        (
            result.scheme.name,
            f"{result.difference:.1e}",
            f"{result.largest:.1f}",
            f"{BOUNDS[dtype] * result.largest:.1e}",
            f"{result.same_choices} of {result.positions}",
            "yes" if result.agrees(dtype) else "NO",
        )
        for result in checked
    ]
    headers = ["K / V", "largest difference", "largest logit", "allowed", "same likeliest token", "agrees"]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] + ["right"] * 4 + ["left"]))
    print(
        f"Allowed: {BOUNDS[dtype]:g} of the largest logit, rounding in {dtype} all the way through the model. The first token, which sees\n"
        "itself alone, is left out.\n"
    )


def print_goals(goals: Sequence[Goal]) -> None:
    """Which goals were reached, and which were not."""
    print("Goals, in excess perplexity over both texts (prose, code in brackets)")
    width = max(len(goal.text) for goal in goals)
    for goal in goals:
        print(f"  {'reached    ' if goal.reached else 'NOT reached'}  {goal.text:<{width}}  {goal.seen}")
    print()


def point_of(result: Measured, own: Measured) -> Point:
    """A scheme in the plot."""
    scheme = result.scheme
    name = ("KIVI: " if scheme.by_page else "") + scheme.name.partition(", newest")[0]
    return Point(
        name, scheme.k.partition("/")[0], result.bytes_per_token, result.excess(own)[-1], result.perplexities[-1], scheme.newest
    )  # fmt: skip


def _row(name: str, result: Measured, excess: str, error: str) -> tuple[str, ...]:
    perplexities = (f"{perplexity:.3f}" for perplexity in result.perplexities)
    return (name, f"{result.bytes_per_token:,.0f}", *perplexities, excess, error)


def _each(excess: Sequence[float]) -> str:
    return f"{_percent(excess[-1])} ({', '.join(_percent(value)[:-2] for value in excess[:-1])})"


def _percent(value: float) -> str:
    # No minus before what is rounded to 0.
    return f"{round(value, 2) + 0.0:+.2f} %"
