"""Attention over keys that are spread over processes is that of one process which has them all."""

import pytest
import torch
import torch.distributed as dist
from bounds import assert_close_to_reference
from caches import kind_id
from distributed_workers import GROUPS, SIZE, Ranks, attend, cascade, gather_and_attend, generate, kivi, misbehave, part_of, refused
from problems import allowance, build, test_device
from ragged import build as build_ragged
from ragged import tree_of_parents
from torch.utils._python_dispatch import TorchDispatchMode
from trees import grow

import tkv
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.integrations import distributed
from tkv.integrations.distributed import Partition

DEVICE = test_device()
KINDS = (
    "fp32", "fp8_e4m3/token_head", "int8/channel", "int4/token_head", ("int4/page_channel", "int8/group32"), ("fp16", "int4/group32"),
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.stop()


def calls(problem, starts, group="all", *, by_rank=None, page_sizes=(None,) * SIZE, **more):
    """The arguments of each rank for a problem of decoding or prefill whose keys start at `starts[seq][rank]`."""
    is_prefill = hasattr(problem, "cu_seqlens")
    rows = problem.cu_seqlens.diff().cpu() if is_prefill else problem.q.shape[1] if problem.q.dim() == 4 else 1
    lens = problem.prefix_lens + problem.cu_seqlens.diff() if is_prefill else problem.seq_lens
    options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in problem.options.items()}
    kv_start = options.pop("kv_start", None)
    q_start = lens.cpu() - rows + (0 if kv_start is None else kv_start)
    payloads = []
    for rank in range(SIZE):
        in_group = rank in GROUPS[group]
        place = GROUPS[group].index(rank) if in_group else 0
        cache, table, seq_lens, first = part_of(
            problem.cache, problem.page_table, starts, lens.tolist(), place, page_size=page_sizes[rank], kv_start=kv_start
        )
        args = [problem.q.cpu(), cache, table, seq_lens] + ([problem.cu_seqlens.cpu()] if is_prefill else [])
        own = {"kv_start": first, "q_start": q_start, "return_lse": True, **options, **more, **(by_rank[place] if by_rank else {})}
        name = "context_parallel_prefill" if is_prefill else "context_parallel_decode"
        payloads.append({"name": name, "group": group, "args": args, "options": own})
    return payloads


def check(ranks, problem, starts, group="all", **more):
    """Run on the ranks of a group; each has the bits of the first, which are right."""
    results = ranks.run(attend, calls(problem, starts, group, **more))
    results = [results[rank] for rank in GROUPS[group]]
    world_size = len(results)
    if more.get("scatter_heads"):
        heads = problem.q.shape[-2] // world_size
        assert all(out.shape[-2] == lse.shape[-1] == heads for out, lse in results)
        out, lse = (torch.cat(parts, dim) for parts, dim in zip(zip(*results), (-2, -1)))
    else:
        out, lse = results[0]
        for other, other_lse in results[1:]:
            assert torch.equal(other, out) and torch.equal(other_lse, lse)
    assert out.dtype == problem.q.dtype
    assert_close_to_reference(out, lse, problem.truth, problem.q.dtype, **allowance(problem))
    return out, lse


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_decoding_is_that_of_one_process_in_every_format(ranks, kind):
    problem = build(kind, [70, 33, 96], 32, 1, 3, 32, seed=1, spike=5.0)
    check(ranks, problem, [[0, 32, 64], [0, 0, 32], [0, 64, 64]])


@pytest.mark.parametrize("group", ["pair", "outer"])
def test_two_of_the_processes_are_a_group_too(ranks, group):
    check(ranks, build("fp16", [45, 8], 16, 1, 4, 64, seed=2), [[0, 17], [0, 3]], group)


def test_runs_may_begin_anywhere_and_ranks_may_have_other_page_sizes(ranks):
    problem = build("int8/token_head", [50, 23, 7], 16, 2, 2, 32, seed=3, layout="hnd")
    check(ranks, problem, [[0, 1, 30], [0, 11, 22], [0, 5, 6]], page_sizes=(3, 16, 8))


