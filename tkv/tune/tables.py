"""Tuning tables: which configuration a function takes on an architecture, for which keys and sizes of work, and how that is known.

A table is the file ``<architecture>/<function>.json`` of a folder laid out like ``autotune_configs``. Reading and writing one needs no
GPU and no Triton.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tkv.errors import TkvError
from tkv.tune.arch import ARCHS
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import ALL_TUNABLES, OP_KINDS, TUNABLES, Key, kernel_hash

SCHEMA = 1
ORIGINS = ("measured", "modelled")
# Numbers up to here are the same in every reader of JSON.
MOST = 2**53
# The kernel counts keys in 32 bits.
MOST_CONFIG = 2**31 - 1
# The kernel of key_scores heeds no number of stages.
_UNUSED = {"num_stages": 1}


class TableError(TkvError, ValueError):
    """A tuning table that is not one: its message is one line with the file and the entry."""


class Bucket(NamedTuple):
    """Upper bounds of a size of work, each inclusive; None is open. Of a key's buckets the first that holds a call is its own.

    Attributes:
        work: programs without splits over keys, as `tkv.tune.keys.programs_of` counts them, per SM.
        keys: visible keys of the longest sequence, as far as the host knows.

    Example:
        >>> bucket = Bucket(work=0.5, keys=4096)
        >>> bucket.holds(0.5, 4000), bucket.holds(0.5, 5000), Bucket(None, None).holds(1e9, 1e9)
        (True, False, True)
    """

    work: float | None = None
    keys: int | None = None

    def holds(self, work: float, keys: float) -> bool:
        """Whether a call of this size is in the bucket or below."""
        return (self.work is None or work <= self.work) and (self.keys is None or keys <= self.keys)

    @property
    def order(self) -> tuple[float, float]:
        """For sorting: open bounds come last."""
        return math.inf if self.work is None else self.work, math.inf if self.keys is None else self.keys

    @property
    def name(self) -> str:
        """A short name for tables and messages."""
        bounds = [f"{name} <= {bound:g}" for name, bound in (("work", self.work), ("keys", self.keys)) if bound is not None]
        return ", ".join(bounds) or "any"


@dataclass(frozen=True)
class Compiled:
    """What compiling an entry's kernel gave.

    Attributes:
        triton: the version that compiled it.
        registers, spills: of a thread; spills in bytes of its stack.
        shared: bytes of shared memory of a program.
        ctas_per_sm: programs that an SM holds at a time; None where the architecture's limits are not known.
    """

    triton: str
    registers: int
    spills: int
    shared: int
    ctas_per_sm: int | None


@dataclass(frozen=True)
class Run:
    """One run of measuring.

    Attributes:
        device: name of the GPU.
        sms: its SMs.
        driver, triton, torch: versions.
        date: when, ISO 8601.
        method: how times were taken, in a few words.
        noise: spread of repeated times of one launch, percent.
    """

    device: str
    sms: int
    driver: str | None
    triton: str
    torch: str
    date: str
    method: str
    noise: float


@dataclass(frozen=True)
class Entry:
    """A choice of a table.

    Attributes:
        match: the key that it is for.
        bucket: the size of work that it is for.
        config: what to launch with; None says that the analytic default is best there.
        origin: ``"measured"`` or ``"modelled"``.
        compiled: what compiling the config gave; None iff the config is.
        us: measured microseconds of the shape that stands for the bucket; None if modelled.
        run: index of the run that measured it; None if modelled.
    """

    match: Key
    bucket: Bucket
    config: AttentionConfig | None
    origin: str
    compiled: Compiled | None
    us: float | None = None
    run: int | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """Where it stands in a table."""
        return (self.match, *self.bucket.order)


@dataclass(frozen=True)
class Table:
    """The choices for one function on one architecture, valid and in order; see `make`.

    Attributes:
        op: the public function.
        arch: the architecture.
        kernel_hash: of the kernel's source that the entries were found with.
        runs: what measured them.
        entries: sorted by key and bucket.
    """

    op: str
    arch: str
    kernel_hash: str
    runs: tuple[Run, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def make(cls, op: str, arch: str, entries: Iterable[Entry], runs: Iterable[Run] = (), source: str | None = None) -> Table:
        """A table of these entries, put in order and validated.

        Args:
            op, arch: the function and the architecture.
            entries: in any order.
            runs: that measured entries refer to.
            source: the hash of the kernel's source; of the kernel as it is now if None.

        Returns:
            The table.

        Raises:
            TableError: as `load` does, with ``<arch>/<op>`` for the file.

        Example:
            >>> key = Key(128, 128, "bf16", "bf16", rows=16, page=16)
            >>> compiled = Compiled("3.9.0", registers=168, spills=0, shared=70000, ctas_per_sm=3)
            >>> entry = Entry(key, Bucket(), AttentionConfig(16, 64, 4, 3), "modelled", compiled)
            >>> len(Table.make("paged_decode", "sm90", [entry]).entries)
            1
        """
        entries = sorted(entries, key=lambda entry: entry.order)
        table = cls(op, arch, source or kernel_hash(op), tuple(runs), tuple(entries))
        return parse(json.loads(dumps(table)), f"{arch}/{op}")


def table_path(folder: Path, arch: str, op: str) -> Path:
    """Where a folder keeps a table."""
    return folder / arch / f"{op}.json"


def load(path: Path) -> Table:
    """Read a table and validate it.

    Args:
        path: the file.

    Returns:
        The table.

    Raises:
        FileNotFoundError: there is no such file.
        TableError: unreadable, an unknown schema, field, key or tunable, a config that cannot be launched, a gap in the buckets, or an
            entry that does not say how it is known; one line with the file and the entry.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: no UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path}: no JSON: {error}") from None
    table = parse(data, str(path))
    if (table.arch, table.op) != (path.parent.name, path.stem):
        raise TableError(f"{path}: it is the table of {table.op} on {table.arch}, which belongs to {table.arch}/{table.op}.json")
    return table


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. A name that comes twice is made one that no object has, to be refused where it stands."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[f"{name} (twice)" if name in found else name] = value
    return found


