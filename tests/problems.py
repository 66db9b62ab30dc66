"""Whole problems of decoding: a paged cache full of poison but for the keys that some row sees, queries, tables and options."""

import math
import os
from dataclasses import dataclass, field, replace

import torch
from bounds import assert_close_to_reference
from caches import FORMATS, LAYOUTS, empty_cache, fits, on_device, poison_, q_dtypes, store
from hypothesis import settings
from hypothesis import strategies as st

import tkv
from tkv import reference
from tkv.kernels.args import Attend
from tkv.tune.configs import AttentionConfig

SENTINELS = (2**31 - 1, -7)
_EFFORT = {"ci": 1, "gpu": 4, "deep": 60}[os.environ.get("TKV_PROFILE", "ci")]


def test_device():
    """Where kernels run: on the GPU if there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


test_device.__test__ = False


def effort(examples):
    """Hypothesis settings for so many examples in the quickest profile, and more in the others."""
    return settings(max_examples=examples * _EFFORT)


def allowance(problem):
    """What the bounds allow for where probabilities are float16, or q is rounded with its scales or once it is rotated."""
    cache, is_wide = problem.cache, problem.q.dtype == torch.float32
    half = not is_wide and (problem.q.dtype == torch.float16 or not cache.v_format.is_native or cache.v_format.dtype == "fp16")
    is_rounded = not is_wide and (cache.k_format.scale == "channel" or "rope" in problem.options)
    return {"v_size": problem.v_size if half else 0.0, "q_is_rounded": is_rounded}


@dataclass
class Problem:
    """One call of paged_decode. `options` change what is computed, `launch` only how."""

    q: torch.Tensor
    cache: tkv.KVCache
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    options: dict = field(default_factory=dict)
    launch: dict = field(default_factory=dict)
    spec: dict = field(default_factory=dict)
    v_size: torch.Tensor | float = 0.0
    _truth: tuple | None = None

    def run(self, **more):
        """(out, lse) of the kernel."""
        return tkv.paged_decode(
            self.q, self.cache, self.page_table, self.seq_lens, return_lse=True, **{**self.options, **self.launch, **more}
        )

    @property
    def truth(self):
        """What the reference says, for the bounds."""
        if self._truth is None:
            self._truth = reference.paged_decode(self.q, self.cache, self.page_table, self.seq_lens, **self.options)
        return self._truth

    def check(self, **more):
        """Run, compare with the reference, and give (out, lse)."""
        out, lse = self.run(**more)
        assert_close_to_reference(out, lse, self.truth, self.q.dtype, **allowance(self))
        return out, lse

    def check_without(self, *names):
        """`check` of the same problem without some of its options."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in names}, _truth=None).check()

    def __repr__(self):
        return f"build({', '.join(f'{name}={value!r}' for name, value in self.spec.items())})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


def placed(num_keys, start, pinned):
    """Positions of logical keys."""
    positions = torch.arange(num_keys)
    positions[pinned:] += start
    return positions


