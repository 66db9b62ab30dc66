"""Perplexity along a text and the pages held meanwhile: the picture of the scenario ``streaming``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkv.demo import DemoError

# In the order of the curves: colour and width.
STYLES = (("#1f78b4", 2.2), ("#d95f02", 1.8), ("#6b6b6b", 1.4))
_INK = "#333333"


@dataclass(frozen=True)
class Curve:
    """A cache in the picture.

    Args:
        name: its label.
        perplexities: (tokens read, perplexity of the newest stretch of them).
        pages: (tokens read, pages held).
    """

    name: str
    perplexities: tuple[tuple[int, float], ...]
    pages: tuple[tuple[int, int], ...]


def draw_curves(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw both against the tokens read.

    Args:
        curves: at most as many as there are `STYLES`.
        title: above the picture.
        path: the file, replaced if it exists.

    Raises:
        DemoError: it cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=140, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for curve, (colour, width) in zip(curves, STYLES):
        above.plot(*zip(*curve.perplexities), color=colour, linewidth=width, marker="o", markersize=3, label=curve.name)
        below.plot(*zip(*curve.pages), color=colour, linewidth=width, label=curve.name)
    above.set_title(title, loc="left", fontsize=13, color=_INK)
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.set_ylabel("perplexity", color=_INK)
    above.legend(frameon=False, labelcolor=_INK)
    below.set_ylim(bottom=0)
    below.set_ylabel("pages held", color=_INK)
    below.set_xlabel("tokens read", color=_INK)
    for axes in (above, below):
        _tidy(axes)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DemoError(f"the picture cannot be written to {path}: {error.strerror or error}; name another file with --out") from error


def _tidy(axes: Any) -> None:
    axes.grid(color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
