"""The backend's classes alone, as vLLM calls them, against the reference."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import assert_close_to_reference
from caches import bits, poison_
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, RSWASpec, SlidingWindowSpec, get_kv_quant_mode

import tkv
from tkv import reference
from tkv.errors import DeviceError, ShapeError, UnsupportedError
from tkv.integrations.vllm import backend as backend_module
from tkv.integrations.vllm.backend import TkvBackend, TkvImpl, TkvMetadataBuilder, uniform_query_len
from tkv.tune.configs import MAX_SCRATCH_BYTES

CPU = torch.device("cpu")
KINDS = {
    "fp8": "fp8_e4m3/tensor", "fp8_e5m2": "fp8_e5m2/tensor", "int8_per_token_head": "int8/token_head",
    "fp8_per_token_head": "fp8_e4m3/token_head",
}  # fmt: skip


def builder(page_size=16, kv_heads=2, dim=32, dtype=torch.float32, **spec):
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=kv_heads, head_size=dim, dtype=dtype, **spec)
    return TkvMetadataBuilder(spec, ["layer.0"], None, CPU)


def described(lens, q_lens, table, slots, *, pad_seqs=0, pad_tokens=0, **changes):
    """What vLLM tells of a batch; `pad_seqs` and `pad_tokens` only fill up a CUDA graph."""
    starts = torch.tensor([0, *np.cumsum(q_lens), *[sum(q_lens)] * pad_seqs], dtype=torch.int32)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": torch.tensor([*lens, *[0] * pad_seqs], dtype=torch.int32),
        "num_reqs": len(lens) + pad_seqs,
        "num_actual_tokens": sum(q_lens) + pad_tokens,
        "max_query_len": max(q_lens, default=0),
        "max_seq_len": max(lens, default=0),
        "block_table_tensor": table,
        "slot_mapping": slots,
    }
    return CommonAttentionMetadata(**{**fields, **changes})


class Case:
    """A layer with its cache and a batch of sequences with `lens` keys, of which the last `q_lens` are new."""

    def __init__(
        self, lens, q_lens, *, heads=4, kv_heads=2, dim=32, page_size=16, dtype=torch.float32, kv_dtype="auto", layout="tokens first",
        pad_seqs=0, pad_tokens=0, k_scale=1.0, v_scale=1.0, seed=0, window=None, **impl,
    ):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        self.lens, self.q_lens, self.page_size, self.kv_heads, self.dim, self.dtype = lens, q_lens, page_size, kv_heads, dim, dtype
        counts = [-(-n // page_size) for n in lens]
        order = torch.randperm(sum(counts) + 3, generator=rng).tolist()
        self.table = torch.full((len(lens) + pad_seqs, max(counts, default=0) + 2), 2**30, dtype=torch.int32)
        slots = []
        for seq, count in enumerate(counts):
            self.table[seq, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
            positions = torch.arange(lens[seq])
            slots.append(self.table[seq, positions // page_size].long() * page_size + positions % page_size)
            if window is not None:
                # vLLM frees pages that left the window and puts page 0 in their place.
                self.table[seq, : max(0, lens[seq] - q_lens[seq] - window + 1) // page_size] = 0
        pages = sum(counts) + 3
        stored = torch.int8 if kv_dtype.startswith("int8") else torch.uint8 if kv_dtype.startswith("fp8") else dtype
        width = 2 * dim + (8 if kv_dtype.endswith("per_token_head") else 0)
        shape = (pages, kv_heads, page_size, width) if layout == "heads first" else (pages, page_size, kv_heads, width)
        memory = torch.empty(2, *shape, dtype=stored)
        poison_(memory.view(torch.float8_e4m3fn) if stored == torch.uint8 else memory)
        self.kv_cache = memory[1] if layout == "heads first" else memory[1].transpose(1, 2)

        self.layer = SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale))
        self.impl = TkvImpl(
            heads, dim, 0.2, kv_heads, impl.pop("alibi_slopes", None), window, kv_dtype, impl.pop("softcap", None), **impl
        )
        total = sum(lens)
        self.k, self.v = torch.randn(2, total, kv_heads, dim, generator=rng).to(dtype)
        if window is not None:
            # Old keys are of other sequences by now.
            starts = np.cumsum([0, *lens])
            for start, n, new in zip(starts, lens, q_lens):
                gone = max(0, n - new - window + 1) // page_size * page_size
                self.k[start : start + gone], self.v[start : start + gone] = torch.nan, torch.nan
        self.slots = torch.cat([*slots, torch.empty(0, dtype=torch.int64)])
        self.impl.do_kv_cache_update(self.layer, self.k, self.v, self.kv_cache, self.slots)
        tokens = sum(q_lens) + pad_tokens
        # A slice of a projection of q, k and v together, as models have it.
        self.q = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=rng).to(dtype)[:, :heads]
        self.batch = described(lens, q_lens, self.table, self.slots, pad_seqs=pad_seqs, pad_tokens=pad_tokens)
        self.options = {
            "scale": 0.2, "window": window, "softcap": self.impl.softcap, "alibi_slopes": self.impl.alibi_slopes,
            "sink_logits": impl.get("sinks"),
        }  # fmt: skip

    def own_cache(self):
        """The cache as the test understands the tensor, apart from the code under test."""
        numbers, kind = self.kv_cache.permute(0, 2, 1, 3), KINDS.get(self.impl.kv_cache_dtype)
        half = numbers.shape[-1] // 2
        k, v = (numbers[..., at : at + self.dim].contiguous() for at in (0, half))
        scales = (None, None) if kind is None else (self.layer._k_scale, self.layer._v_scale)
        if half > self.dim:
            scales = (numbers[..., at - 4 : at].contiguous().view(torch.float32)[..., 0] for at in (half, 2 * half))
        return tkv.KVCache(k, v, *scales, format=kind)

    def run(self):
        """The output for the batch's tokens; what is behind them is not looked at."""
        metadata = builder(self.page_size, self.kv_heads, self.dim, self.dtype).build(0, self.batch)
        out = poison_(torch.empty(self.q.shape, dtype=self.dtype))
        assert self.impl.forward(self.layer, self.q, None, None, self.kv_cache, metadata, out) is out
        return out

    def check(self):
        """Compare with the reference."""
        n, num_seqs = sum(self.q_lens), len(self.lens)
        starts = torch.tensor([0, *np.cumsum(self.q_lens)], dtype=torch.int32)
        prefix = torch.tensor(self.lens) - starts.diff()
        truth = reference.prefix_prefill(
            self.q[:n], None, None, self.own_cache(), self.table[:num_seqs], prefix.int(), starts, **self.options
        )
        quantised = self.impl.kv_cache_dtype in KINDS or self.dtype == torch.float16
        v_size = max(self.lens, default=0) * 8.0 if quantised and self.dtype != torch.float32 else 0.0
        assert_close_to_reference(self.run()[:n], None, truth, self.dtype, v_size)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize(
    "lens, q_lens",
    [([1, 37, 16], [1, 1, 1]), ([9, 40], [3, 3]), ([21, 70, 5], [21, 9, 1]), ([33], [33]), ([130, 4], [66, 4])],
    ids=["decode", "verification", "mixed", "prefill", "chunk"],
)
def test_a_batch_is_the_reference_s_attention(lens, q_lens, layout):
    Case(lens, q_lens, layout=layout).check()


