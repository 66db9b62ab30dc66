"""Perplexity of cache formats against the memory that they take: the plot of the scenario ``formats``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkv.demo import DemoError

HOW_TO_PLOT = "for a plot of this table install matplotlib, `pip install 'tkv[demo]'`"
# Of stored numbers: colour and marker, either of which tells them apart.
STYLES = {
    "native": ("#6b6b6b", "s"),
    "fp8_e5m2": ("#a6761d", "v"),
    "fp8_e4m3": ("#d95f02", "^"),
    "int8": ("#1f78b4", "o"),
    "int4": ("#7b3294", "D"),
}
# Percent of excess below which the axis is linear, so that 0 and what is below it can be seen.
LINEAR_PERCENT = 0.1
# The height of that part of the axis, of that of a decade.
LINEAR_PART = 0.6
# Of the axes' height, from one label to the next.
LABEL_STEP = 0.037
_INK = "#333333"


@dataclass(frozen=True)
class Point:
    """A cache format in the plot.

    Args:
        name: its label.
        dtype: of the keys' numbers.
        bytes_per_token: of all layers.
        excess: of the perplexity, in percent of that without quantisation.
        perplexity: the perplexity itself.
        newest: native tokens beside it, if it has such.
    """

    name: str
    dtype: str
    bytes_per_token: float
    excess: float
    perplexity: float
    newest: int | None = None

    @property
    def kind(self) -> str:
        """A key of `STYLES`."""
        return self.dtype if self.dtype in STYLES else "native"


def best(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both memory and excess, smallest first.

    Example:
        >>> sizes = ((100, 3.0), (100, 2.0), (150, 2.5), (200, 0.1))
        >>> [point.excess for point in best([Point("", "int8", size, excess, 1.0) for size, excess in sizes])]
        [2.0, 0.1]
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes_per_token, point.excess)):
        if not found or point.excess < found[-1].excess:
            found.append(point)
    return found


def spread(heights: Sequence[float], step: float, top: float = 1.0) -> list[float]:
    """Heights of labels, near those given and in their order, no two nearer than a step.

    Args:
        heights: in ascending order, from 0 to `top`.
        step: the least distance.
        top: the largest height.

    Example:
        >>> [round(height, 3) for height in spread([0.5, 0.5, 0.9], 0.1)]
        [0.45, 0.55, 0.9]
    """
    up, down = list(heights), list(heights)
    for i in range(1, len(up)):
        up[i] = max(up[i], up[i - 1] + step)
    for i in reversed(range(len(down) - 1)):
        down[i] = min(down[i], down[i + 1] - step)
    # Both keep the distances, and so does what lies halfway.
    middle = [(a + b) / 2 for a, b in zip(up, down)]
    shift = min(0.0, top - middle[-1]) if middle else 0.0
    return [height + shift for height in middle]


def draw_plot(points: Sequence[Point], title: str, subtitle: str, path: Path) -> None:
    """Draw excess perplexity against bytes a token.

    Args:
        points: at least one.
        title, subtitle: above the plot.
        path: the file, replaced if it exists.

    Raises:
        DemoError: it cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 8), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    _set_axes(axes, points)
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=26)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color="#666666", va="bottom")
    frontier = best([point for point in points if point.newest is None])
    axes.plot(*_places(frontier), color="#b9c7b9", linewidth=4, solid_joinstyle="round", zorder=1)
    for point in points:
        colour, marker = STYLES[point.kind]
        face = colour if point.newest is None else "white"
        place = (point.bytes_per_token, point.excess)
        axes.plot(*place, marker=marker, color=colour, markerfacecolor=face, markersize=8, markeredgewidth=1.6, linestyle="none", zorder=3)
    _label(axes, points)
    _add_legend(axes, points)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DemoError(f"the plot cannot be written to {path}: {error.strerror or error}; name another file with --out") from error


