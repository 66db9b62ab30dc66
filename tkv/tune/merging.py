"""Two tuning tables of one function and architecture made into one."""

from __future__ import annotations

from dataclasses import replace

from tkv.tune.keys import Key, kernel_hash
from tkv.tune.tables import Bucket, Entry, Run, Table, TableError


def merge(a: Table, b: Table) -> tuple[Table, list[str]]:
    """One table of two of the same function and architecture.

    What is measured beats what is modelled. Of two measurements on one device the newer wins, on one day the faster; of two devices the
    first table's stands. Of two models the second table's, which is taken for the newer. Where a key's buckets differ, its entries
    come from one table as a whole. Of tables for different sources of the kernel one counts: that for the source as it is now, else the
    second.

    Args:
        a, b: the tables.

    Returns:
        The table, and one line for each conflict: entries that differ where both are measured, or that were left out.

    Raises:
        TableError: they are of different functions or architectures.
    """
    if (a.op, a.arch) != (b.op, b.arch):
        raise TableError(f"merge: tables of {a.op} on {a.arch} and of {b.op} on {b.arch}")
    if a.kernel_hash != b.kernel_hash:
        kept, left = (a, b) if a.kernel_hash == kernel_hash(a.op) else (b, a)
        which = "second" if left is b else "first"
        return kept, [f"{a.arch}/{a.op}: the {which} table's {len(left.entries)} entries are of another kernel and left out"]
    conflicts: list[str] = []
    runs = tuple(dict.fromkeys((*a.runs, *b.runs)))
    chosen: list[Entry] = []
    of_a, of_b = _by_key(a, runs), _by_key(b, runs)
    for key in sorted({*of_a, *of_b}):
        ours, theirs = of_a.get(key, {}), of_b.get(key, {})
        if not ours or not theirs:
            chosen += (ours or theirs).values()
        elif ours.keys() == theirs.keys():
            chosen += [_better(ours[bucket], theirs[bucket], runs, conflicts) for bucket in ours]
        else:
            first, second = (max(entries.values(), key=lambda entry: _rank(entry, runs)) for entries in (ours, theirs))
            is_second = _rank(second, runs) >= _rank(first, runs)
            conflicts.append(f"{key.name}: buckets differ, all entries are the {'second' if is_second else 'first'} table's")
            chosen += (theirs if is_second else ours).values()
    used = sorted({entry.run for entry in chosen if entry.run is not None})
    entries = [entry if entry.run is None else replace(entry, run=used.index(entry.run)) for entry in chosen]
    return Table.make(a.op, a.arch, entries, [runs[run] for run in used], a.kernel_hash), conflicts


def _by_key(table: Table, runs: tuple[Run, ...]) -> dict[Key, dict[Bucket, Entry]]:
    """Entries by key and bucket, their runs counted among `runs`."""
    found: dict[Key, dict[Bucket, Entry]] = {}
    for entry in table.entries:
        run = None if entry.run is None else runs.index(table.runs[entry.run])
        found.setdefault(entry.match, {})[entry.bucket] = replace(entry, run=run)
    return found


def _rank(entry: Entry, runs: tuple[Run, ...]) -> tuple[bool, str]:
    return entry.run is not None, "" if entry.run is None else runs[entry.run].date


def _better(a: Entry, b: Entry, runs: tuple[Run, ...], conflicts: list[str]) -> Entry:
    if a.run is None or b.run is None or a.us is None or b.us is None:
        return a if a.run is not None else b
    of_a, of_b = runs[a.run], runs[b.run]
    if of_a.device != of_b.device:
        better, why = a, f"measured on {of_a.device} and on {of_b.device}, the first stands"
    elif of_a.date[:10] != of_b.date[:10]:
        better, why = (a, "the newer stands") if of_a.date > of_b.date else (b, "the newer stands")
    else:
        better, why = (a, "the faster stands") if a.us <= b.us else (b, "the faster stands")
    if a.config != b.config:
        conflicts.append(f"{a.match.name}; {a.bucket.name}: {_config_name(a)} at {a.us:g} us and {_config_name(b)} at {b.us:g} us: {why}")
    return better


def _config_name(entry: Entry) -> str:
    return "the default" if entry.config is None else str(entry.config).removeprefix("AttentionConfig")
