"""KVCache: the tensors of one layer's paged cache, and how their numbers are stored."""

from __future__ import annotations

import math
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import torch

from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import KVFormat, infer, parse_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 576


class KVCache:
    """A paged cache of keys and values: views of tensors that the caller owns, checked once.

    Token ``t`` of a sequence lives in page ``page_table[seq, t // page_size]``, row ``t % page_size``; its *slot* is
    ``page * page_size + t % page_size``. Nothing is copied: K and V may be transposed (pass ``.transpose(1, 2)`` of a cache with
    heads before tokens), interleaved in one buffer, or a layer's slice of a larger one.

    Args:
        k: ``[num_pages, page_size, num_kv_heads, head_dim]``, last dimension contiguous, other strides free; those of 1-byte numbers and
            the offset must be even, because the kernels read 16-bit words. head_dim is a multiple of 8 from 16 to 576. fp8 may come as
            its bytes in ``torch.uint8`` with ``format=``; int4 has two numbers a byte, ``[..., head_dim / 2]``.
        v: as ``k``, with strides and a head_dim of its own. It may be a view of k (MLA: the first 512 of 576 dims): then it is
            written and loaded once, with one format and one scale tensor for both.
        k_scale: the scales of K where the format has them, in the shape and dtype that :class:`KVFormat` tells; static ones may be a
            number, which holds for all. None means 1.0 for fp8, and is refused for int8. Scales of groups, channels and pairs are
            contiguous in what follows the heads.
        v_scale: likewise for V; None where V is a view of K means K's.
        format: a :class:`KVFormat` or its name, one for both or a pair (of K, of V); by default what dtype and scales say.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named tensor does not fit.
        UnsupportedError: a format, head_dim or combination that this version does not have.

    Example:
        >>> k, v = torch.zeros(2, 4, 16, 8, 64).unbind(0)          # K and V of 4 pages of 16 tokens, 8 heads of 64
        >>> KVCache(k, v)
        KVCache(fp32, 4 pages of 16 tokens, 8 KV heads of 64, 262,144 bytes)
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        format: str | KVFormat | Sequence[str | KVFormat] | None = None,
    ) -> None:
        for name, tensor in (("k", k), ("v", v)):
            if not isinstance(tensor, torch.Tensor):
                raise DTypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
            if tensor.dim() != 4:
                raise ShapeError(f"{name}: expected [num_pages, page_size, num_kv_heads, head_dim], got shape {tuple(tensor.shape)}")
        if v_scale is None and _is_view(v, k):
            v_scale = k_scale
        formats = parse_pair(format) if format is not None else (infer(k, _tensor(k_scale), "k"), infer(v, _tensor(v_scale), "v"))
        self.k_format, self.v_format = formats
        self.num_pages, self.page_size, self.num_kv_heads = k.shape[:3]
        self.head_dim, self.v_head_dim = (x.shape[3] * (2 if kind.dtype == "int4" else 1) for x, kind in zip((k, v), formats))
        self.device = k.device
        _check_dims(self.page_size, self.num_kv_heads, self.head_dim, self.v_head_dim, formats)
        if v.shape[:3] != k.shape[:3]:
            raise ShapeError(f"v: expected the pages, tokens and heads of k, {tuple(k.shape[:3])}, got {tuple(v.shape[:3])}")
        if v.device != k.device:
            raise DeviceError(f"v: expected the device of k, {k.device}, got {v.device}")
        self.k = _stored(k, self.k_format, "k")
        self.v = _stored(v, self.v_format, "v")
        self.k_scale = self._scale(k_scale, self.k_format, self.head_dim, "k_scale")
        #: Whether V is a view of the first dims of K.
        self.shares_memory = formats[0] == formats[1] and self.v_head_dim <= self.head_dim and _is_view(self.v, self.k)
        by_dims = self.k_format.dtype == "int4" or self.k_format.scale in ("channel", "group")
        if self.shares_memory and by_dims and self.head_dim != self.v_head_dim:
            raise UnsupportedError(f"v: cannot be a view of some dims of k in {self.k_format}: how one is stored depends on others")
        numbers = not isinstance(k_scale, torch.Tensor) and not isinstance(v_scale, torch.Tensor)
        if self.shares_memory and (v_scale is None or v_scale is k_scale or (numbers and v_scale == k_scale)):
            v_scale = self.k_scale
        self.v_scale = self._scale(v_scale, self.v_format, self.v_head_dim, "v_scale")
        #: Whether V is a view of the first dims of K with the same scales (MLA): it is then stored, written and loaded once.
        self.v_is_k = self.shares_memory and (self.k_scale is self.v_scale or _is_view(self.v_scale, self.k_scale))

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: str | KVFormat | Sequence[str | KVFormat] = "bf16",
        *,
        device: torch.device | str | None = None,
        v_head_dim: int | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
    ) -> KVCache:
        """Allocate a cache without initialising it: unwritten slots may hold anything, and no kernel lets them matter.

        Args:
            num_pages, page_size, num_kv_heads, head_dim: the shape, ints.
            format: a :class:`KVFormat` or its name, one for both or a pair (of K, of V).
            device: where; torch's default device if None.
            v_head_dim: head_dim of V if it differs.
            k_scale, v_scale: static scales, where the format has them; 1.0 for fp8 if None, refused for int8.

        Returns:
            The cache.

        Raises:
            UnsupportedError, RangeError, ShapeError, DTypeError: as for :class:`KVCache`.

        Example:
            >>> KVCache.empty(100, 16, 8, 128, format="fp8_e4m3/token_head", device="meta")
            KVCache(fp8_e4m3/token_head, 100 pages of 16 tokens, 8 KV heads of 128, 3,379,200 bytes)
        """
        formats = parse_pair(format)
        dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        _check_counts(num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=dims[0], v_head_dim=dims[1])
        _check_dims(page_size, num_kv_heads, *dims, formats)
        data: list[torch.Tensor] = []
        scales = [k_scale, v_scale]
        for i, (kind, dim) in enumerate(zip(formats, dims, strict=True)):
            shape = kind.scale_shape(num_pages, page_size, num_kv_heads, dim)
            if scales[i] is None and kind.is_static:
                # Before memory is allocated.
                _default_scale(kind, f"{'kv'[i]}_scale")
            data.append(torch.empty(num_pages, page_size, num_kv_heads, kind.stored_dim(dim), dtype=kind.torch_dtype, device=device))
            if kind.is_dynamic and shape is not None:
                if scales[i] is not None:
                    raise UnsupportedError(f"{'kv'[i]}_scale: {kind} writes its scales with the data; leave it out")
                scales[i] = torch.empty(shape, dtype=kind.scale_dtype, device=device)
        return cls(data[0], data[1], scales[0], scales[1], formats)

    @staticmethod
    def nbytes_for(
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: str | KVFormat | Sequence[str | KVFormat] = "bf16",
        *,
        v_head_dim: int | None = None,
    ) -> int:
        """Bytes of the cache that :meth:`empty` would allocate, scales included.

        Args:
            num_pages, page_size, num_kv_heads, head_dim, format, v_head_dim: as for :meth:`empty`.

        Returns:
            The size in bytes of one layer's cache.

        Raises:
            UnsupportedError, RangeError, DTypeError: as for :meth:`empty`.

        Example:
            >>> KVCache.nbytes_for(1000, 16, 8, 128) / 2**20             # bf16, MiB
            62.5
        """
        formats = parse_pair(format)
        dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        _check_counts(num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=dims[0], v_head_dim=dims[1])
        _check_dims(page_size, num_kv_heads, *dims, formats)
        per_page, static = 0, 0
        for kind, dim in zip(formats, dims, strict=True):
            per_page += kind.bytes_per_page(page_size, num_kv_heads, dim)
            static += 4 * math.prod(kind.scale_shape(1, page_size, num_kv_heads, dim) or ()) if kind.is_static else 0
        return num_pages * per_page + static

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token takes in this layer's cache: K, V and their dynamic scales."""
        size = self.k_format.bytes_per_token(self.num_kv_heads, self.head_dim, self.page_size)
        return size if self.v_is_k else size + self.v_format.bytes_per_token(self.num_kv_heads, self.v_head_dim, self.page_size)

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and their scales."""
        tensors = (self.k, self.k_scale) if self.v_is_k else (self.k, self.v, self.k_scale, self.v_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def num_slots(self) -> int:
        """Tokens that the cache has room for."""
        return self.num_pages * self.page_size

    @property
    def is_native(self) -> bool:
        """Whether K and V are stored as they are, without scales."""
        return self.k_format.is_native and self.v_format.is_native

    @cached_property
    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as the attention kernels read them: 8- and 4-bit numbers as 16-bit words, others as they are."""
        return tuple(t if t.element_size() > 1 else t.view(torch.int16) for t in (self.k, self.v))  # type: ignore[return-value]

    @cached_property
    def bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as the writing kernels fill them: 8-bit numbers as uint8, int4 as 16-bit words, others as they are."""
        return tuple(  # type: ignore[return-value]
            words if kind.dtype == "int4" or t.element_size() > 1 else t.view(torch.uint8)
            for t, words, kind in zip((self.k, self.v), self.words, (self.k_format, self.v_format))
        )

    @cached_property
    def scale_words(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of K and V as kernels read them: a scale and its minimum as one int32, others as they are."""
        return tuple(  # type: ignore[return-value]
            scale if scale is None or not kind.is_asymmetric else scale.view(torch.int32)[..., 0]
            for scale, kind in zip((self.k_scale, self.v_scale), (self.k_format, self.v_format))
        )

    def __getstate__(self) -> dict[str, object]:
        # Views would come back as tensors of their own.
        views = ("words", "bytes", "scale_words")
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self.v_is_k:
            self.v, self.v_scale = self.k[..., : self.v.shape[3]], self.k_scale

    def _scale(self, scale: torch.Tensor | float | None, kind: KVFormat, head_dim: int, name: str) -> torch.Tensor | None:
        shape = kind.scale_shape(self.num_pages, self.page_size, self.num_kv_heads, head_dim)
        if shape is None:
            if scale is not None:
                raise UnsupportedError(f"{name}: {kind} has no scales; leave it out, got {_describe(scale)}")
            return None
        if kind.is_static and not isinstance(scale, torch.Tensor):
            value = _default_scale(kind, name) if scale is None else _check_scale(name, scale)
            return torch.full(shape, value, dtype=torch.float32, device=self.device)
        if not isinstance(scale, torch.Tensor):
            raise DTypeError(f"{name}: {kind} needs a {kind.scale_dtype} tensor of shape {list(shape)}, got {_describe(scale)}")
        if scale.dtype != kind.scale_dtype:
            raise DTypeError(f"{name}: {kind} needs {kind.scale_dtype}, got {scale.dtype}")
        if kind.scale == "tensor" and tuple(scale.shape) == (1,):
            scale = scale.reshape(())
        if tuple(scale.shape) != shape:
            raise ShapeError(f"{name}: {kind} needs shape {list(shape)}, got {list(scale.shape)}")
        if scale.device != self.device:
            raise DeviceError(f"{name}: expected the device of k, {self.device}, got {scale.device}")
        return _scale_words(scale, kind, name)

    def __repr__(self) -> str:
        kind = str(self.k_format) if self.k_format == self.v_format else f"{self.k_format} + {self.v_format}"
        dim = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        return (
            f"KVCache({kind}, {self.num_pages:,} pages of {self.page_size} tokens, {self.num_kv_heads} KV heads of {dim}, "
            f"{self.nbytes:,} bytes)"
        )


