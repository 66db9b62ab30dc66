"""Arguments that name a kernel: a public function, the shape and options of a call, and a config."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from tkv.commands.arguments import formats, positive
from tkv.errors import RangeError, UnsupportedError
from tkv.tune.keys import DTYPES, OP_KINDS, TUNABLES

if TYPE_CHECKING:
    from tkv.tune.cases import Case
    from tkv.tune.configs import AttentionConfig

# Public functions without tunables, and the cases that are their kernels.
OTHER_OPS = {
    "write_kv": "write",
    "gather_window": "gather",
    "copy_pages": "copy",
    "quantize_pages": "quantize",
    "compact_kv": "compact",
    "rotate_keys": "rotate",
    "merge_states": "merge",
}
# Which of them rotate on the way.
ROTATING = {("rope", "write_kv"), ("rope", "gather_window")}
INSPECTED_OPS = {**OP_KINDS, **OTHER_OPS}
# New rows of a sequence where none are named.
Q_LENS = {"prefix_prefill": 1024, "key_scores": 32}
FLAGS = {
    "window": "a sliding window, with sink tokens",
    "softcap": "capped scores",
    "alibi": "ALiBi",
    "rope": "rotation at read",
    "pinned": "pinned pages in front of an evicted middle",
    "tree": "a tree mask over the new tokens",
}


def add_call(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a call."""
    call = parser.add_argument_group("the call")
    call.add_argument("--head-dim", type=positive, default=128, help="of K, and of V by default (default: %(default)s)")
    call.add_argument("--v-head-dim", type=positive, help="of V")
    call.add_argument("--shared", action="store_true", help="V is a view of the first dims of K (MLA)")
    call.add_argument("--format", type=formats, default="bf16", help="of the cache, or K+V (default: %(default)s)")
    call.add_argument("--dtype", choices=sorted(DTYPES.values()), help="of q (default: that of a native cache, else bf16)")
    call.add_argument("--group", type=positive, default=8, help="query heads for each KV head (default: %(default)s)")
    call.add_argument("--q-len", type=positive, help="new tokens of a sequence (default: 1; prefix_prefill 1024, key_scores 32)")
    call.add_argument("--page-size", type=positive, default=16, help="tokens of a page (default: %(default)s)")
    for flag, meaning in FLAGS.items():
        call.add_argument(f"--{flag}", action="store_true", help=f"compile for {meaning}")


def case_of(op: str, args: argparse.Namespace) -> Case:
    """The case that the arguments describe.

    Raises:
        TkvError: no such call; the message says why.
    """
    import torch

    from tkv.cache import KVCache
    from tkv.formats import parse_pair
    from tkv.ops.attention import check_queries
    from tkv.tune.cases import DTYPES as TORCH_DTYPES
    from tkv.tune.cases import Case

    kinds = parse_pair(args.format.split("+") if "+" in args.format else args.format)
    if args.shared and (args.v_head_dim or 0) > args.head_dim:
        raise RangeError(f"--v-head-dim: a view of K has at most its {args.head_dim} dims, got {args.v_head_dim}")
    dtype = args.dtype or next((kind.dtype for kind in kinds if kind.is_native), "bf16")
    scales = [1.0 if kind.is_static else None for kind in kinds]
    cache = KVCache.empty(
        1, args.page_size, 1, args.head_dim, kinds, device="meta", v_head_dim=args.v_head_dim, k_scale=scales[0], v_scale=scales[1]
    )
    if args.shared:
        if kinds[0] != kinds[1]:
            raise UnsupportedError(f"--format: a view of K has its format, got {args.format}")
        KVCache(cache.k, cache.k[..., : kinds[0].stored_dim(cache.v_head_dim)], cache.k_scale, format=kinds)
    if op in OP_KINDS:
        check_queries(torch.empty(1, args.group, args.head_dim, dtype=TORCH_DTYPES[dtype], device="meta"), cache)
    elif op == "rotate_keys" and not cache.is_native:
        raise UnsupportedError(f"--format: rotate_keys is for native formats, got {args.format}")
    useless = [flag for flag in FLAGS if getattr(args, flag) and op not in OP_KINDS and (flag, op) not in ROTATING]
    if useless:
        raise UnsupportedError(f"--{useless[0]}: {op} does not have it")
    kind = "channels" if op == "quantize_pages" and cache.k_format.scale == "page_channel" else INSPECTED_OPS[op]
    flags = {flag: getattr(args, flag) for flag in (*FLAGS, "shared")}
    shape = args.head_dim, args.group, args.q_len or Q_LENS.get(op, 1), args.page_size
    v_head_dim = args.v_head_dim if args.shared or args.v_head_dim != args.head_dim else None
    return Case(kind, dtype, args.format, *shape, v_head_dim=v_head_dim, **flags)


def overrides(text: str) -> dict[str, int]:
    """Some fields of a config: ``"block_n=64,num_warps=8"``.

    Example:
        >>> overrides("block_n=64,num_warps=8")
        {'block_n': 64, 'num_warps': 8}
    """
    from tkv.tune.configs import TUNABLES

    found: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name.strip() not in TUNABLES:
            raise argparse.ArgumentTypeError(f"unknown tunable {name.strip()!r}; known are {', '.join(TUNABLES)}")
        if name.strip() in found:
            raise argparse.ArgumentTypeError(f"{name.strip()}: given twice")
        try:
            found[name.strip()] = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name.strip()}: expected an integer, got {value!r}") from None
    return found


def config_with(base: AttentionConfig, changes: dict[str, int], op: str) -> AttentionConfig:
    """A config with some fields changed.

    Raises:
        UnsupportedError, RangeError: a tunable that the function's kernel does not have, or a value that cannot be launched.
    """
    unknown = [name for name in changes if name not in TUNABLES[op]]
    if unknown:
        raise UnsupportedError(f"config: {op} does not have {unknown[0]}; its tunables are {', '.join(TUNABLES[op])}")
    return replace(base, **changes)


def config_text(config: AttentionConfig | None, op: str) -> str:
    """A config as `overrides` reads it.

    Example:
        >>> from tkv.tune.configs import AttentionConfig
        >>> config_text(AttentionConfig(16, 64, 4, 2), "paged_decode")
        'block_m=16,block_n=64,num_warps=4,num_stages=2'
    """
    if config is None:
        return ""
    values = {name: getattr(config, name) for name in TUNABLES[op]}
    return ",".join(f"{name}={value}" for name, value in values.items() if value is not None)