def _set_axes(axes: Any, points: Sequence[Point]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    sizes = [point.bytes_per_token for point in points]
    axes.set_xscale("log", base=2)
    # Labels of the smallest stand to the left of them, those of the largest to the right.
    axes.set_xlim(min(sizes) / 1.72, max(sizes) * 1.28)
    ticks = [1024 * 2**i * half for i in range(-3, 12) for half in (1, 1.5)]
    axes.set_xticks([tick for tick in ticks if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1024:g} KiB"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("bytes of K, V and scales of a token, all layers", color=_INK)

    low, high = min(0.0, *(point.excess for point in points)), max(1.0, *(point.excess for point in points))
    axes.set_yscale("symlog", linthresh=LINEAR_PERCENT, linscale=LINEAR_PART)
    axes.set_ylim(low * 1.3 - 0.04, high * 1.6)
    ticks = [0.0] + [sign * step * 10.0**power for power in range(-1, 7) for step in (1, 2, 5) for sign in (1, -1)]
    shown = sorted(tick for tick in ticks if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1])
    axes.set_yticks(shown, ["0" if tick == 0 else f"{tick:+g} %" for tick in shown])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(f"excess of the perplexity (linear up to {LINEAR_PERCENT:g} %)", color=_INK)
    own = points[0].perplexity / (1 + points[0].excess / 100)
    right = axes.twinx()
    right.set_yscale("symlog", linthresh=LINEAR_PERCENT, linscale=LINEAR_PART)
    right.set_ylim(axes.get_ylim())
    right.set_yticks(shown, [f"{own * (1 + tick / 100):.2f}" for tick in shown])
    right.yaxis.set_minor_locator(NullLocator())
    right.set_ylabel("perplexity", color=_INK)
    axes.axhline(0, color=_INK, linewidth=0.9, zorder=2)
    axes.grid(color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in (axes, right):
        side.tick_params(colors=_INK, length=0)
        for spine in side.spines.values():
            spine.set_visible(False)


def _label(axes: Any, points: Sequence[Point]) -> None:
    """Labels in columns beside the points that they name: left of 4-bit numbers and of static scales, right of the others."""
    columns: dict[tuple[str, bool], list[Point]] = {}
    for point in points:
        width = {"native": "native", "int4": "4"}.get(point.kind, "8")
        static = any(f"/{scale}" in point.name for scale in ("tensor", "head", "channel"))
        columns.setdefault((width, width == "4" or (width == "8" and static)), []).append(point)
    to_axes = axes.transData + axes.transAxes.inverted()
    for (_, left), column in columns.items():
        column.sort(key=lambda point: (point.excess, point.bytes_per_token))
        sizes = [point.bytes_per_token for point in column]
        edge = min(sizes) / 1.045 if left else max(sizes) * 1.045
        x = to_axes.transform((edge, 0))[0]
        heights = spread([to_axes.transform((point.bytes_per_token, point.excess))[1] for point in column], LABEL_STEP, top=0.99)
        for point, height in zip(column, heights):
            axes.annotate(
                point.name, (point.bytes_per_token, point.excess), (x, height), textcoords="axes fraction", fontsize=9,
                color=STYLES[point.kind][0], ha="right" if left else "left", va="center", zorder=4,
                bbox=dict(boxstyle="square,pad=0.12", facecolor="white", edgecolor="none", alpha=0.85),
                arrowprops=dict(arrowstyle="-", color="#b5b5b5", linewidth=0.7, shrinkA=1, shrinkB=4, relpos=(1.0 if left else 0.0, 0.5)),
            )  # fmt: skip


def _add_legend(axes: Any, points: Sequence[Point]) -> None:
    from matplotlib.lines import Line2D

    def sign(kind: str, face: str, name: str) -> Any:
        colour, marker = STYLES[kind]
        look: dict[str, Any] = dict(color=colour, marker=marker, markerfacecolor=face, markersize=8, markeredgewidth=1.6)
        return Line2D([], [], linestyle="none", label=name, **look)

    kinds = [kind for kind in STYLES if any(point.kind == kind for point in points)]
    handles = [sign(kind, STYLES[kind][0], f"{kind} numbers") for kind in kinds]
    newest = sorted({point.newest for point in points if point.newest is not None})
    handles += [sign(kinds[-1], "white", f"newest {count} tokens native, not counted") for count in newest]
    handles.append(Line2D([], [], color="#b9c7b9", linewidth=4, label="best of those with all tokens quantised"))
    axes.legend(handles=handles, loc="upper right", frameon=False, fontsize=9, labelcolor=_INK)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.bytes_per_token for point in points], [point.excess for point in points]
