"""Configs that failed while they were measured, with the reasons: a file, so that no later run tries them again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key
from tkv.tune.tables import TableError

SCHEMA = 1
KINDS = ("compile", "launch", "wrong output", "hang", "crash")


@dataclass(frozen=True)
class Blocked:
    """A config that must not be tried again.

    Attributes:
        arch, op, key: where it failed; key is the name of a :class:`tkv.tune.keys.Key`.
        config: what failed.
        kind: one of `KINDS`.
        reason: what happened.
        triton, kernel_hash: the compiler and the source of the kernel; with others it may work.
        date: when, ISO 8601.
    """

    arch: str
    op: str
    key: str
    config: AttentionConfig
    kind: str
    reason: str
    triton: str
    kernel_hash: str
    date: str


class Blocklist:
    """The failed configs of a file, and those that are added.

    Args:
        path: the file, which need not exist; None keeps them in memory only.
        triton, kernel_hashes: the compiler at hand, and the hash of each op's kernel: only failures with the same count.

    Raises:
        TableError: the file is none of this kind, in one line.

    Example:
        >>> blocklist = Blocklist(None, "3.7.1", {"paged_decode": "5e1f"})
        >>> key, config = Key(128, 128, "bf16", "bf16", rows=16, page=16), AttentionConfig(16, 256, 4, 5)
        >>> blocklist.add("sm90", "paged_decode", key, config, "hang", "no answer within 20 s", "2026-01-31")
        >>> blocklist.reason("sm90", "paged_decode", key, config), blocklist.reason("sm80", "paged_decode", key, config)
        ('hang: no answer within 20 s', None)
    """

    def __init__(self, path: Path | None, triton: str, kernel_hashes: dict[str, str]) -> None:
        self.path, self.triton, self.kernel_hashes = path, triton, kernel_hashes
        self.entries = [] if path is None or not path.exists() else _load(path)

    def reason(self, arch: str, op: str, key: Key, config: AttentionConfig) -> str | None:
        """Why a config must not be tried, or None."""
        for entry in self.entries:
            if (entry.arch, entry.op, entry.key, entry.config) == (arch, op, key.name, config) and self._counts(entry):
                return f"{entry.kind}: {entry.reason}"
        return None

    def add(self, arch: str, op: str, key: Key, config: AttentionConfig, kind: str, reason: str, date: str) -> None:
        """Note a failure, and write the file."""
        entry = Blocked(arch, op, key.name, config, kind, " ".join(reason.split())[:300], self.triton, self.kernel_hashes[op], date)
        self.entries.append(entry)
        if self.path is not None:
            lines = ",\n".join(json.dumps(asdict(entry)) for entry in self.entries)
            write_text(self.path, f'{{\n"schema": {SCHEMA},\n"entries": [\n{lines}\n]\n}}\n')

    def _counts(self, entry: Blocked) -> bool:
        return entry.triton == self.triton and entry.kernel_hash == self.kernel_hashes.get(entry.op)


def _load(path: Path) -> list[Blocked]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema: this version of tkv reads {SCHEMA}, got {data['schema']!r}")
        return [Blocked(**{**entry, "config": AttentionConfig.of(entry["config"])}) for entry in data["entries"]]
    except (ValueError, TypeError, KeyError) as error:
        raise TableError(f"{path}: no list of failed configs: {type(error).__name__}: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole: whoever reads it meanwhile, or after an interruption, sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