@pytest.mark.parametrize("heads, kv_heads, dim, page_size", [(6, 1, 16, 32), (3, 3, 72, 16), (8, 2, 128, 48), (4, 2, 64, 5)])
def test_heads_and_pages_of_any_number_and_size(heads, kv_heads, dim, page_size):
    Case([50, 3, 17], [2, 3, 1], heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size).check()


@pytest.mark.parametrize("q_lens", [[1, 1], [5, 20]], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 17},
        {"softcap": 0.5},
        {"softcap": 0.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"sinks": torch.nn.Parameter(torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.bfloat16)), "window": 20, "softcap": 2.0},
    ],
    ids=["window of itself", "window", "soft cap", "no soft cap", "alibi", "learned sinks", "sinks, window and cap"],
)
def test_options_of_models(options, q_lens):
    Case([60, 41], q_lens, **options).check()


def test_the_window_counts_the_token_itself():
    seen = Case([40], [1], window=16)
    seen.v[23], seen.v[24] = 1e4, 1e4
    seen.impl.do_kv_cache_update(seen.layer, seen.k[23:25], seen.v[23:25], seen.kv_cache, torch.tensor([-1, int(seen.slots[24])]))
    # Position 24 is the oldest of 16 that end at 39.
    assert seen.run()[0].abs().max() > 100
    one_less = Case([40], [1], window=15)
    one_less.v[24] = 1e4
    one_less.impl.do_kv_cache_update(one_less.layer, one_less.k[24:25], one_less.v[24:25], one_less.kv_cache, one_less.slots[24:25])
    assert one_less.run()[0].abs().max() < 100


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_caches_with_their_scales(kv_dtype, dtype):
    for q_lens, layout in (([1, 1], "heads first"), ([7, 2], "tokens first")):
        Case([40, 21], q_lens, kv_dtype=kv_dtype, dtype=dtype, k_scale=0.05, v_scale=0.125, layout=layout).check()


