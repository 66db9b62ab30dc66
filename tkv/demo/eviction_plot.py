"""Perplexity of policies against the budget: the picture of the scenario ``eviction``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tkv.demo import DemoError

# Of policies: colour and marker, either of which tells them apart.
STYLES = (("#1b9e77", "o"), ("#1f78b4", "^"), ("#d95f02", "s"), ("#e7298a", "D"), ("#6b6b6b", "X"))
_INK = "#333333"


@dataclass(frozen=True)
class Line:
    """A policy in the picture.

    Args:
        name: its label.
        ratios: (budget, perplexity as a multiple of that with all keys), budgets ascending.
    """

    name: str
    ratios: tuple[tuple[int, float], ...]


def draw_lines(lines: Sequence[Line], title: str, subtitle: str, path: Path) -> None:
    """Draw the ratios against the budget.

    Args:
        lines: at most as many as there are `STYLES`, all of the same budgets.
        title, subtitle: above the picture.
        path: the file, replaced if it exists.

    Raises:
        DemoError: it cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(10, 7), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for line, (colour, marker) in zip(lines, STYLES):
        axes.plot(*zip(*line.ratios), color=colour, marker=marker, markersize=7, linewidth=1.8, label=line.name)
    axes.axhline(1, color=_INK, linewidth=0.9)
    axes.set_xscale("log", base=2)
    budgets = [budget for budget, _ in lines[0].ratios]
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    most, least = (pick([1.0, *(ratio for line in lines for _, ratio in line.ratios)]) for pick in (max, min))
    steps = [tick for tick in (0.5, 0.8, 1, 1.05, 1.1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 20, 50, 100) if least / 1.03 <= tick <= most * 1.05]
    axes.set_yticks(steps, [f"{tick:g} x" for tick in steps])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("budget: keys that a query sees at most", color=_INK)
    axes.set_ylabel("perplexity, as a multiple of that with all keys", color=_INK)
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=24)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color="#666666", va="bottom")
    axes.grid(color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(frameon=False, labelcolor=_INK)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DemoError(f"the picture cannot be written to {path}: {error.strerror or error}; name another file with --out") from error
