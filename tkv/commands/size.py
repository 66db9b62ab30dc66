"""``tkv size``: bytes of a cache for a model."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass

from tkv.cache import KVCache
from tkv.commands import Commands
from tkv.commands.arguments import formats, model, positive
from tkv.commands.output import bytes_text, print_json, print_table
from tkv.errors import TkvError, UnsupportedError
from tkv.formats import parse_pair

COMMON = (
    "bf16",
    "fp8_e4m3/tensor",
    "fp8_e4m3/token_head",
    "int8/token_head",
    "int8/group32",
    "int4/token_head",
    "int4/group32",
    "int4/page_channel+int4/group32",
)


@dataclass(frozen=True)
class Geometry:
    """What of a model decides the size of its cache; `shared`: V is a view of the first dims of K."""

    layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    shared: bool = False
    window: int | None = None
    windowed_layers: int = 0

    def page_bytes(self, page_size: int, format: str) -> int:
        """Bytes of a page of all layers; static scales, which are there once whatever the number of pages, left out."""
        return self.layers * (self._layer_bytes(2, page_size, format) - self._layer_bytes(1, page_size, format))

    def nbytes(self, batch: int, tokens: int, page_size: int, format: str) -> int:
        """Bytes of all layers for so many sequences, where pages that left a window are given back."""
        pages = -(-tokens // page_size)
        counts = {pages: self.layers - self.windowed_layers}
        windowed = min(pages, self.window_pages(page_size) or pages)
        counts[windowed] = counts.get(windowed, 0) + self.windowed_layers
        return sum(layers * self._layer_bytes(batch * count, page_size, format) for count, layers in counts.items())

    def window_pages(self, page_size: int) -> int | None:
        """Pages over which the keys of a window can lie."""
        return None if self.window is None else -(-(self.window - 1) // page_size) + 1

    def _layer_bytes(self, num_pages: int, page_size: int, format: str) -> int:
        kinds = parse_pair(format.split("+") if "+" in format else format)
        shape = num_pages, page_size, self.num_kv_heads, self.head_dim
        if not self.shared:
            return KVCache.nbytes_for(*shape, kinds, v_head_dim=self.v_head_dim)
        if kinds[0] != kinds[1]:
            raise UnsupportedError(f"v: a view of K has its format, {kinds[0]}")
        scale = 1.0 if kinds[0].is_static else None
        try:
            cache = KVCache.empty(*shape, kinds, device="meta", k_scale=scale, v_scale=scale)
        except RuntimeError:
            raise UnsupportedError(f"{math.prod(shape):.1e} numbers of K are more than torch can count") from None
        v = cache.k[..., : kinds[0].stored_dim(self.v_head_dim)]
        return KVCache(cache.k, v, cache.k_scale, format=kinds).nbytes

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        text = f"{self.layers} layer{'s' * (self.layers > 1)}, {self.num_kv_heads} KV head{'s' * (self.num_kv_heads > 1)} of {dims}"
        return text + ", V a view of K" * self.shared


def add(commands: Commands) -> None:
    """Add the parser."""
    size = commands.add_parser(
        "size",
        help="bytes of a cache for a model",
        description="Bytes that a paged cache takes: of a token, of a page and in total, over all layers, scales included.",
        epilog="example: tkv size --model llama3-8b --tokens 32768 --batch 16 --format bf16 --format int4/group32",
    )
    size.add_argument("--model", type=model, help="a named model, such as llama3-8b; a wrong name lists those that there are")
    size.add_argument("--layers", type=positive, help="layers that have a cache (default: 1)")
    size.add_argument("--kv-heads", type=positive, help="KV heads of a layer")
    size.add_argument("--head-dim", type=positive, help="of K, and of V unless --v-head-dim says another")
    size.add_argument("--v-head-dim", type=positive, help="of V")
    size.add_argument("--shared", action="store_true", help="V is a view of the first dims of K, stored once (MLA)")
    size.add_argument("--window", type=positive, help="keys that a token sees; older pages are given back")
    size.add_argument("--format", type=formats, action="append", help="of the cache, or K+V; may be repeated (default: the common ones)")
    size.add_argument("--page-size", type=positive, default=16, help="tokens of a page (default: %(default)s)")
    size.add_argument("--tokens", type=positive, default=4096, help="tokens of a sequence (default: %(default)s)")
    size.add_argument("--batch", type=positive, default=1, help="sequences (default: %(default)s)")
    size.add_argument("--json", action="store_true", help="for machines; sizes in bytes")
    size.set_defaults(run=lambda args: _run(args, size))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    geometry = _geometry(args, parser)
    sizes: dict[str, tuple[int, int]] = {}
    refused: dict[str, str] = {}
    for kind in args.format or COMMON:
        try:
            sizes[kind] = geometry.page_bytes(args.page_size, kind), geometry.nbytes(args.batch, args.tokens, args.page_size, kind)
        except TkvError as error:
            if args.format:
                parser.error(f"argument --format: {kind} is not for this shape: {error}")
            refused[kind] = str(error)
    if not sizes:
        parser.error(f"no format has this shape: {next(iter(refused.values()))}")
    if args.json:
        rows = [
            {"format": kind, "bytes_per_token": page / args.page_size, "bytes_per_page": page, "total_bytes": total}
            for kind, (page, total) in sizes.items()
        ]
        cache = {"page_size": args.page_size, "tokens": args.tokens, "batch": args.batch}
        print_json({"model": args.model and args.model.name, **asdict(geometry), **cache, "formats": rows, "refused": refused})
        return 0
    name = f"{args.model.name}: " if args.model else ""
    print(f"{name}{geometry}; {args.batch:,} x {args.tokens:,} tokens in pages of {args.page_size}")
    if geometry.window is not None:
        held = geometry.window_pages(args.page_size)
        print(f"{geometry.windowed_layers} layers have a window of {geometry.window:,}: they keep at most {held:,} pages of a sequence")
    print()
    first, (_, largest) = next(iter(sizes.items()))
    print_table(
        [
            {
                "format": kind,
                "bytes a token": f"{page / args.page_size:,.1f}".removesuffix(".0"),
                "bytes a page": page,
                "total": bytes_text(total),
                f"of {first}": f"{total / largest:.1%}",
            }
            for kind, (page, total) in sizes.items()
        ],
        right=("bytes a token", "total", f"of {first}"),
    )
    for kind, reason in refused.items():
        print(f"not for this shape: {kind}: {reason}")
    return 0


def _geometry(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Geometry:
    model = args.model
    if model is not None:
        given = [name for name in ("layers", "kv_heads", "head_dim", "v_head_dim", "shared", "window") if getattr(args, name)]
        if given:
            parser.error(f"argument --{given[0].replace('_', '-')}: the model says it; leave it or --model out")
        windowed = model.layers if model.windowed_layers is None else model.windowed_layers
        dims = model.head_dim, model.v_head_dim or model.head_dim
        return Geometry(model.layers, model.num_kv_heads, *dims, model.shares_v, model.window, windowed if model.window else 0)
    if args.kv_heads is None or args.head_dim is None:
        parser.error("give --model, or --kv-heads and --head-dim")
    v_head_dim = args.head_dim if args.v_head_dim is None else args.v_head_dim
    if args.shared and v_head_dim > args.head_dim:
        parser.error(f"argument --v-head-dim: a view of K has at most its {args.head_dim} dims, got {v_head_dim}")
    layers = args.layers or 1
    return Geometry(layers, args.kv_heads, args.head_dim, v_head_dim, args.shared, args.window, layers if args.window else 0)
