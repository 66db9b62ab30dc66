"""Random models of a few thousand weights, and what Hugging Face makes of them."""

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

COMMON = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.3, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Family, config, and what the embeddings are multiplied by: a model whose input and output embeddings are one repeats what it reads if they
# are large, and needs small ones to say something else.
MODELS = {
    "llama": ("Llama", COMMON, 1.0),
    "parrot": ("Llama", COMMON | {"tie_word_embeddings": True}, 20.0),
    "mistral": ("Mistral", COMMON | {"sliding_window": 24}, 1.0),
    # Every other layer has a window.
    "gemma2": (
        "Gemma2",
        COMMON | {"sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
        0.05,
    ),
    # The last two of four layers read the caches of the first two.
    "gemma3n": (
        "Gemma3n",
        COMMON
        | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32, "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 4, "tie_word_embeddings": True,
        },
        0.05,
    ),
    # Learned sinks, and experts.
    "gpt_oss": (
        "GptOss",
        COMMON
        | {
            "hidden_size": 128, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        1.0,
    ),
    "bloom": ("Bloom", {"vocab_size": 256, "hidden_size": 96, "n_layer": 2, "n_head": 3, "initializer_range": 0.3}, 0.05),
}


def make(name, folder):
    """Write a model with seeded weights; gives its folder as a string."""
    family, config, factor = MODELS[name]
    torch.manual_seed(7)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**config, dtype="float32"))
    model.get_input_embeddings().weight.data *= factor
    model.save_pretrained(folder)
    return str(folder)


def prompts(*lens, seed=1, start=()):
    """Random token ids, so many in each prompt, behind those of `start`."""
    rng = torch.Generator().manual_seed(seed)
    return [[*start, *torch.randint(3, 256, (n,), generator=rng).tolist()] for n in lens]


def expected(folder, prompts, max_tokens, attention="eager"):
    """Greedy tokens by Hugging Face, prompt by prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        results.append(out[0, len(prompt) :].tolist())
    return results


def _in_fp8(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _in_int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


# Keys and values that are rounded whenever they are read are those of a quantised cache.
for _name, _rounded in {"fp8": _in_fp8, "int8_per_token_head": _in_int8}.items():

    def _attention(module, query, key, value, mask, *, _rounded=_rounded, **kwargs):
        return sdpa_attention_forward(module, query, _rounded(key), _rounded(value), mask, **kwargs)

    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
