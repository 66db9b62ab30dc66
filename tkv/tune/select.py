"""Which configuration a call is launched with: its own, a table's, or the analytic default.

In order: the call's ``config=``; the table of the GPU's architecture in the folder that the environment variable ``TKV_CONFIG_DIR`` names;
tkv's own table of the architecture, or where there is none that of its family; the analytic default. A configuration that cannot run
there is passed over. Only values that the host knows take part, so a captured graph and its replay agree.

Tables are read, and candidates looked up, when a kind of call comes for the first time; see `forget`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    for _, found in _tables(op, arch):
        entries = found.get(key, ()) if isinstance(found, dict) else ()
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
    config = default if entry.config is None else None if problems(entry, arch) else entry.config
    return (*entry.bucket.order, config)


def problems(entry: Entry, arch: str) -> list[str]:
    """Why an entry's config cannot run on an architecture, its own or another of the family; empty if it can, or is the default."""
    if entry.config is None:
        return []
    key = entry.match
    bits = min(4 if kind.dtype == "int4" else 8 * kind.torch_dtype.itemsize for kind in key.formats)
    found = problems_of(
        entry.config, arch, key.head_dim, 32 if key.dtype == "fp32" else 16, v_head_dim=key.v_head_dim, bits=bits,
        shared="shared" in key.flags,
    )  # fmt: skip
    limit = arch_facts(arch).shared_per_block
    if entry.compiled is not None and entry.compiled.shared > limit:
        found.append(f"needs {entry.compiled.shared} bytes of shared memory, {arch} has {limit}")
    return found


def _tables(op: str, arch: str) -> Iterator[tuple[Path, dict[Key, tuple[Entry, ...]] | None]]:
    """The tables that a call may take its config from, in order: (file, entries by key, or None where it cannot be read).

    The tables of an architecture's family stand in for a missing one: a key that a table leaves out is best served by the default.
    """
    own = os.environ.get(CONFIG_DIR)
    if own and _is_folder(own):
        path = table_path(Path(own), arch, op)
        yield path, _read(path)
    for name in (arch, *arch_facts(arch).family):
        path = table_path(configs_dir(), name, op)
        found = _read(path)
        yield path, found
        if found is not None:
            return


@functools.lru_cache(maxsize=16)
def _is_folder(name: str) -> bool:
    """Whether `CONFIG_DIR` names a folder; if not, it is logged."""
    if not Path(name).is_dir():
        _log.warning("%s is ignored: there is no folder %s", CONFIG_DIR, name)
        return False
    return True


@functools.lru_cache(maxsize=256)
def _read(path: Path) -> dict[Key, tuple[Entry, ...]] | None:
    """The entries of a table by their keys; None where it is missing or wrong, which is logged."""
    try:
        table = tables.load(path)
    except FileNotFoundError:
        _log.info("no tuning table %s: its family's, or the default configuration, is used", path)
        return None
    except (TableError, OSError) as error:
        _log.warning("a tuning table is ignored: %s", error)
        return None
    found: dict[Key, list[Entry]] = {}
    for entry in table.entries:
        found.setdefault(entry.match, []).append(entry)
    return {key: tuple(entries) for key, entries in found.items()}


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
    key = what
    if not isinstance(what, Key):
        known = [part.sms for part in parts() if part.arch == arch]
        key = key_of_shape(what)
        work, keys = size_of_shape(what, num_sms or (known[0] if known else 132))
    assert isinstance(key, Key)
    rows: list[Candidate] = []
    if config is None:
        rows.append(Candidate("config=", "no match", "not given"))
    else:
        rows.append(Candidate("config=", "matched", "", AttentionConfig.of(config), "call"))
    own = os.environ.get(CONFIG_DIR)
    if not own or not _is_folder(own):
        rows.append(Candidate(CONFIG_DIR, "no match", f"there is no folder {own}" if own else "not set"))
    for path, found in _tables(op, arch):
        rows.append(_candidate(op, path, found, key, arch, work, keys))
    rows.append(Candidate("default", "matched", "", default_config(op, arch, key), "analytic"))
    first = next(i for i, row in enumerate(rows) if row.outcome == "matched")
    rows[first] = Candidate(**{**rows[first].__dict__, "outcome": "chosen"})
    default = rows[-1].config
    return [Candidate(**{**row.__dict__, "config": default}) if row.config is None and row.origin else row for row in rows]


def _candidate(op: str, path: Path, found: dict[Key, tuple[Entry, ...]] | None, key: Key, arch: str, work: float, keys: float) -> Candidate:
    """What a table offers."""
    if found is None:
        return Candidate(str(path), "no match", _why_unread(path))
    entries = found.get(key, ())
    entry = next((entry for entry in entries if entry.bucket.holds(work, keys)), None)
    if entry is None:
        near = sum(other[:4] == key[:4] for other in found)
        return Candidate(str(path), "no match", f"no entry for {key.name}; {near} keys of these dims and this format, {len(found)} in all")
    wrong = problems(entry, arch)
    return Candidate(
        str(path),
        "rejected" if wrong else "matched",
        "; ".join(wrong) if wrong else f"bucket {entry.bucket.name}",
        entry.config,
        entry.origin,
        entry.us,
        None if entry.compiled is None else entry.compiled.triton,
        staleness(tables.load(path), [entry]),
    )


def _why_unread(path: Path) -> str:
    try:
        tables.load(path)
    except FileNotFoundError:
        return "no such table"
    except (TableError, OSError) as error:
        return str(error)
    return "no table"


def staleness(table: Table, entries: Iterable[Entry] | None = None) -> str:
    """Why a table, or some of its entries, may no longer hold: the kernel or Triton is another. Empty if they do."""
    now = installed_triton()
    versions = {entry.compiled.triton for entry in (table.entries if entries is None else entries) if entry.compiled is not None}
    found = [] if table.kernel_hash == kernel_hash(table.op) else ["the kernel has changed"]
    if now is not None and versions - {now}:
        found.append(f"compiled by Triton {', '.join(sorted(versions - {now}))}, here is {now}")
    return "; ".join(found)


@functools.cache
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
            except (TableError, OSError) as error:
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
