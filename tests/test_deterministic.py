"""deterministic=True: a sequence's bits do not depend on its batch, on hints or on the width of the table."""

import pytest
import torch
from caches import poison_
from problems import build

import tkv
from tkv.errors import DTypeError
from tkv.tune import configs
from tkv.tune.configs import AttentionConfig

SMALL = AttentionConfig(16, 16, 4, 1, 32)


def rows_of(problem, seqs, width=None, **more):
    """The call of some of a problem's sequences, with a table of another width."""
    table = problem.page_table[seqs]
    if width is not None:
        wide = poison_(torch.empty(len(seqs), width, dtype=table.dtype, device=table.device))
        wide[:, : min(width, table.shape[1])] = table[:, :width]
        table = wide
    options = {name: value[seqs] if name in ("kv_start", "q_start") else value for name, value in problem.options.items()}
    options = {"config": SMALL, "return_lse": True, "deterministic": True, **options, **more}
    return tkv.paged_decode(problem.q[seqs], problem.cache, table, problem.seq_lens[seqs], **options)


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head"])
@pytest.mark.parametrize("options", [{}, {"window": 50, "sinks": 3}, {"sink_logits": [0.5, -1.0, 2.0, 0.0], "kv_start": [5, 0, 9, 0]}])
def test_alone_among_others_with_any_hint_and_any_width(kind, options):
    problem = build(kind, [150, 33, 7, 0], 16, 2, 2, 32, q_len=2, **options)
    whole = rows_of(problem, [0, 1, 2, 3])
    problem.check(deterministic=True, config=SMALL)
    for seqs, width, hint in [([0], 10, None), ([1], 3, 1), ([2, 1], 400, 10**6), ([3, 2], None, 0), ([2], 1, 7)]:
        out, lse = rows_of(problem, seqs, width, max_seq_len=hint)
        assert torch.equal(out, whole[0][seqs]) and torch.equal(lse, whole[1][seqs])


def test_a_batch_that_needs_too_much_memory_runs_in_several_launches(monkeypatch):
    problem = build("fp16", [70, 3, 40], 16, 1, 2, 32)
    whole = rows_of(problem, [0, 1, 2])
    monkeypatch.setattr(configs, "MAX_SCRATCH_BYTES", 1)
    out, lse = rows_of(problem, [0, 1, 2])
    assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])


def test_the_flag_is_a_bool():
    with pytest.raises(DTypeError, match="deterministic: expected True or False, got 1"):
        build("fp16", [3]).run(deterministic=1)
