"""The errors that tkv raises before it launches or changes anything.

Wrong input is a ``ValueError`` or a ``TypeError``, so callers that do not know tkv can catch it too. A message names the
argument, what was given and what is needed. :class:`OutOfPages` is no wrong input but a state: it is a ``RuntimeError``.
"""


class TkvError(Exception):
    """Base of all errors that tkv raises on purpose."""


class ShapeError(TkvError, ValueError):
    """A tensor's shape, stride or storage offset does not fit."""


class DTypeError(TkvError, TypeError):
    """An argument has the wrong dtype or Python type."""


class DeviceError(TkvError, ValueError):
    """A tensor is on another device than its partners, or on one that tkv cannot launch on."""


class RangeError(TkvError, ValueError):
    """A number is outside its range: an option, or, under ``TKV_CHECK=1``, a slot, a page id or a length."""


class UnsupportedError(TkvError, ValueError):
    """A combination that does not exist, or not in this version."""


class OutOfPages(TkvError, RuntimeError):
    """A pool has too few pages left; nothing has changed, and the same call works once enough of them are free."""


__all__ = ["DTypeError", "DeviceError", "OutOfPages", "RangeError", "ShapeError", "TkvError", "UnsupportedError"]
