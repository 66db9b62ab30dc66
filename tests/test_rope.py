"""Rotation at read: q and keys come unrotated, and every format, pairing and call rotates them as the reference does."""

import math

import pytest
import torch
from caches import FORMATS, MORE_FORMATS, kind_id, q_dtypes
from hypothesis import given
from hypothesis import strategies as st
from problems import build, effort, test_device
from ragged import build as build_ragged
from trees import branches, grow

import tkv
from tkv import Rope
from tkv.errors import DTypeError, RangeError, ShapeError
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 32)


def rope_of(rows, dim, interleaved=False, factor=1.0):
    """Tables with few digits in common, times a factor as some scalings have it."""
    rope = Rope.of(rows, dim, theta=300.0, interleaved=interleaved, device=DEVICE)
    return Rope(rope.cos * factor, rope.sin * factor, interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
def test_every_format_is_rotated_with_and_without_a_window(kind, interleaved):
    q_dtype = q_dtypes(kind)[-1]
    for rope_dim, window in ((64, None), (24, 20)):
        rope = rope_of(100, rope_dim, interleaved)
        options = {"rope": rope, "spike": 9.0, "launch": {"config": SMALL}}
        if window:
            options |= {"window": window, "sinks": 3}
        build(kind, [75, 5], 32, 2, 2, 64, q_dtype, layout="hnd", seed=rope_dim, **options).check()


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 2), (80, 32), (80, 20), (96, 96), (96, 24), (128, 126)])
def test_any_number_of_dims_may_be_rotated(dim, rotary_dim, q_dtype):
    for kind in ("fp16", "int8/token_head", "int4/token_head") if dim % 16 == 0 else ("fp16", "int8/token_head"):
        for interleaved in (False, True):
            build(kind, [37], 16, 1, 3, dim, q_dtype, rope=rope_of(64, rotary_dim, interleaved), launch={"config": SMALL}).check()


def test_a_factor_on_the_tables_counts_once_for_the_query_and_once_for_the_key():
    for window in (None, 9):
        build("fp32", [40], 16, 1, 2, 32, rope=rope_of(300, 32, factor=1.25), window=window, sinks=2).check()


def rotated(x, positions, rope):
    return tkv.reference.rotate(x, positions, rope).to(x.dtype)


@pytest.mark.parametrize("q_len", [1, 5])
def test_it_equals_attention_over_keys_that_were_rotated_before(q_len):
    rope, n = rope_of(100, 64), 90
    rng = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(rows, 2, 64, generator=rng).to(DEVICE) for rows in (q_len, n, n))
    table, lens, slots = torch.arange(6, device=DEVICE)[None], torch.tensor([n], device=DEVICE), torch.arange(n, device=DEVICE)
    raw, turned = (tkv.KVCache.empty(6, 16, 2, 64, "fp32", device=DEVICE) for _ in range(2))
    tkv.write_kv(k, v, raw, slots)
    tkv.write_kv(rotated(k, slots, rope), v, turned, slots)
    turned_q = rotated(q, torch.arange(n - q_len, n, device=DEVICE), rope)
    for window, sinks in ((None, 0), (50, 0), (n, 4), (n + 5, 2)):
        out = tkv.paged_decode(q[None], raw, table, lens, rope=rope_of(300, 64), window=window, sinks=sinks)
        expected = tkv.paged_decode(turned_q[None], turned, table, lens, window=window, sinks=sinks)
        # Until the first key leaves the window, positions in the cache are positions in the sequence.
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


def test_sink_tokens_are_as_far_away_as_they_are_in_the_cache():
    # Two keys that the query sees, the sink token and itself: scores say how far they are turned against each other.
    rope, window, dim = rope_of(300, 2), 20, 16
    for n in (1, 2, 20, 21, 22, 500):
        k = torch.zeros(n, 1, dim, device=DEVICE)
        k[:, :, 0] = 1.0
        v = torch.zeros(n, 1, dim, device=DEVICE)
        v[0] = 1.0
        cache = tkv.KVCache.empty(40, 16, 1, dim, "fp32", device=DEVICE)
        tkv.write_kv(k, v, cache, torch.arange(n, device=DEVICE))
        q = torch.zeros(1, 1, dim, device=DEVICE)
        q[..., 0] = 3.0
        table = torch.arange(40, device=DEVICE)[None]
        out, lse = tkv.paged_decode(
            q, cache, table, torch.tensor([n], device=DEVICE), rope=rope, window=window, sinks=1, scale=1.0, return_lse=True
        )
        p = n - 1
        to_sink = min(p, window)
        seen = [math.cos(p - j) for j in range(max(1, p - window + 1), p + 1)] + [math.cos(to_sink)]
        weights = [math.exp(3.0 * x) for x in seen]
        assert lse.item() == pytest.approx(math.log(sum(weights)), abs=2e-5)
        assert out[0, 0, 0].item() == pytest.approx(weights[-1] / sum(weights), rel=2e-5)


def test_tables_of_a_window_serve_any_length():
    for start in (0, 1000, 10**6, 2**30 - 200):
        options = {"q_len": 6, "window": 30, "sinks": 4, "rope": rope_of(290, 32)}
        result = build("fp16", [70], 16, 1, 4, 32, torch.float16, kv_start=[start], **options).check()
        if start > 4:
            expected = build("fp16", [70], 16, 1, 4, 32, torch.float16, kv_start=[1000], **options).run()
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


