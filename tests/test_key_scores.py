"""key_scores: the attention mass of each cached key is what the reference says, adds up to 1 a row, and is no one else's."""

import pytest
import torch
from bounds import ROUNDED_UNIT, UNIT
from caches import FORMATS, MORE_FORMATS, kind_id, q_dtypes
from hypothesis import given
from hypothesis import strategies as st
from problems import attention_options, build, effort, test_device
from ragged import build as build_ragged

import tkv
from tkv import reference
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()


def own_pages(page_table, seq_lens, page_size):
    """Rows of pages that exist, and -1."""
    used = torch.arange(page_table.shape[1], device=page_table.device) * page_size < seq_lens[:, None]
    return torch.where(used, page_table, -1)


def check(problem, reduce="sum", **more):
    """Scores of a problem of decoding or (its new tokens cached) of prefill: the reference's, and nothing else changed."""
    cache, options = problem.cache, dict(problem.options)
    sink_logits = options.pop("sink_logits", None)
    _, lse = problem.run()
    lens = getattr(problem, "seq_lens", None)
    if lens is None:
        options["cu_seqlens"] = problem.cu_seqlens
        lens = problem.prefix_lens + problem.cu_seqlens.diff()
    truth = reference.key_scores(problem.q, cache, problem.page_table, lens, lse, reduce=reduce, **options)
    before = torch.rand(truth.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = before.clone()
    got = tkv.key_scores(
        problem.q, cache, problem.page_table, lens, lse, reduce=reduce, out=out, sink_logits=sink_logits, **options, **more
    )
    assert got is out
    seen = ~truth.isnan()
    assert torch.equal(out[~seen], before[~seen]), "what no row sees keeps its score"
    _, _, _, score_size = problem.truth
    is_rounded = problem.q.dtype != torch.float32 and ("rope" in options or cache.k_format.scale == "channel")
    unit = ROUNDED_UNIT[problem.q.dtype] if is_rounded else UNIT
    # A probability is as wrong as its score and its LSE are.
    size = float(score_size.max()) if score_size.numel() else 0.0
    allowed = (3 * unit * size + 2e-5) * truth[seen] + 1e-6
    assert bool(((out - before).double()[seen] - truth[seen]).abs().le(allowed).all())
    alone = tkv.key_scores(problem.q, cache, problem.page_table, lens, lse, reduce=reduce, accumulate=False, out=before.clone(), **options)
    assert torch.equal(alone[~seen], before[~seen])
    torch.testing.assert_close(alone[seen], (out - before)[seen], rtol=1e-5, atol=2e-6)
    return alone.where(seen, 0.0), lse


@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
def test_keys_of_every_format_have_the_mass_that_the_reference_gives_them(kind):
    q_dtype = q_dtypes(kind)[-1]
    for reduce in ("sum", "max"):
        check(build(kind, [70, 33, 1], 32, 2, 3, 64, q_dtype, layout="hnd", spike=6.0, seed=3), reduce)


@pytest.mark.parametrize("q_len", [None, 1, 9])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_mass_of_a_row_adds_up_to_one_less_the_learned_sinks(group, q_len):
    sinks = [(-torch.inf, 1.5, -2.0)[h % 3] for h in range(2 * group)]
    for options in ({}, {"sink_logits": sinks}, {"window": 20, "sinks": 3}):
        problem = build("fp32", [90, 17], 16, 2, group, 32, q_len=q_len, spike=9.0, **options)
        scores, lse = check(problem)
        shares = torch.ones(lse.shape, dtype=torch.float64, device=DEVICE)
        if "sink_logits" in options:
            shares = 1 - (problem.options["sink_logits"].double() - lse.double()).exp()
        total = shares.reshape(2, -1, 2, group).sum((1, 3))
        table = own_pages(problem.page_table, problem.seq_lens, 16)
        for seq in range(2):
            pages = table[seq][table[seq] >= 0]
            pages = pages[pages < problem.cache.num_pages].long()
            torch.testing.assert_close(scores[pages].double().sum((0, 1)), total[seq], rtol=1e-5 * group * (q_len or 1), atol=0)


def test_the_group_is_summed_averaged_or_its_largest_taken():
    problem = build("fp32", [40], 16, 2, 3, 32, q_len=4, spike=5.0)
    by_sum, _ = check(problem, "sum")
    by_mean, _ = check(problem, "mean")
    by_max, _ = check(problem, "max")
    torch.testing.assert_close(by_mean * 3, by_sum, rtol=1e-6, atol=0)
    assert bool((by_max <= by_sum).all()) and bool((by_max >= by_mean).all()) and bool((by_max < by_sum).any())


@effort(40)
@given(st.data())
def test_any_options_of_decoding(data):
    draw = data.draw
    kind = draw(st.sampled_from(FORMATS))
    lens = draw(st.lists(st.integers(0, 80), min_size=1, max_size=3))
    group, q_len = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([None, 1, 3, 20]))
    options = draw(attention_options(lens, q_len or 1, 2 * group))
    if "kv_start" in options and draw(st.booleans()):
        options["pinned"] = 16
    if draw(st.integers(0, 3)) == 0 and max(options.get("kv_start", [0])) < 200:
        rows = options["window"] + options.get("sinks", 0) + 256 if "window" in options else 500
        options["rope"] = tkv.Rope.of(rows, 24, theta=300.0, interleaved=draw(st.booleans()), device=DEVICE)
    options |= {"spike": draw(st.sampled_from([0.0, 8.0])), "seed": draw(st.integers(0, 99))}
    problem = build(kind, lens, 16, 2, group, 32, q_len=q_len, **options)
    check(problem, draw(st.sampled_from(["sum", "mean", "max"])), max_seq_len=draw(st.sampled_from([None, 0, 1, 1000])))


