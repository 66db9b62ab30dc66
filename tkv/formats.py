"""KVFormat: how the numbers of a cache are stored, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tkv.errors import DTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a number is stored as: the torch dtype of the cache tensor.
STORED_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
NATIVE = ("fp32", "fp16", "bf16")
# Where the scales of a quantised dtype may live, in this version.
SCALES = {
    "fp8_e4m3": ("tensor", "token_head"),
    "int8": ("token_head",),
}
_KNOWN_DTYPES = (*STORED_DTYPES, "fp8_e5m2", "int4")
_KNOWN_SCALES = ("tensor", "head", "channel", "token_head", "group", "page_channel")
_FNUZ = {torch.float8_e4m3fnuz: "fp8_e4m3", torch.float8_e5m2fnuz: "fp8_e5m2"}


@dataclass(frozen=True)
class KVFormat:
    """How one of K and V is stored: the dtype of a number, and where its scale lives.

    Written as a string, ``"bf16"`` or ``"fp8_e4m3/token_head"``:

    ============== ============== ==================================================================================
    dtype          scale          scale tensor
    ============== ============== ==================================================================================
    fp32 fp16 bf16 none           none: numbers are stored as they are
    fp8_e4m3       ``tensor``     ``[]`` float32, static: given by the caller, or 1.0
    fp8_e4m3       ``token_head`` ``[num_pages, page_size, num_kv_heads]`` float32, written with the data: absmax / 448
    int8           ``token_head`` the same: absmax / 127, codes from -127 to 127
    ============== ============== ==================================================================================

    Args:
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8_e4m3"`` or ``"int8"``.
        scale: ``"tensor"``, ``"token_head"``, or None for the native dtypes.
        group_size: numbers that share a scale; for formats of later versions, so None.

    Raises:
        UnsupportedError: a combination that does not exist, or not in this version.

    Example:
        >>> KVFormat.parse("int8/token_head")
        KVFormat(dtype='int8', scale='token_head', group_size=None)
        >>> KVFormat.parse("fp8_e4m3/tensor").bytes_per_token(num_kv_heads=8, head_dim=128)
        1024
    """

    dtype: str
    scale: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or not isinstance(self.scale, str | None):
            raise DTypeError(f"format: expected names of a dtype and of a scale, got {self.dtype!r} and {self.scale!r}")
        if self.dtype not in STORED_DTYPES or self.group_size is not None or self.scale not in SCALES.get(self.dtype, (None,)):
            raise UnsupportedError(f"format: {str(self)!r} is not in this version of tkv; it has {', '.join(supported_formats())}")

    @staticmethod
    def parse(text: str | KVFormat) -> KVFormat:
        """Read ``"dtype"`` or ``"dtype/scale"``; a KVFormat is returned as it is.

        Args:
            text: the name of a format, such as ``"fp8_e4m3/token_head"``.

        Returns:
            The format.

        Raises:
            DTypeError: ``text`` is neither a string nor a KVFormat.
            UnsupportedError: no such format, or not in this version.

        Example:
            >>> str(KVFormat.parse("fp16"))
            'fp16'
        """
        if isinstance(text, KVFormat):
            return text
        if not isinstance(text, str):
            raise DTypeError(f"format: expected a string such as 'fp8_e4m3/token_head' or a KVFormat, got {text!r}")
        return _parse(text)

    def __str__(self) -> str:
        return self.dtype + (f"/{self.scale}{self.group_size or ''}" if self.scale else "")

    @property
    def is_native(self) -> bool:
        """Whether numbers are stored as they are, without a scale."""
        return self.dtype in NATIVE

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are computed and stored by every write."""
        return self.scale == "token_head"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the cache tensor."""
        return STORED_DTYPES[self.dtype]

    def scale_shape(self, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, ...] | None:
        """Shape of the scale tensor, or None where there is none."""
        if self.scale is None:
            return None
        return () if self.scale == "tensor" else (num_pages, page_size, num_kv_heads)

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one token of one layer takes for one of K and V, its dynamic scales included.

        Example:
            >>> KVFormat.parse("int8/token_head").bytes_per_token(num_kv_heads=2, head_dim=64)
            136
        """
        return num_kv_heads * (head_dim * self.torch_dtype.itemsize + (4 if self.is_dynamic else 0))


@lru_cache(maxsize=256)
def _parse(text: str) -> KVFormat:
    dtype, slash, scale = text.partition("/")
    if dtype not in _KNOWN_DTYPES or (slash and scale.rstrip("0123456789") not in _KNOWN_SCALES):
        raise UnsupportedError(f"format: there is no {text!r}; tkv has {', '.join(supported_formats())}")
    name = scale.rstrip("0123456789")
    if dtype in NATIVE and slash:
        raise UnsupportedError(f"format: {dtype} is stored as it is and has no scale, got {text!r}")
    if dtype not in NATIVE and not slash:
        raise UnsupportedError(f"format: {text!r} does not say where its scale lives, as in 'fp8_e4m3/token_head'")
    group_size = int(scale[len(name) :]) if len(scale) > len(name) else None
    return KVFormat(dtype, name or None, group_size)


def supported_formats() -> list[str]:
    """The names of all formats of this version.

    Example:
        >>> supported_formats()
        ['fp32', 'fp16', 'bf16', 'fp8_e4m3/tensor', 'fp8_e4m3/token_head', 'int8/token_head']
    """
    return [*NATIVE, *(f"{dtype}/{scale}" for dtype, scales in SCALES.items() for scale in scales)]


def parse_pair(formats: str | KVFormat | Sequence[str | KVFormat]) -> tuple[KVFormat, KVFormat]:
    """The formats of K and V from one format for both, or from a pair.

    Example:
        >>> parse_pair("bf16") == parse_pair(("bf16", "bf16"))
        True
    """
    if isinstance(formats, str | KVFormat):
        both = KVFormat.parse(formats)
        return both, both
    if not isinstance(formats, list | tuple) or len(formats) != 2:
        raise DTypeError(f"format: expected one format or a pair (of K, of V), got {formats!r}")
    return KVFormat.parse(formats[0]), KVFormat.parse(formats[1])


def infer(tensor: torch.Tensor, scale: torch.Tensor | None, name: str) -> KVFormat:
    """The format of a cache tensor, from its dtype and the shape of its scales."""
    if tensor.dtype in _FNUZ:
        raise UnsupportedError(
            f"{name}: {tensor.dtype} holds FNUZ numbers; tkv stores OCP fp8 on every GPU: use torch.float8_e4m3fn (or its bytes as uint8)"
        )
    for dtype, stored in STORED_DTYPES.items():
        if stored == tensor.dtype:
            if dtype in NATIVE:
                return KVFormat(dtype)
            if scale is not None and scale.dim() == 3:
                return KVFormat(dtype, "token_head")
            if "tensor" not in SCALES[dtype]:
                raise UnsupportedError(
                    f"{name}_scale: {tensor.dtype} needs scales [num_pages, page_size, num_kv_heads] in this version, "
                    f"got {'none' if scale is None else list(scale.shape)}"
                )
            return KVFormat(dtype, "tensor")
    if tensor.dtype == torch.float8_e5m2:
        raise UnsupportedError(f"{name}: {tensor.dtype} is not in this version of tkv; it has {', '.join(supported_formats())}")
    known = ", ".join(str(dtype) for dtype in STORED_DTYPES.values())
    raise DTypeError(f"{name}: {tensor.dtype} does not say how its numbers are stored; pass format=, or a tensor of {known}")