def _default_scale(kind: KVFormat, name: str) -> float:
    """The static scale of a format where none is given."""
    if kind.dtype == "int8":
        raise UnsupportedError(f"{name}: {kind} needs calibrated scales, as tkv.calibrate gives them; got none")
    return 1.0


def _scale_words(scale: torch.Tensor, kind: KVFormat, name: str) -> torch.Tensor:
    """Scales whose strides the kernels can use: what follows the heads is contiguous, a scale and its minimum are one 32-bit word."""
    inner = {"channel": 1, "group": 1, "page_channel": 1}.get(kind.scale or "", 0) + kind.is_asymmetric
    if not scale.numel():
        return torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
    steps = [stride if size > 1 else 0 for size, stride in zip(scale.shape, scale.stride())]
    needed = 1
    for dim in range(1, inner + 1):
        if steps[-dim] not in (0, needed) or (steps[-dim] == 0 and scale.shape[-dim] > 1):
            raise ShapeError(f"{name}: {kind} needs the last {inner} dimensions contiguous, got strides {scale.stride()}")
        steps[-dim] = needed
        needed *= scale.shape[-dim]
    if kind.is_asymmetric and (any(step % 2 for step in steps[:-1]) or _is_odd(scale)):
        raise ShapeError(
            f"{name}: {kind} has a scale and a minimum in 4 bytes and needs even strides and offset, "
            f"got strides {scale.stride()}, offset {scale.storage_offset()}"
        )
    return scale.as_strided(scale.shape, steps) if kind.is_dynamic else scale


