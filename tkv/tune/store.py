"""Reports of compiled kernels on disk, so that none is compiled twice and an interrupted run goes on where it was."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import zlib
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tkv.ops.launch import Launch
from tkv.tune.cases import Case, config_override, launch_of
from tkv.tune.compile import Report
from tkv.tune.configs import AttentionConfig

# One more whenever reports say more or something else of the same machine code.
SCHEMA = 1


def cache_dir() -> Path:
    """Where tkv keeps what it can make again: ``TKV_CACHE_DIR``, or ``~/.cache/tkv``."""
    named = os.environ.get("TKV_CACHE_DIR", "")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "tkv"


class Store:
    """Reports in a folder, a compressed file each.

    A report's key is the sha256 of all that it depends on: the sources under ``tkv/kernels`` and of what reads the machine code, the case,
    the architecture, the launch that the op makes of them (its config among the rest), Triton's version and its switch for FP fusion.
    Files are written whole or not at all; one that cannot be read counts as missing.

    Args:
        folder: where they lie; ``reports`` in `cache_dir` if None.

    Example:
        >>> import tempfile
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> key = store.key(Case("merge"), "sm90")
        >>> store.put(key, Report(Case("merge"), "sm90", "3.7.1", registers=40))
        >>> store.get(key).registers
        40
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_dir() / "reports" if folder is None else Path(folder)

    def key(self, case: Case, arch: str, config: AttentionConfig | None = None) -> str:
        """The key of a job of `tkv.tune.compile.compile_all`.

        Raises:
            UnsupportedError: no such op or architecture, or a config for a kernel without tunables.
        """
        import triton

        launch = launch_of(case, arch, **config_override(case, config))
        split_len = None if config is None else config.split_len
        fusion = os.environ.get("TRITON_DEFAULT_FP_FUSION", "1")
        parts = (SCHEMA, _sources(), triton.__version__, fusion, asdict(case), arch, split_len, _described(launch))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def get(self, key: str) -> Report | None:
        """The report of a key, or None if there is none that can be read."""
        try:
            found = json.loads(gzip.decompress(self._file(key).read_bytes()))
            config = found["config"]
            found.update(
                case=Case(**found["case"]),
                config=None if config is None else AttentionConfig(**config),
                code=tuple(map(sys.intern, found["code"].split())),
            )
            return Report(**found)
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, zlib.error):
            return None

    def put(self, key: str, report: Report) -> None:
        """Keep a report."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {**asdict(report), "code": " ".join(report.code)}
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json.gz"


@lru_cache(maxsize=1)
def _sources() -> str:
    """The sha256 of the sources that a report depends on, beside the op's launch."""
    package = Path(__file__).resolve().parents[1]
    files = [*sorted((package / "kernels").rglob("*.py")), package / "tune" / "machine_code.py"]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _described(launch: Launch) -> tuple[Any, ...]:
    """A launch as text that is the same in every process: tensors by their dtype."""
    options = (launch.num_warps, launch.num_stages, launch.max_registers)
    return (launch.kernel.__name__, options, tuple(_argument(arg) for arg in launch.args))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
