"""two_processes.py FOLDER '[prompts, number of tokens]': generates with two workers; prints the tokens and the classes of their layers."""

import json
import sys

from vllm import LLM, SamplingParams


def impls(model):
    """The classes of a worker's attention layers."""
    return [type(layer.impl).__name__ for layer in model.modules() if hasattr(layer, "impl")]


def main():
    # By this name workers find the function too.
    import two_processes

    prompts, max_tokens = json.loads(sys.argv[2])
    llm = LLM(
        sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=8, block_size=16,
        tensor_parallel_size=2,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    print("RESULT", json.dumps([tokens, llm.apply_model(two_processes.impls)]), flush=True)


if __name__ == "__main__":
    main()
