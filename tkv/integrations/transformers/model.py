"""use_tkv: a model of transformers that generates on tkv's cache."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

import tkv
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import parse_pair
from tkv.integrations.transformers import attention
from tkv.integrations.transformers.cache import TkvCache
from tkv.integrations.transformers.settings import Policy, Settings, window_of
from tkv.ops.checks import check_int

# The attribute of a decoder that says which TkvModel it is in.
OWNER = "_tkv_model"
# What the attention functions of models may take: all of it is served or, where it comes, refused.
KNOWN_ARGUMENTS = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs", "sliding_window", "softcap", "s_aux", "sinks",
    "output_attentions", "use_cache", "position_ids", "cache_position", "is_causal", "_",
}  # fmt: skip
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def use_tkv(
    model: PreTrainedModel,
    *,
    format: str | tkv.KVFormat | Sequence[str | tkv.KVFormat] | None = None,
    page_size: int = 16,
    window: int | None = None,
    sinks: int = 0,
    policy: Policy | None = None,
    budget: int | None = None,
    policy_scores: str = "sum",
    scales: Mapping[int, Any] | Sequence[Any] | None = None,
    max_pages: int | None = None,
) -> TkvModel:
    """Let a model keep its keys and values in tkv's pages, and attend with tkv's kernels: ``model.generate`` and forward passes.

    With an unquantised format and neither window nor policy the model computes what it computed before, to rounding. Keys are cached as
    the model made them, rotated at their true positions; new tokens are stored first, and attended to as they are stored. Padding is not
    stored; where it sees a token its outputs are those that it has with the model's own attention, elsewhere attention gives it 0. With
    ``use_cache=False`` nothing is kept, and so neither quantised nor evicted.

    The host works once a forward pass, not once a layer. Padding is read from the device once a prompt, not in the steps of ``generate``;
    beam search reads its order in each. Forward passes by hand read the mask if they are given one.

    Args:
        model: a decoder-only model whose attention goes through transformers' ``AttentionInterface``: full or sliding layers, learned
            sinks and softcap are served.
        format: of the cache, a :class:`tkv.KVFormat` or its name, one for K and V or a pair; the dtype of the model's keys if None.
        page_size: tokens of a page.
        window: tokens see the last `window` tokens, themselves included, and the first `sinks` ones; pages of others are freed. Positions
            stay those of the text. Layers with a window of their own have the smaller one; theirs has no sinks.
        sinks: with `window`.
        policy: ``policy(scores, seq_lens) -> (keep, keep_lens)``, as :mod:`tkv.policies` has them: after each forward pass sequences of
            more than `budget` tokens keep what it says, in each layer and KV head. `scores` ``[num_seqs, num_kv_heads, width]`` are the
            attention mass of keys.
        budget: how many tokens the policy keeps: ``heavy + recent`` for ``h2o``.
        policy_scores: ``"sum"``: of all queries since the token came (H2O); ``"last"``: of the newest query alone (TOVA).
        scales: static scales by layer, ``(k_scale, v_scale)``: what ``tkv.calibrate`` and ``tkv.load_scales`` return.
        max_pages: the most pages of a layer; None: as many as there is memory. They are allocated as tokens come.

    Returns:
        A :class:`TkvModel`, which leads back. A model that uses tkv already gets the new settings.

    Raises:
        UnsupportedError: the model, or a combination, is not served exactly.
        DTypeError, RangeError: an argument is of another type or out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> with use_tkv(model, format="int8/token_head"):
        ...     tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
        >>> tokens.shape, model.config._attn_implementation
        (torch.Size([1, 5]), 'sdpa')
    """
    decoder = _check_model(model)
    settings = _settings(format, page_size, window, sinks, policy, budget, policy_scores, scales, max_pages)
    config = model.config.get_text_config()
    if any(kind == "sliding_attention" for kind in _layer_types(config)):
        window_of(config.sliding_window, settings)
    if OWNER in decoder.__dict__:
        decoder.__dict__[OWNER].restore()
    return TkvModel(model, decoder, settings)


class TkvModel:
    """A model that uses tkv, until :meth:`restore`; or for the length of a ``with`` block. Made by :func:`use_tkv`.

    Attributes:
        model: the model.
        settings: what :func:`use_tkv` was asked for.
    """

    def __init__(self, model: PreTrainedModel, decoder: torch.nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self._decoder = decoder
        self._signature = inspect.signature(decoder.forward)
        self._cache_name = "cache" if "cache" in self._signature.parameters else "past_key_values"
        self._num_layers = 1 + max(_layer_numbers(decoder))
        self._before = model.config._attn_implementation
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self._hooks = [
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            decoder.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]
        self._patch("generate", self._generate)
        self._patch("_prepare_cache_for_generation", self._prepare_cache)
        decoder.__dict__[OWNER] = self

    def restore(self) -> None:
        """Give the model its own attention back; caches that it returned stay readable, but cannot be gone on from. Twice is fine."""
        if self._decoder.__dict__.get(OWNER) is not self:
            return
        del self._decoder.__dict__[OWNER]
        for hook in self._hooks:
            hook.remove()
        for name in ("generate", "_prepare_cache_for_generation"):
            self.model.__dict__.pop(name, None)
        self.model.set_attn_implementation(self._before)

    def new_cache(self, max_tokens: int | None = None) -> TkvCache:
        """An empty cache, to pass to the model as ``past_key_values`` (``cache`` from transformers 5.24 on).

        Args:
            max_tokens: columns that it will not pass, if that is known: growing then stops there.

        Returns:
            The cache.
        """
        return TkvCache(self.settings, self._num_layers, max_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> TkvModel:
        """That of a copy of the model, which uses tkv too."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        raise UnsupportedError("model: one that uses tkv cannot be pickled; call restore() first, or save_pretrained()")

    def __enter__(self) -> TkvModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def _patch(self, name: str, function: Any) -> None:
        own = getattr(self.model, name, None)
        if own is not None:
            self.model.__dict__[name] = functools.wraps(own)(functools.partial(function, own))

    def _generate(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """generate, within which masks of steps need not be read."""
        if kwargs.get("cache_implementation") == "paged":
            raise UnsupportedError("cache_implementation: 'paged', transformers' continuous batching, has pages of its own; call restore()")
        attention.passes.generating.append([])
        try:
            return own(*args, **kwargs)
        finally:
            for cache in attention.passes.generating.pop():
                cache.prompt_columns = None

    def _prepare_cache(self, own: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """What generate calls for its cache."""
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise UnsupportedError(
                f"cache_implementation: expected none, for the cache is tkv's, got {generation_config.cache_implementation!r}"
            )
        if generation_config.use_cache is False:
            return own(generation_config, model_kwargs, *args, **kwargs)
        result = True
        if model_kwargs.get(self._cache_name) is not None:
            result = own(generation_config, model_kwargs, *args, **kwargs)
        else:
            max_tokens = kwargs.get("max_cache_length", args[2] if len(args) > 2 else None)
            model_kwargs[self._cache_name] = self.new_cache(max_tokens)
        cache, mask = model_kwargs.get(self._cache_name), model_kwargs.get("attention_mask")
        # Without a generate of ours around it, nothing would end this.
        if isinstance(cache, TkvCache) and attention.passes.generating:
            cache.prompt_columns = mask.shape[1] if mask is not None and mask.dim() == 2 else 0
            attention.passes.generating[-1].append(cache)
        return result

    @torch.compiler.disable
    def _begin(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a forward pass of the decoder."""
        if "past_key_values" in kwargs and self._cache_name == "cache":
            kwargs["cache"] = kwargs.pop("past_key_values")
        given = self._signature.bind_partial(*args, **kwargs)
        values = {**kwargs, **given.arguments}
        config = self.model.config.get_text_config()
        if values.get("output_attentions") or (values.get("output_attentions") is None and getattr(config, "output_attentions", False)):
            raise UnsupportedError("output_attentions: kernels do not keep the weights; use another attn_implementation")
        cache = values.get(self._cache_name)
        if cache is not None and not isinstance(cache, TkvCache):
            raise UnsupportedError(
                f"{self._cache_name}: expected a TkvCache, as new_cache() or the model gives it, or none; got {type(cache).__name__}"
            )
        if cache is not None and len(cache.layers) != self._num_layers:
            raise ShapeError(f"{self._cache_name}: expected one of {self._num_layers} layers, as the model has, got {len(cache.layers)}")
        use_cache = values.get("use_cache")
        temporary = cache is None and not (config.use_cache if use_cache is None else use_cache)
        if cache is None:
            cache = self.new_cache()
        if temporary:
            # Nothing is kept, so nothing is quantised or evicted.
            cache.settings = Settings(window=self.settings.window, sinks=self.settings.sinks)
        else:
            args, kwargs = self._put(self._cache_name, cache, args, kwargs)
        inputs = values.get("input_ids")
        if inputs is None:
            inputs = values["inputs_embeds"]
        mask = values.get("attention_mask")
        if temporary and mask is None:
            positions = values.get("position_ids")
            if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
                raise UnsupportedError("position_ids: without a cache, positions that do not go up by one are packed sequences, not served")
            # Some versions suspect packed sequences wherever there is neither cache nor mask.
            args, kwargs = self._put("attention_mask", torch.ones(inputs.shape[:2], device=inputs.device), args, kwargs)
        cache.begin(inputs.shape[0], inputs.shape[1], self._read(mask, cache))
        attention.passes.stack.append(attention.Forward(self, cache, temporary))
        return args, kwargs

    @torch.compiler.disable
    def _end(self, decoder: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it, also where it failed."""
        stack = attention.passes.stack
        if stack and stack[-1].owner is self:
            stack.pop().cache.end(finished=output is not None)

    def _put(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The decoder's arguments with one of them replaced."""
        at = list(self._signature.parameters).index(name)
        if at < len(args):
            return (*args[:at], value, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def _read(self, mask: Any, cache: TkvCache) -> Any:
        """A mask of columns on the host, where it can say anything new."""
        if mask is None or (cache.prompt_columns is not None and cache.length >= max(1, cache.prompt_columns)):
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"attention_mask: expected [batch, columns], 0 for padding; masks of another kind are not served, got {shape}"
            )
        return (mask != 0).cpu().numpy()


def _settings(
    format: Any, page_size: int, window: int | None, sinks: int, policy: Policy | None, budget: int | None, policy_scores: str, scales: Any,
    max_pages: int | None,
) -> Settings:  # fmt: skip
    """The arguments of use_tkv, each with its own error."""
    check_int("page_size", page_size, 1)
    if window is not None:
        check_int("window", window, 1)
    if check_int("sinks", sinks, 0) and window is None:
        raise UnsupportedError(f"sinks: without a window all tokens are seen; expected a window too, got sinks={sinks}")
    if max_pages is not None:
        check_int("max_pages", max_pages, 1)
    if (policy is None) != (budget is None):
        raise UnsupportedError("budget: expected with policy, how many tokens it keeps, and policy with budget; got one of the two")
    if policy is not None and not callable(policy):
        raise DTypeError(f"policy: expected a function of scores and lengths, got {policy!r}")
    if policy is not None and window is not None:
        raise UnsupportedError("policy: keys that heads chose have no common positions, by which a window goes; leave out one of them")
    if policy_scores not in ("sum", "last"):
        raise RangeError(f"policy_scores: expected 'sum' or 'last', got {policy_scores!r}")
    if scales is not None and not isinstance(scales, Mapping):
        scales = dict(enumerate(scales))
    for kind in parse_pair(format) if format is not None else ():
        if kind.scale == "page_channel":
            raise UnsupportedError(f"format: {kind} is filled a page at a time, beside a native tail; use tkv.CacheManager(tail_pool=)")
        if kind.is_static and kind.dtype == "int8" and scales is None:
            raise UnsupportedError(f"scales: {kind} needs calibrated scales, as tkv.calibrate gives them; got none")
    return Settings(
        format, page_size, window, sinks, policy, 0 if budget is None else check_int("budget", budget, 1), policy_scores, scales, max_pages
    )


def _check_model(model: Any) -> torch.nn.Module:
    """The decoder of a model that can be served."""
    if not isinstance(model, PreTrainedModel):
        raise DTypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    name, config = type(model).__name__, model.config
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedError(f"model: {name} has an encoder; cross-attention is not served")
    if text is not config:
        raise UnsupportedError(f"model: {name} takes more than text, and its tokens may see what is behind them; use its text model")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"model: {name} does not have its attention through transformers' AttentionInterface")
    for field, what in (
        ("attention_chunk_size", "chunked attention"),
        ("num_kv_shared_layers", "layers that share keys"),
        ("kv_sharing_modes", "layers that share keys"),
        ("use_bidirectional_attention", "bidirectional attention"),
        ("index_topk", "a choice of keys by an indexer"),
        ("alibi", "ALiBi"),
    ):
        if getattr(config, field, None):
            raise UnsupportedError(f"model: {name} has {what} (config.{field}), which is not served")
    if getattr(config, "layers_block_type", None) or getattr(config, "block_types", None):
        raise UnsupportedError(f"model: {name} has layers without keys and values, whose states are not in pages")
    others = sorted(set(_layer_types(config)) - LAYER_TYPES)
    if others:
        raise UnsupportedError(f"model: {name} has layers of type {', '.join(others)}; served are full_attention and sliding_attention")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if decoder is None:
        decoder = model
    parameters = inspect.signature(decoder.forward).parameters
    if "cache" not in parameters and "past_key_values" not in parameters:
        raise UnsupportedError(f"model: {type(decoder).__name__} takes no cache")
    if not _layer_numbers(decoder):
        raise UnsupportedError(f"model: layers of {type(decoder).__name__} do not say which layer's cache they have")
    for module in decoder.modules():
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is not None and hasattr(module, "layer_idx"):
            unknown = sorted(set(inspect.signature(eager).parameters) - KNOWN_ARGUMENTS)
            if unknown:
                raise UnsupportedError(f"model: attention of {name} takes {', '.join(unknown)}, which is not served")
    return decoder


def _layer_numbers(decoder: torch.nn.Module) -> list[int]:
    """The places in a cache that a model's attention layers name."""
    numbers = [getattr(module, "layer_idx", None) for module in decoder.modules()]
    return [number for number in numbers if isinstance(number, int)]


def _layer_types(config: Any) -> list[str]:
    """The kinds of a model's layers; where it does not say, all have the window that it has."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    return list(kinds)
