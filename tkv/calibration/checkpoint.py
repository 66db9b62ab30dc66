"""Static scales in safetensors files, by the names that vLLM and llm-compressor use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import KVFormat, parse_pair

if TYPE_CHECKING:
    from os import PathLike

PREFIX = "model.layers.{layer}.self_attn"
INDEX = "model.safetensors.index.json"
Scales = dict[int, tuple[torch.Tensor | None, torch.Tensor | None]]

# What stands after the prefix for the scale of K and of V; the first that a checkpoint has counts.
NAMES = (
    # llm-compressor, and what vLLM reads.
    ("k_scale", "v_scale"),
    # vLLM's own parameters.
    ("attn.k_scale", "attn.v_scale"),
    # NVIDIA ModelOpt.
    ("k_proj.k_scale", "v_proj.v_scale"),
    # llm-compressor, where Q, K and V are one matrix.
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    # Early compressed-tensors.
    ("k_proj.output_scale", "v_proj.output_scale"),
    # AutoFP8: one scale for both.
    ("kv_scale", "kv_scale"),
)
ZERO_POINTS = ("k_zero_point", "v_zero_point")


def save_scales(
    path: str | PathLike[str],
    scales: Mapping[int, tuple[torch.Tensor | None, torch.Tensor | None]],
    format: str | KVFormat | Sequence[str | KVFormat],
    prefix: str = PREFIX,
) -> None:
    """Write scales to a safetensors file, as ``<prefix>.k_scale`` and ``<prefix>.v_scale`` of each layer.

    Those names, and shapes ``[]`` and ``[num_kv_heads]``, are what vLLM reads. The formats of K and V are kept in the file's metadata.

    Args:
        path: the file to write.
        scales: from each layer to its ``(k_scale, v_scale)``, as :func:`tkv.calibrate` returns them; None where there is no static scale.
        format: the format of the cache, or a pair (of K, of V).
        prefix: what stands before the names, with ``{layer}`` for the layer's number.

    Raises:
        ImportError: safetensors is not installed.
        RangeError: a prefix without ``{layer}``.
        ShapeError, DTypeError: a scale is not float32 of the format's kind of shape.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_scales(f"{folder}/kv_scales.safetensors", {0: (torch.tensor(0.5), None)}, ("int8/tensor", "bf16"))
        ...     load_scales(folder, ("int8/tensor", "bf16"))
        {0: (tensor(0.5000), None)}
    """
    formats = parse_pair(format)
    _check_prefix(prefix)
    tensors: dict[str, torch.Tensor] = {}
    for layer, pair in scales.items():
        for i, (scale, kind) in enumerate(zip(pair, formats)):
            name = f"{prefix.format(layer=layer)}.{NAMES[0][i]}"
            if (scale is not None) != kind.is_static:
                raise ShapeError(f"scales: {kind} has {'a' if kind.is_static else 'no'} static scale, got {scale!r} for {name}")
            if scale is None:
                continue
            if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
                raise DTypeError(f"scales: expected a float32 tensor for {name}, got {scale!r}")
            if scale.dim() != _DIMS[kind.scale or ""]:
                raise ShapeError(f"scales: {kind} needs {_SHAPES[kind.scale or '']} for {name}, got {list(scale.shape)}")
            tensors[name] = scale.detach().cpu().contiguous().clone()
    metadata = {"format": "pt", "k_format": str(formats[0]), "v_format": str(formats[1])}
    _safetensors().torch.save_file(tensors, path, metadata=metadata)


def load_scales(
    path: str | PathLike[str],
    format: str | KVFormat | Sequence[str | KVFormat],
    prefix: str = PREFIX,
    *,
    device: torch.device | str = "cpu",
) -> Scales:
    """Read the scales of a checkpoint that was calibrated by tkv, llm-compressor, ModelOpt or AutoFP8.

    After the prefix it looks for ``k_scale`` (vLLM, llm-compressor), ``attn.k_scale`` (vLLM), ``k_proj.k_scale`` (ModelOpt),
    ``qkv_proj.k_scale`` (llm-compressor, some models), ``k_proj.output_scale`` (older compressed-tensors), in this order, for V likewise,
    and at last for ``kv_scale`` (AutoFP8), which is for both. Only the scales are read, nothing else of the files.

    Args:
        path: a safetensors file, or a folder: of the files that its ``model.safetensors.index.json`` names, or else of all its
            ``*.safetensors``.
        format: the format of the cache, or a pair (of K, of V). Files of other libraries do not say for which dtype their scales are meant:
            fp8_e4m3 nearly always.
        prefix: what stands before the names, with ``{layer}`` for the layer's number.
        device: where the scales shall be.

    Returns:
        A dict from each layer that has scales to its ``(k_scale, v_scale)``, float32 in the format's shape: ``[]``, ``[num_kv_heads]``
        or ``[num_kv_heads, head_dim]``; None where the format has no static scale. One number in a foreign file is a scale of the tensor.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: no such file, or none in the folder.
        UnsupportedError: no scales, scales of another kind (tensor, head, channel) or dtype than the format's, or with zero points.
        RangeError: a scale that is not positive and finite, or one of K and V missing in a layer.

    Example:
        >>> import tempfile, safetensors.torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old = {"model.layers.0.self_attn.kv_scale": torch.tensor([0.25], dtype=torch.bfloat16)}
        ...     safetensors.torch.save_file(old, f"{folder}/model.safetensors")
        ...     load_scales(folder, "fp8_e4m3/tensor")
        {0: (tensor(0.2500), tensor(0.2500))}
    """
    formats = parse_pair(format)
    _check_prefix(prefix)
    tensors, stored_formats, others = _read(Path(path), prefix)
    layers = sorted({layer for layer, _ in tensors})
    if not layers:
        hint = f"; its names are like {others[0]}, which needs another prefix=" if others else ""
        raise UnsupportedError(f"path: {path} has no scales named {prefix}.k_scale or the like{hint}")
    result: Scales = {}
    for layer in layers:
        pair: list[torch.Tensor | None] = [None, None]
        for i, kind in enumerate(formats):
            if not kind.is_static:
                continue
            name = next((names[i] for names in NAMES if (layer, names[i]) in tensors), None)
            where = f"{prefix.format(layer=layer)}.{name or NAMES[0][i]}"
            if name is None:
                raise RangeError(f"path: {path} has no {where}, which {kind} needs")
            stored = stored_formats.get((layer, name), {}).get(f"{'kv'[i]}_format")
            if stored is not None and stored != str(kind):
                raise UnsupportedError(f"format: {where} is a scale of {stored}, asked for {kind}")
            zero = tensors.get((layer, ZERO_POINTS[i]))
            if zero is not None and zero.count_nonzero():
                raise UnsupportedError(f"format: {where} comes with a zero point, and codes of {kind} have none")
            pair[i] = _shaped(where, tensors[layer, name], kind, stored is not None).to(device)
        result[layer] = pair[0], pair[1]
    return result


_DIMS = {"tensor": 0, "head": 1, "channel": 2}
_SHAPES = {"tensor": "[]", "head": "[num_kv_heads]", "channel": "[num_kv_heads, head_dim]"}


def _shaped(name: str, scale: torch.Tensor, kind: KVFormat, stored_by_tkv: bool) -> torch.Tensor:
    """A scale as float32 in the shape of the format, if it is of that kind."""
    if not scale.is_floating_point():
        raise DTypeError(f"path: {name} is {scale.dtype}, and scales are floating point numbers")
    scale = scale.float()
    # compressed-tensors keeps scales of heads as [num_kv_heads, 1, 1].
    if scale.dim() == 3 and scale.shape[1:] == (1, 1):
        found, scale = "head", scale.reshape(-1)
    elif scale.dim() == 1 and len(scale) == 1 and not stored_by_tkv:
        found, scale = "tensor", scale.reshape(())
    else:
        found = {dims: known for known, dims in _DIMS.items()}.get(scale.dim(), "")
    if found != kind.scale:
        came = f"a scale of kind {found!r}" if found else "no scale that tkv knows"
        raise UnsupportedError(f"format: {name} of shape {list(scale.shape)} is {came}, and {kind} asks for kind {kind.scale!r}")
    if not (scale.isfinite() & (scale > 0)).all():
        raise RangeError(f"path: {name} is not positive and finite everywhere: its smallest number is {scale.min().item():g}")
    return scale


def _read(path: Path, prefix: str) -> tuple[dict[tuple[int, str], torch.Tensor], dict[tuple[int, str], dict[str, str]], list[str]]:
    """Scales by layer and name after the prefix, their files' metadata likewise, and names of scales with other prefixes."""
    open_file = _safetensors().safe_open
    known = {name for names in NAMES for name in names} | set(ZERO_POINTS)
    before, after = prefix.split("{layer}", 1)
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after).replace(r"\{layer\}", r"\1") + r"\.(.+)")
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    metadata: dict[tuple[int, str], dict[str, str]] = {}
    others: list[str] = []
    for file in _files(path):
        with open_file(file, framework="pt") as handle:
            for name in handle.keys():
                match = pattern.fullmatch(name)
                if match and match[2] in known:
                    key = int(match[1]), match[2]
                    tensors[key], metadata[key] = handle.get_tensor(name), handle.metadata() or {}
                elif name.endswith((".k_scale", ".kv_scale")):
                    others.append(name)
    return tensors, metadata, others


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"path: there is no {path}")
    index = path / INDEX
    if index.is_file():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise FileNotFoundError(f"path: {path} has no {missing[0] if missing else '*.safetensors'}")
    return files


def _check_prefix(prefix: str) -> None:
    if not isinstance(prefix, str) or "{layer}" not in prefix:
        raise RangeError(f"prefix: expected a text with {{layer}} in it, such as {PREFIX!r}, got {prefix!r}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("scales in files need safetensors: pip install 'tkv[calibrate]'") from error
    return safetensors