def parse(data: Any, source: str) -> Table:
    """A table from what its JSON holds; `source` is what messages call it. Raises `TableError` as `load` does."""
    try:
        header = _fields_of(data, ("schema", "op", "arch", "kernel_hash", "tunables", "runs", "entries"))
        if type(header["schema"]) is not int or header["schema"] != SCHEMA:
            raise ValueError(f"schema: this version of tkv reads {SCHEMA}, got {header['schema']!r:.80}")
        op, arch = header["op"], header["arch"]
        if not isinstance(op, str) or op not in OP_KINDS:
            raise ValueError(f"op: expected {', '.join(OP_KINDS)}, got {op!r:.80}")
        if arch not in ARCHS:
            raise ValueError(f"arch: expected {', '.join(ARCHS)}, got {arch!r:.80}")
        if header["tunables"] != list(TUNABLES[op]):
            raise ValueError(f"tunables: the kernel has {', '.join(TUNABLES[op])}, got {header['tunables']!r:.200}")
        if not isinstance(header["kernel_hash"], str):
            raise ValueError(f"kernel_hash: expected text, got {header['kernel_hash']!r:.80}")
        for name in ("runs", "entries"):
            if not isinstance(header[name], list):
                raise ValueError(f"{name}: expected a list, got {type(header[name]).__name__}")
    except (ValueError, TypeError) as error:
        raise TableError(f"{source}: {error}") from None
    runs = tuple(_each(header["runs"], _run, f"{source}: run"))
    entries = tuple(_each(header["entries"], lambda item: _entry(item, op, len(runs)), f"{source}: entry"))
    _check_order(entries, source)
    return Table(op, arch, header["kernel_hash"], runs, entries)


def _each(items: list[Any], read: Any, name: str) -> list[Any]:
    found = []
    for number, item in enumerate(items, 1):
        try:
            found.append(read(item))
        except (ValueError, TypeError) as error:
            raise TableError(f"{name} {number}: {error}") from None
    return found


def _fields_of(data: Any, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"expected an object, got {data!r:.80}")
    unknown = sorted(set(data) - set(names) - set(optional))
    missing = [name for name in names if name not in data]
    if unknown or missing:
        wrong = ", ".join(text for text in (unknown and f"unknown {unknown}", missing and f"missing {missing}") if text)
        raise ValueError(f"{wrong}; the fields are {', '.join((*names, *optional))}")
    return {**dict.fromkeys(optional), **data}


def _number(data: dict[str, Any], name: str, kinds: tuple[type, ...] = (int,), least: float = 0) -> None:
    value = data[name]
    if type(value) not in kinds or not least <= value <= MOST:
        wanted = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name}: expected {wanted} from {least:g} to {MOST}, got {value!r:.80}")


def _run(data: Any) -> Run:
    data = _fields_of(data, [field.name for field in fields(Run)])
    for name in ("device", "driver", "triton", "torch", "date", "method"):
        if not isinstance(data[name], str) and not (name == "driver" and data[name] is None):
            raise TypeError(f"{name}: expected text, got {data[name]!r:.80}")
    _number(data, "sms", least=1)
    _number(data, "noise", (int, float))
    return Run(**data)