@pytest.mark.parametrize("starts", [[0, 40, 40], [0, 0, 0], [0, 100, 200], [0, 0, 40]], ids=["middle", "last", "first", "outer"])
def test_ranks_that_hold_nothing_change_nothing(ranks, starts):
    check(ranks, build("fp32", [40, 21], 16, 1, 2, 16, seed=4), [starts, starts])


def test_a_sequence_without_keys_is_zeros_and_its_learned_sink_counts_once(ranks):
    for sink_logits in (None, [0.5, -torch.inf, 2.0, -3.0]):
        problem = build("fp32", [0, 20], 16, 2, 2, 16, seed=5, sink_logits=sink_logits)
        out, lse = check(ranks, problem, [[0, 0, 0], [0, 0, 16]])
        assert not out[0].any()
        assert torch.equal(lse[0], torch.full((4,), -torch.inf) if sink_logits is None else torch.tensor(sink_logits))


OPTIONS = {
    "window": {"window": 9},
    "window and sinks": {"window": 30, "sinks": 5},
    "sinks on two ranks": {"window": 3, "sinks": 40},
    "learned sinks": {"sink_logits": [0.3, -torch.inf, 4.0, -2.0]},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.0, 0.125]},
    "positions": {"kv_start": [1000, 7], "window": 40},
    "deterministic": {"window": 33, "launch": {"deterministic": True}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_positions_decide_what_is_seen(ranks, options):
    problem = build("bf16", [75, 40], 16, 2, 2, 32, q_len=3, seed=6, **options)
    more = problem.launch
    check(ranks, problem, [[0, 30, 73], [0, 16, 39]], **more)


def test_pages_of_sink_tokens_are_pinned_where_they_are(ranks):
    problem = build("fp32", [60, 37], 16, 1, 2, 16, seed=7, window=25, sinks=4, kv_start=[200, 64], pinned=16)
    by_rank = [{"pinned": 16}, {"pinned": 0}, {"pinned": 0}]
    check(ranks, problem, [[0, 33, 48], [0, 16, 36]], by_rank=by_rank)


@pytest.mark.parametrize("window", [None, 20])
def test_keys_are_rotated_by_their_positions_in_the_sequence(ranks, window):
    rope = tkv.Rope.of(300 if window else 80, 16, theta=300.0, device=DEVICE)
    check(ranks, build("fp16", [75, 18], 16, 1, 2, 32, seed=8, window=window, sinks=3, rope=rope), [[0, 20, 74], [0, 2, 10]])


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_new_tokens_of_a_tree_may_be_on_two_ranks(ranks, kind):
    mask = torch.stack([tree_of_parents([-1, 0, 0, 1, 2]), tree_of_parents([-1, -1, 1, 0, 1])])
    problem = build_ragged(kind, [5, 5], [30, 11], 16, 1, 2, 16, seed=9, fresh=False, tree=list(mask), window=12, sinks=2).decode()
    # The new tokens begin at 30 and at 11.
    check(ranks, problem, [[0, 20, 32], [0, 11, 15]])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp32", {}),
        ("int4/group32", {"softcap": 3.0}),
        ("bf16", {"tree": "tree"}),
        ("fp8_e4m3/token_head", {"window": 11, "sinks": 3, "sink_logits": [1.0, -1.0]}),
    ],
    ids=["plain", "softcap", "tree", "window and sinks"],
)
def test_prefill_of_ragged_tokens_is_that_of_one_process(ranks, kind, options):
    problem = build_ragged(kind, [6, 0, 9, 1], [20, 9, 0, 33], 16, 1, 2, 32, seed=10, fresh=False, tail=2, **options)
    # Runs end before, within and behind the new tokens.
    check(ranks, problem, [[0, 16, 24], [0, 0, 5], [0, 7, 8], [0, 33, 34]], max_q_len=9)
    check(ranks, problem, [[0, 16], [0, 9], [0, 7], [0, 34]], "pair", scatter_heads=True)


@pytest.mark.parametrize("q_len", [None, 2])
def test_scattered_heads_are_those_of_each_rank(ranks, q_len):
    problem = build("fp8_e4m3/token_head", [50, 3], 16, 2, 6, 32, q_len=q_len, seed=11, sink_logits=[0.1 * h for h in range(12)])
    scattered = check(ranks, problem, [[0, 10, 49], [0, 0, 1]], scatter_heads=True)
    assert all(torch.equal(one, other) for one, other in zip(scattered, check(ranks, problem, [[0, 10, 49], [0, 0, 1]])))


def test_ranks_that_have_some_heads_of_q_gather_them_and_get_theirs_back(ranks):
    problem = build("bf16", [44, 17], 16, 1, 6, 32, q_len=2, seed=12)
    payloads = calls(problem, [[0, 16, 32], [0, 3, 16]], scatter_heads=True)
    results = ranks.run(gather_and_attend, [{"call": payload} for payload in payloads])
    out, lse = (torch.cat(parts, 2) for parts in zip(*results))
    assert_close_to_reference(out, lse, problem.truth, problem.q.dtype, **allowance(problem))


def test_a_sequence_grows_from_rank_to_rank(ranks):
    lens, steps, table = [5, 0, 13], 7, torch.arange(9).view(3, 3)
    rng = torch.Generator().manual_seed(13)
    k, v, q = (torch.randn(steps, 18, heads, 32, generator=rng) for heads in (2, 2, 4))
    payload = {"partition": Partition.by_capacity(3, SIZE, capacity=8), "lens": lens, "k": k, "v": v, "q": q}
    results = ranks.run(generate, [payload] * SIZE)

    cache = tkv.KVCache.empty(9, 16, 2, 32, "int8/token_head", device=DEVICE)
    for step in range(steps):
        new = [1] * 3 if step else lens
        lens = [n + 1 for n in lens] if step else lens
        slots = Partition.even([0] * 3, 1, 16).slot_mapping(0, lens, new, table, 16)
        tkv.write_kv(k[step, : len(slots)].to(DEVICE), v[step, : len(slots)].to(DEVICE), cache, slots.to(DEVICE))
        truth = tkv.reference.paged_decode(q[step, :3].to(DEVICE), cache, table.to(DEVICE), torch.tensor(lens).to(DEVICE))
        assert_close_to_reference(results[0][step], None, truth, torch.float32)
        assert all(torch.equal(results[0][step], result[step]) for result in results[1:])


