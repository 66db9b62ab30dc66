"""Which configuration a call is launched with: its own, a table's, or the analytic default.

In order: the call's ``config=``; the table of the GPU's architecture in the folder that the environment variable ``TKV_CONFIG_DIR`` names;
tkv's own table of the architecture, or where there is none that of its family; the analytic default. A configuration that cannot run
there is passed over, and so is one that was modelled, not measured, for another version of Triton. Only values that the host knows take
part, so a captured graph and its replay agree.

Tables are read, and candidates looked up, when a kind of call comes for the first time; see `forget`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tkv.tune import tables
from tkv.tune.arch import ARCHS, configs_dir, parts
from tkv.tune.arch import arch as arch_facts
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, check_op, kernel_hash, key_of_facts, key_of_shape, size_of_shape
from tkv.tune.limits import problems_of
from tkv.tune.tables import Entry, Table, TableError, table_path
from tkv.tune.versions import installed_triton

if TYPE_CHECKING:
    from tkv.tune.model import Shape

CONFIG_DIR = "TKV_CONFIG_DIR"
_log = logging.getLogger("tkv")

DefaultOf = Callable[[str, str, Key], AttentionConfig]


class Choices:
    """What a kind of call may be launched with, looked up once.

    Attributes:
        default: the analytic default.
        sources: of each table that has the key, in order, its buckets: (bound of work, bound of keys, config); None for a config that
            cannot run.
    """

    __slots__ = ("default", "sources")

    def __init__(self, default: AttentionConfig, sources: list[list[tuple[float, float, AttentionConfig | None]]]) -> None:
        self.default = default
        self.sources = sources

    def pick(self, work: float, keys: float) -> AttentionConfig:
        """The config for a size of work; infinite ones give that of the open buckets, which no batch changes."""
        for buckets in self.sources:
            for most_work, most_keys, config in buckets:
                if work <= most_work and keys <= most_keys:
                    if config is not None:
                        return config
                    break
        return self.default


@functools.lru_cache(maxsize=4096)
def choices(op: str, arch: str, facts: tuple[Any, ...], default_of: DefaultOf) -> Choices:
    """The choices for a kind of call.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        arch: the architecture.
        facts: of the call, from `tkv.tune.keys.facts_of`.
        default_of: gives the analytic default of (op, arch, key).

    Returns:
        The choices, the same object for equal arguments.
    """
    return choices_of(op, arch, key_of_facts(facts), default_of)


def choices_of(op: str, arch: str, key: Key, default_of: DefaultOf) -> Choices:
    """As `choices`, for a key, and looked up anew."""
    default = default_of(op, arch, key)
    sources = []
    for source in _tables(op, arch):
        entries = source.entries.get(key)
        if entries:
            sources.append([_row(entry, arch, default) for entry in entries])
    return Choices(default, sources)


def choose(op: str, arch: str, key: Key, programs: float, num_sms: int, keys: float, default: AttentionConfig) -> AttentionConfig:
    """The config of a call.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        arch: the architecture.
        key: of the call.
        programs: as `tkv.tune.keys.programs_of` counts them.
        num_sms: of the GPU.
        keys: visible keys of the longest sequence, as far as the host knows.
        default: the analytic default.

    Returns:
        A table's config, or the default.

    Example:
        >>> key, default = Key(40, 40, "fp32", "fp32", rows=128, page=1), AttentionConfig(16, 16, 4, 1)
        >>> choose("paged_decode", "gfx1201", key, programs=8, num_sms=64, keys=1000, default=default) == default
        True
    """
    return choices_of(op, arch, key, lambda *_: default).pick(programs / num_sms, keys)


def forget() -> None:
    """Forget what was chosen and read: after a change of ``TKV_CONFIG_DIR`` or of a table, the next call looks again."""
    for cached in (choices, _read, _is_folder):
        cached.cache_clear()


def _row(entry: Entry, arch: str, default: AttentionConfig) -> tuple[float, float, AttentionConfig | None]:
    config = default if entry.config is None else None if reasons_against(entry, arch) else entry.config
    return (*entry.bucket.order, config)


def problems(entry: Entry, arch: str) -> list[str]:
    """Why an entry's config cannot run on an architecture, its own or another of the family; empty if it can, or is the default."""
    if entry.config is None:
        return []
    found = config_problems(entry.config, entry.match, arch)
    limit = arch_facts(arch).shared_per_block
    if entry.compiled is not None and entry.compiled.shared > limit:
        found.append(f"needs {entry.compiled.shared} bytes of shared memory, {arch} has {limit}")
    return found


def reasons_against(entry: Entry, arch: str) -> list[str]:
    """Why a call passes an entry by: its `problems`, or it was modelled from what another Triton made of the kernel."""
    found, now = problems(entry, arch), installed_triton()
    if entry.origin == "modelled" and entry.compiled is not None and now is not None:
        if entry.compiled.triton.split(".")[:2] != now.split(".")[:2]:
            found.append(f"modelled from what Triton {entry.compiled.triton} makes of the kernel, {now} is installed")
    return found