@pytest.mark.parametrize("kv_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_scales_of_tokens_lie_behind_their_numbers(kv_dtype):
    case = Case([5], [1], kv_dtype=kv_dtype)
    page, offset = divmod(int(case.slots[3]), 16)
    row = case.kv_cache[page, 1, offset]
    largest = 127 if kv_dtype.startswith("int8") else 448
    scales = torch.cat([row[32:36], row[68:72]]).view(torch.float32)
    assert torch.allclose(scales, torch.stack([case.k[3, 1].abs().max(), case.v[3, 1].abs().max()]) / largest, rtol=1e-6)

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32}
    spec = FullAttentionSpec(**shape, dtype=row.dtype, kv_quant_mode=get_kv_quant_mode(kv_dtype))
    assert TkvBackend.customize_spec(spec).state_content_size_bytes == 72
    plain = FullAttentionSpec(**shape, dtype=torch.bfloat16)
    assert TkvBackend.customize_spec(plain) is plain


def test_fp8_numbers_are_those_of_the_scaled_keys():
    case = Case([5], [1], kv_dtype="fp8", k_scale=0.25, v_scale=0.5)
    page, offset = divmod(int(case.slots[3]), 16)
    k, v = case.kv_cache[page, :, offset].view(torch.float8_e4m3fn).split(32, -1)
    assert torch.equal(k.float(), (case.k[3] / 0.25).to(torch.float8_e4m3fn).float())
    assert torch.equal(v.float(), (case.v[3] / 0.5).to(torch.float8_e4m3fn).float())


def test_scales_that_are_loaded_later_count():
    case = Case([5], [1], kv_dtype="fp8", k_scale=1.0, v_scale=1.0)
    case.layer._k_scale.fill_(0.25)
    case.layer._v_scale.fill_(0.5)
    case.impl.do_kv_cache_update(case.layer, case.k, case.v, case.kv_cache, case.slots)
    case.check()


def test_new_keys_are_stored_in_their_slots_and_nowhere_else():
    case = Case([], [])
    k, v = torch.randn(2, 4, 2, 32)
    before = case.kv_cache.clone()
    # Two tokens only fill up a graph, one of them without a slot at all.
    case.impl.do_kv_cache_update(case.layer, k, v, case.kv_cache, torch.tensor([17, -1, 2]))
    before[1, :, 1], before[0, :, 2] = torch.cat([k[0], v[0]], -1), torch.cat([k[2], v[2]], -1)
    assert torch.equal(bits(case.kv_cache), bits(before))


def test_sequences_and_tokens_that_fill_up_a_graph_change_nothing():
    Case([37, 5], [1, 1], pad_seqs=3, pad_tokens=3).check()
    Case([37, 5], [3, 3], pad_seqs=2, pad_tokens=6).check()
    Case([37, 5], [9, 3], pad_seqs=2, pad_tokens=6).check()


@pytest.mark.parametrize("longest", [1, 500])
def test_the_longest_length_is_a_hint_as_replayed_graphs_need_it(longest):
    for q_lens in ([1, 1], [3, 9]):
        case = Case([150, 20], q_lens)
        case.batch.max_seq_len = longest
        case.check()


def test_an_empty_batch():
    assert Case([], []).run().shape == (0, 4, 32)


def test_a_run_that_measures_memory_takes_what_calls_may_take(monkeypatch):
    case, out, taken, empty = Case([4], [1]), poison_(torch.empty(3, 4, 32)), [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: taken.append(size) or empty(0))
    result = case.impl.forward(case.layer, torch.ones(3, 4, 32), None, None, torch.tensor([]), None, out)
    assert result is out and not out.any()
    assert taken == [MAX_SCRATCH_BYTES]


def test_the_cache_is_a_view_and_made_once():
    case = Case([4], [1])
    cache = case.impl.cache_of(case.layer, case.kv_cache)
    assert cache.k.data_ptr() == case.kv_cache.data_ptr() and cache.v.data_ptr() == case.kv_cache.data_ptr() + 32 * 4
    assert case.impl.cache_of(case.layer, case.kv_cache) is cache
    other = case.impl.cache_of(case.layer, case.kv_cache.clone())
    assert other is not cache and other.k.data_ptr() != cache.k.data_ptr()


