"""What decides which kernel of attention runs, in one canonical form: the key under which tuning tables keep configurations.

A key holds what the host knows without looking at the device: shapes, dtypes and options, not the numbers in tensors. Keys that are
equal run the same kernel; how many programs run and how many keys each visits is the bucket's part, see `tkv.tune.tables`.
"""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tkv.errors import DTypeError, RangeError, UnsupportedError
from tkv.formats import KVFormat, parse_pair

if TYPE_CHECKING:
    from tkv.cache import KVCache
    from tkv.ops.attention import Options
    from tkv.tune.cases import Case
    from tkv.tune.model import Shape

OP_KINDS = {"paged_decode": "decode", "prefix_prefill": "prefill", "shared_prefix_decode": "level", "key_scores": "scores"}
"""Public functions with tunables, and the kind of :class:`tkv.tune.cases.Case` that compiles them. Of a cascade it is its levels."""

_KERNELS = {"decode": "attention", "prefill": "attention", "level": "attention", "scores": "scores"}

ALL_TUNABLES = ("block_m", "block_n", "num_warps", "num_stages", "split_len", "max_registers")
TUNABLES = {
    "paged_decode": ALL_TUNABLES,
    "prefix_prefill": ALL_TUNABLES,
    "shared_prefix_decode": ALL_TUNABLES,
    # Its programs share keys without partial results, and its loop is not pipelined.
    "key_scores": ("block_m", "block_n", "num_warps", "max_registers"),
}
"""Fields of :class:`tkv.tune.configs.AttentionConfig` that a function's kernel heeds."""

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MIN_ROWS, MAX_ROWS = 16, 128
# Query rows of a sequence that share a tile of key_scores.
MAX_SCORE_ROWS = 64
PAGES = (256, 128, 64, 32, 16, 1)
FLAGS = ("alibi", "pinned", "rope", "shared", "softcap", "tree", "window")


