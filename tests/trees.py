"""Whole problems of decoding with shared prefixes: sequences whose keys are paths through a tree, in a cache full of poison."""

from dataclasses import dataclass, field

import torch
from caches import FORMATS, LAYOUTS, empty_cache, encode_rows, fits, poison_, q_dtypes
from hypothesis import strategies as st
from problems import SENTINELS, Problem, attention_options, placed, small_configs, test_device

import tkv
from tkv import reference
from tkv.tune.configs import AttentionConfig


@dataclass(repr=False)
class Tree(Problem):
    """One call of shared_prefix_decode. `whole_table` has every key of every sequence, `page_table` perhaps only what no level covers."""

    levels: list = field(default_factory=list)
    whole_table: torch.Tensor | None = None

    def run(self, levels=None, **more):
        """(out, lse) of the cascade."""
        levels = self.levels if levels is None else levels
        options = {"return_lse": True, **self.options, **self.launch, **more}
        return tkv.shared_prefix_decode(self.q, self.cache, levels, self.page_table, self.seq_lens, **options)

    def plain(self, **more):
        """(out, lse) of paged_decode."""
        launch = {name: value for name, value in self.launch.items() if name != "level_config"}
        options = {"return_lse": True, **self.options, **launch, **more}
        return tkv.paged_decode(self.q, self.cache, self.whole_table, self.seq_lens, **options)

    @property
    def truth(self):
        """What the reference says of the whole sequences."""
        if self._truth is None:
            self._truth = reference.paged_decode(self.q, self.cache, self.whole_table, self.seq_lens, **self.options)
        return self._truth

    @property
    def inputs(self):
        """Every tensor that a call reads."""
        levels = [t for level in self.levels for t in (level.page_table, level.lens, level.starts, level.cu_seqs, level.seqs)]
        cache = [self.cache.k, self.cache.v, self.cache.k_scale, self.cache.v_scale]
        return [t for t in (self.q, self.page_table, self.seq_lens, *cache, *self.options.values(), *levels) if isinstance(t, torch.Tensor)]

    def __repr__(self):
        return f"grow({', '.join(f'{name}={value!r}' for name, value in self.spec.items())})"


