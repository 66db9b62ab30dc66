"""Whole problems of prefill: ragged new tokens over a paged cache, with poison in all that no row sees, and trees among the new tokens."""

import math
from dataclasses import dataclass, field, replace

import torch
from bounds import assert_close_to_reference
from caches import FORMATS, LAYOUTS, _on, empty_cache, fits, on_device, poison_, q_dtypes, store
from hypothesis import strategies as st
from problems import SENTINELS, Problem, allowance, attention_options, dims, placed, small_configs, test_device

import tkv
from tkv import reference

TREES = ("tree", "chain", "full", "any")


@dataclass
class Ragged:
    """One call of prefix_prefill. `options` change what is computed, `launch` only how."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache: tkv.KVCache
    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    options: dict = field(default_factory=dict)
    launch: dict = field(default_factory=dict)
    spec: dict = field(default_factory=dict)
    v_size: torch.Tensor | float = 0.0
    _truth: tuple | None = None

    @property
    def args(self):
        """The positional arguments."""
        return self.q, self.k, self.v, self.cache, self.page_table, self.prefix_lens, self.cu_seqlens

    @property
    def q_lens(self):
        """New tokens of each sequence."""
        return self.cu_seqlens.diff().tolist()

    def run(self, **more):
        """(out, lse) of the kernel."""
        return tkv.prefix_prefill(*self.args, return_lse=True, **{**self.options, **self.launch, **more})

    @property
    def truth(self):
        """What the reference says, for the bounds."""
        if self._truth is None:
            self._truth = reference.prefix_prefill(*self.args, **self.options)
        return self._truth

    def compare(self, out, lse):
        """Assert that this is the result."""
        assert_close_to_reference(out, lse, self.truth, self.q.dtype, **allowance(self))
        return out, lse

    def check(self, **more):
        """Run, compare with the reference, and give (out, lse)."""
        return self.compare(*self.run(**more))

    def change(self, **changes):
        """The problem with other fields, to be solved anew."""
        return replace(self, _truth=None, **changes)

    def select(self, seqs):
        """The problem of some of the sequences, in that order, without rows behind them."""
        bounds = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(0), *(torch.arange(bounds[s], bounds[s + 1]) for s in seqs)]).to(self.q.device)
        lens = torch.tensor([0, *(self.q_lens[s] for s in seqs)], device=self.q.device)
        per_seq = {name: self.options[name][seqs] for name in ("kv_start", "q_start", "mask") if name in self.options}
        return self.change(
            q=self.q[rows], k=None if self.k is None else self.k[rows], v=None if self.v is None else self.v[rows],
            page_table=self.page_table[seqs], prefix_lens=self.prefix_lens[seqs], cu_seqlens=lens.cumsum(0).to(self.cu_seqlens.dtype),
            options={**self.options, **per_seq},
            v_size=self.v_size[rows.cpu()],
        )  # fmt: skip

    def decode(self):
        """The same problem for paged_decode: all keys are cached, and every sequence has equally many new tokens."""
        num_seqs, q_len = len(self.q_lens), self.q_lens[0]
        assert self.k is None and set(self.q_lens) == {q_len}
        lens = self.prefix_lens if "q_start" in self.options else self.prefix_lens + q_len
        rows = num_seqs * q_len
        launch = {name: value for name, value in self.launch.items() if name != "max_q_len"}
        return Problem(
            self.q[:rows].unflatten(0, (num_seqs, q_len)), self.cache, self.page_table, lens, self.options, launch,
            {**self.spec, "decode": True}, self.v_size[:rows].unflatten(0, (num_seqs, q_len)),
        )  # fmt: skip

    def __repr__(self):
        return f"build({', '.join(f'{name}={value!r}' for name, value in self.spec.items())})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


def tree_of_parents(parents):
    """[n, n] bool: which new token each one sees, itself and what its chain of parents has; -1 is no parent."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def random_tree(kind, n, rng):
    """A mask of n new tokens: of a tree, of a chain, all that there is, or anything with its diagonal set."""
    if kind == "chain":
        return torch.ones(n, n, dtype=torch.bool).tril()
    if kind == "full":
        return torch.ones(n, n, dtype=torch.bool)
    if kind == "any":
        return (torch.rand(n, n, generator=rng) < 0.4) | torch.eye(n, dtype=torch.bool)
    return tree_of_parents([int(torch.randint(-1, token, (), generator=rng)) if token else -1 for token in range(n)])


