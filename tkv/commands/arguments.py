"""Types of arguments: each turns a text into a value, or refuses it with a message that argparse prints."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tkv.errors import TkvError

if TYPE_CHECKING:
    from tkv.tune.arch import Part
    from tkv.tune.shapes import Model

Value = TypeVar("Value")

# Sizes are 32-bit numbers on a GPU.
MOST = 2**31 - 1
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def positive(text: str) -> int:
    """An integer of at least 1.

    Example:
        >>> positive("16")
        16
    """
    return _integer(text, 1)


def positives(text: str) -> list[int]:
    """Integers of at least 1 with commas between.

    Example:
        >>> positives("1,16,128")
        [1, 16, 128]
    """
    return [positive(number) for number in text.split(",")]


def at_least_0(text: str) -> int:
    """An integer of at least 0.

    Example:
        >>> at_least_0("0")
        0
    """
    return _integer(text, 0)


def duration(text: str) -> float:
    """Seconds: ``"300s"``, ``"5m"``, ``"1.5h"``, or a plain number.

    Example:
        >>> duration("300s"), duration("5m"), duration("90")
        (300.0, 300.0, 90.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a time such as 300s, 5m or 1h, got {text!r}")
    return seconds


def arch(text: str) -> str:
    """The name of an architecture that tkv compiles for.

    Example:
        >>> arch("sm90")
        'sm90'
    """
    from tkv.tune.arch import arch as facts_of

    return _checked(facts_of, text).name


def model(text: str) -> Model:
    """A model of ``tkv.tune.shapes.MODELS``.

    Example:
        >>> model("llama3-8b").layers
        32
    """
    from tkv.tune.shapes import model_of

    return _checked(model_of, text)


def models(text: str) -> list[Model]:
    """Models with commas between.

    Example:
        >>> [model.name for model in models("llama3-8b,gemma2-9b")]
        ['llama3-8b', 'gemma2-9b']
    """
    return [model(name.strip()) for name in text.split(",")]


def part(text: str) -> Part:
    """A GPU of ``autotune_configs/gpus.json``, by its name in any case, or a beginning that no other has.

    Example:
        >>> part("h200").name
        'H200 SXM'
    """
    from tkv.tune.arch import parts

    named = [part for part in parts() if part.name.lower() == text.lower()]
    found = named or [part for part in parts() if part.name.lower().startswith(text.lower())]
    if len(found) != 1:
        names = ", ".join(part.name for part in found or parts())
        raise argparse.ArgumentTypeError(f"{'several match' if found else 'unknown part'} {text!r}: {names}")
    return found[0]


def formats(text: str) -> str:
    """The name of a cache format, or of those of K and of V with a ``+`` between.

    Example:
        >>> formats("fp8_e4m3/tensor"), formats("int4/page_channel+int4/group32")
        ('fp8_e4m3/tensor', 'int4/page_channel+int4/group32')
    """
    from tkv.formats import KVFormat

    names = [str(_checked(KVFormat.parse, name)) for name in text.split("+")]
    if len(names) > 2:
        raise argparse.ArgumentTypeError(f"expected one format or K+V, got {text!r}")
    return names[0] if len(set(names)) == 1 else "+".join(names)


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r:.40}") from None
    if not least <= number <= MOST:
        wanted = f"at least {least}" if number < least else f"at most {MOST}"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r:.40}")
    return number


def _checked(read: Callable[[str], Value], text: str) -> Value:
    """What a function of tkv makes of a text; its error becomes one that argparse prints."""
    try:
        return read(text)
    except TkvError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