@effort(20)
@given(st.data())
def test_ragged_queries_and_trees(data):
    draw = data.draw
    q_lens = draw(st.lists(st.sampled_from([0, 1, 3, 18]), min_size=1, max_size=3))
    prefix = [draw(st.integers(0, 50)) for _ in q_lens]
    options = {"tree": draw(st.sampled_from([None, "tree", "chain"])), "window": draw(st.sampled_from([None, 9])), "sinks": 2}
    if options["window"] is None:
        del options["window"]
    if not sum(q_lens):
        q_lens[0] = 2
    check(build_ragged("int8/token_head", q_lens, prefix, 16, 2, 3, 32, fresh=False, tail=draw(st.sampled_from([0, 2])), **options))


def test_scores_of_a_sequence_do_not_depend_on_the_batch():
    problem = build("bf16", [70, 90, 5], 16, 2, 4, 64, torch.bfloat16, q_len=2, spike=6.0)
    q, cache, table, lens = problem.q, problem.cache, problem.page_table, problem.seq_lens
    _, lse = problem.run()
    together = tkv.key_scores(q, cache, table, lens, lse)
    for seq in range(3):
        one = slice(seq, seq + 1)
        alone = tkv.key_scores(q[one], cache, table[one], lens[one], lse[one])
        pages = table[seq][: -(-int(lens[seq]) // 16)].long()
        assert torch.equal(alone[pages], together[pages])


def test_scores_of_ragged_rows_do_not_depend_on_the_batch_either():
    problem = build_ragged("fp32", [1, 40, 3], [60, 20, 5], 16, 2, 4, 64, fresh=False, spike=6.0)
    q, cache, table, cu_seqlens = problem.q, problem.cache, problem.page_table, problem.cu_seqlens
    lens = problem.prefix_lens + cu_seqlens.diff()
    _, lse = problem.run()
    together = tkv.key_scores(q, cache, table, lens, lse, cu_seqlens=cu_seqlens)
    for seq in range(3):
        rows, one = slice(int(cu_seqlens[seq]), int(cu_seqlens[seq + 1])), slice(seq, seq + 1)
        starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
        alone = tkv.key_scores(q[rows], cache, table[one], lens[one], lse[rows], cu_seqlens=starts)
        pages = table[seq][: -(-int(lens[seq]) // 16)].long()
        assert torch.equal(alone[pages], together[pages])


def test_a_given_config_is_what_is_launched():
    problem = build("fp32", [70], 16, 2, 2, 32)
    args = (problem.q, problem.cache, problem.page_table, problem.seq_lens, problem.run()[1])
    expected = tkv.key_scores(*args)
    for config in ({"block_m": 32, "block_n": 128, "num_warps": 4, "num_stages": 1}, AttentionConfig(16, 16, 4, 1)):
        torch.testing.assert_close(tkv.key_scores(*args, config=config), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="config: tunables are"):
        tkv.key_scores(*args, config={"tile": 3})


def test_scores_live_in_any_layout_and_add_up_over_calls():
    problem = build("fp32", [40], 16, 2, 2, 32)
    q, cache, table, lens = problem.q, problem.cache, problem.page_table, problem.seq_lens
    _, lse = problem.run()
    once = tkv.key_scores(q, cache, table, lens, lse)
    # Heads first, in a slice of a buffer for all layers.
    out = torch.zeros(3, cache.num_pages, 2, 16, device=DEVICE)[1].transpose(1, 2)
    for _ in range(3):
        tkv.key_scores(q, cache, table, lens, lse, out=out)
    torch.testing.assert_close(out, 3 * once, rtol=1e-6, atol=0)


def test_nothing_to_score_leaves_zeros():
    cache = tkv.KVCache.empty(3, 16, 2, 32, "fp32", device=DEVICE)
    for num_seqs, width in ((0, 2), (2, 0), (2, 2)):
        table = torch.full((num_seqs, width), -1, dtype=torch.int32, device=DEVICE)
        lens, lse = (torch.zeros(num_seqs, *more, device=DEVICE) for more in ((), (4,)))
        scores = tkv.key_scores(torch.zeros(num_seqs, 4, 32, device=DEVICE), cache, table, lens.int(), lse - torch.inf)
        assert scores.shape == (3, 16, 2) and not scores.any()


def test_wrong_arguments_are_named(monkeypatch):
    cache = tkv.KVCache.empty(3, 16, 2, 32, "fp32", device=DEVICE)
    q, table, lens, lse = torch.zeros(1, 4, 32), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([20]), torch.zeros(1, 4)
    q, table, lens, lse = (x.to(DEVICE) for x in (q, table, lens, lse))
    cases = [
        ({"lse": lse.half()}, DTypeError, "lse: expected torch.float32"),
        ({"lse": lse[:, :3]}, ShapeError, r"lse: expected shape \[1, 4\]"),
        ({"reduce": "product"}, UnsupportedError, "reduce: expected sum, mean, max, got 'product'"),
        ({"out": torch.zeros(3, 16, 1, device=DEVICE)}, ShapeError, "out: expected shape"),
        ({"cu_seqlens": lens}, ShapeError, "cu_seqlens: expected shape"),
        ({"accumulate": 1}, DTypeError, "accumulate"),
        ({"pinned": 5}, RangeError, "pinned: expected whole pages of 16 keys, got 5"),
    ]
    for changed, error, match in cases:
        with pytest.raises(error, match=match):
            tkv.key_scores(**{"q": q, "cache": cache, "page_table": table, "seq_lens": lens, "lse": lse, **changed})
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match="pages that come twice"):
        tkv.key_scores(q, cache, table, lens, lse)
