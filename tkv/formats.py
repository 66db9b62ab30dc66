"""KVFormat: how the numbers of a cache are stored, and how many bytes that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tkv.errors import DTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a number is stored as: the torch dtype of the cache tensor. Two int4 numbers share a byte.
STORED_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
}
NATIVE = ("fp32", "fp16", "bf16")
STATIC = ("tensor", "head", "channel")
# Where the scales of a quantised dtype may live.
SCALES = {
    "fp8_e4m3": ("tensor", "head", "token_head"),
    "fp8_e5m2": ("tensor", "head", "token_head"),
    "int8": ("tensor", "head", "channel", "token_head", "group", "page_channel"),
    "int4": ("token_head", "group", "page_channel"),
}
GROUP_SIZES = (32, 64)
# A channel's scale holds for a page: with fewer tokens it would take more room than it saves.
MIN_CHANNEL_PAGE = 16
_FNUZ = {torch.float8_e4m3fnuz: "fp8_e4m3", torch.float8_e5m2fnuz: "fp8_e5m2"}


@dataclass(frozen=True)
class KVFormat:
    r"""How one of K and V is stored: the dtype of a number, and where its scale lives.

    Written as a string, ``"bf16"``, ``"fp8_e4m3/token_head"`` or ``"int4/group32"``. P pages of S tokens, H heads of D:

    ============== ================ ======================= ==========================================================
    dtype          scale            scale tensor            what a number is
    ============== ================ ======================= ==========================================================
    fp32 fp16 bf16 none             none                    itself
    fp8_e4m3,      ``tensor``       ``[]`` float32          ``code * scale``; static: calibrated, or 1.0
    fp8_e5m2       ``head``         ``[H]`` float32         the same
    \              ``token_head``   ``[P, S, H]`` float32   the same; written with the data, absmax / 448 (57344)
    int8           ``tensor``       ``[]`` float32          ``code * scale``, codes -127 to 127; static: calibrated
    \              ``head``         ``[H]`` float32         the same
    \              ``channel``      ``[H, D]`` float32      the same
    \              ``token_head``   ``[P, S, H]`` float32   the same; written with the data, absmax / 127
    \              ``group32|64``   ``[P, S, H, D/group]``  ``fp16(code * scale)``; written with the data; float16 scales
    int4           ``token_head``   ``[P, S, H, 2]``        ``code * scale + minimum``, codes 0 to 15; float16 both
    \              ``group32|64``   ``[P, S, H, D/group,    ``fp16(code * scale + minimum)``; float16 both
    \                               2]``
    int8, int4     ``page_channel`` ``[P, H, D, 2]``        ``fp16(code * scale + minimum)``, over the tokens of a page,
    \                                                       codes 0 to 255 (stored less 128) and 0 to 15; float16 both;
    \                                                       of K, filled by `quantize_pages`
    ============== ================ ======================= ==========================================================

    An int4 tensor is uint8 ``[P, S, H, D/2]``: nibble j of its little-endian 16-bit word w is dim ``j * D/4 + w``.

    A scale with a minimum is ``(largest - smallest) / largest code`` of the finite numbers, a step of float16 less where the largest code
    would decode to more than 65504; codes are computed from both as they are stored. Float16 scales take numbers up to 65504, and lose
    precision where the largest magnitude of a group (int8) is below 1e-2, or a range (int4) below 1e-3. Inf is stored as the largest code.

    Args:
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"`` or ``"int4"``.
        scale: ``"tensor"``, ``"head"``, ``"channel"``, ``"token_head"``, ``"group"``, ``"page_channel"``, or None for the native dtypes.
        group_size: numbers that share a scale, 32 or 64, of the ``group`` formats; else None.

    Raises:
        UnsupportedError: a combination that does not exist.

    Example:
        >>> KVFormat.parse("int4/group32")
        KVFormat(dtype='int4', scale='group', group_size=32)
        >>> KVFormat.parse("fp8_e4m3/tensor").bytes_per_token(num_kv_heads=8, head_dim=128)
        1024
    """

    dtype: str
    scale: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or not isinstance(self.scale, str | None):
            raise DTypeError(f"format: expected names of a dtype and of a scale, got {self.dtype!r} and {self.scale!r}")
        sizes = GROUP_SIZES if self.scale == "group" else (None,)
        if self.dtype not in STORED_DTYPES or self.scale not in SCALES.get(self.dtype, (None,)) or self.group_size not in sizes:
            raise UnsupportedError(f"format: there is no {str(self)!r}; tkv has {', '.join(supported_formats())}")

    @staticmethod
    def parse(text: str | KVFormat) -> KVFormat:
        """Read ``"dtype"`` or ``"dtype/scale"``; a KVFormat is returned as it is.

        Args:
            text: the name of a format, such as ``"fp8_e4m3/token_head"``.

        Returns:
            The format.

        Raises:
            DTypeError: ``text`` is neither a string nor a KVFormat.
            UnsupportedError: no such format.

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
    def is_static(self) -> bool:
        """Whether the caller gives the scales."""
        return self.scale in STATIC

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are computed from the data and stored with it."""
        return self.scale in ("token_head", "group", "page_channel")

    @property
    def is_asymmetric(self) -> bool:
        """Whether a minimum is stored beside each scale."""
        return self.dtype == "int4" or self.scale == "page_channel"

    @property
    def is_rounded(self) -> bool:
        """Whether a decoded number is rounded to float16."""
        return self.scale in ("group", "page_channel")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the cache tensor."""
        return STORED_DTYPES[self.dtype]

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the scale tensor."""
        return torch.float16 if self.is_asymmetric or self.is_rounded else torch.float32

    def stored_dim(self, head_dim: int) -> int:
        """Elements of the cache tensor that hold a head."""
        return head_dim // 2 if self.dtype == "int4" else head_dim

    def scale_shape(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...] | None:
        """Shape of the scale tensor, or None where there is none.

        Example:
            >>> KVFormat.parse("int4/group64").scale_shape(num_pages=10, page_size=16, num_kv_heads=8, head_dim=128)
            (10, 16, 8, 2, 2)
        """
        pair = (2,) if self.is_asymmetric else ()
        return {
            None: None,
            "tensor": (),
            "head": (num_kv_heads,),
            "channel": (num_kv_heads, head_dim),
            "token_head": (num_pages, page_size, num_kv_heads, *pair),
            "group": (num_pages, page_size, num_kv_heads, head_dim // (self.group_size or 1), *pair),
            "page_channel": (num_pages, num_kv_heads, head_dim, *pair),
        }[self.scale]

    def check_geometry(self, name: str, head_dim: int, page_size: int) -> None:
        """Refuse a head_dim or a page_size that the format cannot hold.

        Raises:
            UnsupportedError: with the argument's name, what came and what is needed.
        """
        step = math.lcm(16 if self.dtype == "int4" else 8, self.group_size or 1)
        if head_dim % step:
            raise UnsupportedError(f"{name}: {self} needs a multiple of {step}, got {head_dim}")
        if self.scale == "page_channel" and (page_size < MIN_CHANNEL_PAGE or page_size & (page_size - 1)):
            raise UnsupportedError(f"page_size: {self} needs a power of two of at least {MIN_CHANNEL_PAGE}, got {page_size}")

    def bytes_per_page(self, page_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one page of one layer takes for one of K and V, its dynamic scales included.

        Example:
            >>> KVFormat.parse("int4/page_channel").bytes_per_page(page_size=32, num_kv_heads=2, head_dim=64)
            2560
        """
        numbers = page_size * num_kv_heads * self.stored_dim(head_dim) * self.torch_dtype.itemsize
        if not self.is_dynamic:
            return numbers
        return numbers + math.prod(self.scale_shape(1, page_size, num_kv_heads, head_dim) or (0,)) * self.scale_dtype.itemsize

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, page_size: int = 32) -> float:
        """Bytes that one token of one layer takes for one of K and V, its dynamic scales included.

        Only of ``page_channel`` formats it depends on page_size, and may be a fraction.

        Example:
            >>> KVFormat.parse("int8/token_head").bytes_per_token(num_kv_heads=2, head_dim=64)
            136
        """
        size = self.bytes_per_page(page_size, num_kv_heads, head_dim)
        return size / page_size if size % page_size else size // page_size