class Key(NamedTuple):
    """What a kernel of attention is compiled for.

    Attributes:
        head_dim, v_head_dim: of K and of V.
        dtype: of q, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        format: of the cache, or of K and of V with a ``+`` between them.
        rows: query rows x heads of a group that share their keys, as `rows_class` gives them.
        page: the page size, as `page_class` gives it.
        flags: the options that the kernel is compiled for, sorted, of `FLAGS`; ``"shared"`` is a V that is a view of K.

    Example:
        >>> Key(128, 128, "bf16", "int8/token_head", rows=16, page=16, flags=("window",)).name
        'd128 bf16 int8/token_head r16 p16 window'
    """

    head_dim: int
    v_head_dim: int
    dtype: str
    format: str
    rows: int
    page: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for tables and messages."""
        dims = f"d{self.head_dim}" if self.v_head_dim == self.head_dim else f"d{self.head_dim}/{self.v_head_dim}"
        return " ".join((dims, self.dtype, self.format, f"r{self.rows}", f"p{self.page}", *self.flags))

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        """Of K and of V."""
        return parse_pair(self.format.split("+", 1) if "+" in self.format else self.format)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Key:
        """A key from its fields, each of them checked; flags may be in any order.

        Args:
            fields: by name, as a table has them.

        Returns:
            The key in its canonical form.

        Raises:
            UnsupportedError: a field that keys do not have, or that is missing, or a value that no call has.
            RangeError: a number that no call has.

        Example:
            >>> Key.of({"head_dim": 64, "v_head_dim": 64, "dtype": "fp16", "format": "fp16", "rows": 16, "page": 48, "flags": []})
            Traceback (most recent call last):
            tkv.errors.RangeError: page: expected one of 1, 16, 32, 64, 128, 256, got 48
        """
        unknown, missing = sorted(set(fields) - set(cls._fields)), [name for name in cls._fields if name not in fields]
        if unknown or missing:
            raise UnsupportedError(f"expected the fields {', '.join(cls._fields)}; unknown {unknown}, missing {missing}")
        for name in ("head_dim", "v_head_dim"):
            if type(fields[name]) is not int or not 16 <= fields[name] <= 576 or fields[name] % 8:
                raise RangeError(f"{name}: expected a multiple of 8 from 16 to 576, got {fields[name]!r}")
        for name, values in (("rows", (16, 32, 64, 128)), ("page", PAGES[::-1])):
            if type(fields[name]) is not int or fields[name] not in values:
                raise RangeError(f"{name}: expected one of {', '.join(map(str, values))}, got {fields[name]!r}")
        if fields["dtype"] not in DTYPES.values():
            raise UnsupportedError(f"dtype: expected one of {', '.join(DTYPES.values())}, got {fields['dtype']!r}")
        flags = fields["flags"]
        if not isinstance(flags, list | tuple) or not set(flags) <= set(FLAGS) or len(set(flags)) < len(flags):
            raise UnsupportedError(f"flags: expected some of {', '.join(FLAGS)}, each once, got {flags!r}")
        return cls(**{**fields, "format": _format_name(fields["format"]), "flags": tuple(sorted(flags))})


def _format_name(text: object) -> str:
    if not isinstance(text, str):
        raise DTypeError(f"format: expected text, got {text!r}")
    k, v = parse_pair(text.split("+", 1) if "+" in text else text)
    return str(k) if k == v else f"{k}+{v}"


def rows_class(rows: int) -> int:
    """So many rows as the power of two from 16 to 128 that holds them, or 128.

    A tile has at least 16 rows: decoding with groups of 1 to 16 heads runs one kernel.

    Example:
        >>> [rows_class(rows) for rows in (1, 8, 16, 17, 100, 8192)]
        [16, 16, 16, 32, 128, 128]
    """
    return min(max(MIN_ROWS, 1 << (rows - 1).bit_length()), MAX_ROWS)


def page_class(page_size: int) -> int:
    """The largest of 1, 16, 32, 64, 128 and 256 that divides the page size: tiles up to that size lie in one page.

    Example:
        >>> [page_class(size) for size in (1, 8, 16, 48, 64, 528, 1024)]
        [1, 1, 16, 16, 64, 16, 256]
    """
    return next(page for page in PAGES if page_size % page == 0)


def key_of(q_dtype: torch.dtype, cache: KVCache, options: Options, rows: int) -> Key:
    """The key of a call.

    Args:
        q_dtype: of q.
        cache: the paged cache.
        options: as the op has checked them.
        rows: query rows x heads of a group that share their keys; of `key_scores` at most 64 query rows count.

    Returns:
        The key.

    Example:
        >>> import tkv
        >>> from tkv.ops.attention import Options
        >>> cache = tkv.KVCache.empty(4, 48, 2, 64, "int8/token_head", device="meta")
        >>> key_of(torch.bfloat16, cache, Options(scale=0.125, window=100, softcap=30.0), rows=20).name
        'd64 bf16 int8/token_head r32 p16 softcap window'
    """
    return key_of_facts(facts_of(q_dtype, cache, options, rows))


def facts_of(q_dtype: torch.dtype, cache: KVCache, options: Options, rows: int) -> tuple[Any, ...]:
    """What the key of a call is made of, quick to take and to hash: calls whose facts are equal have one key."""
    flags = (
        options.alibi_slopes is not None,
        options.pinned > 0,
        options.rope is not None,
        cache.v_is_k,
        options.softcap is not None,
        options.mask is not None,
        options.window is not None,
    )
    # By class, so that a length which changes from call to call makes no new facts.
    size = MIN_ROWS if rows <= MIN_ROWS else rows_class(rows)
    return q_dtype, cache.k_format, cache.v_format, cache.head_dim, cache.v_head_dim, cache.page_size, size, flags


def key_of_facts(facts: tuple[Any, ...]) -> Key:
    """The key that `facts_of` is about."""
    q_dtype, k, v, head_dim, v_head_dim, page_size, rows, flags = facts
    return Key(
        head_dim,
        v_head_dim,
        DTYPES[q_dtype],
        str(k) if k == v else f"{k}+{v}",
        rows,
        page_class(page_size),
        tuple(name for name, is_set in zip(FLAGS, flags, strict=True) if is_set),
    )


def key_of_shape(shape: Shape) -> Key:
    """The key of the calls that a :class:`tkv.tune.model.Shape` stands for."""
    flags, format = tuple(sorted(shape.flags)), _format_name(shape.format)
    return Key(shape.head_dim, shape.v_head_dim, shape.dtype, format, rows_class(rows_of(shape)), page_class(shape.page_size), flags)


def rows_of(shape: Shape) -> int:
    """Query rows x heads of a group that share their keys."""
    group = shape.num_q_heads // shape.num_kv_heads
    if shape.op == "shared_prefix_decode":
        return shape.num_seqs * shape.q_len * group
    return group * (min(shape.q_len, MAX_SCORE_ROWS) if shape.op == "key_scores" else shape.q_len)


def programs_of(op: str, num_seqs: int, num_kv_heads: int, rows: int, total_rows: int = 0) -> int:
    """Programs that a call would launch without splits over keys if tiles had the rows of its key: what buckets count as work.

    Args:
        op: the function.
        num_seqs: sequences of the batch.
        num_kv_heads: heads of the cache.
        rows: query rows x heads of a group that share their keys, as for `key_of`.
        total_rows: the same of all sequences, for `prefix_prefill` and the levels of `shared_prefix_decode`.

    Example:
        >>> programs_of("paged_decode", num_seqs=4, num_kv_heads=8, rows=8)
        32
        >>> programs_of("prefix_prefill", num_seqs=4, num_kv_heads=8, rows=1024, total_rows=4000)
        256
    """
    tile = rows_class(rows)
    if op in ("prefix_prefill", "shared_prefix_decode"):
        return num_kv_heads * -(-total_rows // tile)
    return num_kv_heads * num_seqs * -(-rows // tile)


def size_of_shape(shape: Shape, num_sms: int) -> tuple[float, int]:
    """The work per SM and the visible keys of the calls that a shape stands for, by which a bucket is found.

    Args:
        shape: a :class:`tkv.tune.model.Shape`.
        num_sms: of the GPU.

    Returns:
        (programs without splits / SMs, keys).
    """
    rows = rows_of(shape)
    group = shape.num_q_heads // shape.num_kv_heads
    programs = programs_of(shape.op, shape.num_seqs, shape.num_kv_heads, rows, shape.num_seqs * shape.q_len * group)
    keys = shape.kv_len
    if shape.window is not None and "window" in shape.flags and shape.op in ("paged_decode", "prefix_prefill"):
        keys = min(keys, shape.window + shape.q_len - 1)
    return programs / num_sms, keys


def key_case(op: str, key: Key) -> Case:
    """A shape with this key, to compile its kernel.

    Args:
        op: one of `OP_KINDS`.
        key: the key.

    Returns:
        A :class:`tkv.tune.cases.Case` with pages of ``key.page`` and rows like those that bring the op to this key: decoding one token
        of 8 heads a group, or so many tokens of 8 heads as fill the rows; latent attention (more than 256 dims) one token of a large
        group; prefill 1024 tokens where rows fill a tile.

    Raises:
        UnsupportedError: an op without tunables.

    Example:
        >>> key_case("paged_decode", Key(64, 64, "bf16", "bf16", rows=32, page=16)).name
        'decode bf16 bf16 d64 g8 q4 p16'
    """
    from tkv.tune.cases import NUM_SEQS, Case

    check_op(op)
    group, q_len = 8, max(1, key.rows // 8)
    if op == "prefix_prefill":
        q_len = 1024 if key.rows == MAX_ROWS else q_len
    elif op == "shared_prefix_decode":
        # Rows of a level are those of all its sequences.
        group, q_len = key.rows // NUM_SEQS, 1
    elif "tree" not in key.flags:
        if key.rows == MIN_ROWS:
            q_len = 1
        elif max(key.head_dim, key.v_head_dim) > 256:
            group, q_len = key.rows, 1
    return Case(
        OP_KINDS[op],
        key.dtype,
        key.format,
        key.head_dim,
        group,
        q_len,
        key.page,
        v_head_dim=None if key.v_head_dim == key.head_dim and "shared" not in key.flags else key.v_head_dim,
        **{flag: True for flag in key.flags},
    )


def key_of_case(op: str, case: Case, num_seqs: int | None = None) -> Key:
    """The key of a case's call; rows of a cascade's level are those of all its sequences.

    Example:
        >>> from tkv.tune.cases import Case
        >>> key_of_case("prefix_prefill", Case("prefill_cached", q_len=1024)).name
        'd128 bf16 bf16 r128 p16'
    """
    flags = tuple(flag for flag in FLAGS if getattr(case, flag))
    v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
    rows = rows_class(rows_of_case(op, case, num_seqs))
    return Key(case.head_dim, v_head_dim, case.dtype, case.format, rows, page_class(case.page_size), flags)


def rows_of_case(op: str, case: Case, num_seqs: int | None = None) -> int:
    """Query rows x heads of a group that share their keys."""
    from tkv.tune.cases import NUM_SEQS

    q_len = min(case.q_len, MAX_SCORE_ROWS) if op == "key_scores" else case.q_len
    return q_len * case.group * ((num_seqs or NUM_SEQS) if op == "shared_prefix_decode" else 1)


def programs_of_case(op: str, case: Case, num_seqs: int, num_kv_heads: int) -> int:
    """`programs_of` a case's call."""
    return programs_of(op, num_seqs, num_kv_heads, rows_of_case(op, case, num_seqs), num_seqs * case.q_len * case.group)


