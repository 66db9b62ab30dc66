"""Rope: the tables of a rotary position embedding, given by the caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding by tables, so that any frequencies and any scaling will do.

    A vector x at position p becomes R(p) x: of the pair (a, b) of dims with the angle of column i,
    ``a' = a cos[p, i] - b sin[p, i]`` and ``b' = b cos[p, i] + a sin[p, i]``. Dims from ``rotary_dim`` on stay as they are.

    Args:
        cos: ``[num_rows, rotary_dim / 2]`` float32, row p for position p, last dimension contiguous.
        sin: likewise.
        interleaved: pairs are dims (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2), as in Llama and GPT-NeoX.

    Raises:
        ShapeError, DTypeError, DeviceError: the named tensor does not fit.

    Example:
        >>> rope = Rope.of(num_rows=4096, rotary_dim=64, theta=10000.0)
        >>> rope.num_rows, rope.rotary_dim
        (4096, 64)
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            table = getattr(self, name)
            if not isinstance(table, torch.Tensor):
                raise DTypeError(f"rope.{name}: expected a torch.Tensor, got {type(table).__name__}")
            if table.dim() != 2 or not table.shape[0] or not table.shape[1] or table.shape != self.cos.shape:
                wanted = "[num_rows, rotary_dim / 2], not empty" if name == "cos" else f"that of cos, {list(self.cos.shape)}"
                raise ShapeError(f"rope.{name}: expected shape {wanted}, got {list(table.shape)}")
            if table.dtype != torch.float32:
                raise DTypeError(f"rope.{name}: expected torch.float32, got {table.dtype}")
            if table.device != self.cos.device:
                raise DeviceError(f"rope.{name}: expected the device of cos, {self.cos.device}, got {table.device}")
            if table.shape[1] > 1 and table.stride(1) != 1:
                raise ShapeError(f"rope.{name}: the last dimension must be contiguous, got strides {table.stride()}; call .contiguous()")
        if not isinstance(self.interleaved, bool):
            raise DTypeError(f"rope.interleaved: expected True or False, got {self.interleaved!r}")

    @classmethod
    def of(
        cls, num_rows: int, rotary_dim: int, theta: float = 10000.0, *, interleaved: bool = False, device: torch.device | str | None = None
    ) -> Rope:
        """Tables of the unscaled embedding: the angle of column i at position p is ``p * theta^(-2i / rotary_dim)``.

        Args:
            num_rows: positions 0 to num_rows - 1.
            rotary_dim: dims that are rotated, even.
            theta: base of the frequencies.
            interleaved: which dims are pairs, as above.
            device: of the tables.

        Returns:
            The tables.

        Raises:
            RangeError: num_rows is not positive, or rotary_dim not positive and even.

        Example:
            >>> Rope.of(4, 4, theta=100.0).cos[3].tolist()                       # angles of 3 and 0.3
            [-0.9899924993515015, 0.9553365111351013]
        """
        if num_rows < 1:
            raise RangeError(f"num_rows: expected at least 1, got {num_rows}")
        if rotary_dim < 2 or rotary_dim % 2:
            raise RangeError(f"rotary_dim: expected a positive even number, got {rotary_dim}")
        frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        angles = torch.arange(num_rows, dtype=torch.float64)[:, None] * frequencies
        return cls(angles.cos().float().to(device), angles.sin().float().to(device), interleaved)

    @property
    def num_rows(self) -> int:
        """Positions that the tables have."""
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        """Dims that are rotated, the first of each head."""
        return 2 * self.cos.shape[1]
