"""Faults that the checker must find: in copies of the real kernels with one expression changed, and in calls that break a promise.

Each call goes through with the kernels as they are, or with the promise kept: what is found is what was planted.
"""

import importlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from checked import DEVICE, SPLITS, WHOLE, chain_and_forks, empty_of, fault_of, tight
from ragged import build
from trees import grow

import tkv
from tkv.kernels.args import PagedKV, Stored, TokenStrides
from tkv.ops.attention import launch_merge, results_of
from tkv.ops.launch import arch_name, interpreting, target_for

pytestmark = pytest.mark.sanitize

KERNELS = {"attention": "attention_kernel", "merge": "merge_kernel", "tree": "depth_kernel", "write": "write_kernel", "copy": "copy_kernel"}


def integers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def filled(pages, page_size=16, heads=2, dim=24, kind="fp16"):
    cache = empty_of(kind, pages, page_size, heads, dim)
    for data in (cache.k, cache.v):
        data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE))
    return cache


def decode(page=None, page_size=16, config=WHOLE):
    """Two sequences of two heads of 24 numbers, from a cache without a page too many. `page` is where the last keys of the second are."""
    pages = 64 // page_size
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE).view(2, -1)
    if page is not None:
        table[1, -1] = page
    q = torch.randn(2, 2, 24, device=DEVICE).half()
    tkv.paged_decode(q, filled(pages, page_size), table, integers([16, 32]), config=config, return_lse=True)


def prefill():
    """Of two heads: single rows that are split, nine that are not, and rows behind the last sequence."""
    tight(build("fp16", [1, 1, 9], [40, 33, 20], 16, 1, 2, 16, torch.float16, tail=3), config=SPLITS).run(max_q_len=2)


def tree():
    """Verification of four new tokens."""
    q, table, masks = torch.randn(2, 4, 2, 24, device=DEVICE).half(), integers([[0, 1], [2, 0]]), chain_and_forks(2, 4)
    tkv.paged_decode(q, filled(3), table, integers([32, 16]), mask=masks, window=9, config=WHOLE)


def cascade():
    """Two heads of two sequences that share all but their last keys."""
    grow("fp16", [32], [(0,), (0,)], [3, 5], 16, 2, 1, 16, torch.float16, launch={"config": WHOLE, "level_config": WHOLE}).run()


def write(slot):
    k, v = torch.randn(2, 3, 2, 24, device=DEVICE)
    tkv.write_kv(k, v, filled(2), integers([5, slot, 9]))


def copy(src_page, dst_page):
    tkv.copy_pages(filled(2), filled(3), integers([0, src_page]), integers([1, dst_page]))


def merge():
    tkv.merge_states(torch.randn(3, 5, 24, device=DEVICE), torch.randn(3, 5, device=DEVICE))


# File, text and what stands there instead; kind of the fault, and the kernel's argument that it is about; a call.
PLANTS = {
    "a page beyond the cache is followed": (
        "tiles/paging.py", " & (exists < num_pages)", "", "oob_read", "cache", lambda: decode(page=4),
    ),
    "a page beyond the cache is followed where all keys are seen": (
        "tiles/paging.py", "tl.where(exists, pages, 0)", "pages", "oob_read", "cache", lambda: decode(page=4),
    ),
    "a small page before the cache is followed": (
        "tiles/paging.py", " & (exists >= 0)", "", "oob_read", "cache", lambda: decode(page=-1, page_size=8),
    ),
    "a tile behind the last one is visited": (
        "tiles/visibility.py", "tl.cdiv(end, BLOCK_N) - window_tile", "tl.cdiv(end, BLOCK_N) + 1 - window_tile",
        "oob_read", "page_table_ptr", decode,
    ),
    "numbers behind a key are loaded": (
        "tiles/load.py", "mask = in_row[:, None] if", "mask = (in_row | (in_row == 0))[:, None] if", "oob_read", "cache", decode,
    ),
    "the rows of a sequence that is none are looked up": (
        "tiles/rows.py", "cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=rest_end", "cu_seqlens_ptr + seq + 1",
        "oob_read", "cu_seqlens_ptr", prefill,
    ),
    "more of a mask than it has is read": (
        "tree.py", "mask=others < tl.minimum(q_len, num_tokens)", "mask=others < BLOCK", "oob_read", "mask_ptr", tree,
    ),
    "parts behind the last one are merged": (
        "merge.py", "mask=indices < num_parts", "mask=indices >= 0", "oob_read", "parts", merge,
    ),
    "a page beyond a cache is copied": (
        "tiles/paging.py", " & (src_page < src_num_pages)", "", "oob_read", "src", lambda: copy(2, 2),
    ),
    "numbers behind a result are stored": (
        "tiles/rows.py", "out, mask=in_rows[:, None] & in_row[None, :])", "out, mask=in_rows[:, None])", "oob_write", "results", decode,
    ),
    "a slot beyond the cache is written": (
        "write.py", " & (slots < num_slots)", "", "oob_write", "cache", lambda: write(32),
    ),
    "a slot before the cache is written": (
        "write.py", "(slots >= 0)", "(slots != -1)", "oob_write", "cache", lambda: write(-7),
    ),
    "a page beyond a cache is copied to": (
        "tiles/paging.py", " & (dst_page < dst_num_pages)", "", "oob_write", "dst", lambda: copy(1, 3),
    ),
    "two heads store the same rows": (
        "tiles/rows.py", "head * group + rows % group", "head * 0 + rows % group", "write-write", "results", decode,
    ),
    "two splits store the same part": (
        "attention.py", "parts.out_ptr + tl.multiple_of(split.to(tl.int64) * part_stride, 8)", "parts.out_ptr",
        "write-write", "parts", lambda: decode(config=SPLITS),
    ),
    "rows behind a sequence are merged": (
        "merge.py", "(row >= q_len) | (q_len > max_q_len)", "q_len > max_q_len", "write-write", "results", prefill,
    ),
    "a level reads what it writes itself": (
        "attention.py", "num_keys = load_position(level.group_lens_ptr + seq)",
        "num_keys = load_position(level.group_lens_ptr + seq) + tl.minimum(load_position(level.cover_ptr), 0)",
        "read-write", "level", cascade,
    ),
}  # fmt: skip


