"""prefix_prefill at its edges: nothing to do, mixed batches, parts, outputs, workspaces, and what is refused."""

# One case a line: a table is read by its columns.
# ruff: noqa: E501

import pytest
import torch
from caches import poison_
from problems import test_device
from ragged import build

import tkv
from tkv import KVCache
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, TkvError, UnsupportedError
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 32)
F32, META = torch.float32, "meta"


@pytest.fixture
def one_sm(monkeypatch):
    """A GPU so small that only sequences of few rows are split."""
    for op in ("prefill", "decode"):
        monkeypatch.setattr(f"tkv.ops.{op}.num_sms", lambda device: 1)


def zeros(*shape, dtype=torch.float16, device=DEVICE):
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*shape, dtype=torch.int32, device=DEVICE):
    return torch.zeros(*shape, dtype=dtype, device=device)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


class TestNothingToDo:
    def test_no_sequences(self):
        cache = KVCache.empty(2, 16, 2, 64, "fp16", device=DEVICE)
        for total in (0, 3):
            q, kv = poison_(zeros(total, 4, 64)), poison_(zeros(total, 2, 64))
            for k in (kv, None):
                for logits, nothing in ((None, [-torch.inf] * 4), (tensor(1, 2, 3, 4).float(), [1.0, 2.0, 3.0, 4.0])):
                    empty = ints(0, 3), ints(0), ints(1)
                    out, lse = tkv.prefix_prefill(q, k, k, cache, *empty, sink_logits=logits, return_lse=True)
                    assert out.shape == (total, 4, 64) and not out.any()
                    assert lse.tolist() == [nothing] * total

    @pytest.mark.parametrize("fresh", [True, False])
    def test_no_tokens(self, fresh):
        out, lse = build("fp16", [0, 0], [20, 0], fresh=fresh, group=2).check()
        assert out.shape == (0, 2, 64) and lse.shape == (0, 2)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_sequences_without_new_tokens_among_others(self, deterministic):
        for q_lens, tail in (([0, 3, 0, 0, 20, 0], 2), ([0, 0, 1], 0), ([2, 0], 20), ([0, 0], 3)):
            problem = build("bf16", q_lens, [9] * len(q_lens), 16, 1, 2, 16, tail=tail, launch={"config": SMALL})
            out, lse = problem.check(deterministic=deterministic)
            behind = sum(q_lens)
            assert not out[behind:].any() and bool((lse[behind:] == -torch.inf).all())

    def test_rows_of_no_sequence_have_the_learned_sink_alone(self):
        out, lse = build("fp32", [3], [5], 16, 1, 2, 16, tail=2, sink_logits=[0.5, -2.0]).check()
        assert not out[3:].any() and lse[3:].tolist() == [[0.5, -2.0]] * 2

    @pytest.mark.parametrize("fresh", [True, False])
    def test_no_prefix_anywhere(self, fresh):
        for page_size in (1, 16):
            launch = {"config": SMALL}
            problem = build("int8/token_head", [20, 1, 33], [0, 0, 0], page_size, 1, 2, 16, torch.float16, fresh=fresh, launch=launch)
            assert problem.page_table.shape == (3, 0 if fresh else -(-33 // page_size))
            problem.check()

    def test_a_part_that_covers_no_keys_and_a_cache_of_no_pages(self):
        out, lse = build("fp16", [3, 2], [0, 0], fresh=False, q_start=[7, 0]).check()
        assert not out.any() and bool((lse == -torch.inf).all())
        q, cache = torch.ones(3, 2, 64, dtype=torch.float16, device=DEVICE), KVCache.empty(0, 16, 1, 64, "fp16", device=DEVICE)
        out = tkv.prefix_prefill(q, None, None, cache, tensor([0, 3]), tensor(20), tensor(0, 3))
        assert not out.any()
        out = tkv.prefix_prefill(q, q[:, :1], q[:, :1], cache, tensor([0, 3]), tensor(20), tensor(0, 3))
        assert torch.equal(out, torch.ones_like(out))


class TestMixedBatches:
    @pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8_e4m3/token_head"])
    def test_one_new_token_of_each_sequence_is_decoding(self, kind):
        problem = build(kind, [1] * 4, [40, 0, 16, 77], 16, 1, 3, 32, fresh=False, spike=8.0)
        for config in (SPLIT, None):
            problem.check(config=config)
            args = problem.q, problem.cache, problem.page_table, problem.prefix_lens + 1
            problem.compare(*tkv.paged_decode(*args, config=config, return_lse=True))

    @pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
    @pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
    def test_rows_of_decoding_beside_a_chunk_are_split_and_merged(self, kind, fresh, one_sm):
        problem = build(
            kind, [1, 1, 20, 0, 8], [120, 7, 20, 40, 66], 16, 1, 2, 16, fresh=fresh, tail=1, spike=8.0, sink_logits=[1.0, -1.0],
            launch={"config": SPLIT},
        )  # fmt: skip
        workspace = poison_(zeros(40_000, dtype=F32))
        out, _ = problem.check(workspace=workspace)
        assert not workspace.isnan().all(), "partial results were used"
        torch.testing.assert_close(problem.check(config=SMALL)[0], out, rtol=1e-2, atol=1e-2)

    def test_chunks_are_split_too_where_programs_are_few(self):
        workspace = poison_(zeros(300_000, dtype=F32))
        problem = build("fp32", [20, 1], [70, 100], 16, 1, 2, 16, launch={"config": SPLIT})
        problem.check(workspace=workspace)
        # More rows than the 8 of a tile have partial results.
        assert int((~workspace.isnan()).sum()) > 3 * 20 * 2 * 16

    @pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
    def test_a_prompt_in_several_chunks_is_the_prompt_in_one(self, kind):
        problem = build(kind, [50, 31], [5, 0], 16, 1, 2, 16, fresh=False, window=40, sinks=2, launch={"config": SMALL})
        outs, lses = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        for begin, end in ((0, 13), (13, 16), (16, 47), (47, 50)):
            q_lens = [max(0, min(n, end) - begin) for n in (50, 31)]
            rows = torch.cat([torch.arange(first + begin, first + begin + n) for first, n in zip((0, 50), q_lens)])
            q, cu_seqlens = problem.q[rows], tensor(0, q_lens[0], sum(q_lens))
            part = problem.change(q=q, prefix_lens=problem.prefix_lens + begin, cu_seqlens=cu_seqlens, v_size=problem.v_size[rows])
            outs[rows], lses[rows] = part.check()
        problem.compare(outs, lses)

    def test_new_tokens_that_come_with_the_call_are_then_in_the_cache(self):
        problem = build("fp32", [20, 9], [30, 3], 16, 1, 2, 16, launch={"config": SMALL})
        fresh, _ = problem.check()
        cache = KVCache.empty(12, 16, 1, 16, "fp32", device=DEVICE)
        table, rows = tensor([7, 3, 11, 0], [2, 9, 1, 5]), torch.arange(30)
        for seq, (n, prefix) in enumerate(((20, 30), (9, 3))):
            k, v = tkv.reference.gather(problem.cache, problem.page_table[seq], rows[:prefix].to(DEVICE))
            new = slice(0, 20) if seq == 0 else slice(20, 29)
            k, v = (torch.cat([old.float(), x[new]]) for old, x in ((k, problem.k), (v, problem.v)))
            positions = torch.arange(prefix + n, device=DEVICE)
            tkv.write_kv(k, v, cache, table[seq, positions // 16] * 16 + positions % 16)
        again = problem.change(k=None, v=None, cache=cache, page_table=table)
        problem.compare(*again.run())
        torch.testing.assert_close(again.check()[0], fresh, rtol=1e-5, atol=1e-5)


class TestParts:
    @pytest.mark.parametrize("kind", ["fp32", "fp8_e4m3/token_head"])
    @pytest.mark.parametrize("plain", [True, False])
    def test_the_prefix_in_parts_and_the_new_tokens_merge_into_the_whole(self, kind, plain):
        options = {"window": 30, "sinks": 3, "alibi_slopes": [0.5, 0.0625], "sink_logits": [1.0, -2.0], "kv_start": [0, 9, 100]}
        options = {} if plain else options
        whole = build(kind, [20, 1, 5], [50, 40, 0], 16, 1, 2, 16, spike=8.0, tail=1, launch={"config": SMALL}, **options)
        starts = options.get("kv_start", [0, 0, 0])
        q_start = whole.prefix_lens + tensor(*starts)
        outs, lses = [], []
        for first, last in ((0, 32), (32, 64), (None, None)):
            part = {**whole.options, "q_start": q_start}
            if first != 0:
                part.pop("sink_logits", None)
            if first is None:
                problem = whole.change(page_table=whole.page_table[:, :0], prefix_lens=ints(3), options=part)
            else:
                part["kv_start"] = tensor(*starts) + first
                lens, table = (whole.prefix_lens.clamp(max=last) - first).clamp(min=0), whole.page_table[:, first // 16 : last // 16]
                problem = whole.change(k=None, v=None, page_table=table, prefix_lens=lens, options=part)
            out = torch.empty(whole.q.shape, dtype=F32, device=DEVICE)
            outs.append(out)
            lses.append(problem.check(out=out)[1])
        whole.compare(*tkv.merge_states(outs, lses))

    def test_a_part_sees_by_position_and_has_no_new_tokens(self):
        def numbered(q, k, v):
            k[:] = 0.0
            v[:] = torch.arange(1.0, len(v) + 1)[:, None, None]

        # Keys at positions 10 to 29, rows at positions 8 to 13.
        out, lse = build("fp32", [6], [20], 16, 1, 1, 16, fresh=False, kv_start=[10], q_start=[8], edit=numbered).check()
        assert out[:, 0, 0].tolist() == pytest.approx([0.0, 0.0, 1.0, 1.5, 2.0, 2.5])
        assert lse[:2, 0].tolist() == [-torch.inf] * 2


class TestOutputs:
    def test_out_may_be_float32_and_a_view(self):
        problem = build("fp16", [20, 3], [30, 90], 16, 1, 2, 16, torch.float16, tail=2, launch={"config": SPLIT})
        wide = torch.full((25, 4, 24), 77.0, device=DEVICE)
        out, _ = problem.check(out=wide[:, 1:3, 4:20])
        assert out.data_ptr() == wide[:, 1:3, 4:20].data_ptr()
        # What float16 outputs lose by being rounded, a float32 one keeps.
        assert not torch.equal(out, out.half().float())
        wide[:, 1:3, 4:20] = 77.0
        assert bool((wide == 77.0).all())

    def test_heads_may_lie_outside_of_tokens(self):
        problem = build("bf16", [20, 3], [30, 60], 16, 2, 2, 16, launch={"config": SPLIT})
        problem.check(out=poison_(torch.empty(4, 23, 16, dtype=torch.bfloat16, device=DEVICE)).transpose(0, 1))


@pytest.mark.parametrize("op", ["prefill", "decode"])
class TestWorkspace:
    """9 splits of 2 sequences, 8 rows of 2 heads each; 288 keys."""

    BYTES = 9 * 2 * 8 * 2 * (16 + 1) * 4

    def problem(self, op):
        problem = build("fp32", [8, 8], [280, 100], 16, 1, 2, 16, fresh=False, spike=6.0, launch={"config": SPLIT})
        return problem if op == "prefill" else problem.decode()

    @pytest.mark.parametrize("nbytes", [0, 2000, BYTES // 9, BYTES - 4, BYTES])
    def test_any_size_gives_the_result_and_nothing_around_it_is_written(self, op, nbytes, one_sm):
        buffer = poison_(zeros(nbytes // 4 + 8, dtype=F32))
        workspace = buffer[4 : 4 + nbytes // 4]
        out, lse = self.problem(op).check(workspace=workspace)
        assert bool(buffer[:4].isnan().all() and buffer[4 + nbytes // 4 :].isnan().all())
        assert bool(workspace.isnan().all()) == (nbytes < 4000), "partial results go there if there is room for two of every row"
        if nbytes >= self.BYTES:
            assert not workspace[self.BYTES // 4 - 1].isnan(), "it is exactly enough"
            again = self.problem(op).run()
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)

    def test_bytes_are_as_good_as_floats(self, op, one_sm):
        bytes_, floats = zeros(self.BYTES - 1, dtype=torch.uint8), zeros(self.BYTES // 4 - 1, dtype=F32)
        a, b = self.problem(op).check(workspace=bytes_), self.problem(op).check(workspace=floats)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert bool(bytes_.any())

    def test_what_it_held_does_not_matter(self, op):
        results = []
        for fill in (0.0, torch.nan):
            results.append(self.problem(op).check(workspace=torch.full((self.BYTES // 4,), fill, device=DEVICE)))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_deterministic_results_need_room_for_one_sequence(self, op):
        problem = self.problem(op)
        whole = problem.check(deterministic=True)
        with pytest.raises(ShapeError, match=r"workspace: deterministic needs \d+ bytes a sequence, got 0") as caught:
            problem.run(deterministic=True, workspace=zeros(0, dtype=torch.uint8))
        enough = int(str(caught.value).split()[3])
        assert enough >= self.BYTES // 2
        with pytest.raises(ShapeError, match=f"needs {enough} bytes a sequence, got {enough - 1}"):
            problem.run(deterministic=True, workspace=zeros(enough - 1, dtype=torch.uint8))
        # First a launch for each sequence, then one for both.
        for nbytes in (enough, 2 * enough):
            buffer = poison_(zeros(nbytes // 4 + 8, dtype=F32))
            again = problem.run(deterministic=True, workspace=buffer[4:-4])
            assert torch.equal(again[0], whole[0]) and torch.equal(again[1], whole[1])
            assert bool(buffer[:4].isnan().all() and buffer[-4:].isnan().all())

    @pytest.mark.parametrize(
        ("workspace", "error", "message"),
        [
            (lambda: 4096, DTypeError, "workspace: expected a torch.Tensor, got int"),
            (lambda: zeros(4, 16, dtype=F32), ShapeError, r"workspace: expected shape \[bytes\], got \[4, 16\]"),
            (lambda: zeros(64), DTypeError, "workspace: expected torch.uint8 or torch.float32, got torch.float16"),
            (lambda: zeros(64, dtype=torch.int8), DTypeError, "workspace: .* got torch.int8"),
            (lambda: zeros(64, dtype=F32, device=META), DeviceError, "workspace: expected device .* got meta"),
            (lambda: zeros(64, dtype=F32)[::2], ShapeError, "workspace: the last dimension must be contiguous"),
            (lambda: zeros(64, dtype=torch.uint8)[1:], ShapeError, "workspace: its memory must begin at a multiple of 16 bytes"),
            (lambda: zeros(64, dtype=F32)[1:], ShapeError, "workspace: its memory must begin at a multiple of 16 bytes"),
        ],
    )
    def test_other_tensors_are_refused(self, op, workspace, error, message):
        with pytest.raises(error, match=message):
            self.problem(op).run(workspace=workspace())


def prefill(cache=None, **changes):
    """A correct call (2 sequences of 2 and 3 new tokens, 4 query heads) with some arguments changed."""
    cache = KVCache.empty(4, 16, 2, 64, "fp16", device=DEVICE) if cache is None else cache
    args = {"q": zeros(5, 4, 64), "k": zeros(5, 2, 64), "v": zeros(5, 2, 64), "cache": cache}
    args |= {"page_table": ints(2, 3), "prefix_lens": ints(2), "cu_seqlens": tensor(0, 2, 5)}
    return tkv.prefix_prefill(**{**args, **changes})


WRONG = {
    "q is no tensor": (lambda: prefill(q=[1.0]), DTypeError, "q: expected a torch.Tensor, got list"),
    "q has four dims": (lambda: prefill(q=zeros(1, 5, 4, 64)), ShapeError, r"q: expected shape \[total_tokens, num_q_heads, 64\]"),
    "q has another head_dim": (lambda: prefill(q=zeros(5, 4, 32)), ShapeError, r"q: .*64\], got \[5, 4, 32\]"),
    "q is bf16 on fp16": (lambda: prefill(q=zeros(5, 4, 64, dtype=torch.bfloat16)), UnsupportedError, "q: a fp16 cache needs q in torch.float16"),
    "q heads are no multiple": (lambda: prefill(q=zeros(5, 3, 64)), UnsupportedError, r"q: expected a multiple of num_kv_heads \(2\) heads.* got 3"),
    "q has too many rows": (lambda: prefill(q=zeros(1, 1, 64).expand(2**29, 4, 64), k=None, v=None), RangeError, r"q: expected total_tokens x group below 2\^30, got 536870912 x 2"),
    "k alone": (lambda: prefill(v=None), UnsupportedError, "v: expected a tensor, as k is one, or None for both"),
    "v alone": (lambda: prefill(k=None), UnsupportedError, "k: expected a tensor, as v is one, or None for both"),
    "k is a list": (lambda: prefill(k=[1.0]), DTypeError, "k: expected a torch.Tensor, got list"),
    "k has other tokens": (lambda: prefill(k=zeros(4, 2, 64)), ShapeError, r"k: expected shape \[5, 2, 64\], got \[4, 2, 64\]"),
    "v has other tokens": (lambda: prefill(v=zeros(6, 2, 64)), ShapeError, r"v: expected shape \[5, 2, 64\], got \[6, 2, 64\]"),
    "k has q's heads": (lambda: prefill(k=zeros(5, 4, 64)), ShapeError, r"k: expected shape \[5, 2, 64\], got \[5, 4, 64\]"),
    "v has another head_dim": (lambda: prefill(v=zeros(5, 2, 32)), ShapeError, r"v: expected shape \[5, 2, 64\], got \[5, 2, 32\]"),
    "k is of another dtype": (lambda: prefill(k=zeros(5, 2, 64, dtype=F32)), DTypeError, "k: expected torch.float16, got torch.float32"),
    "v is of another dtype": (lambda: prefill(v=zeros(5, 2, 64, dtype=torch.bfloat16)), DTypeError, "v: expected torch.float16, got torch.bfloat16"),
    "k is fp16 beside a float32 q": (lambda: prefill(q=zeros(5, 4, 64, dtype=F32)), DTypeError, "k: expected torch.float32, got torch.float16"),
    "k is elsewhere": (lambda: prefill(k=zeros(5, 2, 64, device=META)), DeviceError, "k: expected device .* got meta"),
    "v has a strided last dim": (lambda: prefill(v=zeros(5, 2, 128)[..., ::2]), ShapeError, "v: the last dimension must be contiguous"),
    "cache is no cache": (lambda: prefill(cache=zeros(1)), DTypeError, "cache: expected a tkv.KVCache, got Tensor"),
    "table has one dim": (lambda: prefill(page_table=ints(2)), ShapeError, r"page_table: expected shape \[num_seqs, max_pages\], got \[2\]"),
    "table is of floats": (lambda: prefill(page_table=zeros(2, 3)), DTypeError, "page_table: expected torch.int32 or torch.int64"),
    "prefix_lens are of other sequences": (lambda: prefill(prefix_lens=ints(3)), ShapeError, r"prefix_lens: expected shape \[2\], got \[3\]"),
    "prefix_lens are of floats": (lambda: prefill(prefix_lens=zeros(2)), DTypeError, "prefix_lens: expected torch.int32 or torch.int64"),
    "prefix_lens are a list": (lambda: prefill(prefix_lens=[1, 2]), DTypeError, "prefix_lens: expected a torch.Tensor, got list"),
    "cu_seqlens are too short": (lambda: prefill(cu_seqlens=tensor(0, 5)), ShapeError, r"cu_seqlens: expected shape \[3\], got \[2\]"),
    "cu_seqlens are too long": (lambda: prefill(cu_seqlens=tensor(0, 2, 4, 5)), ShapeError, r"cu_seqlens: expected shape \[3\], got \[4\]"),
    "cu_seqlens are of floats": (lambda: prefill(cu_seqlens=zeros(3)), DTypeError, "cu_seqlens: expected torch.int32 or torch.int64, got torch.float16"),
    "cu_seqlens are int16": (lambda: prefill(cu_seqlens=ints(3, dtype=torch.int16)), DTypeError, "cu_seqlens: .* got torch.int16"),
    "cu_seqlens are elsewhere": (lambda: prefill(cu_seqlens=ints(3, device=META)), DeviceError, "cu_seqlens: expected device"),
    "window is 0": (lambda: prefill(window=0), RangeError, "window: expected at least 1, got 0"),
    "softcap is 0": (lambda: prefill(softcap=0), RangeError, "softcap: expected a positive number"),
    "slopes are of other heads": (lambda: prefill(alibi_slopes=zeros(2, dtype=F32)), ShapeError, r"alibi_slopes: expected shape \[4\], got \[2\]"),
    "sink_logits are of other heads": (lambda: prefill(sink_logits=zeros(2)), ShapeError, r"sink_logits: expected shape \[4\], got \[2\]"),
    "kv_start is of tokens": (lambda: prefill(kv_start=ints(5)), ShapeError, r"kv_start: expected shape \[2\], got \[5\]"),
    "q_start is of floats": (lambda: prefill(q_start=zeros(2)), DTypeError, "q_start: expected torch.int32"),
    "max_q_len is negative": (lambda: prefill(max_q_len=-1), RangeError, "max_q_len: expected at least 0, got -1"),
    "max_q_len is a tensor": (lambda: prefill(max_q_len=ints(1)), DTypeError, "max_q_len: expected an int"),
    "max_seq_len is a float": (lambda: prefill(max_seq_len=3.0), DTypeError, "max_seq_len: expected an int, got 3.0"),
    "return_lse is 1": (lambda: prefill(return_lse=1), DTypeError, "return_lse: expected True or False, got 1"),
    "deterministic is 1": (lambda: prefill(deterministic=1), DTypeError, "deterministic: expected True or False, got 1"),
    "out is of another shape": (lambda: prefill(out=zeros(2, 4, 64)), ShapeError, r"out: expected shape \[5, 4, 64\], got \[2, 4, 64\]"),
    "out is bf16": (lambda: prefill(out=zeros(5, 4, 64, dtype=torch.bfloat16)), DTypeError, "out: expected .* got torch.bfloat16"),
    "out shares rows": (lambda: prefill(out=zeros(1, 4, 64).expand(5, 4, 64)), ShapeError, "out: rows must not share memory"),
    "config is unknown": (lambda: prefill(config={"block": 3}), UnsupportedError, "config: tunables are"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_with_a_reason(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, TkvError) and isinstance(caught.value, (ValueError, TypeError))


def test_the_call_that_the_table_changes_is_right_as_it_is():
    assert prefill().shape == (5, 4, 64) and prefill(k=None, v=None).shape == (5, 4, 64)


class TestChecksOnRequest:
    """TKV_CHECK=1 reads lengths and pages, and refuses what otherwise is skipped."""

    @pytest.fixture(autouse=True)
    def checks(self, monkeypatch):
        monkeypatch.setenv("TKV_CHECK", "1")

    @pytest.mark.parametrize("cu_seqlens", [(0, 3, 2), (1, 2, 5), (-1, 2, 5), (0, 2, 6), (0, 7, 5)])
    def test_starts_of_rows(self, cu_seqlens):
        with pytest.raises(RangeError, match=r"cu_seqlens: expected to rise from 0 to at most 5, got \["):
            prefill(cu_seqlens=tensor(*cu_seqlens))

    def test_starts_of_rows_may_stay_and_end_early(self):
        for cu_seqlens in ((0, 0, 0), (0, 0, 3), (0, 5, 5)):
            prefill(cu_seqlens=tensor(*cu_seqlens))

    def test_lengths(self):
        with pytest.raises(RangeError, match=r"prefix_lens: expected 0 to 48 .*got 49 for sequence 1"):
            prefill(prefix_lens=tensor(3, 49))
        with pytest.raises(RangeError, match=r"prefix_lens: expected 0 to 48 .*got -1 for sequence 0"):
            prefill(prefix_lens=tensor(-1, 3))
        prefill(prefix_lens=tensor(48, 48))
        # New tokens that are in the cache need room in the table too.
        prefill(k=None, v=None, prefix_lens=tensor(46, 45))
        with pytest.raises(RangeError, match=r"prefix_lens: expected 0 to 48 .*got 49 for sequence 1"):
            prefill(k=None, v=None, prefix_lens=tensor(46, 46))
        prefill(k=None, v=None, prefix_lens=tensor(48, 48), q_start=tensor(60, 60))

    def test_positions(self):
        with pytest.raises(RangeError, match=r"kv_start: expected 0 to 2\^30 - 1, got -5 for sequence 1"):
            prefill(kv_start=tensor(0, -5))
        with pytest.raises(RangeError, match=r"q_start: expected .* got 1073741824 for sequence 0"):
            prefill(q_start=tensor(2**30, 0))

    @pytest.mark.parametrize(
        ("table", "changes", "message"),
        [
            ([[0, 1, 9], [0, 4, 9]], {}, r"got 4 at \[1, 1\]"),
            ([[0, -1, 9], [0, 1, 9]], {}, r"got -1 at \[0, 1\]"),
            ([[9, 1, 2], [0, 1, 2]], {"window": 5, "sinks": 1}, r"got 9 at \[0, 0\]"),
            ([[0, 1, 9], [0, 1, 9]], {"prefix_lens": tensor(30, 30), "k": None, "v": None}, r"got 9 at \[1, 2\]"),
            ([[0, 1, 9], [0, 9, 9]], {"q_start": tensor(40, 14), "k": None, "v": None}, r"got 9 at \[1, 1\]"),
        ],
    )  # fmt: skip
    def test_pages(self, table, changes, message):
        with pytest.raises(RangeError, match=f"page_table: expected pages from 0 to 3 where keys are visible, {message}"):
            prefill(**{"page_table": tensor(*table), "prefix_lens": tensor(32, 20), **changes})

    def test_pages_that_no_row_sees_may_be_anything(self):
        table, lens = tensor([0, 1, 99], [3, -7, 2**31 - 1]), tensor(32, 16)
        prefill(page_table=table, prefix_lens=lens)
        # Left of the window of the first row.
        prefill(page_table=tensor([-1, 1, 2], [9, 9, 2]), prefix_lens=tensor(31, 47), window=16)
        # No new tokens, no rows that could see anything.
        prefill(page_table=tensor([9, 9, 9], [0, 1, 2]), prefix_lens=tensor(40, 40), cu_seqlens=tensor(0, 0, 5))
        # Behind the last row of a part.
        prefill(page_table=tensor([0, 9, 9], [9, 9, 9]), prefix_lens=tensor(40, 40), k=None, v=None, q_start=tensor(14, -3))

    def test_masks_as_large_as_the_longest_sequence(self):
        mask = torch.ones(2, 3, 3, dtype=torch.bool, device=DEVICE)
        prefill(mask=mask)
        with pytest.raises(ShapeError, match=r"mask: expected at least 3 tokens, got \[2, 2, 2\]"):
            prefill(mask=mask[:, :2, :2])
