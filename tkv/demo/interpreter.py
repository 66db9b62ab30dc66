"""Triton's interpreter without what costs most of its time and changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Run kernels about three times as fast in Triton's interpreter while the context is open, with the same results.

    The interpreter replaces the functions of ``triton.language`` by its own, again at each call of a jit helper: here once a launch. And
    it computes each 32-bit sum and product in 64 bits too, to compare them in an assertion that is off unless Triton debugs: here not. A
    Triton that does not work in this way is left as it is.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options: Any = getattr(builder, "options", None)
    unused_checks = getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True)
    if unused_checks:
        builder.options = replace(options, sanitize_overflow=False)
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is not None:
        interpreter._patch_lang = _once_a_launch(patch)
    try:
        yield
    finally:
        if unused_checks:
            builder.options = options
        if patch is not None:
            interpreter._patch_lang = patch


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Modules whose view of the language is replaced already.
    done: set[int] = set()

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        scope = None if module in done else patch(fn)
        done.add(module)
        return _Scope(scope, done)

    return patch_once


class _Scope:
    """What the interpreter restores at the end of a launch."""

    def __init__(self, scope: Any, done: set[int]) -> None:
        self.scope, self.done = scope, done

    def restore(self) -> None:
        self.done.clear()
        if self.scope is not None:
            self.scope.restore()