def build(
    kind="fp32", lens=(5,), page_size=16, kv_heads=1, group=1, dim=64, q_dtype=None, q_len=None, layout="nhd", seed=0, *,
    v_dim=None, q_scale=1.0, k_amplitude=1.0, v_amplitude=1.0, v_mix=0.0, spike=0.0, k_scale=None, v_scale=None,
    kv_start=None, q_start=None, index_dtype=torch.int32, launch=None, edit=None, **options,
):  # fmt: skip
    """A problem. Tensors in `options` may come as lists; amplitudes are of the decoded numbers.

    v_mix: the amplitude of V varies from token to token by up to 10^v_mix; spike: score that one key of each sequence has with one row;
    edit: called with each sequence's q [rows, heads, dim], k and v [keys, heads, dim] before they are stored, to change them in place.
    """
    spec = {name: value for name, value in locals().items() if name not in ("options", "launch", "edit")} | options
    spec["launch"] = launch or {}
    device, rng = test_device(), torch.Generator().manual_seed(seed)
    q_dtype = q_dtype or q_dtypes(kind)[0]
    rows, num_seqs = q_len or 1, len(lens)

    q = torch.randn(num_seqs, rows, kv_heads * group, dim, generator=rng) * q_scale
    largest = torch.finfo(q_dtype).max
    q = q.clamp(-largest, largest).to(q_dtype)
    page_counts = [-(-n // page_size) for n in lens]
    spare = 2
    order = torch.randperm(sum(page_counts) + spare, generator=rng).tolist()
    cache = empty_cache(kind, layout, len(order), page_size, kv_heads, dim, k_scale, v_scale, v_dim=v_dim)

    width, v_size = max(page_counts, default=0), torch.zeros(num_seqs)
    table = torch.full((num_seqs, width + 3), SENTINELS[seed % 2], dtype=index_dtype)
    for seq, n in enumerate(lens):
        start = kv_start[seq] if kv_start else 0
        first = q_start[seq] if q_start else n + start - rows
        positions = torch.arange(n)
        seen = reference.visible(
            first + torch.arange(rows), placed(n, start, options.get("pinned", 0)), options.get("window"), options.get("sinks", 0)
        ).any(0)
        pages = torch.tensor([order.pop() for _ in range(page_counts[seq])], dtype=index_dtype)
        followed = torch.zeros(len(pages), dtype=torch.bool)
        followed[(positions[seen] // page_size).unique()] = True
        # Of pages that no row sees, some entries lead out of the cache and some to poison.
        lost = torch.rand(len(pages), generator=rng) < 0.5
        table[seq, : len(pages)] = torch.where(followed | ~lost, pages, table[seq, : len(pages)])

        k = torch.randn(n, kv_heads, dim, generator=rng) * k_amplitude
        v = torch.randn(n, kv_heads, v_dim or dim, generator=rng) * v_amplitude
        v = v * 10 ** (-v_mix * torch.rand(n, kv_heads, 1, generator=rng))
        if spike and seen.any():
            key = int(positions[seen][int(torch.randint(int(seen.sum()), (), generator=rng))])
            head = int(torch.randint(kv_heads, (), generator=rng))
            row = q[seq, int(torch.randint(rows, (), generator=rng)), head * group].float()
            scale = options.get("scale") or 1 / math.sqrt(dim)
            k[key, head] = row * (spike / (scale * row.square().sum().clamp_min(1e-20)))
        if edit:
            edit(q[seq], k, v)
        store(cache, pages, seen, k, v)
        if seen.any():
            v_size[seq] = n * reference.gather(cache, pages, positions[seen])[1].abs().max()

    lens_buffer = torch.full((num_seqs + 2,), 2**31 - 1, dtype=index_dtype)
    lens_buffer[1:-1] = torch.tensor(lens, dtype=index_dtype)
    for name, starts in (("kv_start", kv_start), ("q_start", q_start)):
        if starts is not None:
            options[name] = torch.tensor(starts, dtype=index_dtype)
    for name, dtype in (("alibi_slopes", torch.float32), ("sink_logits", q_dtype)):
        if isinstance(options.get(name), list | tuple):
            options[name] = torch.tensor(options[name]).to(dtype)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    cache = on_device(cache, device)
    # q as engines have it: a slice of a wider tensor.
    wide = poison_(torch.empty(num_seqs, rows, kv_heads * group + 2, dim, dtype=q_dtype))
    wide[:, :, 1:-1] = q
    q = wide.to(device)[:, :, 1:-1]
    return Problem(
        q if q_len else q[:, 0],
        cache,
        table.to(device)[:, :width],
        lens_buffer.to(device)[1:-1],
        options,
        dict(launch or {}),
        spec,
        v_size.reshape(-1, *[1] * (q.dim() - 1 if q_len else q.dim() - 2)),
    )


# Tiles times rows of tiles times heads that a problem may take, and rows of split results: about two seconds in the interpreter.
MAX_VISITS, MAX_SPLIT_ROWS = 72, 96


@st.composite
def problems(draw, kind=None, **fixed):
    """Any problem of decoding, of one format if `kind` is given; `fixed` go to `build` as they are."""
    kind = kind or draw(st.sampled_from(FORMATS))
    q_dtype = draw(st.sampled_from(q_dtypes(kind)))
    page_size = draw(st.sampled_from([size for size in (1, 3, 16, 64, 528) if fits(kind, 64, size)]))
    dim = 8 * draw(dims(kind, page_size, [2, 8, 10, 12, 14, 16, 20, 24, 32]))
    v_dim = 8 * draw(dims(kind, page_size, [2, 8, 16])) if draw(st.integers(0, 3)) == 0 else None
    config = draw(st.one_of(st.none(), small_configs()))
    block_m, block_n = (config.block_m, config.block_n) if config else (16, 64)
    group = draw(st.one_of(st.integers(1, 8), st.sampled_from([1, 4, 16, 48, 128])))
    q_len = draw(st.one_of(st.none(), st.integers(1, 5), st.sampled_from([16, 33, 64])))
    kv_heads = draw(st.integers(1, 3))
    if (q_len or 1) * group > 144:
        q_len = draw(st.sampled_from([None, 1, 2]))
    rows = q_len or 1
    if -(-rows * group // block_m) * kv_heads > 8:
        kv_heads = 1
    if rows * group * kv_heads > MAX_SPLIT_ROWS and config:
        config = AttentionConfig(config.block_m, config.block_n, config.num_warps, config.num_stages)
    tiles = max(2, MAX_VISITS // (-(-rows * group // block_m) * kv_heads))

    num_seqs = draw(st.integers(1, max(1, min(4, MAX_SPLIT_ROWS // (rows * group)))))
    longest = max(2, tiles // num_seqs * block_n)
    near = [n for edge in (page_size, block_n, 2 * block_n) for n in (edge - 1, edge, edge + 1) if 0 < n <= longest]
    one_len = st.one_of(st.integers(0, longest), st.sampled_from([0, 1, *near]))
    lens = draw(st.lists(one_len, min_size=num_seqs, max_size=num_seqs))

    options = draw(attention_options(lens, rows, kv_heads * group))
    if "kv_start" in options and draw(st.booleans()):
        options["pinned"] = page_size * draw(st.integers(0, 3))
    if draw(st.booleans()) and kind == "fp8_e4m3/tensor":
        options |= {"k_scale": draw(st.sampled_from([0.05, 1.0, 3.0])), "v_scale": draw(st.sampled_from([0.125, 2.0, 77.0]))}
    return build(
        kind, lens, page_size, kv_heads, group, dim, q_dtype, q_len, draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 2**31 - 1)),
        q_scale=draw(st.sampled_from([1.0, 1.0, 0.01, 8.0])),
        v_amplitude=draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])) * (options.get("v_scale", 1.0)),
        v_mix=draw(st.sampled_from([0.0, 0.0, 2.0])),
        spike=draw(st.sampled_from([0.0, 6.0, 20.0])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        launch={"config": config, "max_seq_len": draw(st.sampled_from([None, None, 0, 1, max(lens), 10 * max(lens) + 7]))},
        v_dim=v_dim, **options, **fixed,
    )  # fmt: skip


def dims(kind, page_size, common):
    """Head dims that a format can hold, in units of 8: common ones, and any up to 256."""
    holds = [n for n in range(2, 33) if fits(kind, 8 * n, page_size)]
    return st.one_of(st.sampled_from([n for n in common if n in holds] or holds), st.sampled_from(holds))


@st.composite
def small_configs(draw):
    """Launches with small tiles and short splits, so that few keys make many of both."""
    block_n = draw(st.sampled_from([16, 32]))
    split_len = draw(st.sampled_from([None, block_n, 2 * block_n, 4 * block_n]))
    return AttentionConfig(draw(st.sampled_from([16, 16, 32])), block_n, 4, 1, split_len)


@st.composite
def attention_options(draw, lens, rows, num_q_heads):
    """Options of attention that fit sequences of these lengths."""
    options = {}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, max(lens) + 2))
        options["sinks"] = draw(st.sampled_from([0, 0, 1, 4, 17]))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        options["alibi_slopes"] = [(0.0, *(2.0**-e for e in range(8)))[h % 9] for h in range(num_q_heads)]
    if draw(st.integers(0, 2)) == 0:
        options["sink_logits"] = [(-torch.inf, 1.5, -2.0, 6.0)[h % 4] for h in range(num_q_heads)]
    if draw(st.integers(0, 2)) == 0:
        options["kv_start"] = [draw(st.sampled_from([0, 1, 5, 16, 100, 10**6])) for _ in lens]
    if draw(st.integers(0, 2)) == 0:
        starts = options.get("kv_start") or [0] * len(lens)
        options["q_start"] = [start + draw(st.integers(-rows - 1, n + 20)) for start, n in zip(starts, lens)]
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([0.0, 0.02, 0.5]))
    return options


def looking_at(block_n, has_window, has_pinned=False):
    """The constants of a loop over keys that decide what it visits."""
    return Attend(
        PAGE_SIZE=16, BLOCK_N=block_n, DTYPE=None, P_DTYPE=None, V_IS_K=False, LIFT=0, HAS_WINDOW=has_window, HAS_SOFTCAP=False,
        HAS_ALIBI=False, HAS_TREE=False, HAS_PINNED=has_pinned, PARTS=1, ONE_POSITION=False,
    )  # fmt: skip
