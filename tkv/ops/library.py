"""Operators of ``torch.library``: what ``torch.compile``, ``torch.export`` and fake tensors see of tkv's functions.

In eager mode a function that is decorated here runs as it is written. Where it is traced it becomes one call of ``torch.ops.tkv.<name>``,
which takes tensors, numbers and strings alone: its schema follows from the function's signature, and objects are taken apart.

    KVCache ``cache``      ``cache_k, cache_v, cache_k_scale, cache_v_scale, cache_k_format, cache_v_format, cache_v_head_dim``;
                           cache_v and its scale are None where V is a view of K
    Rope ``rope``          ``rope_cos, rope_sin, rope_interleaved``
    SharedLevels           lists with an entry a level, one for each field: ``levels_page_table, levels_lens, ...``
    AttentionConfig        its fields in order, 0 for None

Nothing here imports Triton: operators are there as soon as tkv is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch

from tkv.cache import KVCache
from tkv.errors import DTypeError
from tkv.formats import KVFormat
from tkv.levels import SharedLevel
from tkv.rope import Rope
from tkv.tune.configs import TUNABLES, AttentionConfig

Function = TypeVar("Function", bound=Callable[..., Any])
Values = dict[str, Any]

_NONE = inspect.Parameter.empty

LIBRARY = torch.library.Library("tkv", "FRAGMENT")
# Kernels read tensors by their strides, so the compiler must not choose others; opcheck passes.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)


@dataclass(frozen=True)
class _Kind:
    """What a parameter is in a schema: (suffix of its name, type) of each argument, and how to get there and back."""

    arguments: tuple[tuple[str, str], ...]
    apart: Callable[[Any], Sequence[Any]] = lambda value: (value,)
    together: Callable[..., Any] = lambda value: value


def _cache_apart(cache: KVCache) -> Sequence[Any]:
    v, v_scale = (None, None) if cache.v_is_k else (cache.v, cache.v_scale)
    return cache.k, v, cache.k_scale, v_scale, str(cache.k_format), str(cache.v_format), cache.v_head_dim


def _cache_together(
    k: torch.Tensor, v: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k_format: str, v_format: str,
    v_head_dim: int,
) -> KVCache:  # fmt: skip
    if v is None:
        v, v_scale = k[..., : KVFormat.parse(v_format).stored_dim(v_head_dim)], k_scale
    return KVCache(k, v, k_scale, v_scale, (k_format, v_format))


def _rope_together(cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, interleaved: bool = False) -> Rope | None:
    return None if cos is None or sin is None else Rope(cos, sin, interleaved)


def _config_apart(config: AttentionConfig | dict[str, Any] | None) -> Sequence[Any]:
    if config is None:
        return (None,)
    config = AttentionConfig.of(config)
    return ([getattr(config, name) or 0 for name in TUNABLES],)


def _config_together(numbers: Sequence[int] | None = None) -> AttentionConfig | None:
    return None if numbers is None else AttentionConfig(*numbers[:4], *(number or None for number in numbers[4:]))


_LEVEL_FIELDS = tuple(field.name for field in fields(SharedLevel))

# By annotation.
_KINDS = {
    "torch.Tensor": _Kind((("", "Tensor"),)),
    "torch.Tensor | None": _Kind((("", "Tensor?"),)),
    "torch.Tensor | Sequence[torch.Tensor]": _Kind((("", "Tensor[]"),), lambda tensors: (list(tensors),)),
    "int": _Kind((("", "SymInt"),)),
    "int | None": _Kind((("", "SymInt?"),)),
    "float | None": _Kind((("", "float?"),)),
    "bool": _Kind((("", "bool"),)),
    "str": _Kind((("", "str"),)),
    "torch.dtype | None": _Kind((("", "ScalarType?"),)),
    "KVCache": _Kind(
        (("_k", "Tensor"), ("_v", "Tensor?"), ("_k_scale", "Tensor?"), ("_v_scale", "Tensor?"))
        + (("_k_format", "str"), ("_v_format", "str"), ("_v_head_dim", "SymInt")),
        _cache_apart,
        _cache_together,
    ),
    "Rope": _Kind(
        (("_cos", "Tensor"), ("_sin", "Tensor"), ("_interleaved", "bool")),
        lambda rope: (rope.cos, rope.sin, rope.interleaved),
        Rope,
    ),
    "Rope | None": _Kind(
        (("_cos", "Tensor?"), ("_sin", "Tensor?"), ("_interleaved", "bool")),
        lambda rope: (None, None, False) if rope is None else (rope.cos, rope.sin, rope.interleaved),
        _rope_together,
    ),
    "Sequence[SharedLevel]": _Kind(
        tuple((f"_{name}", "SymInt[]" if name.startswith("max_") else "Tensor[]") for name in _LEVEL_FIELDS),
        lambda levels: tuple([getattr(level, name) for level in levels] for name in _LEVEL_FIELDS),
        lambda *lists: [SharedLevel(*values) for values in zip(*lists, strict=True)],
    ),
    "AttentionConfig | dict[str, Any] | None": _Kind((("", "int[]?"),), _config_apart, _config_together),
}


@dataclass(frozen=True)
class _Parameter:
    name: str
    kind: _Kind
    default: Any

    def arguments(self, alias: Callable[[], str] | None) -> list[str]:
        """Its part of the schema; tensors are written to where there is an `alias`."""
        given = []
        for suffix, of_type in self.kind.arguments:
            if alias is not None and of_type.startswith("Tensor"):
                of_type = of_type.replace("Tensor", f"Tensor({alias()}!)")
            default = False if self.default is None and of_type == "bool" else self.default
            shown = "" if default is _NONE else f'="{default}"' if isinstance(default, str) else f"={default}"
            given.append(f"{of_type} {self.name}{suffix}{shown}")
        return given


class _Operator:
    """A function and its operator."""

    def __init__(
        self, function: Callable[..., Any], mutates: Sequence[str], needs: Sequence[str], omits: Sequence[str],
        fake: Callable[..., Any] | None,
    ) -> None:  # fmt: skip
        self.function = function
        self.name = function.__name__
        self.fake = fake
        signature = inspect.signature(function).parameters.values()
        self.names = tuple(parameter.name for parameter in signature)
        self.defaults = {parameter.name: parameter.default for parameter in signature}
        parameters = [
            _Parameter(parameter.name, _KINDS[parameter.annotation], _NONE if parameter.name in needs else parameter.default)
            for parameter in signature
            if parameter.name not in omits
        ]
        # Those without a default come first.
        self.parameters = tuple(sorted(parameters, key=lambda parameter: parameter.default is not _NONE))
        letters = iter("abcdefghijklmnop")
        arguments = [
            argument
            for parameter in self.parameters
            for argument in parameter.arguments((lambda: next(letters)) if parameter.name in mutates else None)
        ]
        LIBRARY.define(f"{self.name}({', '.join(arguments)}) -> {'()' if fake is None else 'Tensor[]'}", tags=_TAGS)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, self.run, device)
        torch.library.register_fake(f"tkv::{self.name}", self.run_fake, lib=LIBRARY)

    def run(self, *given: Any) -> list[torch.Tensor] | None:
        """The operator on a device."""
        results = self.function(**self.together(given))
        if self.fake is None:
            return None
        # An operator must not return what it was given.
        inputs = {id(value) for value in given}
        return [tensor for tensor in results if tensor is not None and id(tensor) not in inputs]

    def run_fake(self, *given: Any) -> list[torch.Tensor] | None:
        """The operator on tensors without numbers."""
        return None if self.fake is None else self.fake(**self.together(given))

    def together(self, given: Sequence[Any]) -> Values:
        """The function's arguments from the operator's, of which those at the end may be left out."""
        values = {name: default for name, default in self.defaults.items() if default is not _NONE}
        at = 0
        for parameter in self.parameters:
            size = len(parameter.kind.arguments)
            if at < len(given):
                values[parameter.name] = parameter.kind.together(*given[at : at + size])
            at += size
        return values

    def bind(self, args: Sequence[Any], kwargs: Values) -> Values:
        """The value of every parameter of the function."""
        values = dict(self.defaults)
        for name, value in zip(self.names, args):
            values[name] = value
        for name, value in kwargs.items():
            values[name] = value
        unknown = [name for name in kwargs if name not in self.names]
        missing = [name for name in self.names if values[name] is _NONE]
        if unknown or missing or len(args) > len(self.names):
            raise TypeError(f"{self.name}(): takes {len(self.names)} arguments, got {len(args) + len(kwargs)}: {unknown=}, {missing=}")
        return values

    def call(self, values: Values) -> Any:
        """Call the operator with a value for every parameter."""
        given: list[Any] = []
        for parameter in self.parameters:
            value = values[parameter.name]
            if parameter.kind is _KINDS["KVCache"] and not isinstance(value, KVCache):
                raise DTypeError(f"{parameter.name}: expected a tkv.KVCache, got {type(value).__name__}")
            given += parameter.kind.apart(value)
        return getattr(torch.ops.tkv, self.name)(*given)


def tracing() -> bool:
    """Whether calls are recorded instead of run: by a compiler, by export, or on fake tensors."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def operator(
    *,
    mutates: Sequence[str] = (),
    needs: Sequence[str] = (),
    omits: Sequence[str] = (),
    fake: Callable[..., list[torch.Tensor]] | None = None,
    traced: Callable[[Callable[[Values], Any], Values], Any] | None = None,
) -> Callable[[Function], Function]:
    """Make a function an operator where it is traced.

    Args:
        mutates: parameters whose tensors it writes to. An operator returns none of them.
        needs: parameters that the operator cannot do without, though the function can.
        omits: parameters that the operator does not have.
        fake: for a function that returns new tensors: a list like them, from the same arguments.
        traced: ``traced(call, values)`` stands for the function where that is traced: it allocates what the function would allocate and
            returns what it would return; ``call(values)`` is the operator.
    """

    def decorate(function: Function) -> Function:
        made = _Operator(function, mutates, needs, omits, fake)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tracing():
                values = made.bind(args, kwargs)
                return made.call(values) if traced is None else traced(made.call, values)
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate
