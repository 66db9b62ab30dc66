"""kivi_decode and kivi_prefill: sequences in two caches give what they give in one that holds the same numbers."""

import functools

import pytest
import torch
from bounds import assert_close_to_reference
from problems import test_device
from ragged import padded_masks, random_tree

import tkv
from tkv import reference
from tkv.errors import DTypeError, ShapeError, UnsupportedError
from tkv.pages import CacheManager, PagePool, kivi_decode, kivi_prefill

KIVI = ("int4/page_channel", "int4/group32")
DIM, NUM_Q_HEADS = 32, 4
# Old keys and newest ones of each sequence, the new ones included.
OLD = (32, 0, 16)
TAIL = (5, 9, 21)


def poisoned(kind, pages, page_size, kv_heads=1, dim=DIM):
    """A cache full of what would spoil a result."""
    cache = tkv.KVCache.empty(pages, page_size, kv_heads, dim, format=kind, device=test_device())
    for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return cache


def fill(cache, pages, k, v):
    """Store a sequence's first keys and values; whole pages go through a native cache."""
    if cache.is_native:
        slots = slots_of(pages, len(k), cache.page_size)
        cache.k.flatten(0, 1)[slots], cache.v.flatten(0, 1)[slots] = k.to(cache.k.dtype), v.to(cache.v.dtype)
        return
    count = -(-len(k) // cache.page_size)
    native = poisoned("fp32", count, cache.page_size, *k.shape[1:])
    at = torch.arange(count, device=k.device)
    fill(native, at, k, v)
    reference.quantize_pages(native, cache, at, pages[:count])


class Case:
    """Sequences in two poisoned caches, and the same numbers in a third."""

    def __init__(self, kind=KIVI, tail_kind="fp32", old=OLD, tail=TAIL, page_size=16, tail_page_size=16, kv_heads=1):
        self.device, self.rng = test_device(), torch.Generator().manual_seed(0)
        self.old, self.tail_lens = (torch.tensor(lens, dtype=torch.int32, device=self.device) for lens in (old, tail))
        lens = [a + b for a, b in zip(old, tail)]
        self.cache, self.page_table = self._part(kind, old, page_size, kv_heads)
        self.tail, self.tail_page_table = self._part(tail_kind, tail, tail_page_size, kv_heads)
        self.whole, self.whole_table = self._part("fp32", lens, 8, kv_heads)
        for seq, counts in enumerate(zip(old, tail)):
            numbers = []
            for cache, table, count in zip((self.cache, self.tail), (self.page_table, self.tail_page_table), counts):
                k, v = torch.randn(2, count, kv_heads, DIM, generator=self.rng).to(self.device)
                fill(cache, table[seq], k, v)
                numbers.append(reference.gather(cache, table[seq], torch.arange(count, device=self.device)))
            fill(self.whole, self.whole_table[seq], *(torch.cat(both).float() for both in zip(*numbers)))
        self.v_size = max(lens) * float(self.whole.v.nan_to_num().abs().max())

    def _part(self, kind, lens, page_size, kv_heads):
        """A poisoned cache and a table of shuffled pages, with entries that lead nowhere behind them."""
        counts = [-(-length // page_size) for length in lens]
        pages = torch.randperm(sum(counts) + 2, generator=self.rng)
        table = torch.full((len(lens), max(counts) + 1), -7, dtype=torch.int32)
        for seq, count in enumerate(counts):
            table[seq, :count], pages = pages[:count], pages[count:]
        return poisoned(kind, sum(counts) + 2, page_size, kv_heads), table.to(self.device)

    def queries(self, *rows, dtype=torch.float32):
        return torch.randn(*rows, NUM_Q_HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(self.device, dtype)

    @property
    def parts(self):
        return self.cache, self.tail, self.page_table, self.old, self.tail_page_table, self.tail_lens

    def decode(self, q, **options):
        """Run, compare with the reference on one cache, and give (out, lse)."""
        out, lse = kivi_decode(q, *self.parts, return_lse=True, **options)
        options = {name: value for name, value in options.items() if name in MEANING}
        truth = reference.paged_decode(q, self.whole, self.whole_table, self.old + self.tail_lens, **options)
        assert_close_to_reference(out, lse, truth, q.dtype, self.v_size if q.dtype != torch.float32 else 0.0)
        return out, lse

    def prefill(self, q, cu_seqlens, **options):
        out, lse = kivi_prefill(q, *self.parts, cu_seqlens, return_lse=True, **options)
        options = {name: value for name, value in options.items() if name in MEANING}
        prefix_lens = self.old + self.tail_lens - cu_seqlens.diff()
        truth = reference.prefix_prefill(q, None, None, self.whole, self.whole_table, prefix_lens, cu_seqlens, **options)
        assert_close_to_reference(out, lse, truth, q.dtype, self.v_size if q.dtype != torch.float32 else 0.0)
        return out, lse


@functools.cache
def usual():
    """A case that no test changes."""
    return Case()


def slots_of(pages, count, page_size):
    """Slots of the first tokens of a sequence."""
    at = torch.arange(count, device=pages.device)
    return pages[at // page_size].long() * page_size + at % page_size


MEANING = {"scale", "softcap", "alibi_slopes", "window", "sinks", "sink_logits", "mask"}
SLOPES = torch.linspace(0.01, 0.2, NUM_Q_HEADS)
LOGITS = torch.linspace(-2.0, 6.0, NUM_Q_HEADS)
OPTIONS = [
    {"scale": 0.3},
    {"softcap": 1.5},
    {"alibi_slopes": SLOPES},
    {"window": 2},
    {"window": 19},
    {"window": 30, "sinks": 5},
    {"window": 1, "sinks": 40},
    {"sink_logits": LOGITS},
    {"window": 7, "sinks": 3, "sink_logits": LOGITS, "alibi_slopes": SLOPES, "softcap": 2.0},
]


def on_device(options):
    return {name: value.to(test_device()) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


@pytest.mark.parametrize("kind", ["int8/token_head", KIVI, "fp32"])
@pytest.mark.parametrize("q_len", [None, 3])
def test_two_caches_give_what_one_gives(kind, q_len):
    case = Case(kind, kv_heads=2)
    out, _ = case.decode(case.queries(3) if q_len is None else case.queries(3, q_len))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_tail_beside_a_quantised_cache(dtype):
    case = Case(tail_kind={torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype])
    assert case.decode(case.queries(3, dtype=dtype))[0].dtype == dtype
    cu_seqlens = torch.tensor([0, 1, 1, 22], dtype=torch.int32, device=case.device)
    assert case.prefill(case.queries(22, dtype=dtype), cu_seqlens)[0].dtype == dtype


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
def test_options_hold_by_positions_in_the_whole_sequence(options):
    case = usual()
    case.decode(case.queries(3, 3), **on_device(options))


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 30, "sinks": 5, "alibi_slopes": SLOPES}], ids="+".join)
def test_a_tree_of_new_tokens_is_in_the_tail(options):
    case = usual()
    rng = torch.Generator().manual_seed(2)
    _, mask = padded_masks([random_tree("tree", 5, rng) for _ in range(3)], room=2)
    case.decode(case.queries(3, 5), mask=mask.to(case.device), **on_device(options))


def test_pages_of_other_sizes_and_lens_within_a_page():
    case = Case("int8/token_head", old=(31, 1, 50, 0), tail=(1, 7, 12, 2), page_size=4, tail_page_size=8)
    case.decode(case.queries(4))


def test_a_sequence_that_sees_nothing_of_one_part_or_of_both():
    case = Case(old=(0, 16, 0, 32), tail=(3, 0, 0, 1))
    out, lse = case.decode(case.queries(4))
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()
    out, lse = case.decode(case.queries(4), sink_logits=LOGITS.to(case.device))
    assert (out[2] == 0).all() and torch.equal(lse[2].cpu(), LOGITS)


def test_no_sequence():
    case = Case(old=(16,), tail=(4,))
    none = case.cache, case.tail, case.page_table[:0], case.old[:0], case.tail_page_table[:0], case.tail_lens[:0]
    out, lse = kivi_decode(case.queries(0), *none, return_lse=True)
    assert out.shape == (0, NUM_Q_HEADS, DIM) and lse.shape == (0, NUM_Q_HEADS)


@pytest.mark.parametrize("options", [{}, *OPTIONS[-4:]], ids="+".join)
def test_prefill_over_two_caches_gives_what_it_gives_over_one(options):
    case = usual()
    # All of a tail, none, many.
    cu_seqlens = torch.tensor([0, 5, 5, 18], dtype=torch.int32, device=case.device)
    case.prefill(case.queries(18), cu_seqlens, max_q_len=13, **on_device(options))


def test_prefill_of_trees():
    case = Case(tail=(5, 9, 17))
    cu_seqlens = torch.tensor([0, 5, 5, 17], dtype=torch.int32, device=case.device)
    _, mask = padded_masks([random_tree("tree", n, case.rng) for n in (5, 0, 12)], room=1)
    case.prefill(case.queries(17), cu_seqlens, mask=mask.to(case.device), window=20, sinks=2)


def test_rows_of_no_sequence_are_nothing():
    case = usual()
    cu_seqlens = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=case.device)
    out, lse = case.prefill(case.queries(9), cu_seqlens)
    assert (out[4:] == 0).all() and (lse[4:] == -torch.inf).all()


@pytest.mark.parametrize("q_len", [None, 2])
def test_out_is_returned_and_may_be_float32_and_strided(q_len):
    case = Case(tail_kind="fp16")
    q = case.queries(3, dtype=torch.float16) if q_len is None else case.queries(3, q_len, dtype=torch.float16)
    expected = case.decode(q)[0]
    wide = torch.full((*q.shape[:-1], 2 * DIM), torch.nan, device=case.device)
    out = wide[..., :DIM]
    assert kivi_decode(q, *case.parts, out=out) is out
    assert torch.equal(out.half(), expected) and wide[..., DIM:].isnan().all()


def test_hints_and_a_workspace_do_not_change_a_result():
    case = usual()
    workspace = torch.zeros(1 << 14, dtype=torch.uint8, device=case.device)
    case.decode(case.queries(3), max_seq_len=1, max_tail_len=1, workspace=workspace)


def test_deterministic_results_do_not_depend_on_the_batch():
    case = usual()
    q = case.queries(3)
    out, lse = case.decode(q, deterministic=True)
    alone = [x[2:3] for x in (case.page_table, case.old, case.tail_page_table, case.tail_lens)]
    again = kivi_decode(q[2:3], case.cache, case.tail, *alone, deterministic=True, return_lse=True)
    assert torch.equal(again[0], out[2:3]) and torch.equal(again[1], lse[2:3])


@pytest.mark.gpu
def test_nothing_is_read_back_from_the_device():
    case = Case(tail_kind="bf16")
    q, cu_seqlens = case.queries(3, dtype=torch.bfloat16), torch.arange(4, dtype=torch.int32, device=case.device)
    kivi_decode(q, *case.parts)
    kivi_prefill(q, *case.parts, cu_seqlens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kivi_decode(q, *case.parts)
        kivi_prefill(q, *case.parts, cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tail": None}, DTypeError, "tail: expected a tkv.KVCache, got NoneType"),
        ({"tail": lambda: poisoned("fp32", 2, 16, kv_heads=2)}, UnsupportedError, "tail: expected the num_kv_heads of cache, 1"),
        ({"tail": lambda: poisoned("fp32", 2, 16, dim=64)}, UnsupportedError, "tail: expected the head_dim of cache, 32, got 64"),
        ({"tail": lambda: poisoned("fp16", 9, 16)}, UnsupportedError, "q: a fp16 cache needs q in"),
        ({"tail_page_table": lambda: torch.zeros(2, 1, dtype=torch.int32)}, ShapeError, "tail_page_table: expected shape"),
        ({"tail_lens": lambda: torch.zeros(2, dtype=torch.int32)}, ShapeError, r"tail_lens: expected shape \[3\], got \[2\]"),
        ({"tail_lens": lambda: torch.zeros(3)}, DTypeError, "tail_lens: expected torch.int32 or torch.int64, got torch.float32"),
        ({"seq_lens": lambda: torch.zeros(5, dtype=torch.int32)}, ShapeError, r"seq_lens: expected shape \[3\], got \[5\]"),
        ({"page_table": lambda: torch.zeros(5, 1, dtype=torch.int32)}, ShapeError, "page_table: expected shape"),
        ({"q": lambda: torch.zeros(3, NUM_Q_HEADS, 64)}, ShapeError, "q: expected shape"),
        ({"out": lambda: torch.zeros(3, NUM_Q_HEADS, 64)}, ShapeError, "out: expected shape"),
        ({"return_lse": 1}, DTypeError, "return_lse: expected True or False, got 1"),
    ],
)
def test_misuse_names_the_argument(change, error, message):
    case = Case(tail_kind="bf16")
    names = "cache", "tail", "page_table", "seq_lens", "tail_page_table", "tail_lens"
    arguments = {"q": case.queries(3, dtype=torch.bfloat16), **dict(zip(names, case.parts))}
    for name, value in change.items():
        value = value() if callable(value) else value
        arguments[name] = value.to(case.device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=message):
        kivi_decode(**arguments)


@pytest.mark.parametrize("kind", ["int8/token_head", KIVI], ids=str)
def test_an_engine_that_does_what_batches_say_attends_to_all_keys(kind):
    """Prompts in chunks, decoding, a fork and a shared prefix."""
    device, rng, size = test_device(), torch.Generator().manual_seed(0), 16
    manager = CacheManager(PagePool(12), size, tail_pool=PagePool(12), tail_len=11)
    cache, tail = poisoned(kind, 12, size), poisoned("fp32", 12, size)
    # Keys and values of a token at a position, whatever the sequence.
    numbers = torch.randn(2, 3, 80, 1, DIM, generator=rng).to(device)
    texts = {}

    def numbers_of(tokens, cut):
        """Keys and values of a sequence, the first as the cache has them."""
        k, v = numbers[:, torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)]
        old, pages = poisoned(kind, 5, size), torch.arange(5, device=device)
        fill(old, pages, k[:cut], v[:cut])
        return (torch.cat([a.float(), b[cut:]]) for a, b in zip(reference.gather(old, pages, torch.arange(cut, device=device)), (k, v)))

    def step(new, attend):
        batch = manager.step(new)
        tensors = batch.tensors(device)
        tkv.quantize_pages(tail, cache, tensors.conversions[:, 0], tensors.conversions[:, 1])
        tkv.copy_pages(tail, tail, tensors.copies[:, 0], tensors.copies[:, 1])
        rows = torch.tensor([token for more in new.values() for token in more], device=device)
        tkv.write_kv(*numbers[:, rows, tensors.positions], tail, tensors.slot_mapping)
        q = torch.randn(len(rows), NUM_Q_HEADS, DIM, generator=rng).to(device)
        parts = cache, tail, tensors.page_table, tensors.seq_lens, tensors.tail_page_table, tensors.tail_lens
        ragged = {"cu_seqlens": tensors.cu_seqlens, "max_q_len": batch.max_q_len} if attend is kivi_prefill else {}
        out, lse = attend(q, *parts, **ragged, max_seq_len=batch.max_seq_len, max_tail_len=batch.max_tail_len, return_lse=True)
        for i, (seq, more) in enumerate(new.items()):
            texts[seq] += more
            k, v = numbers_of(texts[seq], int(batch.seq_lens[i]))
            own, count = slice(*batch.cu_seqlens[i : i + 2].tolist()), torch.tensor([0, len(more)], device=device)
            pages = torch.arange(len(k), device=device)[None]
            truth = reference.prefix_prefill(
                q[own], None, None, tkv.KVCache(k[:, None], v[:, None]), pages, pages[:, -1] + 1 - count[1:], count
            )
            assert_close_to_reference(out[own], lse[own], truth, q.dtype)

    def add(prompt):
        seq = manager.add(prompt)
        texts[seq] = prompt[: manager.length(seq)]
        return seq

    prompt = torch.randint(0, 3, (53,), generator=rng).tolist()
    a, b = add(prompt), add([2, *prompt[:3]])
    step({a: prompt[:30], b: [2, *prompt[:3]]}, kivi_prefill)
    step({a: prompt[30:], b: [1]}, kivi_prefill)
    step({a: [0], b: [1]}, kivi_decode)
    c = add([*prompt[:40], 1, 2, 0])
    assert manager.length(c) == 32
    step({c: [*prompt[32:40], 1, 2, 0], b: [0]}, kivi_prefill)
    d = manager.fork(a)
    texts[d] = [*texts[a]]
    for token in range(2):
        step({seq: [(token + i) % 3] for i, seq in enumerate((a, b, c, d))}, kivi_decode)
    manager.free(a)
    manager.truncate(d, 50)
    del texts[d][50:]
    step({d: [0, 1, 2] * 5, c: [1]}, kivi_prefill)
    step({d: [0], c: [1]}, kivi_decode)
    assert (manager.stats().conversions, manager.stats().copies) == (3, 1)
