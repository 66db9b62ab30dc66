"""Whole generations by vLLM's engine on tkv's backend: the tokens are those of Hugging Face and of vLLM's own CPU backend."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from vllm import LLM, SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

import tkv
from tkv.integrations.vllm import register

PROMPTS = tiny.prompts(5, 33, 70, 17)
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tiny.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def engine(folder):
    """Starts an engine: on tkv, or on what vLLM takes by itself. A prompt of more than 48 tokens comes in several batches."""

    def start(name="llama", *, backend="tkv", **options):
        os.environ["TKV_VLLM"] = "1" if backend == "tkv" else "0"
        registry._ATTN_OVERRIDES.clear()
        selector._cached_get_attn_backend.cache_clear()
        register()
        options = {"block_size": 16, "max_num_batched_tokens": 48, "dtype": "float32", "max_model_len": 128, **options}
        return LLM(folder(name), enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=8, **options)

    yield start
    os.environ.pop("TKV_VLLM", None)
    gc.collect()


def run(llm, prompts=PROMPTS, max_tokens=TOKENS):
    """vLLM's results, greedily."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


def tokens(results):
    """The new tokens of each."""
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture
def calls(monkeypatch):
    """Batches that tkv's kernels got, as (function, number of new tokens of each sequence)."""
    seen = []
    decode, prefill = tkv.paged_decode, tkv.prefix_prefill

    def counted_decode(q, *args, **kwargs):
        seen.append(("paged_decode", [q.shape[1] if q.dim() == 4 else 1] * q.shape[0]))
        return decode(q, *args, **kwargs)

    def counted_prefill(q, k, v, cache, table, prefix_lens, cu_seqlens, **kwargs):
        seen.append(("prefix_prefill", cu_seqlens.diff().tolist()))
        return prefill(q, k, v, cache, table, prefix_lens, cu_seqlens, **kwargs)

    monkeypatch.setattr(tkv, "paged_decode", counted_decode)
    monkeypatch.setattr(tkv, "prefix_prefill", counted_prefill)
    return seen


def test_tokens_are_those_of_hugging_face_and_of_vllm_alone_and_prefixes_are_found(engine, folder, calls):
    expected = tiny.expected(folder("llama"), PROMPTS, TOKENS)
    llm = engine()
    assert tokens(run(llm)) == expected
    lens = [q_lens for function, q_lens in calls if function == "prefix_prefill"]
    assert any(1 in q_lens and max(q_lens) > 1 for q_lens in lens), "a batch with decoding and prefilling sequences"
    assert any(q_lens == [1, 1, 1, 1] for function, q_lens in calls if function == "paged_decode")

    # 70 tokens are 4 whole pages, which a second prompt that begins with them finds.
    shared = tiny.prompts(9, seed=2, start=PROMPTS[2])
    calls.clear()
    results = run(llm, [*shared, PROMPTS[1]])
    assert tokens(results) == [*tiny.expected(folder("llama"), shared, TOKENS), expected[1]]
    assert [result.num_cached_tokens for result in results] == [64, 32]
    assert calls[0] == ("prefix_prefill", [70 + 9 - 64, 1])

    calls.clear()
    own = engine(backend="vllm", block_size=32)
    assert tokens(run(own)) == expected
    assert not calls


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3n", "gpt_oss", "bloom"])
def test_windows_soft_caps_shared_caches_learned_sinks_and_alibi(engine, folder, calls, name):
    assert tokens(run(engine(name, block_size=32))) == tiny.expected(folder(name), PROMPTS, TOKENS)
    assert {function for function, _ in calls} == {"paged_decode", "prefix_prefill"}


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8_per_token_head"])
def test_a_quantised_cache_has_the_tokens_of_rounded_keys_and_values(engine, folder, kv_dtype):
    got = tokens(run(engine(kv_cache_dtype=kv_dtype)))
    assert got == tiny.expected(folder("llama"), PROMPTS, TOKENS, attention=kv_dtype)


def test_sequences_that_lose_their_pages_start_again(engine, folder, calls):
    # Each needs a third page in the course of generating, and one is left besides the page that vLLM keeps for itself.
    prompts = tiny.prompts(30, 29, 31)
    llm = engine(num_gpu_blocks_override=8, max_model_len=64, enable_prefix_caching=False)
    assert tokens(run(llm, prompts)) == tiny.expected(folder("llama"), prompts, TOKENS)
    computed = sum(sum(q_lens) for _, q_lens in calls) // 2
    assert computed > 90 + 3 * (TOKENS - 1), "tokens a layer: none was computed again"


def test_guessed_tokens_are_verified_several_at_once(engine, folder, calls):
    # What repeats itself is guessed: wrongly while the prompt goes on otherwise, and rightly once the model says one token only.
    prompts = [prompt * 3 for prompt in tiny.prompts(7, 5, seed=6)]
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    got = tokens(run(engine("parrot", speculative_config=guess), prompts, 12))
    assert got == tiny.expected(folder("parrot"), prompts, 12)
    assert any(function == "paged_decode" and q_lens[0] > 1 for function, q_lens in calls), calls


def test_two_processes_with_half_of_the_heads_each(folder):
    script = Path(__file__).with_name("two_processes.py")
    env = {
        **os.environ, "TKV_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, str(script), folder("llama"), json.dumps([PROMPTS[::3], 3])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    got, impls = json.loads(result.removeprefix("RESULT "))
    assert got == tiny.expected(folder("llama"), PROMPTS[::3], 3)
    assert impls == [["TkvImpl", "TkvImpl"]] * 2
