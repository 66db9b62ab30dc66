"""What commands print: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from tabulate import tabulate

_QUIET_SECONDS = 2.0


def print_table(rows: Sequence[Mapping[str, object]], right: Sequence[str] = ()) -> None:
    """Rows as a table, their keys as its head.

    Numbers stand to the right, and the texts of the columns named in `right`; None is an empty cell.

    Example:
        >>> print_table([{"arch": "sm90", "bytes": 1024}, {"arch": "gfx942", "bytes": None}])
        arch      bytes
        ------  -------
        sm90      1,024
        gfx942
    """
    if not rows:
        return
    heads = list(rows[0])
    cells = [[_cell(row[head]) for head in heads] for row in rows]
    is_text = [head not in right and any(isinstance(row[head], str) for row in rows) for head in heads]
    lines = tabulate(cells, heads, disable_numparse=True, colalign=["left" if text else "right" for text in is_text])
    print("\n".join(line.rstrip() for line in lines.splitlines()))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def print_json(value: object) -> None:
    """A value for machines: one JSON document, keys in the order given."""
    print(json.dumps(value, indent=2))


def bytes_text(count: float) -> str:
    """A number of bytes for people.

    Example:
        >>> bytes_text(1000), bytes_text(131072), bytes_text(40 << 30)
        ('1,000 B', '128 KiB', '40 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    digits = f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.1f}"
    return f"{digits} {units[power]}"


class Progress:
    """How far long work is: a bar where tqdm is installed, else a line every other second; on stderr both.

    Args:
        label: what is done.
        total: how many steps; None if that is not known yet.
    """

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.done = label, total, 0
        self._said = time.monotonic()
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            self._bar = None
        else:
            self._bar = tqdm(total=total, desc=label, file=sys.stderr, leave=False)

    def step(self, text: str = "") -> None:
        """One more is done; `text` says what it was."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self.done == self.total or time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            of_total = "" if self.total is None else f" of {self.total}"
            self.note(f"{self.label}: {self.done}{of_total}{text and ', '}{text}")

    def expect(self, total: int) -> None:
        """There are so many steps."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
