"""Calibrator and calibrate: static scales from observed keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tkv.calibration.checkpoint import PREFIX, Scales, save_scales
from tkv.calibration.histogram import Magnitudes
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import KVFormat, parse_pair

if TYPE_CHECKING:
    from os import PathLike

METHODS = ("absmax", "percentile", "mse")
LAYOUTS = ("nhd", "hnd")


class Calibrator:
    """Observes keys and values batch by batch and gives the static scales of a cache, in memory that does not grow with the tokens.

    A stored number is ``encode(x / scale)``, rounded to nearest even and saturated at the format's largest code (448 for fp8_e4m3, 57344
    for fp8_e5m2, 127 for int8); it is read back as ``code * scale``. With c the largest magnitude that is to be stored without saturation,
    ``scale = c / largest code``, and the method chooses c for each tensor, head or channel that has a scale of its own:

    - ``"absmax"``: the largest magnitude seen, exactly. Nothing saturates.
    - ``"percentile"``: the smallest observed magnitude that so many percent of all magnitudes, zeros included, do not pass; larger ones
      saturate. To within 1/512 of itself (exact for bfloat16 numbers), or 2^-15 of the largest magnitude if that is more.
    - ``"mse"``: the c with the least sum of ``(x - code * scale)^2`` in that very format, saturation included: of 256 candidates an octave
      from the power of two above the largest magnitude down to 2^-8 of it, and the largest magnitude itself. The sum is taken over the
      histogram, with each number at the centre of its bin.

    The two last count magnitudes in a histogram for each scale: 256 bins an octave, each at most 1/256 of its magnitudes wide, over the
    16 octaves below the power of two above the largest magnitude, which move up with it; what is smaller shares one bin. They take
    8 bytes a bin, 4 for ``channel``: 34 MB for K and V of a layer with 8 heads of 128 and a scale a channel, 33 KB for each other scale.

    What does not count: NaN and Inf, and tokens that a mask leaves out. Where nothing but zeros was seen the scale is 1.0; scales are kept
    within 1e-30 and 1e30. Results do not depend on how tokens were cut into batches. ``update`` never waits for the device.

    Keys are to be observed **as the cache stores them**: after rotary embedding, unless the cache holds unrotated keys.

    Args:
        num_layers: layers of the model.
        format: format of the cache, or a pair (of K, of V), as for :class:`tkv.KVCache`: fp8_e4m3 or fp8_e5m2 with scale ``tensor`` or
            ``head``, int8 with ``tensor``, ``head`` or ``channel``. One of a pair may be of any other format, which has no static scale.
        method: ``"absmax"``, ``"percentile"`` or ``"mse"``.
        percentile: percent of the magnitudes, above 0 and up to 100, for ``"percentile"`` alone; 99.9 if None.

    Raises:
        UnsupportedError: no such format or method, neither of the formats has static scales, or a percentile for another method.
        RangeError, DTypeError: ``num_layers`` or ``percentile`` is out of range or no number.

    Example:
        >>> calibrator = Calibrator(num_layers=1, format="int8/head")
        >>> calibrator.update(0, torch.full((5, 2, 16), 254.0), torch.ones(5, 2, 16))           # 5 tokens, 2 heads of 16
        >>> calibrator.scales(0)[0]
        tensor([2., 2.])
    """

    def __init__(
        self,
        num_layers: int,
        format: str | KVFormat | Sequence[str | KVFormat],
        method: str = "absmax",
        *,
        percentile: float | None = None,
    ) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise DTypeError(f"num_layers: expected an int, got {num_layers!r}")
        if num_layers < 1:
            raise RangeError(f"num_layers: expected at least 1, got {num_layers}")
        if method not in METHODS:
            raise UnsupportedError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if percentile is not None and method != "percentile":
            raise UnsupportedError(f"percentile: only method 'percentile' takes it, got {percentile!r} for {method!r}")
        if percentile is not None and (isinstance(percentile, bool) or not isinstance(percentile, int | float)):
            raise DTypeError(f"percentile: expected a number, got {percentile!r}")
        if percentile is not None and not 0 < percentile <= 100:
            raise RangeError(f"percentile: expected percent above 0 and up to 100, got {percentile}")
        self.num_layers = num_layers
        self.formats = static_pair(format)
        self.method = method
        self.percentile = 99.9 if percentile is None else float(percentile)
        self._seen: dict[int, list[Magnitudes | None]] = {}

    @property
    def layers(self) -> list[int]:
        """The layers of which tokens were observed, in order."""
        return sorted(self._seen)

    def update(
        self,
        layer: int,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        layout: str = "nhd",
        mask: torch.Tensor | None = None,
    ) -> None:
        """Observe keys and values of one layer.

        Args:
            layer: which layer, 0 to ``num_layers - 1``.
            k: ``[..., num_kv_heads, head_dim]``, any leading dimensions, any floating dtype (taken as float32), any device; may be None,
                and is not looked at, where the format of K has no static scale.
            v: likewise for V; its head_dim may be another.
            layout: ``"nhd"`` as above, or ``"hnd"`` for heads before tokens, as transformers have them:
                ``[..., num_kv_heads, num_tokens, head_dim]``.
            mask: the shape of k and v without heads and head_dim, bool or integers; only tokens where it is not zero count. All if None.

        Raises:
            ShapeError, DTypeError, RangeError, UnsupportedError: the named argument does not fit.

        Example:
            >>> calibrator = Calibrator(1, "fp8_e4m3/tensor")
            >>> x = torch.tensor([448.0, 1e6]).expand(1, 4, 16, 2).transpose(2, 3)           # the last token is padding
            >>> calibrator.update(0, x, x, layout="hnd", mask=torch.tensor([[1, 0]]))
            >>> calibrator.scales(0)[1]
            tensor(1.)
        """
        self._check_layer(layer)
        if layout not in LAYOUTS:
            raise UnsupportedError(f"layout: expected 'nhd' or 'hnd', got {layout!r}")
        tokens: list[torch.Tensor | None] = [None, None]
        leading: torch.Size | None = None
        for i, (x, kind) in enumerate(zip((k, v), self.formats)):
            if not kind.is_static:
                continue
            x = _checked("kv"[i], x, layout)
            if leading is not None and x.shape[:-1] != leading:
                raise ShapeError(f"v: expected the tokens and heads of k, {list(leading)}, got {list(x.shape[:-1])}")
            leading = x.shape[:-1]
            known = self._seen.get(layer, [None, None])[i]
            if known is not None and x.shape[-2:] != (known.num_kv_heads, known.head_dim):
                raise ShapeError(
                    f"{'kv'[i]}: earlier batches of layer {layer} have {known.num_kv_heads} heads of {known.head_dim}, "
                    f"got {x.shape[-2]} of {x.shape[-1]}"
                )
            tokens[i] = x
        if leading is None:
            return
        if mask is not None:
            mask = _checked_mask(mask, leading[:-1])
        if not leading.numel():
            return
        # Under torch.inference_mode() the state would be of a kind that later batches outside of it could not be added to.
        with torch.inference_mode(False):
            states = self._seen.setdefault(layer, [None, None])
            for i, x in enumerate(tokens):
                if x is None:
                    continue
                state = states[i]
                if state is None:
                    state = states[i] = Magnitudes(self.formats[i], x.shape[-2], x.shape[-1], self.method != "absmax", x.device)
                state.observe(x.reshape(-1, *x.shape[-2:]), None if mask is None else mask.reshape(-1))

    def update_cache(self, past_key_values: Any, attention_mask: torch.Tensor | None = None) -> None:
        """Observe all that a cache of Hugging Face transformers holds after a forward pass, its keys after rotary embedding.

        Call it once for each pass over fresh sequences: what a cache already held is counted again. A preallocated (static) cache also
        counts the zeros of its free places, and one that is quantised holds only its newest tokens: take a ``DynamicCache``.

        Args:
            past_key_values: a ``DynamicCache``, or whatever has ``layers`` with ``keys`` and ``values`` of
                ``[batch, num_kv_heads, num_tokens, head_dim]``. Layers without keys (not run, or of linear attention) are passed over.
            attention_mask: ``[batch, num_tokens]``, 0 for padding, which then does not count. A sliding window layer (``is_sliding``) that
                has only the last tokens takes the last of its columns.

        Raises:
            DTypeError: not such a cache.
            ShapeError, RangeError: a layer does not fit the mask, earlier batches or ``num_layers``.

        Example:
            >>> from types import SimpleNamespace as Fake
            >>> cache = Fake(layers=[Fake(keys=torch.full((1, 2, 7, 16), 12.7), values=torch.ones(1, 2, 7, 16))])
            >>> calibrator = Calibrator(1, ("int8/tensor", "bf16"))
            >>> calibrator.update_cache(cache, attention_mask=torch.ones(1, 7))
            >>> calibrator.scales(0)
            (tensor(0.1000), None)
        """
        if not _is_cache(past_key_values):
            raise DTypeError(
                "past_key_values: expected a cache with layers that have keys and values, as transformers' DynamicCache, "
                f"got {type(past_key_values).__name__}"
            )
        for index, layer in enumerate(past_key_values.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                continue
            mask = attention_mask
            if mask is not None and getattr(layer, "is_sliding", False):
                mask = mask[..., max(mask.shape[-1] - keys.shape[-2], 0) :]
            self.update(index, keys, values, layout="hnd", mask=mask)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of one layer, as :class:`tkv.KVCache` takes them.

        Args:
            layer: which layer, 0 to ``num_layers - 1``.

        Returns:
            ``(k_scale, v_scale)``, float32 of shape ``[]`` (tensor), ``[num_kv_heads]`` (head) or ``[num_kv_heads, head_dim]`` (channel) on
            the device of the layer's first batch; None where the format has no static scale.

        Raises:
            RangeError: there is no such layer, or nothing finite of it was observed.

        Example:
            >>> calibrator = Calibrator(1, "fp8_e4m3/tensor", method="mse")
            >>> calibrator.update(0, torch.zeros(3, 2, 16), torch.full((3, 2, 16), 448.0))
            >>> calibrator.scales(0)
            (tensor(1.), tensor(1.))
        """
        self._check_layer(layer)
        states = self._seen.get(layer)
        if states is None:
            raise RangeError(f"layer: no tokens of layer {layer} were observed; call update({layer}, k, v) before scales")
        result: list[torch.Tensor | None] = [None, None]
        for i, state in enumerate(states):
            if state is None:
                continue
            if state.saw_nothing():
                raise RangeError(f"layer: no finite number of {'KV'[i]} of layer {layer} was observed")
            result[i] = state.scale(self.method, self.percentile)
        return result[0], result[1]

    def save(self, path: str | PathLike[str], prefix: str = PREFIX, layers: Iterable[int] | None = None) -> None:
        """Write the scales of all layers as :func:`tkv.save_scales` does.

        Args:
            path: the file to write.
            prefix: what stands before ``.k_scale`` and ``.v_scale``, with ``{layer}`` for the layer's number.
            layers: which layers; all if None. A model that has a KV cache in some of its layers alone needs ``calibrator.layers``.

        Raises:
            RangeError: of one of the layers nothing was observed.
            ImportError: safetensors is not installed.

        Example:
            >>> import tempfile
            >>> calibrator = Calibrator(1, "int8/tensor")
            >>> calibrator.update(0, torch.ones(3, 2, 16), torch.ones(3, 2, 16))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     calibrator.save(f"{folder}/kv_scales.safetensors")
        """
        chosen = range(self.num_layers) if layers is None else layers
        save_scales(path, {layer: self.scales(layer) for layer in chosen}, self.formats, prefix)

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise DTypeError(f"layer: expected an int, got {layer!r}")
        if not 0 <= layer < self.num_layers:
            raise RangeError(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")


def calibrate(
    batches: Iterable[Any],
    format: str | KVFormat | Sequence[str | KVFormat],
    method: str = "absmax",
    *,
    percentile: float | None = None,
    layout: str = "nhd",
) -> Scales:
    """Static scales from batches of keys and values, in one call; see :class:`Calibrator` for methods, bounds and what does not count.

    Over a Hugging Face model, ``calibrate((model(**batch, use_cache=True).past_key_values for batch in data), format)`` (with padding,
    :meth:`Calibrator.update_cache`, which takes the attention mask).

    Args:
        batches: an iterable, read once, of: a pair ``(k, v)`` of tensors, of layer 0; or a list of such pairs by layer; or a dict from
            layer to pair; or a cache as :meth:`Calibrator.update_cache` takes it.
        format, method, percentile: as for :class:`Calibrator`.
        layout: of the tensors, ``"nhd"`` for ``[..., num_kv_heads, head_dim]``, ``"hnd"`` for
            ``[..., num_kv_heads, num_tokens, head_dim]``; caches are of the latter in any case.

    Returns:
        A dict from each layer that was observed to its ``(k_scale, v_scale)``, as :meth:`Calibrator.scales` gives them.

    Raises:
        RangeError: no tokens at all, or nothing finite of a layer.
        ShapeError, DTypeError, UnsupportedError: what came does not fit.

    Example:
        >>> batches = [(torch.full((1, 2, 16), 0.5 * n), torch.full((1, 2, 16), 127.0)) for n in range(5)]
        >>> calibrate(batches, ("fp8_e5m2/tensor", "int8/head"))[0][1]
        tensor([1., 1.])
    """
    # Layers are known only once the last batch has come.
    calibrator = Calibrator(2**31, format, method, percentile=percentile)
    for batch in batches:
        if _is_cache(batch):
            calibrator.update_cache(batch)
            continue
        if isinstance(batch, Mapping):
            pairs = list(batch.items())
        elif _is_pair(batch):
            pairs = [(0, batch)]
        elif isinstance(batch, list | tuple):
            pairs = list(enumerate(batch))
        else:
            raise DTypeError(f"batches: expected pairs (k, v), lists or dicts of them by layer, or caches, got {type(batch).__name__}")
        for layer, pair in pairs:
            if not _is_pair(pair):
                raise DTypeError(f"batches: expected a pair (k, v) of tensors for layer {layer}, got {type(pair).__name__}")
            calibrator.update(layer, *pair, layout=layout)
    if not calibrator.layers:
        raise RangeError("batches: no tokens came, and scales need some")
    return {layer: calibrator.scales(layer) for layer in calibrator.layers}


def static_pair(format: str | KVFormat | Sequence[str | KVFormat]) -> tuple[KVFormat, KVFormat]:
    """The formats of K and V, one of which has static scales at least."""
    formats = parse_pair(format)
    if not any(kind.is_static for kind in formats):
        raise UnsupportedError(
            f"format: {formats[0]} and {formats[1]} have no static scales; those of tensor, head and channel formats are calibrated"
        )
    return formats


def _is_cache(value: Any) -> bool:
    return isinstance(getattr(value, "layers", None), list | tuple)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(x, torch.Tensor | None) for x in value)


def _checked(name: str, x: torch.Tensor | None, layout: str) -> torch.Tensor:
    """The tensor as ``[..., num_kv_heads, head_dim]``, without its gradient."""
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise DTypeError(f"{name}: expected floating point numbers, got {x.dtype}")
    if x.dim() < (2 if layout == "nhd" else 3):
        shape = "[..., num_kv_heads, head_dim]" if layout == "nhd" else "[..., num_kv_heads, num_tokens, head_dim]"
        raise ShapeError(f"{name}: layout {layout!r} needs {shape}, got shape {list(x.shape)}")
    x = x.detach()
    x = x if layout == "nhd" else x.transpose(-3, -2)
    if not x.shape[-1] or not x.shape[-2]:
        raise ShapeError(f"{name}: expected at least one head and one channel, got {x.shape[-2]} heads of {x.shape[-1]}")
    return x


def _checked_mask(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor):
        raise DTypeError(f"mask: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.shape != shape:
        raise ShapeError(f"mask: expected the tokens of k and v, {list(shape)}, got {list(mask.shape)}")
    return mask != 0