def test_another_group_of_layers_has_the_batch_in_its_own_pages():
    case = Case([9, 33], [4, 2])
    made = builder()
    metadata = made.build(0, case.batch)
    other = made.update_block_table(metadata, case.table + 1, case.slots + 16)
    assert torch.equal(other.block_table, case.table + 1) and torch.equal(other.slot_mapping, case.slots + 16)
    assert metadata.block_table is case.table and other.seq_lens is metadata.seq_lens


@pytest.mark.parametrize(
    "starts, tokens, longest, expected",
    [
        ([0, 1, 2, 3], 3, 1, 1),
        ([0, 3, 6], 6, 3, 3),
        ([0, 3, 6, 6, 6], 12, 3, 3),
        ([0, 2, 3, 6], 6, 3, 0),
        # Tokens that fill up make the numbers fit by chance.
        ([0, 1, 3, 5], 6, 2, 0),
        ([0, 1, 2], 4, 2, 0),
        ([0, 1, 2], 4, 1, 0),
        ([0, 3, 5, 5], 9, 3, 0),
        ([0, 65], 65, 65, 0),
        ([0, 64], 64, 64, 64),
        ([0], 0, 0, 0),
        ([0, 0], 1, 1, 1),
    ],
)
def test_batches_of_equal_lengths_are_recognised(starts, tokens, longest, expected):
    assert uniform_query_len(np.array(starts), tokens, longest) == expected


def test_equal_lengths_are_decoded_and_others_prefilled(monkeypatch):
    called = []
    monkeypatch.setattr(tkv, "paged_decode", lambda q, *args, **kwargs: called.append(("decode", list(q.shape))))
    monkeypatch.setattr(tkv, "prefix_prefill", lambda q, *args, **kwargs: called.append(("prefill", list(q.shape))))
    for q_lens in ([1, 1], [2, 2], [2, 1]):
        Case([7, 9], q_lens).run()
    assert called == [("decode", [2, 4, 32]), ("decode", [2, 2, 4, 32]), ("prefill", [3, 4, 32])]


@pytest.mark.parametrize("lens, q_lens", [([37, 70], [1, 1]), ([37, 70, 5], [30, 7, 5])])
def test_chunked_local_attention_sees_its_chunk_only(lens, q_lens):
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

    chunk, case = 32, Case(lens, q_lens)
    spec = ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=chunk)
    made = create_chunked_local_attention_backend(TkvBackend, chunk).get_builder_cls()(spec, ["layer.0"], None, CPU)
    # Ids of pages are multiplied there, before it is known whether any row sees them.
    case.batch.block_table_tensor = case.table.masked_fill(case.table == 2**30, 0)
    out = torch.empty_like(case.q)
    case.impl.forward(case.layer, case.q, None, None, case.kv_cache, made.build(0, case.batch), out)
    row = key = 0
    for n, new in zip(lens, q_lens):
        for i in range(n - new, n):
            seen = slice(key + i // chunk * chunk, key + i + 1)
            k, v = (x[seen].repeat_interleave(2, 1).double() for x in (case.k, case.v))
            weights = (0.2 * torch.einsum("hd,jhd->hj", case.q[row].double(), k)).softmax(-1)
            assert torch.allclose(out[row].double(), torch.einsum("hj,jhd->hd", weights, v), rtol=1e-4, atol=1e-5), (n, i)
            row += 1
        key += n


def test_a_layer_may_read_another_layer_s_cache():
    writer = Case([20, 6], [5, 6])
    reader = TkvImpl(4, 32, 0.2, 2, kv_sharing_target_layer_name="layer.0")
    out = torch.empty_like(writer.q)
    reader.forward(writer.layer, writer.q, None, None, writer.kv_cache, builder().build(0, writer.batch), out)
    assert torch.equal(out, writer.run())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attn_type": AttentionType.ENCODER}, "attn_type: .* got 'encoder'"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type: .* got 'encoder_only'"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "attn_type: .* got 'encoder_decoder'"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: .* got 'nvfp4'"),
        ({"kv_cache_dtype": "fp8", "kv_sharing_target_layer_name": "layer.0"}, "kv_cache_dtype: an fp8 cache shared with layer.0"),
        ({"chunk_lookback": 3}, "chunk_lookback: unknown"),
        ({"block_m": 64}, "block_m: unknown"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, words):
    with pytest.raises(UnsupportedError, match=words):
        TkvImpl(4, 32, 0.2, 2, **options)


@pytest.mark.parametrize(
    "model, options, words",
    [
        ({"is_mm_prefix_lm": True}, {}, "multimodal prefix"),
        ({"rswa_window": 64}, {}, "rswa_window: .* got 64"),
        ({"dtype": torch.bfloat16}, {"kv_cache_dtype": "float16"}, "kv_cache_dtype: a model in torch.bfloat16"),
    ],
)
def test_what_a_model_s_config_asks_for_is_refused_by_name(monkeypatch, model, options, words):
    plain = {"is_mm_prefix_lm": False, "rswa_window": None, "dtype": torch.float16}
    config = SimpleNamespace(model_config=SimpleNamespace(**plain))
    monkeypatch.setattr(backend_module.vllm, "get_current_vllm_config_or_none", lambda: config)
    TkvImpl(4, 32, 0.2, 2, **{name: "auto" for name in options})
    config.model_config = SimpleNamespace(**{**plain, **model})
    with pytest.raises(UnsupportedError, match=words):
        TkvImpl(4, 32, 0.2, 2, **options)


def test_context_parallelism_is_refused(monkeypatch):
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda enabled=True: (2, 0))
    with pytest.raises(UnsupportedError, match=r"context parallelism: .* got decode 2, prefill 1"):
        TkvImpl(4, 32, 0.2, 2)
    assert not TkvBackend.supports_dcp() and not TkvBackend.supports_pcp()