def test_values_that_are_a_view_of_the_keys_are_split_as_well(ranks):
    rng = torch.Generator().manual_seed(20)
    k = torch.randn(6, 16, 1, 48, generator=rng).half()
    cache, table, lens = tkv.KVCache(k, k[..., :32]), torch.tensor([[4, 0, 2, 5], [3, 1, 0, 0]]), torch.tensor([61, 20])
    q = torch.randn(2, 6, 48, generator=rng).half()
    truth = tkv.reference.paged_decode(q, cache, table, lens)
    payloads = []
    for first, end in ((0, 16), (16, 48), (48, 64)):
        args = [q, cache, table[:, first // 16 : end // 16], lens.clamp(first, end) - first]
        starts = {"kv_start": torch.full((2,), first), "q_start": lens - 1}
        options = {**starts, "scatter_heads": True, "return_lse": True}
        payloads.append({"name": "context_parallel_decode", "group": "all", "args": args, "options": options})
    out, lse = (torch.cat(parts, 1) for parts in zip(*ranks.run(attend, payloads)))
    v_size = 61 * float(k.abs().max())
    assert_close_to_reference(out, lse, truth, torch.float16, v_size)


def test_shared_prefixes_of_parts_are_merged(ranks):
    problem = grow("fp32", nodes=(40,), paths=((0,), (0,), (0,)), own=(25, 9, 40), seed=14, group=2, q_len=2, window=50, sinks=2)
    payloads = []
    for first, end in ((0, 16), (16, 48), (48, 80)):
        args = [problem.q, problem.cache, problem.page_table[:, first // 16 : end // 16], problem.seq_lens.clamp(first, end) - first]
        start = torch.full_like(problem.seq_lens, first)
        payloads.append({"args": args, "options": {**problem.options, "kv_start": start, "q_start": problem.seq_lens - 2}})
    results = ranks.run(cascade, payloads)
    assert [num_levels for num_levels, *_ in results] == [1, 1, 0]
    for _, out, lse in results:
        assert_close_to_reference(out, lse, problem.truth, torch.float32)


def test_quantised_pages_on_all_ranks_and_a_native_tail_on_the_last_are_merged(ranks):
    options = {"q_start": [101, 69], "window": 80}
    problem = build(("int4/page_channel", "int4/group32"), [96, 64], 32, 1, 4, 32, seed=15, **options)
    tail = build("fp16", [6, 6], 16, 1, 4, 32, seed=16, kv_start=[96, 64], **options)
    tail.q = problem.q
    payloads = calls(problem, [[0, 32, 64], [0, 0, 32]])
    for rank, payload in enumerate(payloads):
        del payload["name"], payload["group"]
        lens = tail.seq_lens if rank == SIZE - 1 else torch.zeros_like(tail.seq_lens)
        payload |= {"tail": [tail.cache, tail.page_table, lens], "tail_start": tail.options["kv_start"]}
    outs, lses, out_sizes, score_sizes = (torch.stack(parts) for parts in zip(problem.truth, tail.truth))
    truth = *tkv.reference.merge_states(outs, lses), tkv.reference.merge_states(out_sizes, lses)[0], score_sizes.amax(0)
    for out, lse in ranks.run(kivi, payloads):
        assert_close_to_reference(out, lse, truth, torch.float32)


def test_results_and_what_is_exchanged_may_have_memory_of_the_caller(ranks):
    problem = build("fp16", [40, 9], 16, 2, 2, 32, seed=17, q_len=2)
    for scatter_heads in (False, True):
        group, out_heads = ("pair", 2) if scatter_heads else ("all", 4)
        numbers = 2 * 2 * 4 * 33 * (2 if scatter_heads else SIZE + 1)
        out = torch.full((2, 2, out_heads, 40), torch.nan)[..., :32]
        starts = [[0, 16, 32], [0, 3, 5]]
        more = {"scatter_heads": scatter_heads, "out": out, "buffer": torch.full((numbers,), torch.nan)}
        payloads = calls(problem, [row[: len(GROUPS[group])] for row in starts], group, **more)
        results = [result for result in ranks.run(attend, payloads) if result]
        outs = [out for out, _ in results]
        whole = torch.cat(outs, 2) if scatter_heads else outs[0]
        assert whole.dtype == torch.float32
        assert_close_to_reference(whole, None, problem.truth, torch.float16)
        for payload in payloads:
            payload["options"]["buffer"] = torch.empty(numbers - 1)
        errors = ranks.run(refused, payloads)
        assert errors[0][0] is ShapeError and f"buffer: expected at least {numbers} numbers, got {numbers - 1}" in errors[0][1]


def test_a_process_that_is_not_in_the_group_is_told_so(ranks):
    problem = build("fp32", [20], 16, 1, 2, 16)
    payloads = calls(problem, [[0, 16]], "pair")
    for payload in payloads[:2]:
        payload["group"] = "a group"
    errors = ranks.run(refused, payloads)
    assert errors[0] == errors[1] == (DTypeError, "group: expected a torch.distributed.ProcessGroup, got 'a group'")
    assert errors[2] == (UnsupportedError, "group: this process is not in it")


def test_heads_that_ranks_cannot_share_are_refused(ranks):
    payloads = calls(build("fp32", [20], 16, 2, 2, 16), [[0, 16, 16]], scatter_heads=True)
    assert set(ranks.run(refused, payloads)) == {
        (UnsupportedError, "scatter_heads: expected a multiple of 3 heads, the ranks of the group, got 4")
    }


# What one rank says otherwise, and what all of them are told.
DISAGREEMENTS = {
    "q_start": (
        {"q_start": torch.tensor([39, 8])},
        "q_start: expected the same on every rank, got [39, 7] on rank 0 and [39, 8] on rank 1",
    ),
    "window": ({"window": 12}, "window: expected the same on every rank, got None on rank 0 and 12 on rank 1"),
    "softcap": ({"softcap": 3.0}, "softcap: expected the same on every rank, got None on rank 0 and 3.0 on rank 1"),
    "alibi": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes: expected the same on every rank, got None on rank 0 and [1.0, 1.0]"),
    "sink logits": ({"sink_logits": torch.ones(2)}, "sink_logits: expected the same on every rank, got None on rank 0 and [1.0, 1.0]"),
    "a key twice": ({"kv_start": torch.tensor([15, 3])}, "kv_start: ranks 0 and 1 both hold the key at position 15 of sequence 0"),
    "a failure": ({"window": 0}, "window: expected at least 1, got 0"),
}


@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_disagree_all_say_so_where_checks_are_on(ranks, change, message):
    payloads = calls(build("fp32", [40, 8], 16, 1, 2, 16), [[0, 16, 32], [0, 3, 5]])
    payloads[1]["options"] |= change
    errors = ranks.run(refused, [{**payload, "check": True} for payload in payloads])
    assert all(message in text for _, text in errors), errors
    if change == {"window": 0}:
        assert [error for error, _ in errors] == [UnsupportedError, RangeError, UnsupportedError]
        assert errors[0][1] == f"rank 1 failed: {message}"


def test_other_queries_on_a_rank_are_found_where_checks_are_on(ranks):
    payloads = calls(build("fp32", [40, 8], 16, 1, 2, 16), [[0, 16, 32], [0, 3, 5]])
    payloads[2]["args"][0] = payloads[2]["args"][0].repeat(1, 2, 1)
    errors = ranks.run(refused, [{**payload, "check": True} for payload in payloads])
    assert all("q: expected the same on every rank" in text and "on rank 2" in text for _, text in errors), errors


def test_calls_that_agree_pass_the_checks(ranks):
    problem = build("fp32", [60, 37], 16, 1, 2, 16, seed=7, window=25, sinks=4, kv_start=[200, 64], pinned=16)
    payloads = calls(problem, [[0, 33, 48], [0, 16, 36]], by_rank=[{"pinned": 16}, {"pinned": 0}, {"pinned": 0}])
    assert ranks.run(refused, [{**payload, "check": True} for payload in payloads]) == [None] * SIZE


def test_nothing_works_without_a_process_group():
    problem = build("fp32", [20], 16, 1, 2, 16)
    with pytest.raises(UnsupportedError, match=r"group: there is no process group; call torch.distributed.init_process_group first"):
        distributed.context_parallel_decode(
            problem.q, problem.cache, problem.page_table, problem.seq_lens, kv_start=problem.seq_lens * 0, q_start=problem.seq_lens - 1
        )


@pytest.fixture
def alone():
    """A group of this process only."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nothing_is_read_back_from_the_device(alone):
    problem = build("int8/token_head", [50, 9], 16, 1, 2, 16, seed=18, sink_logits=[0.5, 1.0])
    starts = {"kv_start": problem.seq_lens * 0, "q_start": problem.seq_lens - 1}

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
            return function(*args, **(kwargs or {}))

    with NoReads():
        out = distributed.context_parallel_decode(
            problem.q, problem.cache, problem.page_table, problem.seq_lens, **starts, sink_logits=problem.options["sink_logits"]
        )
    assert_close_to_reference(out, None, problem.truth, problem.q.dtype)


@pytest.mark.gpu
def test_a_cuda_graph_can_capture_it(alone):
    problem = build("fp8_e4m3/token_head", [50, 9], 16, 2, 2, 64, seed=19)
    starts = {"kv_start": problem.seq_lens * 0, "q_start": problem.seq_lens - 1}
    args, q = (problem.cache, problem.page_table, problem.seq_lens), torch.zeros_like(problem.q)
    for scatter_heads in (False, True):
        # The first call makes the communicator and compiles.
        distributed.context_parallel_decode(q, *args, **starts, scatter_heads=scatter_heads)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = distributed.context_parallel_decode(q, *args, **starts, scatter_heads=scatter_heads, return_lse=True)
        q.copy_(problem.q)
        graph.replay()
        assert_close_to_reference(out, lse, problem.truth, problem.q.dtype, **allowance(problem))
        q.zero_()


def test_a_rank_that_hangs_or_fails_fails_its_test(ranks):
    with pytest.raises(AssertionError, match=r"no answer in 1.0 s from ranks \[2\]"):
        ranks.run(misbehave, [{"how": how} for how in ("return", "return", "wait")], timeout=1.0)
    with pytest.raises(AssertionError, match=r"rank 1 failed:(.|\n)*KeyError: 'no such function'"):
        ranks.run(misbehave, [{"how": how} for how in ("wait", "fail", "wait")])
