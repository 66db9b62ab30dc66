"""What measuring gave: the results of shapes as a file, and the tuning tables that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tkv.tune.blocklist import write_text
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key, key_of_shape, size_of_shape
from tkv.tune.model import Shape
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, TableError
from tkv.tune.timing import Times

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """What measuring a shape gave.

    Attributes:
        shape: what was measured.
        default, default_us: the analytic default and its times.
        best, best_us: the winner and its times; None where the default stays.
        compiled: what compiling the winner gave.
        noise: spread of the default's rounds, percent.
        tried, failed, left: candidates that were timed, that failed, and that the budget left no time for.
        finalists: those that were timed in turns, with their medians in microseconds.
        run: index of the run that measured it.
        kernel_hash: of the kernel's source.
    """

    shape: Shape
    default: AttentionConfig
    default_us: Times
    best: AttentionConfig | None
    best_us: Times | None
    compiled: Compiled | None
    noise: float
    tried: int
    failed: int
    left: int
    finalists: tuple[tuple[AttentionConfig, float], ...]
    run: int
    kernel_hash: str

    @property
    def gain(self) -> float:
        """How much less time than the default the winner takes, in percent; 0 where the default stays."""
        return 0.0 if self.best_us is None else 100 * (1 - self.best_us.p50 / self.default_us.p50)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Result:
        """A result from its JSON."""
        shape = {**data["shape"], "flags": tuple(data["shape"]["flags"])}
        config = AttentionConfig.of
        return cls(
            **{
                **data,
                "shape": Shape(**shape),
                "default": config(data["default"]),
                "default_us": Times(**data["default_us"]),
                "best": data["best"] and config(data["best"]),
                "best_us": data["best_us"] and Times(**data["best_us"]),
                "compiled": data["compiled"] and Compiled(**data["compiled"]),
                "finalists": tuple((config(finalist), us) for finalist, us in data["finalists"]),
            }
        )


def save_results(path: Path, arch: str, results: Iterable[Result], runs: Iterable[Run]) -> None:
    """Write results and the runs that they refer to, one a line, for `load_results`."""
    lines = [",\n".join(json.dumps(asdict(item)) for item in items) for items in (runs, results)]
    write_text(path, f'{{\n"schema": {SCHEMA},\n"arch": "{arch}",\n"runs": [\n{lines[0]}\n],\n"results": [\n{lines[1]}\n]\n}}\n')


def load_results(path: Path) -> tuple[list[Result], list[Run]]:
    """The results and runs of a file that a tuner wrote.

    Raises:
        TableError: it is none, in one line.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema: this version of tkv reads {SCHEMA}, got {data['schema']!r}")
        return [Result.of(item) for item in data["results"]], [Run(**item) for item in data["runs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise TableError(f"{path}: no results of tkv tune: {type(error).__name__}: {error}") from None


def tables_of(arch: str, results: Iterable[Result], runs: Sequence[Run]) -> list[Table]:
    """Tables of what was measured: of each key the shapes' sizes, cut half-way between one and the next; the largest stays open.

    Args:
        arch: the architecture.
        results: of its GPUs, with the kernels as they are now; of two for one size the later counts.
        runs: that they refer to.

    Returns:
        A :class:`tkv.tune.tables.Table` for each op; where the default stays, entries say so.
    """
    by_op: dict[str, dict[Key, list[Result]]] = {}
    for result in results:
        # A winner without its registers cannot be kept: tables say of each config what compiling it gave.
        if result.best is None or result.compiled is not None:
            by_op.setdefault(result.shape.op, {}).setdefault(key_of_shape(result.shape), []).append(result)
    tables = []
    for op, by_key in by_op.items():
        used = sorted({result.run for of_key in by_key.values() for result in of_key})
        entries = [
            Entry(
                key, bucket, result.best, "measured", None if result.best is None else result.compiled,
                round((result.best_us or result.default_us).p50, 2), used.index(result.run),
            )
            for key, of_key in by_key.items()
            for bucket, result in _buckets(of_key, runs)
        ]  # fmt: skip
        tables.append(Table.make(op, arch, entries, [runs[run] for run in used]))
    return tables


def _buckets(results: Iterable[Result], runs: Sequence[Run]) -> list[tuple[Bucket, Result]]:
    """The results of a key by ordered bounds of work and of keys; neighbours with the same winner are one."""
    sizes = {size_of_shape(result.shape, runs[result.run].sms): result for result in results}
    rows: dict[float, list[tuple[int, Result]]] = {}
    for (work, keys), result in sorted(sizes.items(), key=lambda item: item[0]):
        rows.setdefault(work, []).append((keys, result))
    cut = {work: _cut(row) for work, row in rows.items()}
    found: list[tuple[Bucket, Result]] = []
    works = list(cut)
    for work, after in zip(works, [*works[1:], None], strict=True):
        if after is None or [(bound, r.best) for bound, r in cut[work]] != [(bound, r.best) for bound, r in cut[after]]:
            # Three digits are enough, and a table stays readable.
            bound = None if after is None else float(f"{math.sqrt(work * after):.3g}")
            found += [(Bucket(bound, keys), result) for keys, result in cut[work]]
    return found


def _cut(row: list[tuple[int, Result]]) -> list[tuple[int | None, Result]]:
    """Upper bounds of keys for the results of one amount of work, in order: the geometric mean of neighbours, the last open."""
    found: list[tuple[int | None, Result]] = []
    for (keys, result), after in zip(row, [*row[1:], None], strict=True):
        if after is None or after[1].best != result.best:
            found.append((None if after is None else math.isqrt(keys * after[0]), result))
    return found