@st.composite
def rotations(draw, dim, window, sinks, longest):
    rows = longest + 1 if window is None else window + sinks + 256
    rotary_dim = draw(st.sampled_from([dim, dim // 2, 2, dim - 2]))
    return rope_of(rows, rotary_dim, draw(st.booleans()), draw(st.sampled_from([1.0, 1.0, 1.3])))


@st.composite
def calls(draw):
    kind = draw(st.sampled_from(FORMATS))
    options = {"layout": draw(st.sampled_from(["nhd", "hnd"])), "seed": draw(st.integers(0, 999))}
    options["spike"] = draw(st.sampled_from([0.0, 9.0]))
    lens = draw(st.lists(st.integers(0, 70), min_size=1, max_size=3))
    if draw(st.integers(0, 2)):
        options |= {"window": draw(st.integers(1, 60)), "sinks": draw(st.sampled_from([0, 1, 4, 17]))}
    if draw(st.integers(0, 2)) == 0:
        options |= {"kv_start": [draw(st.sampled_from([0, 3, 16, 100])) for _ in lens], "pinned": draw(st.sampled_from([0, 16, 32]))}
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = 5.0
    if draw(st.integers(0, 3)) == 0:
        options["alibi_slopes"] = [0.5, 0.25, 0.0, 1.0, 0.125, 2.0]
    options["launch"] = {"config": draw(st.sampled_from([SMALL, SPLIT]))}
    options["rope"] = draw(rotations(32, options.get("window"), options.get("sinks", 0), 400))
    return kind, lens, options


@effort(60)
@given(calls(), st.sampled_from([None, 1, 3, 7]))
def test_any_call_of_decoding(call, q_len):
    kind, lens, options = call
    build(kind, lens, 16, 2, 3, 32, q_len=q_len, **options).check()


@effort(60)
@given(calls(), st.data())
def test_any_call_of_prefill(call, data):
    kind, prefix_lens, options = call
    q_lens = [data.draw(st.sampled_from([0, 1, 2, 5, 23])) for _ in prefix_lens]
    build_ragged(kind, q_lens, prefix_lens, 16, 2, 3, 32, fresh=data.draw(st.booleans()), **options).check()


@effort(25)
@given(calls(), st.data())
def test_any_cascade(call, data):
    kind, _, options = call
    options.pop("kv_start", None)
    options["pinned"] = 0
    nodes = [data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))]
    own = [data.draw(st.integers(1, 30)) for _ in range(3)]
    options["launch"] = options["launch"] | {"level_config": SMALL}
    grow(kind, nodes, ((0, 1), (0, 1), (0,)), own, 16, 2, 3, 32, strict=False, **options).check()


def test_new_tokens_of_a_tree_are_rotated_by_their_depth():
    mask = torch.stack([branches([None, 0, 0, 1, 2, 4], 6)] * 2)
    for window, sinks in ((None, 0), (9, 2)):
        options = {"rope": rope_of(300, 32), "window": window, "sinks": sinks, "launch": {"config": SMALL}}
        build_ragged("fp32", [6, 6], [20, 41], 16, 1, 2, 32, tree=list(mask), **options).check()
        build_ragged("int8/token_head", [6, 6], [20, 41], 16, 1, 2, 32, tree=list(mask), fresh=False, **options).check()


def test_a_non_finite_key_outside_of_the_window_changes_nothing():
    # What is not seen is poison in these problems already; here it is the partner in a pair that must not be read.
    def edit(q, k, v):
        k[10:20] = math.nan

    problem = build("fp32", [60], 16, 1, 2, 32, window=20, sinks=2, rope=rope_of(300, 32), edit=edit)
    problem.check()


@pytest.mark.parametrize(
    ("rope", "error", "match"),
    [
        ("llama", DTypeError, "rope: expected a tkv.Rope, got str"),
        (Rope.of(10, 80), ShapeError, r"rope: expected tables for at most head_dim \(64\) dims, got rotary_dim 80"),
        (Rope.of(10, 64), ShapeError, "rope: expected tables for 14 positions or more"),
    ],
)
def test_tables_that_do_not_fit_are_refused(rope, error, match):
    cache = tkv.KVCache.empty(4, 16, 1, 64, "fp32")
    table, lens = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([3])
    with pytest.raises(error, match=match):
        tkv.paged_decode(torch.zeros(1, 1, 64), cache, table, lens, rope=rope, window=10, sinks=4)


def test_tables_themselves_are_checked():
    table = torch.zeros(4, 8)
    for cos, sin, error, match in (
        (table[0], table[0], ShapeError, "rope.cos: expected shape"),
        (table, table[:3], ShapeError, "rope.sin: expected shape that of cos"),
        (table.double(), table.double(), DTypeError, "rope.cos: expected torch.float32"),
        (table, table.T.contiguous().T, ShapeError, "rope.sin: the last dimension must be contiguous"),
        ("cos", table, DTypeError, "rope.cos: expected a torch.Tensor, got str"),
    ):
        with pytest.raises(error, match=match):
            Rope(cos, sin)
    with pytest.raises(DTypeError, match=r"rope\.interleaved"):
        Rope(table, table, interleaved=1)
    with pytest.raises(RangeError, match="rotary_dim: expected a positive even number, got 3"):
        Rope.of(4, 3)


def test_checks_find_positions_past_the_tables(monkeypatch):
    monkeypatch.setenv("TKV_CHECK", "1")
    problem = build("fp32", [40], 16, 1, 2, 32, rope=rope_of(39, 32))
    with pytest.raises(RangeError, match="rope: expected tables for positions up to 39, got 39 rows"):
        problem.run()