def config_problems(config: AttentionConfig, key: Key, arch: str) -> list[str]:
    """Why a config cannot run for a key on an architecture, as far as it is known before compiling."""
    bits = min(4 if kind.dtype == "int4" else 8 * kind.torch_dtype.itemsize for kind in key.formats)
    return problems_of(
        config, arch, key.head_dim, 32 if key.dtype == "fp32" else 16, v_head_dim=key.v_head_dim, bits=bits, shared="shared" in key.flags
    )


class _Source(NamedTuple):
    """A table as it was read.

    Attributes:
        path: its file.
        table: what it holds; None where it is missing or wrong.
        entries: of the table, by key.
        problem: why there is no table.
    """

    path: Path
    table: Table | None = None
    entries: Mapping[Key, tuple[Entry, ...]] = MappingProxyType({})
    problem: str = ""


def _tables(op: str, arch: str) -> Iterator[_Source]:
    """The tables that a call may take its config from, in order.

    The tables of an architecture's family stand in for a missing one: a key that a table leaves out is best served by the default.
    """
    own = os.environ.get(CONFIG_DIR)
    if own and _is_folder(own):
        yield _read(table_path(Path(own), arch, op))
    for name in (arch, *arch_facts(arch).family):
        source = _read(table_path(configs_dir(), name, op))
        yield source
        if source.table is not None:
            return


@functools.lru_cache(maxsize=16)
def _is_folder(name: str) -> bool:
    """Whether `CONFIG_DIR` names a folder; if not, it is logged."""
    if not os.path.isdir(name):
        _log.warning("%s is ignored: there is no folder %s", CONFIG_DIR, name)
        return False
    return True


@functools.lru_cache(maxsize=256)
def _read(path: Path) -> _Source:
    """A table; that it is missing or wrong is logged."""
    try:
        table = tables.load(path)
    except FileNotFoundError:
        _log.info("no tuning table %s: its family's, or the default configuration, is used", path)
        return _Source(path, problem="no such table")
    except TableError as error:
        _log.warning("a tuning table is ignored: %s", error)
        return _Source(path, problem=str(error))
    entries: dict[Key, tuple[Entry, ...]] = {}
    for entry in table.entries:
        entries[entry.match] = (*entries.get(entry.match, ()), entry)
    return _Source(path, table, entries)


@dataclass(frozen=True)
class Candidate:
    """One source of a configuration, as `explain` shows it.

    Attributes:
        source: ``"config="``, the file of a table, or ``"default"``.
        outcome: ``"chosen"``, ``"matched"`` (it would be next), ``"rejected"`` or ``"no match"``.
        reason: why not, or which bucket matched.
        config: what it offers; None if nothing.
        origin: ``"measured"``, ``"modelled"``, ``"analytic"`` or ``"call"``; empty without a config.
        us: measured microseconds of the shape that stands for the bucket.
        triton: the version that compiled the entry.
        stale: why the entry may no longer hold; empty if it does.
    """

    source: str
    outcome: str
    reason: str = ""
    config: AttentionConfig | None = None
    origin: str = ""
    us: float | None = None
    triton: str | None = None
    stale: str = ""


def explain(
    op: str, what: Key | Shape, arch: str, *, work: float = math.inf, keys: float = math.inf, num_sms: int | None = None,
    config: AttentionConfig | dict[str, Any] | None = None,
) -> list[Candidate]:  # fmt: skip
    """Every source that a call's configuration may come from, in their order, and what became of it.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        what: a key, or a :class:`tkv.tune.model.Shape`, which also says how much work there is.
        arch: the architecture.
        work, keys: the size of the work if `what` is a key; the open bucket if left out.
        num_sms: of the GPU, for a shape; those of the first part of the architecture that is known if None.
        config: the call's own.

    Returns:
        :class:`Candidate`, exactly one of them chosen.

    Raises:
        UnsupportedError: an op without tunables, an unknown architecture, or a config that the kernel does not have.

    Example:
        >>> key = Key(128, 128, "bf16", "bf16", rows=16, page=16)
        >>> [(row.source, row.outcome) for row in explain("paged_decode", key, "sm90", config=dict(
        ...     block_m=16, block_n=32, num_warps=4, num_stages=2))][0]
        ('config=', 'chosen')
    """
    from tkv.ops.attention import default_config

    check_op(op)
    if isinstance(what, Key):
        key = what
    else:
        known = [part.sms for part in parts() if part.arch == arch]
        key = key_of_shape(what)
        work, keys = size_of_shape(what, num_sms or (known[0] if known else 132))
    rows: list[Candidate] = []
    if config is None:
        rows.append(Candidate("config=", "no match", "not given"))
    else:
        given = AttentionConfig.of(config)
        wrong = config_problems(given, key, arch)
        rows.append(Candidate("config=", "matched", f"cannot run: {'; '.join(wrong)}" if wrong else "", given, "call"))
    own = os.environ.get(CONFIG_DIR)
    if not own or not _is_folder(own):
        rows.append(Candidate(CONFIG_DIR, "no match", f"there is no folder {own}" if own else "not set"))
    rows += [_candidate(source, key, arch, work, keys) for source in _tables(op, arch)]
    rows.append(Candidate("default", "matched", "", default_config(op, arch, key), "analytic"))
    first = next(i for i, row in enumerate(rows) if row.outcome == "matched")
    rows[first] = Candidate(**{**rows[first].__dict__, "outcome": "chosen"})
    default = rows[-1].config
    return [Candidate(**{**row.__dict__, "config": default}) if row.config is None and row.origin else row for row in rows]


