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
    """A pool has too few pages left; nothing has changed, and the same call works once enough of them are free.

    It never will, whatever else is freed, where ``needed + held > total``: then its sequences have to be fewer, or shorter.

    Attributes:
        needed: pages that the call has to take, beside those that its sequences have already.
        available: pages that it can take: free ones, cached ones, and those that become free within the call; fewer than `needed`.
        held: pages that its sequences have and keep, each counted once.
        total: pages of the pool.

    Example:
        >>> import tkv
        >>> manager = tkv.CacheManager(tkv.PagePool(4), page_size=2)
        >>> a, b = manager.add(range(6)), manager.add(range(10, 14))
        >>> batch = manager.step({a: range(6)})
        >>> for work in ({b: range(10, 14)}, {a: range(6, 9)}):
        ...     try:
        ...         batch = manager.step(work)
        ...     except tkv.errors.OutOfPages as error:
        ...         error.needed, error.available, error.held, error.total
        (2, 1, 0, 4)
        (2, 1, 3, 4)
    """

    def __init__(self, message: str, *, needed: int = 0, available: int = 0, held: int = 0, total: int = 0) -> None:
        super().__init__(message)
        self.needed, self.available, self.held, self.total = needed, available, held, total


__all__ = ["DTypeError", "DeviceError", "OutOfPages", "RangeError", "ShapeError", "TkvError", "UnsupportedError"]