def plant(monkeypatch, folder, file, text, other):
    """Let ops launch copies of all kernels in which one text, which must be there once, is another."""
    name = f"planted_{folder.name}"
    shutil.copytree(Path(tkv.kernels.__file__).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (folder / name).rglob("*.py"):
        source.write_text(source.read_text().replace("tkv.kernels", name))
    source = (folder / name / file).read_text()
    assert source.count(text) == 1, f"{file} has no one place for this fault any more: plant it anew"
    (folder / name / file).write_text(source.replace(text, other))
    monkeypatch.syspath_prepend(folder)
    for module, kernel in KERNELS.items():
        monkeypatch.setattr(f"tkv.kernels.{module}.{kernel}", getattr(importlib.import_module(f"{name}.{module}"), kernel))


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", 0)
    file, text, other, kind, buffer, call = PLANTS[name]
    call()
    plant(monkeypatch, tmp_path, file, text, other)
    fault = fault_of(call)
    if kind.startswith("oob"):
        assert fault.kind == kind
    else:
        assert fault.kind == "race" and f"({kind})" in fault.detail
    assert fault.buffer.split(".")[0] == buffer


def test_a_copy_of_the_kernels_in_which_nothing_is_planted_is_right(tmp_path, monkeypatch):
    plant(monkeypatch, tmp_path, "merge.py", '"""Merge partial results', '"""Join partial results')
    tight(build("fp16", [1, 9], [40, 20], 16, 1, 2, 16, torch.float16, tail=3), config=SPLITS).check()


@triton.jit
def beyond_kernel(cache, out_ptr, BEYOND: tl.constexpr):
    lanes = tl.arange(0, 16)
    tl.store(out_ptr + lanes, tl.load(cache.v.ptr + lanes + BEYOND).to(tl.float32))


def test_one_number_beyond_a_tensor_that_a_kernel_has_inside_of_tuples():
    strides = TokenStrides(64, 16, 16)
    k, v = (torch.zeros(2, 4, 1, 16, device=DEVICE) for _ in "kv")
    cache = PagedKV(Stored(k, strides, None, strides), Stored(v, strides, None, strides))
    out = torch.zeros(16, device=DEVICE)
    beyond_kernel[(1,)](cache, out, 112)
    fault = fault_of(lambda: beyond_kernel[(1,)](cache, out, 113))
    assert fault.kind == "oob_read" and fault.elements_past_end == 1 and fault.buffer.startswith("cache.1.")


def test_a_slot_that_two_programs_write():
    """A program has 128 rows of 16 numbers. Two of its own rows in one slot are an undefined store."""
    k, v = torch.randn(2, 130, 1, 16, device=DEVICE)
    slots, cache = torch.arange(130, device=DEVICE), filled(9, heads=1, dim=16)
    tkv.write_kv(k, v, cache, slots)
    slots[129] = 0
    fault = fault_of(lambda: tkv.write_kv(k, v, cache, slots))
    assert fault.kind == "race" and "(write-write)" in fault.detail and fault.buffer.startswith("cache")
    slots[129], slots[1] = 129, 0
    assert fault_of(lambda: tkv.write_kv(k, v, cache, slots)).kind == "poison"


def test_a_page_that_is_written_and_read_in_one_copy():
    cache = filled(3)
    tkv.copy_pages(cache, cache, integers([0]), integers([1]))
    fault = fault_of(lambda: tkv.copy_pages(cache, cache, integers([1, 2]), integers([0, 1])))
    assert fault.kind == "race" and "(read-write)" in fault.detail


def test_results_that_are_merged_into_the_parts_of_other_rows():
    outs, lses = torch.randn(2, 1, 3, 1, 16, device=DEVICE), torch.randn(2, 1, 3, 1, device=DEVICE)

    def merge_into(out):
        launch_merge((outs, lses), results_of(out, None), target_for(arch_name(DEVICE), interpreting()), 2).run(DEVICE)

    merge_into(torch.empty(1, 2, 1, 16, device=DEVICE))
    fault = fault_of(lambda: merge_into(outs[0, :, 1:]))
    assert fault.kind == "race" and "(read-write)" in fault.detail


def test_a_sequence_in_two_groups_of_a_level(monkeypatch):
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", 0)
    problem = grow("fp16", [32, 20], [(0,), (0,), (1,), (1,)], [3, 5, 1, 9], 16, 1, 1, 16, torch.float16, apart=True)
    problem = tight(problem, config=WHOLE, level_config=WHOLE)
    problem.check()
    (level,) = problem.levels
    twice = replace(level, seqs=torch.where(level.seqs == 2, 0, level.seqs))
    fault = fault_of(replace(problem, levels=[twice]).run)
    assert fault.kind == "race" and "(write-write)" in fault.detail