def _candidate(source: _Source, key: Key, arch: str, work: float, keys: float) -> Candidate:
    """What a table offers."""
    name = str(source.path)
    if source.table is None:
        return Candidate(name, "no match", source.problem)
    entry = next((entry for entry in source.entries.get(key, ()) if entry.bucket.holds(work, keys)), None)
    if entry is None:
        near = sum(other[:4] == key[:4] for other in source.entries)
        many = len(source.entries)
        return Candidate(name, "no match", f"no entry for {key.name}; {near} keys of these dims and this format, {many} in all")
    wrong = reasons_against(entry, arch)
    return Candidate(
        name,
        "rejected" if wrong else "matched",
        "; ".join(wrong) if wrong else f"bucket {entry.bucket.name}",
        entry.config,
        entry.origin,
        entry.us,
        None if entry.compiled is None else entry.compiled.triton,
        staleness(source.table, [entry]),
    )


def staleness(table: Table, entries: Iterable[Entry] | None = None) -> str:
    """Why a table, or some of its entries, may no longer hold: the kernel or Triton is another. Empty if they do."""
    now = installed_triton()
    versions = {entry.compiled.triton for entry in (table.entries if entries is None else entries) if entry.compiled is not None}
    found = [] if table.kernel_hash == kernel_hash(table.op) else ["the kernel has changed"]
    if now is not None and versions - {now}:
        found.append(f"compiled by Triton {', '.join(sorted(versions - {now}))}, here is {now}")
    return "; ".join(found)


@dataclass(frozen=True)
class Coverage:
    """What the tables hold of a function, an architecture and a format.

    Attributes:
        arch, op, format: what of; format is empty where there is no table, or none that can be read.
        entries: how many.
        measured, modelled: how many of each.
        triton: versions that compiled them.
        stale: why they may no longer hold; empty if they do.
        problem: what is wrong with the table; ``"no table"`` where there is none, with the one that stands in.
    """

    arch: str
    op: str
    format: str = ""
    entries: int = 0
    measured: int = 0
    modelled: int = 0
    triton: tuple[str, ...] = ()
    stale: str = ""
    problem: str = ""

    @property
    def is_wrong(self) -> bool:
        """There is a table, but it cannot be used."""
        return bool(self.problem) and not self.problem.startswith("no table")


def coverage(folder: Path | None = None) -> list[Coverage]:
    """What the tables of a folder hold, by architecture, function and format.

    Args:
        folder: laid out like ``autotune_configs``; tkv's own if None.

    Returns:
        One :class:`Coverage` for each format of each table, and one for each table that is missing or wrong.

    Example:
        >>> {row.arch for row in coverage()} == set(ARCHS)
        True
    """
    folder = configs_dir() if folder is None else folder
    rows: list[Coverage] = []
    for arch in ARCHS:
        for op in OP_KINDS:
            try:
                table = tables.load(table_path(folder, arch, op))
            except FileNotFoundError:
                stand_in = next((name for name in arch_facts(arch).family if table_path(folder, name, op).is_file()), None)
                rows.append(Coverage(arch, op, problem="no table" + (f", that of {stand_in} stands in" if stand_in else "")))
                continue
            except TableError as error:
                rows.append(Coverage(arch, op, problem=str(error)))
                continue
            rows += _covered(table)
    return rows


def _covered(table: Table) -> list[Coverage]:
    found = []
    for format in sorted({entry.match.format for entry in table.entries}) or [""]:
        entries = [entry for entry in table.entries if entry.match.format == format]
        measured = sum(entry.origin == "measured" for entry in entries)
        triton = tuple(sorted({entry.compiled.triton for entry in entries if entry.compiled is not None}))
        counts = (len(entries), measured, len(entries) - measured)
        found.append(Coverage(table.arch, table.op, format, *counts, triton, staleness(table, entries)))
    return found