def _check_scale(name: str, scale: object) -> float:
    """A static scale as a float that float32 arithmetic can take."""
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise DTypeError(f"{name}: expected a number or a float32 tensor, got {scale!r}")
    if not 1e-30 <= float(scale) <= 1e30:
        raise RangeError(f"{name}: expected a positive number from 1e-30 to 1e30, got {scale}")
    return float(scale)


def _is_view(tensor: torch.Tensor | None, of: torch.Tensor | None) -> bool:
    """Whether a tensor begins where another does, with the same strides. Asks for no address, which fake tensors do not have."""
    if tensor is None or of is None:
        return False
    if torch.compiler.is_compiling():
        # Storages cannot be compared in a trace: the operator that the tensors are given to looks again.
        return tensor is of
    same = tensor.untyped_storage()._cdata == of.untyped_storage()._cdata and tensor.storage_offset() == of.storage_offset()
    return same and tensor.stride() == of.stride() and tensor.numel() > 0


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether it begins at an odd element of its storage; a trace cannot tell, the operator looks again."""
    return not torch.compiler.is_compiling() and tensor.storage_offset() % 2 == 1


def _tensor(scale: torch.Tensor | float | None) -> torch.Tensor | None:
    return scale if isinstance(scale, torch.Tensor) else None


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise DTypeError(f"{name}: expected an int, got {count!r}")
        if count < (0 if name == "num_pages" else 1):
            raise RangeError(f"{name}: expected at least {0 if name == 'num_pages' else 1}, got {count}")


def _check_dims(page_size: int, num_kv_heads: int, head_dim: int, v_head_dim: int, formats: tuple[KVFormat, KVFormat]) -> None:
    if page_size < 1 or num_kv_heads < 1:
        raise ShapeError(f"k: expected at least one token a page and one KV head, got page_size {page_size}, num_kv_heads {num_kv_heads}")
    for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if dim % 8 or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise UnsupportedError(f"{name}: expected a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {dim}")
    formats[0].check_geometry("head_dim", head_dim, page_size)
    formats[1].check_geometry("v_head_dim", v_head_dim, page_size)
    if formats[1].scale == "page_channel":
        raise UnsupportedError(f"format: {formats[1]} is for K; V can have {formats[1].dtype}/token_head or a group format, for example")


def _stored(tensor: torch.Tensor, kind: KVFormat, name: str) -> torch.Tensor:
    """The tensor in the dtype of its format, with strides that the kernels can use."""
    if tensor.dtype == torch.uint8 and kind.dtype.startswith("fp8"):
        tensor = tensor.view(kind.torch_dtype)
    if tensor.dtype != kind.torch_dtype:
        raise DTypeError(f"{name}: {kind} is stored as {kind.torch_dtype}, got {tensor.dtype}")
    if tensor.stride(3) != 1:
        raise ShapeError(f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}")
    if tensor.element_size() > 1:
        return tensor
    # The stride of a dimension of size 1 is never used, but would spoil the view as 16-bit words.
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if any(stride % 2 for stride in strides[:3]) or _is_odd(tensor):
        raise ShapeError(
            f"{name}: {kind} is read as 16-bit words and needs even strides and offset, "
            f"got strides {tensor.stride()}, offset {tensor.storage_offset()}"
        )
    return tensor.as_strided(tensor.shape, strides)