def _entry(data: Any, op: str, num_runs: int) -> Entry:
    data = _fields_of(data, ("match", "bucket", "config", "origin", "compiled"), ("us", "run"))
    if data["origin"] not in ORIGINS:
        raise ValueError(f"origin: expected {' or '.join(ORIGINS)}, got {data['origin']!r:.80}")
    is_measured = data["origin"] == "measured"
    if is_measured != (data["us"] is not None):
        raise ValueError("us: an entry has it if and only if its origin is measured")
    if is_measured:
        _number(data, "us", (int, float))
    if is_measured != (data["run"] is not None):
        raise ValueError("run: an entry has it if and only if its origin is measured")
    if is_measured and (type(data["run"]) is not int or not 0 <= data["run"] < num_runs):
        raise ValueError(f"run: expected an index below {num_runs}, the number of runs, got {data['run']!r:.80}")
    if (data["config"] is None) != (data["compiled"] is None):
        raise ValueError("compiled: an entry has it if and only if it has a config")
    try:
        match = _match(data["match"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"match: {error}") from None
    config = None if data["config"] is None else _config(data["config"], op)
    compiled = None if data["compiled"] is None else _compiled(data["compiled"])
    return Entry(match, _bucket(data["bucket"]), config, data["origin"], compiled, data["us"], data["run"])


def _match(data: Any) -> Key:
    data = _fields_of(data, Key._fields)
    if not isinstance(data["flags"], list) or not all(isinstance(flag, str) for flag in data["flags"]):
        raise TypeError(f"flags: expected a list of names, got {data['flags']!r:.80}")
    return Key.of(data)


def _bucket(data: Any) -> Bucket:
    try:
        data = _fields_of(data, Bucket._fields)
        if data["work"] is not None:
            _number(data, "work", (int, float))
        if data["keys"] is not None:
            _number(data, "keys")
    except (ValueError, TypeError) as error:
        raise ValueError(f"bucket: {error}") from None
    return Bucket(**data)


def _config(data: Any, op: str) -> AttentionConfig:
    if not isinstance(data, dict):
        raise TypeError(f"config: expected an object or null, got {data!r:.80}")
    unknown = sorted(set(data) - set(TUNABLES[op]))
    if unknown:
        raise ValueError(f"config: tunables of {op} are {', '.join(TUNABLES[op])}; unknown {unknown}")
    for name, value in data.items():
        if type(value) is not int or value > MOST_CONFIG:
            wanted = f"at most {MOST_CONFIG}" if type(value) is int else "an integer"
            raise ValueError(f"config.{name}: expected {wanted}, got {value!r:.80}")
    return AttentionConfig.of({**{name: value for name, value in _UNUSED.items() if name not in TUNABLES[op]}, **data})


def _compiled(data: Any) -> Compiled:
    try:
        data = _fields_of(data, [field.name for field in fields(Compiled)])
        for name in ("registers", "spills", "shared"):
            _number(data, name)
        if data["ctas_per_sm"] is not None:
            _number(data, "ctas_per_sm")
        if not isinstance(data["triton"], str):
            raise TypeError(f"triton: expected text, got {data['triton']!r:.80}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"compiled: {error}") from None
    return Compiled(**data)


def _check_order(entries: tuple[Entry, ...], source: str) -> None:
    """Entries stand in order, and the buckets of each key leave no size out: bounds ascend, and the last ones are open."""
    for number, entry in enumerate(entries, 1):
        after = entries[number] if number < len(entries) else None
        where = f"{source}: entry {number} ({entry.match.name}; {entry.bucket.name})"
        if after is not None and entry.order >= after.order:
            again = "twice" if entry.order == after.order else "behind one that it belongs before; bounds must ascend"
            raise TableError(f"{where}: comes {again}")
        is_last = after is None or after.match != entry.match
        if is_last and entry.bucket != Bucket(None, None):
            raise TableError(f"{where}: bucket: a gap above it; the last bucket of a key must be open (null) in work and keys")
        if after is not None and not is_last and after.bucket.work != entry.bucket.work and entry.bucket.keys is not None:
            raise TableError(f"{where}: bucket: a gap above it; the last bucket of a bound of work must be open (null) in keys")


def dumps(table: Table) -> str:
    """The table as its file has it: an entry a line, in order, integers only in configs."""
    lines = [f'"schema": {SCHEMA}'] + [f'"{name}": {json.dumps(getattr(table, name))}' for name in ("op", "arch")]
    lines += [hash_line(table), f'"tunables": {json.dumps(TUNABLES[table.op])}']
    lines.append(_list("runs", [json.dumps(asdict(run)) for run in table.runs]))
    lines.append(_list("entries", [entry_line(entry, table.op) for entry in table.entries]))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def hash_line(table: Table) -> str:
    """The line of a table's file that says for which kernel it is."""
    return f'"kernel_hash": {json.dumps(table.kernel_hash)}'


def entry_line(entry: Entry, op: str) -> str:
    """The line of an entry in its table's file, without the comma behind it."""
    return json.dumps(_as_json(entry, TUNABLES[op]))


def _list(name: str, items: list[str]) -> str:
    return f'"{name}": [\n' + ",\n".join(items) + "\n]" if items else f'"{name}": []'


def _as_json(entry: Entry, tunables: tuple[str, ...]) -> dict[str, Any]:
    config = None
    if entry.config is not None:
        values = {name: getattr(entry.config, name) for name in ALL_TUNABLES}
        config = {name: value for name, value in values.items() if value is not None and (name in tunables or name not in _UNUSED)}
    found: dict[str, Any] = {
        "match": entry.match._asdict(),
        "bucket": entry.bucket._asdict(),
        "config": config,
        "origin": entry.origin,
        "compiled": None if entry.compiled is None else asdict(entry.compiled),
    }
    return found if entry.origin == "modelled" and entry.us is None and entry.run is None else {**found, "us": entry.us, "run": entry.run}


def dump(table: Table, path: Path) -> None:
    """Write a table; whoever reads it meanwhile sees the old one or the new one.

    Args:
        table: the table.
        path: the file; its folder is made if there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(dumps(table), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
