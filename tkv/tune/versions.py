"""Versions of what compiles the kernels, found without importing it."""

from __future__ import annotations

import functools
import re
from importlib import metadata


@functools.cache
def installed_triton() -> str | None:
    """The version of Triton; None if there is no such package."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def triton_is_at_least(major: int, minor: int) -> bool:
    """Whether the installed Triton is of this version or a later one.

    Example:
        >>> triton_is_at_least(3, 0), triton_is_at_least(99, 0)
        (True, False)
    """
    found = re.match(r"(\d+)\.(\d+)", installed_triton() or "")
    return found is not None and (int(found[1]), int(found[2])) >= (major, minor)