class Soil:
    """A cache full of poison, and what is put into it: pages of keys [total, heads, dim] that are named by their numbers."""

    def __init__(self, cache, k, v, index_dtype, seed, rng):
        self.cache, self.index_dtype, self.rng, self.sentinel = cache, index_dtype, rng, SENTINELS[seed % 2]
        sides = ((k, cache.k_format, cache.k_scale), (v, cache.v_format, cache.v_scale))
        self.stored = [encode_rows(x, form, scale.cpu() if form.is_static else None) for x, form, scale in sides]
        self.free = torch.randperm(cache.num_pages, generator=rng).tolist()
        # Pages that must not be read: two full of poison, two outside of the cache.
        self.poison = [self.free.pop(), self.free.pop(), self.sentinel, -1]

    def chance(self, count):
        return int(torch.randint(count, (), generator=self.rng))

    def new_pages(self, num_keys):
        return [self.free.pop() for _ in range(-(-num_keys // self.cache.page_size))]

    def bad_page(self):
        return self.poison[self.chance(4)]

    def write(self, pages, keys, wanted):
        """Store those of the keys that are wanted. Gives the pages, with anything for those of them that hold none."""
        size, device = self.cache.page_size, self.cache.device
        at = torch.arange(len(keys))[wanted]
        page, row = torch.tensor(pages, dtype=torch.long)[at // size].to(device), (at % size).to(device)
        parts = zip(self.stored, (self.cache.k, self.cache.v), (self.cache.k_scale, self.cache.v_scale))
        for (codes, dynamic), data, scales in parts:
            data[page, row] = codes[keys[at]].to(device)
            if dynamic is not None:
                scales[page, row] = dynamic[keys[at]].to(device)
        used = set((at // size).tolist())
        return [page if i in used or self.chance(2) else self.bad_page() for i, page in enumerate(pages)]

    def values(self, keys):
        """V of keys as it comes back."""
        codes, dynamic = self.stored[1]
        scale = dynamic[keys] if dynamic is not None else self.cache.v_scale
        return reference.dequantize(codes[keys], scale if scale is None else scale.cpu(), self.cache.v_format)

    def inside(self, values):
        """Integers as a part of a tensor that goes on with others on either side."""
        buffer = torch.full((len(values) + 2,), self.sentinel, dtype=self.index_dtype)
        buffer[1:-1] = torch.tensor(values, dtype=self.index_dtype)
        return buffer.to(self.cache.device)[1:-1]

    def table(self, rows):
        """A page table exactly as wide as it must be, with others behind it."""
        width = max(map(len, rows), default=0)
        table = torch.full((len(rows), width + 3), self.sentinel, dtype=self.index_dtype)
        for row, pages in zip(table, rows):
            row[: len(pages)] = torch.tensor(pages, dtype=self.index_dtype)
        return table.to(self.cache.device)[:, :width]

    def level(self, groups):
        """A level of groups (pages, number of keys, position of the first, members)."""
        sizes = [len(members) for *_, members in groups]
        members = [members[i] for *_, members in groups for i in torch.randperm(len(members), generator=self.rng)]
        return tkv.SharedLevel(
            self.table([pages for pages, *_ in groups]),
            self.inside([num_keys for _, num_keys, *_ in groups]),
            self.inside([start for *_, start, _ in groups]),
            self.inside(torch.tensor([0, *sizes]).cumsum(0).tolist()),
            self.inside(members),
            max_group=max(sizes),
            max_len=max(num_keys for _, num_keys, *_ in groups),
        )


def grow(
    kind="fp32", nodes=(32,), paths=((0,), (0,)), own=(5, 9), page_size=16, kv_heads=1, group=1, dim=16, q_dtype=None, q_len=None, seed=0,
    *, apart=False, taken=None, strict=True, layout="nhd", v_dim=None, q_scale=1.0, v_mix=0.0, spike=0.0, k_scale=None, v_scale=None,
    kv_start=None, q_start=None, index_dtype=torch.int32, launch=None, **options,
):  # fmt: skip
    """A problem. Sequence s has the keys of the nodes ``paths[s]`` (None: of no node at that depth), then ``own[s]`` of its own.

    Sequences share the pages that hold the same keys, and levels are found by `find_shared_levels`. With `apart`, levels are made by hand,
    one a depth, with pages of their own: what the first `taken` of them cover (None: all) is nowhere else but for `whole_table`, and what
    only further ones cover is nowhere but in the sequences' pages. Slots that no row may see hold poison; if not `strict`, those between
    the windows of sequences with a common node hold numbers.
    """
    spec = {name: value for name, value in locals().items() if name not in ("options", "launch")} | options
    spec["launch"] = launch or {}
    device, rng = test_device(), torch.Generator().manual_seed(seed)
    rows, num_seqs = q_len or 1, len(paths)
    q_dtype = q_dtype or q_dtypes(kind)[0]
    starts = list(kv_start or [0] * num_seqs)
    if options.get("mask") is not None:
        options["mask"] = torch.as_tensor(options["mask"])

    # All keys there are, one after the other: a node has some of them, and a sequence those of its nodes and its own.
    total = sum(nodes) + sum(own)
    node_keys = torch.arange(total).split([*nodes, *own])
    parts = [[node_keys[node] if node is not None else node_keys[0][:0] for node in path] for path in paths]
    keys = [torch.cat([*part, node_keys[len(nodes) + seq]]) for seq, part in enumerate(parts)]
    k, v = (torch.randn(total, kv_heads, size, generator=rng) for size in (dim, v_dim or dim))
    v = v * 10 ** (-v_mix * torch.rand(total, kv_heads, 1, generator=rng))
    q = (torch.randn(num_seqs, rows, kv_heads * group, dim, generator=rng) * q_scale).to(q_dtype)
    seen = []
    for seq, start in enumerate(starts):
        first = q_start[seq] if q_start else len(keys[seq]) + start - rows
        mask = None if options.get("mask") is None else options["mask"][seq]
        positions = placed(len(keys[seq]), start, options.get("pinned", 0))
        seen.append(reference.look(first, rows, positions, options.get("window"), options.get("sinks", 0), mask)[0].any(0))
        if spike and seen[seq].any():
            visible = keys[seq][seen[seq]]
            key, row, head = (int(torch.randint(n, (), generator=rng)) for n in (len(visible), rows, kv_heads))
            towards = q[seq, row, head * group].float()
            scale = options.get("scale") or dim**-0.5
            k[visible[key], head] = towards * (spike / (scale * towards.square().sum().clamp_min(1e-20)))

    if not strict and options.get("window"):
        firsts = [q_start[seq] if q_start else len(keys[seq]) + start - rows for seq, start in enumerate(starts)]
        for seq, path in enumerate(paths):
            near = [firsts[other] for other in range(num_seqs) if {*paths[other]} & {*path} - {None}]
            if near:
                positions = placed(len(keys[seq]), starts[seq], options.get("pinned", 0))
                seen[seq] |= (positions > min(near) - options["window"]) & (positions < max(near) + rows)

    num_pages = 4 + sum(2 * (-(-len(seq) // page_size)) for seq in keys) + sum(-(-n // page_size) for n in nodes)
    cache = empty_cache(kind, layout, num_pages, page_size, kv_heads, dim, k_scale, v_scale, device, v_dim)
    soil = Soil(cache, k, v, index_dtype, seed, rng)
    lens = soil.inside([len(seq) for seq in keys])
    levels = []
    if apart:
        whole_table = soil.table([soil.write(soil.new_pages(len(seq)), seq, wanted) for seq, wanted in zip(keys, seen)])
        for depth in range(max(map(len, paths), default=0)):
            groups = []
            for node in dict.fromkeys(path[depth] for path in paths if len(path) > depth and path[depth] is not None):
                members = [seq for seq, path in enumerate(paths) if len(path) > depth and path[depth] == node]
                firsts = [sum(map(len, parts[seq][:depth])) for seq in members]
                wanted = torch.stack([seen[seq][first : first + nodes[node]] for seq, first in zip(members, firsts)]).any(0)
                pages = soil.new_pages(nodes[node])
                if taken is None or depth < taken:
                    pages = soil.write(pages, node_keys[node], wanted)
                groups.append((pages, nodes[node], firsts[0] + starts[members[0]], members))
                assert len({first + starts[seq] for seq, first in zip(members, firsts)}) == 1, "a node stands at one position"
            if groups:
                levels.append(soil.level(groups))
        rest = []
        for seq in range(num_seqs):
            covered = sum(map(len, parts[seq][:taken]))
            pages = soil.write(soil.new_pages(len(keys[seq])), keys[seq], seen[seq] & (torch.arange(len(keys[seq])) >= covered))
            rest.append([page if (i + 1) * page_size > covered else soil.bad_page() for i, page in enumerate(pages)])
        table = soil.table(rest)
    else:
        pages_of, book = [[] for _ in keys], {}
        # A page that a longer sequence has filled serves those that end inside of it.
        for seq in sorted(range(num_seqs), key=lambda seq: -len(keys[seq])):
            for i in range(-(-len(keys[seq]) // page_size)):
                held = (i, *keys[seq][i * page_size : (i + 1) * page_size].tolist())
                page = book[held] if held in book else soil.free.pop()
                pages_of[seq].append(page)
                for end in range(2, len(held) + 1):
                    book.setdefault(held[:end], page)
            soil.write(pages_of[seq], keys[seq], seen[seq])
        table = whole_table = soil.table(pages_of)
        levels = tkv.find_shared_levels(table, lens, page_size, kv_start=soil.inside(starts), pinned=options.get("pinned", 0))

    for name, given in (("kv_start", kv_start), ("q_start", q_start)):
        if given is not None:
            options[name] = soil.inside(given)
    for name, dtype in (("alibi_slopes", torch.float32), ("sink_logits", q_dtype)):
        if options.get(name) is not None:
            options[name] = torch.tensor(options[name]).to(dtype)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    v_size = torch.tensor([len(seq) * float(soil.values(seq).abs().max()) if len(seq) else 0.0 for seq in keys])
    # q as engines have it: a slice of a wider tensor.
    wide = poison_(torch.empty(num_seqs, rows, kv_heads * group + 2, dim, dtype=q_dtype))
    wide[:, :, 1:-1] = q
    q = wide.to(device)[:, :, 1:-1]
    return Tree(
        q if q_len else q[:, 0], cache, table, lens, options, dict(launch or {}), spec, v_size.reshape(-1, *[1] * (3 if q_len else 2)),
        None, levels, whole_table,
    )  # fmt: skip


def branches(parents, size):
    """A tree mask ``[size, size]``: token c sees itself and what its parent sees, None being no parent. Beyond the tokens all is True."""
    mask = torch.ones(size, size, dtype=torch.bool)
    mask[: len(parents), : len(parents)] = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent is not None:
            mask[token, :token] = mask[parent, :token]
    return mask


# Rows x heads that a drawn problem may have, and keys of its sequences x heads: about half a second in the interpreter.
MAX_ROWS, MAX_KEYS = 40, 500


@st.composite
def trees(draw, kind=None):
    """Any problem of decoding with shared prefixes, of one format if `kind` is given."""
    kind = kind or draw(st.sampled_from(FORMATS))
    q_dtype = draw(st.sampled_from(q_dtypes(kind)))
    page_size = draw(st.sampled_from([1, 3, 16, 16, 64]))
    num_seqs = draw(st.integers(2, 5))
    q_len = draw(st.one_of(st.none(), st.integers(1, 5)))
    rows = q_len or 1
    group = draw(st.integers(1, min(8, MAX_ROWS // (num_seqs * rows)))) if draw(st.integers(0, 7)) else MAX_ROWS // num_seqs // rows
    kv_heads = draw(st.integers(1, 2)) if group * rows * num_seqs <= MAX_ROWS // 2 else 1
    longest = MAX_KEYS // (num_seqs * kv_heads * 2)

    # Nodes below others or beside them, at the next depth or the one after it. The last two sequences share keys.
    one_len = st.one_of(st.integers(0, longest), st.sampled_from([1, 16, 32, longest // page_size * page_size]))
    nodes, chains = [draw(st.one_of(st.integers(1, longest), st.sampled_from([16, page_size]))), *draw(st.lists(one_len, max_size=3))], []
    for node in range(len(nodes)):
        parent = draw(st.sampled_from([*range(node), None]))
        gap = (None,) * draw(st.sampled_from([0, 0, 0, 1]))
        chains.append((() if parent is None else chains[parent]) + gap + (node,))
    below = st.sampled_from([chain for chain in chains if 0 in chain])
    paths = [*(draw(st.sampled_from([(), *chains])) for _ in range(num_seqs - 2)), draw(below), draw(below)]
    own = draw(st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1, rows])), min_size=num_seqs, max_size=num_seqs))

    lens = [sum(nodes[node] for node in path if node is not None) + n for path, n in zip(paths, own)]
    options = draw(attention_options(lens, rows, kv_heads * group))
    apart = draw(st.booleans())
    if "kv_start" in options and (apart or draw(st.booleans())):
        # Levels that are made by hand have sequences that agree where their keys stand.
        roots = [next((i for i, other in enumerate(paths) if other[:2] == path[:2] or {*other} & {*path} - {None}), 0) for path in paths]
        starts = [options["kv_start"][root] for root in roots]
        if "q_start" in options:
            options["q_start"] = [first + new - old for first, new, old in zip(options["q_start"], starts, options["kv_start"])]
        options["kv_start"] = starts
    if q_len and draw(st.booleans()):
        parents = [[draw(st.sampled_from([*range(token), None])) for token in range(q_len)] for _ in paths]
        size = q_len + draw(st.sampled_from([0, 0, 3]))
        options["mask"] = torch.stack([branches(tree, size) for tree in parents]).tolist()
    if draw(st.booleans()) and kind == "fp8_e4m3/tensor":
        options |= {"k_scale": draw(st.sampled_from([0.05, 1.0, 3.0])), "v_scale": draw(st.sampled_from([0.125, 2.0, 77.0]))}
    config = small_configs() if kind == "fp32" else st.one_of(st.none(), small_configs())
    holds = [n for n in (2, 3, 5, 8, 10) if fits(kind, 8 * n, page_size)]
    if "kv_start" in options and not apart and draw(st.booleans()):
        options["pinned"] = page_size * draw(st.integers(0, 3))
    launch = {
        "config": draw(config),
        "level_config": draw(st.one_of(st.none(), small_configs(), st.just(AttentionConfig(64, 32, 4, 1, 32)))),
        "max_seq_len": draw(st.sampled_from([None, None, 0, 1, max(lens), 10 * max(lens) + 7])),
    }
    return grow(
        kind, nodes, paths, own, page_size, kv_heads, group, 8 * draw(st.sampled_from(holds)), q_dtype, q_len,
        draw(st.integers(0, 2**31 - 1)),
        apart=apart,
        strict=False,
        layout=draw(st.sampled_from(LAYOUTS)),
        q_scale=draw(st.sampled_from([1.0, 1.0, 0.01, 8.0])),
        v_mix=draw(st.sampled_from([0.0, 0.0, 2.0])),
        spike=draw(st.sampled_from([0.0, 6.0, 20.0])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        launch=launch,
        **options,
    )  # fmt: skip
