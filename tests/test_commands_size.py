"""tkv size: the bytes of a cache, as KVCache would allocate it."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tkv import KVCache
from tkv.cli import main
from tkv.commands.output import Progress, bytes_text, print_table
from tkv.tune.shapes import MODELS

LLAMA = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def sizes(capsys, *argv):
    assert main(["size", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bytes_are_those_of_the_cache(capsys):
    argv = ["--format", "bf16", "--format", "int4/group32", "--page-size", "32", "--tokens", "1000", "--batch", "3"]
    found = sizes(capsys, *LLAMA, *argv)
    for row in found["formats"]:
        cache = KVCache.empty(96, 32, 8, 128, row["format"], device="meta")
        assert row["total_bytes"] == 32 * cache.nbytes
        assert row["bytes_per_page"] * 96 == row["total_bytes"]
        assert row["bytes_per_token"] == 32 * cache.bytes_per_token
    assert [row["bytes_per_token"] for row in found["formats"]] == [131072, 40960]


def test_static_scales_are_no_part_of_a_page(capsys):
    (row,) = sizes(capsys, *LLAMA, "--format", "int8/channel")["formats"]
    assert row["bytes_per_page"] == 32 * 16 * 8 * 256
    assert row["total_bytes"] == 256 * row["bytes_per_page"] + 32 * 2 * 8 * 128 * 4


def test_keys_and_values_may_have_formats_and_dims_of_their_own(capsys):
    argv = ["--kv-heads", "2", "--head-dim", "192", "--v-head-dim", "128", "--format", "int4/page_channel+int4/group32"]
    (row,) = sizes(capsys, *argv)["formats"]
    assert row["bytes_per_page"] == KVCache.nbytes_for(1, 16, 2, 192, ("int4/page_channel", "int4/group32"), v_head_dim=128)


def test_a_v_that_is_a_view_of_k_is_stored_once(capsys):
    found = sizes(capsys, "--layers", "61", "--kv-heads", "1", "--head-dim", "576", "--v-head-dim", "512", "--shared")
    by_format = {row["format"]: row["bytes_per_token"] for row in found["formats"]}
    assert by_format["bf16"] == 61 * 576 * 2
    assert by_format["fp8_e4m3/token_head"] == 61 * (576 + 4)
    assert set(found["refused"]) == {"int8/group32", "int4/token_head", "int4/group32", "int4/page_channel+int4/group32"}


def test_layers_with_a_window_keep_its_pages(capsys):
    model = sizes(capsys, "--model", "gpt-oss-20b", "--format", "bf16", "--tokens", "10000", "--batch", "4")
    page = 16 * 8 * 64 * 2 * 2
    # 128 keys that end anywhere in a page lie in up to 9 pages of 16.
    assert model["formats"][0]["total_bytes"] == 4 * page * (12 * 625 + 12 * 9)
    assert model["formats"][0]["bytes_per_page"] == 24 * page
    same = sizes(capsys, "--kv-heads", "8", "--head-dim", "64", "--window", "129", "--tokens", "10000", "--format", "bf16")
    assert same["formats"][0]["total_bytes"] == page * 9
    short = sizes(capsys, "--model", "gpt-oss-20b", "--format", "bf16", "--tokens", "100")
    assert short["formats"][0]["total_bytes"] == page * 24 * 7


def test_a_model_is_named_in_the_table(capsys):
    assert main(["size", "--model", "gemma2-9b", "--format", "int4/group64"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "gemma2-9b: 42 layers, 8 KV heads of 256; 1 x 4,096 tokens in pages of 16"
    assert second == "21 layers have a window of 4,096: they keep at most 257 pages of a sequence"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_size(model, capsys):
    found = sizes(capsys, "--model", model)
    shape = MODELS[model]
    dims = shape.head_dim if shape.shares_v else shape.head_dim + (shape.v_head_dim or shape.head_dim)
    assert found["model"] == model
    assert found["formats"][0]["bytes_per_token"] == shape.layers * shape.num_kv_heads * dims * 2


def test_table_names_formats_that_the_shape_cannot_have(capsys):
    assert main(["size", "--kv-heads", "3", "--head-dim", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 layer, 3 KV heads of 40; 1 x 4,096 tokens in pages of 16\n")
    assert "\nnot for this shape: int4/group32: head_dim: int4/group32 needs a multiple of 32, got 40\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model"),
        (["--model", "gpt-9"], "llama3-8b"),
        (["--model", "llama3-8b", "--head-dim", "64"], "--head-dim: the model says it"),
        (["--kv-heads", "8"], "--head-dim"),
        (["--kv-heads", "0", "--head-dim", "128"], "at least 1"),
        (["--kv-heads", "8", "--head-dim", "9"], "multiple of 8"),
        ([*LLAMA, "--format", "fp7"], "'fp7'"),
        ([*LLAMA, "--format", "bf16+bf16+bf16"], "K+V"),
        (["--kv-heads", "8", "--head-dim", "40", "--format", "int4/group32"], "multiple of 32, got 40"),
        (["--kv-heads", "1", "--head-dim", "64", "--v-head-dim", "128", "--shared"], "at most its 64 dims"),
        ([*LLAMA, "--tokens", "1e5"], "argument --tokens: expected an integer of at least 1, got '1e5'"),
        ([*LLAMA, "--tokens", str(2**31)], "argument --tokens: expected at most 2147483647"),
        (
            ["--kv-heads", "8", "--head-dim", "64", "--shared", *(f"--{name}={2**31 - 1}" for name in ("batch", "tokens"))],
            "more than torch",
        ),
    ],
)
def test_mistakes_give_one_line(argv, message, refused):
    assert message in refused("size", *argv)


def test_tables_align_numbers_and_leave_nothing_empty_out(capsys):
    print_table([{"name": "a", "n": None, "x": 1.5, "ok": True}, {"name": "bb", "n": 12345, "x": 0.25, "ok": False}])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [["a", "1.5", "yes"], ["bb", "12,345", "0.25", "no"]]
    assert lines[3].index("12,345") + len("12,345") == lines[0].index("n", 4) + 1
    print_table([])
    assert capsys.readouterr().out == ""


def test_sizes_for_people():
    assert [bytes_text(count) for count in (0, 1023, 1536, 5 << 40)] == ["0 B", "1,023 B", "1.5 KiB", "5 TiB"]


def test_progress_without_tqdm_is_lines_on_stderr(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress("compiling", None) as progress:
        progress.step("first")
        progress.expect(3)
        progress.step("second")
        progress.note("sm90 spills")
        progress.step("third")
    assert capsys.readouterr() == ("", "sm90 spills\ncompiling: 3 of 3, third\n")


def test_progress_is_a_bar_where_tqdm_is_installed(monkeypatch):
    bar = MagicMock()
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bar))
    with Progress("compiling", 2) as progress:
        progress.step("first")
        progress.expect(3)
        progress.note("sm90 spills")
    assert bar.call_args.kwargs["total"] == 2
    assert bar.call_args.kwargs["file"] is sys.stderr
    assert bar.return_value.total == 3
    assert [call[0] for call in bar.return_value.method_calls] == ["set_postfix_str", "update", "write", "close"]