def check_op(op: str) -> None:
    """Refuse the name of a function that has no tunables.

    Raises:
        UnsupportedError: with the names of those that have.
    """
    if op not in OP_KINDS:
        raise UnsupportedError(f"op: expected {', '.join(OP_KINDS)}, got {op!r}")


@lru_cache(maxsize=16)
def kernel_hash(op: str) -> str:
    """The sha256 of the source of a function's kernel and of all modules of `tkv.kernels` that it imports.

    Comments, docstrings and layout do not count. The files are parsed, not imported: it needs no Triton.

    Args:
        op: one of `OP_KINDS`.

    Returns:
        64 hexadecimal digits.

    Raises:
        UnsupportedError: an op without tunables.

    Example:
        >>> len(kernel_hash("paged_decode")), kernel_hash("paged_decode") == kernel_hash("key_scores")
        (64, False)
    """
    check_op(op)
    return source_hash(Path(__file__).resolve().parents[1] / "kernels", _KERNELS[OP_KINDS[op]])


def source_hash(folder: Path, module: str) -> str:
    """The hash of a module in a folder of kernels (``"attention"``, ``"tiles.codec"``) with the modules there that it imports."""
    trees: dict[str, ast.Module] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        if name not in trees and file.is_file():
            trees[name] = ast.parse(file.read_text(encoding="utf-8"))
            waiting += _imported(trees[name])
    text = "\n".join(f"{name}: {_normalised(tree)}" for name, tree in sorted(trees.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _imported(tree: ast.Module) -> list[str]:
    """Names of what may be modules of `tkv.kernels`, without that prefix."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name.removeprefix("tkv.kernels.") for name in found if name.startswith("tkv.kernels.")]


def _normalised(node: object) -> str:
    """The syntax tree as text that is the same in every version of Python: no empty fields, and no docstrings."""
    if isinstance(node, list):
        return f"[{', '.join(map(_normalised, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = dict(ast.iter_fields(node))
    body = parts.get("body")
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        if isinstance(body[0].value.value, str):
            parts["body"] = body[1:]
    kept = {name: value for name, value in sorted(parts.items()) if value not in (None, []) and name not in ("ctx", "kind", "type_comment")}
    return f"{type(node).__name__}({', '.join(f'{name}={_normalised(value)}' for name, value in kept.items())})"
