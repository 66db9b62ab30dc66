"""What a launch is made of: sizes that change from step to step must not compile new kernels."""

import json
import os
import subprocess
import sys

import pytest
import torch
from problems import build

import tkv
from tkv.tune.configs import AttentionConfig, split_plan

KEYS = """
import json, sys, torch, tkv
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from tkv.ops.attention import Options
from tkv.ops.decode import plan_decode
from tkv.ops.prefill import plan_prefill
from tkv.ops.write import plan_write

backend, keys = CUDABackend(GPUTarget("cuda", 90, 32)), {}

def note(launch):
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    key = str(bind(*launch.args, **launch.options("cuda"), debug=False)[1])
    keys.setdefault(kernel.__name__, set()).add(key)

cache = tkv.KVCache.empty(64, 16, 2, 64, "int8/token_head")
for seqs, width, hint in [(1, 7, None), (1, 2048, 30000), (3, 2047, 4000), (16, 512, 1000), (64, 300, 4200), (5, 512, 1)]:
    q = torch.empty(seqs, 8, 64, dtype=torch.float16)
    table, lens = torch.empty(seqs, width, dtype=torch.int32), torch.empty(seqs, dtype=torch.int32)
    out, lse = torch.empty_like(q), torch.empty(seqs, 8)
    for launch in plan_decode(q, cache, table, lens, out, lse, "sm90", False, Options(scale=0.1), max_seq_len=hint):
        note(launch)
    q, cu_seqlens = torch.empty(37 * seqs, 8, 64, dtype=torch.float16), torch.empty(seqs + 1, dtype=torch.int32)
    args = (table, lens, cu_seqlens, q, torch.empty(37 * seqs, 8), "sm90", False, Options(scale=0.1))
    for launch in plan_prefill(q, None, cache, *args, max_q_len=512, max_seq_len=hint):
        note(launch)
    new = torch.empty(seqs, 2, 64, dtype=torch.float16)
    note(plan_write(new, new, cache, torch.empty(seqs, dtype=torch.int64), "sm90"))
print(json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_batch_size_table_width_and_hints_do_not_compile_new_kernels():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # decode and prefill are each compiled once for results that are final and once for partial ones.
    assert json.loads(done.stdout.splitlines()[-1]) == {"attention_kernel": 4, "merge_kernel": 2, "write_kernel": 1}


def test_partial_results_take_bounded_memory_and_long_sequences_are_spread_in_any_batch():
    config = AttentionConfig(16, 64, 4, 2)
    splits, tiles = split_plan(config, num_programs=36 * 8, max_keys=220_000, num_sms=132, part_bytes=36 * 32 * 129 * 4)
    assert tiles * 64 <= 4096 and splits >= 54
    splits, tiles = split_plan(config, num_programs=10**6, max_keys=2**20, num_sms=132, part_bytes=2**25)
    assert splits * 2**25 <= 2**28
    assert split_plan(config, num_programs=8, max_keys=0, num_sms=132, part_bytes=0)[0] == 1


@pytest.mark.parametrize("splits", [None, 16])
@pytest.mark.parametrize("what", ["k", "v", "q"])
def test_a_visible_number_that_is_not_finite_shows_in_out_and_lse(what, splits):
    def spoil(q, k, v):
        {"q": q, "k": k, "v": v}[what][0 if what == "q" else 3, 0, 5] = torch.nan

    problem = build("fp32", [40], edit=spoil, launch={"config": AttentionConfig(16, 16, 4, 1, splits)})
    out, lse = problem.run()
    assert out[0, 0, 5].isnan()
    assert lse.isnan().all() or what == "v"
    merged, merged_lse = tkv.merge_states(torch.stack([out, torch.zeros_like(out)]), torch.stack([lse, torch.zeros_like(lse)]))
    assert merged[0, 0, 5].isnan() and (merged_lse.isnan().all() or what == "v")


def test_values_that_fall_far_below_earlier_ones_leave_the_result_finite():
    def shrink(q, k, v):
        v[16:] *= 1e-34

    for kind in ("int8/token_head", "fp8_e4m3/token_head"):
        build(kind, [128], q_dtype=torch.float16, edit=shrink, launch={"config": AttentionConfig(16, 16, 4, 1)}).check()