@lru_cache(maxsize=256)
def _parse(text: str) -> KVFormat:
    dtype, slash, scale = text.partition("/")
    if dtype in NATIVE and slash:
        raise UnsupportedError(f"format: {dtype} is stored as it is and has no scale, got {text!r}")
    if dtype in SCALES and not slash:
        raise UnsupportedError(f"format: {text!r} does not say where its scale lives, as in '{dtype}/token_head'")
    if text not in supported_formats():
        raise UnsupportedError(f"format: there is no {text!r}; tkv has {', '.join(supported_formats())}")
    name = scale.rstrip("0123456789")
    return KVFormat(dtype, name or None, int(scale[len(name) :]) if scale != name else None)


def supported_formats() -> list[str]:
    """The names of all formats.

    Example:
        >>> supported_formats()[:5], len(supported_formats())
        (['fp32', 'fp16', 'bf16', 'fp8_e4m3/tensor', 'fp8_e4m3/head'], 20)
    """
    names = list(NATIVE)
    for dtype, scales in SCALES.items():
        for scale in scales:
            names += [f"{dtype}/{scale}{size}" for size in (GROUP_SIZES if scale == "group" else ("",))]
    return names


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
        ocp = STORED_DTYPES[_FNUZ[tensor.dtype]]
        raise UnsupportedError(
            f"{name}: {tensor.dtype} holds FNUZ numbers; tkv stores OCP fp8 on every GPU: use {ocp} (or its bytes as uint8)"
        )
    kinds = {stored: dtype for dtype, stored in STORED_DTYPES.items()}
    dtype = kinds.get(tensor.dtype)
    if dtype is None or (dtype == "int4" and (scale is None or scale.dtype != torch.float16)):
        known = ", ".join(str(stored) for kind, stored in STORED_DTYPES.items() if kind != "int4")
        raise DTypeError(f"{name}: {tensor.dtype} does not say how its numbers are stored; pass format=, or a tensor of {known}")
    if dtype in NATIVE:
        return KVFormat(dtype)
    if "tensor" in SCALES[dtype] and (scale is None or tuple(scale.shape) in ((), (1,))):
        # A number, or nothing: one for all.
        return KVFormat(dtype, "tensor")
    head_dim = tensor.shape[3] * (2 if dtype == "int4" else 1)
    for text in supported_formats():
        kind = KVFormat.parse(text)
        if kind.dtype == dtype and scale is not None and head_dim % (kind.group_size or 1) == 0:
            shape = kind.scale_shape(tensor.shape[0], tensor.shape[1], tensor.shape[2], head_dim)
            if shape == tuple(scale.shape) and scale.dtype == kind.scale_dtype:
                return kind
    given = "none" if scale is None else f"{list(scale.shape)} of {scale.dtype}"
    raise UnsupportedError(
        f"{name}_scale: no {dtype} format has such scales for {list(tensor.shape)}, got {given}; pass format= to see which fit"
    )
