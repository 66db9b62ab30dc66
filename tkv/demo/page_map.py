"""Which sequence owns which page: as text, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from tkv.demo import DemoError

WIDTH = 120
SUFFIX = ".png"
HOW_TO_DRAW = "the page map is drawn here only: for a picture install matplotlib, `pip install 'tkv[demo]'`"
# Of a page by its owners: 0 not this sequence's, 1 its own, 2 of some, 3 of all. Lightness tells them apart too.
KINDS = ("of others, or free", "of this sequence alone", "shared by some", "shared by all")
COLOURS = ("#ffffff", "#fdb863", "#5e9fc9", "#1f2f66")


@dataclass(frozen=True)
class PageMap:
    """The pages of some sequences, at one moment.

    Args:
        names: of the sequences.
        pages: physical pages of each, in the order of its tokens.
        page_size: tokens of a page.
        num_pages: pages of the pool.
    """

    names: tuple[str, ...]
    pages: tuple[tuple[int, ...], ...]
    page_size: int
    num_pages: int

    @property
    def used(self) -> int:
        """Pages in use, each counted once."""
        return len(self._owners)

    @property
    def unshared(self) -> int:
        """Pages that the sequences would use if each had its own."""
        return sum(map(len, self.pages))

    @property
    def title(self) -> str:
        """What there is to see."""
        return f"{self.used} pages hold {len(self.pages)} sequences, which would take {self.unshared} without sharing"

    def kinds(self, seq: int) -> list[int]:
        """For each page of a sequence, in the order of its tokens, an index of `KINDS`."""
        owners = self._owners
        return [1 if owners[page] == 1 else 3 if owners[page] == len(self.pages) else 2 for page in self.pages[seq]]

    def matrix(self) -> np.ndarray:
        """``[sequence, physical page]``, indices of `KINDS`."""
        matrix = np.zeros((len(self.pages), self.num_pages), np.int64)
        for seq, pages in enumerate(self.pages):
            matrix[seq, list(pages)] = self.kinds(seq)
        return matrix

    @property
    def _owners(self) -> Counter[int]:
        return Counter(page for pages in self.pages for page in pages)


def text_lines(page_map: PageMap, width: int = WIDTH) -> list[str]:
    """The map as text: a line for each sequence with a character for each of its pages, in the order of its tokens.

    Args:
        page_map: the map.
        width: most characters of a line, at least 70.
    """
    signs = ".o+#"
    names = [_cut(name, width // 3) for name in page_map.names]
    margin = max(map(len, names), default=0)
    owned = [
        _cut(_ranges(page for page, kind in zip(pages, page_map.kinds(seq)) if kind == 1), width // 4)
        for seq, pages in enumerate(page_map.pages)
    ]
    room = max(1, width - margin - len(" |") - len("| own: ") - max(map(len, owned), default=0))
    longest = max(map(len, page_map.pages), default=0)
    each = max(1, -(-longest // room))
    lines = [page_map.title]
    for seq, name in enumerate(names):
        # Several pages in one place: what is shared least.
        kinds = page_map.kinds(seq)
        signs_of = "".join(signs[min(kinds[first : first + each])] for first in range(0, len(kinds), each))
        lines.append(f"{name:<{margin}} |{signs_of:<{-(-longest // each)}}| own: {owned[seq]}".rstrip())
    present = sorted({kind for seq in range(len(names)) for kind in page_map.kinds(seq)}, reverse=True)
    for kind in present:
        pages = sorted({page for seq in range(len(names)) for page, k in zip(page_map.pages[seq], page_map.kinds(seq)) if k == kind})
        where = f": physical pages {_ranges(pages)}" if kind > 1 else ""
        lines.append(_cut(f"  {signs[kind]}  {KINDS[kind]}{where}", width))
    at_once = "a page" if each == 1 else f"{each} pages"
    lines.append(f"  A character is {at_once} of {page_map.page_size} tokens, in the order of the tokens.")
    return lines


def check_png(path: Path, what: str = "page map") -> None:
    """Refuse a path that a picture cannot be written to, before any work is done.

    Args:
        path: the file.
        what: the picture's name, for messages.

    Raises:
        DemoError: it cannot.
    """
    if path.suffix.lower() != SUFFIX:
        raise DemoError(f"the {what} is a PNG: expected a file name that ends in {SUFFIX}, got {path}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error, what) from error


def draw_png(page_map: PageMap, path: Path) -> None:
    """The map as a picture: physical pages from left to right, a row for each sequence.

    Args:
        page_map: the map.
        path: the file, replaced if it exists.

    Raises:
        DemoError: it cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    matrix = page_map.matrix()
    num_seqs, num_pages = matrix.shape
    figure = Figure(figsize=(min(24.0, 5 + 0.12 * num_pages), 2 + 0.34 * num_seqs), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    edges = np.arange(num_pages + 1) - 0.5, np.arange(num_seqs + 1) - 0.5
    axes.pcolormesh(*edges, matrix, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS) - 1, edgecolors="#d9d9d9", linewidth=0.4)
    axes.invert_yaxis()
    axes.set_yticks(range(num_seqs), [_cut(name, 44) for name in page_map.names])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"physical page ({page_map.page_size} tokens)")
    axes.set_ylabel("sequence")
    axes.set_title(page_map.title)
    patches = [Patch(facecolor=COLOURS[kind], edgecolor="#7f7f7f", label=KINDS[kind]) for kind in np.unique(matrix)[::-1]]
    figure.legend(handles=patches, loc="outside lower center", ncols=max(1, len(patches)), frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError, what: str = "page map") -> DemoError:
    return DemoError(f"the {what} cannot be written to {path}: {error.strerror or error}; name another file with --out")


def _ranges(pages: Iterable[int]) -> str:
    """Numbers in order, runs as ``first-last``."""
    runs = [[page for _, page in run] for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
