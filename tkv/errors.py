"""The errors that tkv raises before it launches anything.

Every one is a ``ValueError`` or a ``TypeError``, so callers that do not know tkv can catch them too. A message names the
argument, what was given and what is needed.
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


__all__ = ["DTypeError", "DeviceError", "RangeError", "ShapeError", "TkvError", "UnsupportedError"]