def test_caches_that_are_no_plain_pages_are_refused():
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    TkvMetadataBuilder(SlidingWindowSpec(**shape, sliding_window=8), ["layer.0"], None, CPU)
    with pytest.raises(UnsupportedError, match=r"kv_cache_spec: .* got RSWASpec for layer.0"):
        TkvMetadataBuilder(RSWASpec(**shape, rswa_window=8), ["layer.0"], None, CPU)
    with pytest.raises(UnsupportedError, match=r"head_size_v: expected 32, .* got 16 for layer.0"):
        builder(head_size_v=16)
    with pytest.raises(UnsupportedError, match=r"non_causal: .* tokens of layer.0 see later ones"):
        builder(non_causal=True)


@pytest.mark.parametrize("guesses, expected", [(None, "UNIFORM_BATCH"), (63, "UNIFORM_BATCH"), (64, "UNIFORM_SINGLE_TOKEN_DECODE")])
def test_cuda_graphs_are_for_batches_that_are_decoded(guesses, expected):
    speculative = None if guesses is None else SimpleNamespace(num_speculative_tokens=guesses, parallel_drafting=False)
    support = TkvMetadataBuilder.get_cudagraph_support(SimpleNamespace(speculative_config=speculative), None)
    assert support is AttentionCGSupport[expected]


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_tokens_that_see_later_ones_are_refused(causal):
    case = Case([4, 5], [2, 2])
    with pytest.raises(UnsupportedError, match="causal: "):
        builder().build(0, case.batch.replace(causal=causal))


def test_a_quantised_output_is_refused():
    case = Case([4], [1])
    with pytest.raises(UnsupportedError, match="output_scale: "):
        case.impl.forward(case.layer, case.q, None, None, case.kv_cache, None, case.q.clone(), output_scale=torch.tensor(1.0))


def test_a_cache_of_another_shape_is_refused_with_vllm_s_version():
    case = Case([4], [1])
    with pytest.raises(ShapeError, match=r"expected \[num_blocks, 2, block_size, 64\], .* got \[2, 4, 16, 2, 32\] from vLLM 0\.32"):
        case.impl.cache_of(case.layer, torch.zeros(2, 4, 16, 2, 32))


def test_a_cpu_without_the_interpreter_is_refused_before_the_first_request(monkeypatch):
    monkeypatch.setattr("tkv.ops.launch.interpreting", lambda: False)
    with pytest.raises(DeviceError, match="TRITON_INTERPRET=1"):
        builder()


def test_vllm_s_own_check_of_backends_accepts_what_is_served_and_no_more():
    from vllm.platforms.interface import DeviceCapability

    plain = {
        "head_size": 72, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 48, "use_mla": False, "has_sink": True,
        "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER, "has_sliding_window": True,
    }  # fmt: skip
    assert TkvBackend.validate_configuration(**plain) == []
    for change in (
        {"head_size": 20}, {"head_size": 584}, {"kv_cache_dtype": "nvfp4"}, {"block_size": 24}, {"use_mla": True}, {"use_sparse": True},
        {"use_mm_prefix": True}, {"use_per_head_quant_scales": True}, {"attn_type": AttentionType.ENCODER_ONLY},
        {"use_non_causal": True}, {"use_dcp": True}, {"use_pcp": True}, {"use_rswa": True}, {"use_batch_invariant": True},
        {"use_adaptive_verification": True},
    ):  # fmt: skip
        assert len(TkvBackend.validate_configuration(**{**plain, **change})) == 1, change