def padded_masks(masks, room):
    """[num_seqs, M, M], M being `room` more than the largest: a view of a wider tensor, and set where it must not be read."""
    size = max([len(mask) for mask in masks], default=0) + room
    wide = torch.ones(len(masks), size + 1, size + 5, dtype=torch.bool)
    padded = wide[:, 1:, 2 : size + 2]
    for mask, whole in zip(masks, padded, strict=True):
        whole[: len(mask), : len(mask)] = mask
    return wide, padded


def build(
    kind="fp32", q_lens=(3,), prefix_lens=(5,), page_size=16, kv_heads=1, group=1, dim=64, q_dtype=None, layout="nhd", seed=0, *,
    fresh=True, tail=0, tree=None, room=0, q_scale=1.0, k_amplitude=1.0, v_amplitude=1.0, v_mix=0.0, new_k=1.0, new_v=1.0, spike=0.0,
    v_dim=None,
    k_scale=None, v_scale=None, kv_start=None, q_start=None, index_dtype=torch.int32, launch=None, edit=None, **options,
):  # fmt: skip
    """A problem. What is not said here is as in `problems.build`.

    fresh: k and v of the new tokens come with the call; else they are in the cache, or with `q_start` the call is a part without them.
    tail: rows behind the last sequence; tree: masks as in `random_tree`, or a list of them; room: by how much they are larger than needed;
    new_k, new_v: amplitudes of the new tokens' keys and values, times those of the cached ones.
    """
    spec = {name: value for name, value in locals().items() if name not in ("options", "launch", "edit")} | options
    spec["launch"] = launch or {}
    device, rng = test_device(), torch.Generator().manual_seed(seed)
    q_dtype = q_dtype or q_dtypes(kind)[0]
    num_seqs, total, heads = len(q_lens), sum(q_lens) + tail, kv_heads * group
    window, sinks = options.get("window"), options.get("sinks", 0)

    cached_lens = [p + (0 if fresh or q_start else n) for p, n in zip(prefix_lens, q_lens, strict=True)]
    page_counts = [-(-n // page_size) for n in cached_lens]
    spare = 2
    order = torch.randperm(sum(page_counts) + spare, generator=rng).tolist()
    cache = empty_cache(kind, layout, len(order), page_size, kv_heads, dim, k_scale, v_scale, v_dim=v_dim)
    v_dim = v_dim or dim
    masks = None
    if tree is not None:
        masks = [random_tree(tree, n, rng) for n in q_lens] if isinstance(tree, str) else tree

    # As engines have them: slices of wider tensors. V's heads lie outside of its tokens.
    wide_q = poison_(torch.empty(total + 2, heads + 2, dim, dtype=q_dtype))
    wide_k = poison_(torch.empty(total + 2, kv_heads + 1, dim + 8, dtype=q_dtype))
    wide_v = poison_(torch.empty(kv_heads + 2, total + 3, v_dim, dtype=q_dtype))
    q, new_keys, new_values = wide_q[1:-1, 1:-1], wide_k[1:-1, 1:, 8:], wide_v.transpose(0, 1)[1:-2, 1:-1]

    width, v_size = max(page_counts, default=0), torch.zeros(total, 1, 1)
    table = torch.full((num_seqs, width + 3), SENTINELS[seed % 2], dtype=index_dtype)
    row = 0
    for seq, (rows, prefix, cached) in enumerate(zip(q_lens, prefix_lens, cached_lens)):
        mine = slice(row, row + rows)
        row += rows
        start = kv_start[seq] if kv_start else 0
        first = q_start[seq] if q_start else prefix + start
        positions, seen = torch.arange(cached), torch.zeros(cached, dtype=torch.bool)
        if rows:
            where = placed(cached, start, options.get("pinned", 0))
            seen = reference.look(first, rows, where, window, sinks, masks and masks[seq])[0].any(0)
        pages = torch.tensor([order.pop() for _ in range(page_counts[seq])], dtype=index_dtype)
        followed = torch.zeros(len(pages), dtype=torch.bool)
        followed[(positions[seen] // page_size).unique()] = True
        # Of pages that no row sees, some entries lead out of the cache and some to poison.
        lost = torch.rand(len(pages), generator=rng) < 0.5
        table[seq, : len(pages)] = torch.where(followed | ~lost, pages, table[seq, : len(pages)])

        count = cached + (rows if fresh else 0)
        own_q = (torch.randn(rows, heads, dim, generator=rng) * q_scale).to(q_dtype)
        k = torch.randn(count, kv_heads, dim, generator=rng) * k_amplitude
        v = torch.randn(count, kv_heads, v_dim, generator=rng) * v_amplitude
        v = v * 10 ** (-v_mix * torch.rand(count, kv_heads, 1, generator=rng))
        k[prefix:] *= new_k
        v[prefix:] *= new_v
        keys = torch.cat([positions[seen], torch.arange(cached, count)])
        if spike and rows and len(keys):
            key = int(keys[int(torch.randint(len(keys), (), generator=rng))])
            head, at = (int(torch.randint(n, (), generator=rng)) for n in (kv_heads, rows))
            like = own_q[at, head * group].float()
            scale = options.get("scale") or 1 / math.sqrt(dim)
            k[key, head] = like * (spike / (scale * like.square().sum().clamp_min(1e-20)))
        if edit:
            edit(own_q, k, v)
        q[mine] = own_q
        store(cache, pages, seen, k[:cached], v[:cached])
        if seen.any():
            v_size[mine] = count * reference.gather(cache, pages, positions[seen])[1].abs().max().float()
        if fresh and rows:
            new_keys[mine], new_values[mine] = k[cached:].to(q_dtype), v[cached:].to(q_dtype)
            v_size[mine] = v_size[mine].clamp_min(count * new_values[mine].float().abs().max())

    def guarded(values):
        buffer = torch.full((len(values) + 2,), 2**31 - 1, dtype=index_dtype)
        buffer[1:-1] = torch.tensor(values, dtype=index_dtype)
        return buffer.to(device)[1:-1]

    bounds = [sum(q_lens[:i]) for i in range(num_seqs + 1)]
    for name, starts in (("kv_start", kv_start), ("q_start", q_start)):
        if starts is not None:
            options[name] = torch.tensor(starts, dtype=index_dtype)
    for name, dtype in (("alibi_slopes", torch.float32), ("sink_logits", q_dtype)):
        if isinstance(options.get(name), list | tuple):
            options[name] = torch.tensor(options[name]).to(dtype)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    if masks is not None:
        options["mask"] = _on([padded_masks(masks, room)[1]], device)[0]
    q, new_keys, new_values = _on([q, new_keys, new_values], device)
    return Ragged(
        q,
        new_keys if fresh else None,
        new_values if fresh else None,
        on_device(cache, device),
        table.to(device)[:, :width],
        guarded(prefix_lens),
        guarded(bounds),
        options,
        dict(launch or {}),
        spec,
        v_size,
    )


# Tiles of keys times tiles of rows times heads that a problem may take, and rows of split results: about half a second in the interpreter.
MAX_VISITS, MAX_SPLIT_ROWS = 28, 36


@st.composite
def ragged_problems(draw, kind=None, *, trees=(None, None, None, *TREES), uniform=False, **fixed):
    """Any problem of prefill, of one format if `kind` is given; `fixed` go to `build` as they are.

    With `uniform`, what paged_decode can take too: nothing fresh, and as many new tokens in each sequence, at most 64.
    """
    kind = kind or draw(st.sampled_from(FORMATS))
    q_dtype = draw(st.sampled_from(q_dtypes(kind)))
    page_size = draw(st.sampled_from([size for size in (1, 3, 16, 64, 528) if fits(kind, 64, size)]))
    dim = 8 * draw(dims(kind, page_size, [2, 8, 10, 12, 16, 24, 32]))
    v_dim = 8 * draw(dims(kind, page_size, [2, 8, 16])) if draw(st.integers(0, 3)) == 0 else None
    config = draw(st.one_of(st.none(), small_configs()))
    # Few rows with splits of their keys, or many rows.
    is_split = draw(st.booleans())
    group = draw(st.one_of(st.integers(1, 8), st.sampled_from([1, 4, 16] if is_split else [1, 16, 48, 128])))
    kv_heads = draw(st.integers(1, 2 if group < 16 else 1))
    num_seqs = draw(st.integers(1, 4 if group < 16 else 2))
    # A tile of the default config may have 128 rows: it takes longer.
    block_m, block_n, visits = (config.block_m, config.block_n, MAX_VISITS) if config else (128, 64, MAX_VISITS // (2 if is_split else 4))

    most = MAX_SPLIT_ROWS // num_seqs if is_split else (5 if config else 2) // kv_heads * block_m
    most = max(1, min(most // (group * kv_heads if is_split else group), 64 if uniform else 200))
    q_lens = []
    for _ in range(num_seqs):
        room = most if is_split else max(1, most - sum(q_lens))
        q_lens.append(draw(st.one_of(st.sampled_from([0, 1, 1, min(2, most), min(3, most)]), st.integers(1, room))))
    if uniform:
        q_lens = [max(1, min(q_lens[0], most // (1 if is_split else num_seqs)))] * num_seqs
    prefix_lens = []
    for n in q_lens:
        limit = max(2, visits // (kv_heads * num_seqs * max(1, -(-n * group // block_m))) * block_n - n // 2)
        near = [n for edge in (page_size, block_n, 2 * block_n) for n in (edge - 2, edge - 1, edge, edge + 1) if 0 < n <= limit]
        prefix_lens.append(draw(st.one_of(st.sampled_from([0, 1, *near]), st.integers(0, limit))))

    deterministic = num_seqs * block_m * kv_heads <= 64 and draw(st.sampled_from([False, False, True]))
    room = None if deterministic else draw(st.sampled_from([None, None, 5001, 40_000])) if is_split else 0
    workspace = None if room is None else torch.full((room,), 0xFF, dtype=torch.uint8, device=test_device())
    rows, lens = max(q_lens), [p + n for p, n in zip(prefix_lens, q_lens)]
    options = draw(attention_options(lens, rows, kv_heads * group))
    if draw(st.booleans()) and kind == "fp8_e4m3/tensor":
        options |= {"k_scale": draw(st.sampled_from([0.05, 1.0, 3.0])), "v_scale": draw(st.sampled_from([0.125, 2.0, 77.0]))}
    if "kv_start" in options and draw(st.booleans()):
        options["pinned"] = page_size * draw(st.integers(0, 3))
    tree = draw(st.sampled_from(trees)) if rows else None
    of_q, of_keys = (draw(st.sampled_from([None, None, 0, 1, n, 10 * n + 7])) for n in (rows, max(lens)))
    return build(
        kind, q_lens, prefix_lens, page_size, kv_heads, group, dim, q_dtype, draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 2**31 - 1)),
        v_dim=v_dim,
        fresh=not uniform and draw(st.booleans()),
        tail=0 if uniform else draw(st.sampled_from([0, 0, 1, 5])),
        tree=tree,
        room=draw(st.sampled_from([0, 1, 9])) if tree else 0,
        q_scale=draw(st.sampled_from([1.0, 1.0, 0.01, 8.0])),
        v_amplitude=draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])) * options.get("v_scale", 1.0),
        v_mix=draw(st.sampled_from([0.0, 0.0, 2.0])),
        new_k=draw(st.sampled_from([1.0, 1.0, 0.05, 3.0])),
        new_v=draw(st.sampled_from([1.0, 1.0, 1e-3, 50.0])),
        spike=draw(st.sampled_from([0.0, 6.0, 20.0])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        launch={
            "config": config, "max_q_len": of_q, "max_seq_len": of_keys, "deterministic": deterministic, "workspace": workspace,
        },
        **options, **fixed,
    )  # fmt: skip
