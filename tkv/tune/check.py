"""Check tuning tables without their GPUs: every entry is a config that compiles, fits, does not spill, and is what the table says it is."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tkv.errors import TkvError, UnsupportedError
from tkv.tune import limits, select, tables
from tkv.tune.arch import ARCHS, configs_dir
from tkv.tune.arch import arch as arch_facts
from tkv.tune.cases import Case, config_override, launch_of
from tkv.tune.compile import Report, compile_all
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, check_op, kernel_hash, key_case
from tkv.tune.tables import Compiled, Entry, Table, TableError, table_path

if TYPE_CHECKING:
    from tkv.tune.store import Store

SAMPLE = 64


@dataclass(frozen=True)
class Problem:
    """What is wrong with a table.

    Attributes:
        file: of the table.
        entry: its number among the entries, from 1; None if it is about the whole table.
        what: the key and the bucket of the entry; empty without one.
        text: what is wrong, in one line.
    """

    file: str
    entry: int | None
    what: str
    text: str

    def __str__(self) -> str:
        where = self.file if self.entry is None else f"{self.file}: entry {self.entry} ({self.what})"
        return self.text if self.text.startswith(self.file) else f"{where}: {self.text}"


@dataclass(frozen=True)
class _Place:
    """An entry where it stands."""

    table: Table
    file: Path
    number: int

    @property
    def entry(self) -> Entry:
        return self.table.entries[self.number - 1]

    @property
    def kernel(self) -> tuple[str, str, tuple[object, ...]]:
        """Entries that are equal in it compile to one kernel: buckets and the length of splits do not count."""
        config = self.entry.config
        return self.table.op, self.table.arch, (self.entry.match, None if config is None else replace(config, split_len=None))

    def problem(self, text: str) -> Problem:
        return Problem(str(self.file), self.number, f"{self.entry.match.name}; {self.entry.bucket.name}", " ".join(text.split()))


def check(
    archs: Iterable[str] | None = None, ops: Iterable[str] | None = None, *, folder: Path | None = None, strict: bool = False,
    since: str | None = None, sample: int = SAMPLE, seed: int = 0, store: Store | None = None, workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:  # fmt: skip
    """Read tables, and compile what they choose.

    Every table has to be valid, and every entry within what is known before compiling. Compiled are with `strict` all entries, else those
    of kernels that have changed since their table was made, those that a table has not had at the revision `since`, and a sample of
    the rest; entries that differ in their bucket alone are compiled once. A compiled entry must fit in the architecture's shared memory
    and registers. Where the entry's own Triton compiled it, it must not spill, unless it is measured and says so, and be what ``compiled``
    says; with another Triton, spills count only with `strict`.

    Args:
        archs: architectures whose tables are checked; all if None.
        ops: functions whose tables are checked; all if None.
        folder: laid out like ``autotune_configs``; tkv's own if None.
        strict: all entries; and a table whose kernel has changed since is a problem.
        since: a git revision of the repository that the folder belongs to.
        sample: how many kernels of the entries that have not changed are compiled.
        seed: of the sample.
        store: of compiled kernels.
        workers: processes; one a core if None.
        progress: called with (kernels done, all kernels) before the first and after each.

    Returns:
        What is wrong, by table and entry; empty if nothing is.

    Raises:
        UnsupportedError: an unknown architecture, function or revision.

    Example:
        >>> check(["sm90"], folder=Path("a folder without tables"))
        []
    """
    folder = configs_dir() if folder is None else folder
    archs, ops = ARCHS if archs is None else tuple(archs), tuple(OP_KINDS) if ops is None else tuple(ops)
    for arch in archs:
        arch_facts(arch)
    for op in ops:
        check_op(op)
    if since is not None:
        _check_revision(folder, since)
    found = list(_strays(folder)) if len(archs) == len(ARCHS) and len(ops) == len(OP_KINDS) else []
    places: list[_Place] = []
    changed: set[_Place] = set()
    for arch in archs:
        for op in ops:
            path = table_path(folder, arch, op)
            try:
                table = tables.load(path)
            except FileNotFoundError:
                continue
            except TableError as error:
                found.append(Problem(str(path), None, "", str(error)))
                continue
            is_stale = table.kernel_hash != kernel_hash(op)
            if strict and is_stale:
                found.append(Problem(str(path), None, "", "stale: the kernel has changed since, tune again"))
            known = None if since is None else _known(path, since)
            for number, entry in enumerate(table.entries, 1):
                place = _Place(table, path, number)
                before = _problems_before(place)
                found += map(place.problem, before)
                if entry.config is not None and not before:
                    places.append(place)
                    if is_stale or (known is not None and _is_new(table, entry, known)):
                        changed.add(place)
    jobs = _jobs(places if strict else _chosen(places, changed, sample, seed))
    for place, report in _reports(jobs, store, workers, progress):
        found += map(place.problem, problems_after(place.entry, place.table.arch, report, strict))
    return sorted(found, key=lambda problem: (problem.file, problem.entry or 0))


def _strays(folder: Path) -> Iterator[Problem]:
    """Files where no table is looked for."""
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name not in ARCHS or path.stem not in OP_KINDS:
            yield Problem(
                str(path), None, "", f"nothing reads it: expected <arch>/<op>.json, of {', '.join(ARCHS)} and {', '.join(OP_KINDS)}"
            )


def _check_revision(folder: Path, since: str) -> None:
    known = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{since}^{{commit}}")
    if known.returncode:
        raise UnsupportedError(f"since: there is no git revision {since!r} of {folder}")


def _git(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, encoding="utf-8", errors="replace")


def _known(path: Path, since: str) -> set[str]:
    """Lines of the table at a revision; empty if it was not there."""
    shown = _git(path.parent, "show", f"{since}:./{path.name}")
    return {line.rstrip(",") for line in shown.stdout.splitlines()} if shown.returncode == 0 else set()


def _is_new(table: Table, entry: Entry, known: set[str]) -> bool:
    """Whether the table did not have the entry, or not for this kernel."""
    return not {tables.entry_line(entry, table.op), tables.hash_line(table)} <= known


def _chosen(places: list[_Place], changed: set[_Place], sample: int, seed: int) -> list[_Place]:
    """Those that have changed, and those of some of the other kernels."""
    rest = sorted({place.kernel for place in places} - {place.kernel for place in changed}, key=repr)
    taken = set(random.Random(seed).sample(rest, min(sample, len(rest))))
    return [place for place in places if place in changed or place.kernel in taken]


def _problems_before(place: _Place) -> list[str]:
    """What is known without compiling."""
    entry, arch = place.entry, place.table.arch
    if entry.config is None or entry.compiled is None:
        return []
    found = select.problems(entry, arch)
    if entry.origin == "modelled" and entry.compiled.spills:
        found.append(f"spills {entry.compiled.spills}, as the table says; a modelled entry must not")
    try:
        case = key_case(place.table.op, entry.match)
        launch_of(case, arch, **config_override(case, entry.config))
    except TkvError as error:
        found.append(f"there is no such call: {error}")
    return found


def _jobs(places: list[_Place]) -> list[list[_Place]]:
    """Places by the kernel that they compile to."""
    found: dict[object, list[_Place]] = {}
    for place in places:
        found.setdefault(place.kernel, []).append(place)
    return list(found.values())


def _reports(
    jobs: list[list[_Place]], store: Store | None, workers: int | None, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[_Place, Report]]:
    compiled: list[tuple[Case, str, AttentionConfig | None]] = []
    for places in jobs:
        first = places[0]
        compiled.append((key_case(first.table.op, first.entry.match), first.table.arch, first.entry.config))
    if progress is not None:
        progress(0, len(jobs))
    for done, (places, report) in enumerate(zip(jobs, compile_all(compiled, workers, store=store)), 1):
        for place in places:
            yield place, report
        if progress is not None:
            progress(done, len(jobs))


def problems_after(entry: Entry, arch: str, report: Report, strict: bool = False) -> list[str]:
    """What the compiled kernel of an entry says against it.

    Args:
        entry: of a table, with a config.
        arch: the table's architecture.
        report: of the entry's config.
        strict: spills count with any version of Triton.

    Returns:
        A line a problem.

    Raises:
        UnsupportedError: the entry has no config.
    """
    says = entry.compiled
    if says is None:
        raise UnsupportedError(f"entry: expected one with a config, got the default for {entry.match.name}")
    is_same = report.triton == says.triton
    allowed = says.spills if entry.origin == "measured" else 0
    counts_spills = (is_same or strict) and report.spills > allowed
    found = limits.report_problems(report if counts_spills else replace(report, spills=0))
    if is_same and not report.error:
        now = asdict(compiled_of(report))
        wrong = [f"{name} {value}, now {now[name]}" for name, value in asdict(says).items() if value != now[name]]
        if wrong:
            found.append(f"compiled says {'; '.join(wrong)} (Triton {says.triton} on {arch})")
    return found


def compiled_of(report: Report) -> Compiled:
    """What an entry says of its kernel."""
    ctas = limits.ctas_per_sm(arch_facts(report.arch), report.registers, report.shared, report.num_warps)
    return Compiled(report.triton, report.registers, report.spills, report.shared, ctas)
