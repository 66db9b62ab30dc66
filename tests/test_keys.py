"""Keys of tuning tables: what decides which kernel runs, and no more; and the hash that says when a kernel has changed."""

from types import SimpleNamespace

import pytest
import torch

import tkv
from tkv.errors import TkvError, UnsupportedError
from tkv.ops.attention import Options
from tkv.tune.cases import launch_of
from tkv.tune.keys import FLAGS, OP_KINDS, Key, kernel_hash, key_case, key_of, key_of_shape, rows_class, size_of_shape, source_hash

FIELDS = {"head_dim": 128, "v_head_dim": 64, "dtype": "fp16", "format": "int8/token_head", "rows": 32, "page": 16, "flags": ["window"]}


def cache_of(kind="fp16", page_size=16, dim=64, v_dim=None):
    return tkv.KVCache.empty(4, page_size, 2, dim, kind, device="meta", v_head_dim=v_dim)


def test_every_option_that_the_kernel_is_compiled_for_is_a_flag_and_the_others_are_none():
    ones, mask = torch.ones(1), torch.ones(1, 1, 1, dtype=torch.bool)
    flagged = {"alibi_slopes": ones, "pinned": 16, "rope": SimpleNamespace(), "softcap": 3.0, "mask": mask, "window": 5}
    named = {"alibi_slopes": "alibi", "mask": "tree"}
    for name, value in flagged.items():
        assert key_of(torch.float16, cache_of(), Options(scale=1.0, **{name: value}), 8).flags == (named.get(name, name),)
    every = key_of(torch.float16, cache_of(), Options(scale=1.0, **flagged), 8)
    assert (*every.flags, "shared") == (*sorted(set(FLAGS) - {"shared"}), "shared")
    plain = Options(scale=0.3, sinks=4, sink_logits=ones, kv_start=ones, q_start=ones)
    assert key_of(torch.float16, cache_of(), plain, 8).flags == ()


def test_a_view_of_keys_as_values_and_two_formats_show_in_the_key():
    base = cache_of(dim=576)
    latent = tkv.KVCache(base.k, base.k[..., :512])
    assert key_of(torch.float16, latent, Options(scale=1.0), 16) == Key(576, 512, "fp16", "fp16", 16, 16, ("shared",))
    mixed = cache_of(("int8/page_channel", "int8/token_head"), page_size=128)
    assert key_of(torch.float32, mixed, Options(scale=1.0), 128).format == "int8/page_channel+int8/token_head"


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 100}, {"head_dim": True}, {"rows": 48}, {"rows": 16.0}, {"page": 8}, {"dtype": "fp8"}, {"format": "int3"}]
    + [{"flags": ["fast"]}, {"flags": ["window", "window"]}, {"flags": None}, {"format": 4}, {"more": 1}],
    ids=str,
)
def test_fields_that_no_call_has_are_refused_by_name(change):
    assert Key.of(FIELDS) == Key(128, 64, "fp16", "int8/token_head", 32, 16, ("window",))
    with pytest.raises(TkvError, match=next(iter(change))):
        Key.of({**FIELDS, **change})


@pytest.mark.parametrize("op", OP_KINDS)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("flags", [(), ("tree",), ("pinned", "softcap", "window")], ids=str)
def test_a_case_of_a_key_has_its_rows_page_and_flags(op, rows, flags):
    key = Key(64, 64, "bf16", "int8/token_head", rows, 32, flags)
    case = key_case(op, key)
    members = 8 if op == "shared_prefix_decode" else 1
    assert rows_class(members * case.group * case.q_len) == rows
    assert (case.page_size, case.format, case.dtype) == (32, "int8/token_head", "bf16")
    assert {flag for flag in FLAGS if getattr(case, flag)} == set(flags)
    launch = launch_of(case, "sm90")
    assert launch.kernel.__name__ == ("scores_kernel" if op == "key_scores" else "attention_kernel")


def test_latent_attention_decodes_one_token_of_a_large_group():
    case = key_case("paged_decode", Key(576, 512, "bf16", "bf16", 128, 64, ("shared",)))
    assert (case.group, case.q_len, case.v_head_dim, case.shared) == (128, 1, 512, True)


def test_functions_without_tunables_are_refused():
    for call in (lambda: kernel_hash("write_kv"), lambda: key_case("write_kv", Key.of(FIELDS))):
        with pytest.raises(UnsupportedError, match=r"op: expected paged_decode, .* got 'write_kv'"):
            call()


def test_a_kernel_changes_with_its_code_and_with_what_it_imports_but_not_with_its_comments(tmp_path):
    (tmp_path / "tiles").mkdir()
    main, tile, other = tmp_path / "attend.py", tmp_path / "tiles" / "codec.py", tmp_path / "tiles" / "other.py"

    def hash_of(code="x = codec.f(1)", codec="def f(a):\n    return a + 1\n"):
        main.write_text(f"from tkv.kernels.tiles import codec\n{code}\n")
        tile.write_text(codec)
        return source_hash(tmp_path, "attend")

    first = hash_of()
    assert hash_of("x = codec.f(\n    1,  # why\n)") == first
    assert hash_of(codec='"""What."""\n\n\ndef f(a):\n    """More."""\n    return (a + 1)  # why\n') == first
    other.write_text("y = 2\n")
    assert hash_of() == first
    assert len({first, hash_of("x = codec.f(2)"), hash_of(codec="def f(a):\n    return a + 2\n"), hash_of("x = codec.f(None)")}) == 4
    importing = hash_of("from tkv.kernels.tiles.other import y")
    other.write_text("y = 3\n")
    assert hash_of("from tkv.kernels.tiles.other import y") != importing


SHAPES = [
    ("paged_decode", 4, 1, 300, {"rows": 16}, 4 * 2, 300),
    ("paged_decode", 4, 10, 300, {"rows": 64}, 4 * 2, 300),
    ("paged_decode", 3, 64, 300, {"rows": 128, "flags": ("window",)}, 3 * 2 * 2, 163),
    ("prefix_prefill", 4, 100, 5000, {"rows": 128}, 2 * 13, 5000),
    ("prefix_prefill", 4, 5, 5000, {"rows": 32}, 2 * 3, 5000),
    ("shared_prefix_decode", 9, 1, 5000, {"rows": 64}, 2 * 1, 5000),
    ("shared_prefix_decode", 80, 1, 5000, {"rows": 128}, 2 * 3, 5000),
    ("key_scores", 4, 1000, 5000, {"rows": 128}, 4 * 2 * 2, 5000),
]


@pytest.mark.parametrize("op, num_seqs, q_len, kv_len, key, programs, keys", SHAPES)
def test_a_shape_has_the_key_and_the_size_of_work_of_its_calls(op, num_seqs, q_len, kv_len, key, programs, keys):
    shape = SimpleNamespace(
        op=op, num_seqs=num_seqs, q_len=q_len, kv_len=kv_len, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype="bf16",
        format="int8/token_head", page_size=48, flags=key.get("flags", ()), window=100,
    )  # fmt: skip
    assert key_of_shape(shape) == Key(64, 64, "bf16", "int8/token_head", page=16, **{"flags": (), **key})
    assert size_of_shape(shape, num_sms=10) == (programs / 10, keys)
