"""Launch configurations, and the analytic defaults that exist for every shape on every architecture."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from tkv.errors import DTypeError, RangeError, UnsupportedError

# A sequence is split at least this finely, so that one long sequence in a large batch is spread over the GPU.
MAX_SPLIT_LEN = 4096
# Partial results of one call take at most this much memory; splits grow where they would take more.
MAX_SCRATCH_BYTES = 256 << 20
# Keys of a split where results must not depend on the rest of the batch.
DETERMINISTIC_SPLIT_LEN = 1024

# A level of a cascade costs a launch and a partial result: the keys that its largest group must save in return.
MIN_KEYS_SAVED = 1024


@dataclass(frozen=True)
class AttentionConfig:
    """How an attention function is launched.

    Args:
        block_m: query rows (query rows x heads of a group) of a tile, a power of two of at least 16.
        block_n: keys of a tile, a power of two of at least 16.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        split_len: keys of a split, a multiple of ``block_n``; None chooses by the size of the batch and the GPU.
        max_registers: of a thread, NVIDIA only; None leaves it to ptxas, which may spill a few to fit more programs on an SM.

    Example:
        >>> AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=3)
        AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=3, split_len=None, max_registers=None)
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_len: int | None = None
    max_registers: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("block_m", 16, 128), ("block_n", 16, 512), ("num_warps", 1, 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or value & (value - 1) or not low <= value <= high:
                raise RangeError(f"config.{name}: expected a power of two from {low} to {high}, got {value!r}")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise RangeError(f"config.num_stages: expected 1 to 8, got {self.num_stages!r}")
        split_len = self.split_len
        if split_len is not None and (not isinstance(split_len, int) or not 1 <= split_len < 2**31 or split_len % self.block_n):
            raise RangeError(f"config.split_len: expected a multiple of block_n ({self.block_n}) below 2^31 or None, got {split_len!r}")
        if self.max_registers is not None and (not isinstance(self.max_registers, int) or not 32 <= self.max_registers <= 255):
            raise RangeError(f"config.max_registers: expected 32 to 255 or None, got {self.max_registers!r}")

    @classmethod
    def of(cls, config: AttentionConfig | dict[str, Any]) -> AttentionConfig:
        """A config from itself or from a dict of its fields.

        Raises:
            UnsupportedError: a key that the kernel does not have, or a key is missing.
            RangeError: a value that cannot be launched.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, dict):
            raise DTypeError(f"config: expected a AttentionConfig or a dict of its fields, got {config!r}")
        unknown = sorted(set(config) - set(TUNABLES))
        missing = [name for name in TUNABLES if name not in ("split_len", "max_registers", *config)]
        if unknown or missing:
            raise UnsupportedError(f"config: tunables are {', '.join(TUNABLES)}; unknown {unknown}, missing {missing}")
        return cls(**config)


TUNABLES = tuple(field.name for field in fields(AttentionConfig))


def with_tree(config: AttentionConfig) -> AttentionConfig:
    """The config of a call with a tree mask, whose lookups for each row and key take the registers of a large tile.

    Example:
        >>> with_tree(AttentionConfig(128, 128, num_warps=8, num_stages=2))
        AttentionConfig(block_m=64, block_n=32, num_warps=8, num_stages=2, split_len=None, max_registers=None)
    """
    return replace(config, block_m=min(config.block_m, 64), block_n=min(config.block_n, 32))


def with_rope(config: AttentionConfig, head_dim: int) -> AttentionConfig:
    """The config of a call that rotates keys: both numbers of a pair, their cosine and sine take four times the registers of a tile.

    Example:
        >>> with_rope(AttentionConfig(128, 128, num_warps=4, num_stages=2), head_dim=128)
        AttentionConfig(block_m=32, block_n=16, num_warps=8, num_stages=1, split_len=None, max_registers=None)
    """
    block_m, block_n = (32, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 else (16, 16)
    return replace(config, block_m=min(config.block_m, block_m), block_n=min(config.block_n, block_n), num_warps=8, num_stages=1)


@lru_cache(maxsize=4096)
def default_decode(
    arch: str, head_dim: int, bits: int, compute_bits: int, rows: int, page_size: int, plain: bool, shared: bool = False,
    decoded: bool = False, by_page: bool = False, scaled: bool = False, lean: bool = False,
) -> AttentionConfig:
    """The analytic default of `paged_decode`.

    Args:
        arch: architecture, as in ``tkv.tune.arch.ARCHS``.
        head_dim: the larger head_dim of K and V.
        bits: of a stored number.
        compute_bits: of the dots' operands.
        rows: query rows x heads of a group.
        page_size: keys of a page.
        plain: no option changes scores or visibility.
        shared: V is a view of K, and loaded with it.
        decoded: scales are brought in before the products, in registers.
        by_page: keys have scales of pages, so that a tile within a page needs few of them.
        scaled: every token has scales of its own.
        lean: the compiler computes the address of a key once, as Triton does from 3.9 on, instead of in each warp that reads it.

    Returns:
        A config that fits the architecture's shared memory.

    Example:
        >>> default_decode("sm90", 128, bits=16, compute_bits=16, rows=8, page_size=16, plain=True).block_n
        128
    """
    wide = head_dim > 128
    if head_dim > 256:
        # The accumulator alone takes half of the registers of four warps.
        if arch.startswith("gfx") or compute_bits == 32:
            num_warps = 4 if arch.startswith("gfx9") and compute_bits == 16 else 8
            return AttentionConfig(16, 16, num_warps, num_stages=1, max_registers=None if arch.startswith("gfx") else 255)
        return AttentionConfig(16, 32, num_warps=8 if bits == 16 and not shared else 4, num_stages=2, max_registers=255)
    if arch.startswith("gfx9"):
        return AttentionConfig(16, 16 if wide and compute_bits == 32 else 32, num_warps=4, num_stages=1 if wide and decoded else 2)
    if arch.startswith("gfx"):
        # Half the registers of gfx9: smaller tiles, and no second one in flight. float32 has no matrix unit, so more warps share it.
        block_n = 32 if head_dim <= 64 and compute_bits == 16 else 16
        return AttentionConfig(block_m=16, block_n=block_n, num_warps=8 if compute_bits == 32 else 4, num_stages=1)
    if compute_bits == 32:
        # IEEE float32 products run on the scalar units and hold both operands in registers.
        return AttentionConfig(16, 16, num_warps=8 if head_dim > 64 else 4, num_stages=1 if wide else 2, max_registers=255)
    block_m = 16 if wide or rows <= 16 else 32
    if wide:
        block_n = 64 if bits <= 8 and not decoded and arch != "sm89" and not arch.startswith("sm12") else 32
    elif block_m == 32:
        block_n = 32 if bits <= 8 else 64
    elif bits <= 8:
        block_n = 128 if head_dim >= (128 if bits == 4 else 64) else 64
    else:
        # 128 keys of 128 native dims leave no registers for an option's arithmetic; a tile that lies in one page needs fewer instructions.
        block_n = 128 if head_dim == 64 or (head_dim == 128 and plain and page_size % 64) else 64
    num_warps = 4
    if by_page:
        block_n = min(block_n, max(32, page_size))
        num_warps = 2 if block_n == 32 and head_dim <= 128 else 4
    elif scaled and lean and plain and head_dim == 128 and block_m == 16 and bits <= 8 and arch in ("sm80", "sm90", "sm100", "sm103"):
        # What a key's scales need is computed by every warp and lane that holds some of its scores.
        num_warps = 2
        if decoded and arch != "sm80":
            block_n, num_warps = (32, 1) if arch == "sm90" else (64, 1)
    return AttentionConfig(block_m, block_n, num_warps, num_stages=2, max_registers=255)


@lru_cache(maxsize=4096)
def default_prefill(
    arch: str, head_dim: int, bits: int, compute_bits: int, rows: int, plain: bool, scaled: bool, decoded: bool = False
) -> AttentionConfig:
    """The analytic default of `prefix_prefill` and of the levels of `shared_prefix_decode`.

    Args:
        arch: architecture, as in ``tkv.tune.arch.ARCHS``.
        head_dim: the larger head_dim of K and V.
        bits: of a stored number.
        compute_bits: of the dots' operands.
        rows: query rows x heads of a group, of the longest sequence as far as hints say.
        plain: no option changes scores or visibility.
        scaled: every token has scales of its own.
        decoded: scales are brought in before the products, in registers.

    Returns:
        A config that fits the architecture's shared memory. Heads of a group are always rows of one tile: rows stand without gaps, so a
        tile of 128 rows has 128 / group tokens, reads its keys once for all heads, and no group leaves rows idle.

    Example:
        >>> default_prefill("sm90", 128, bits=16, compute_bits=16, rows=8192, plain=True, scaled=False).block_m
        128
    """
    block_m, block_n, num_warps = _prefill_tile(arch, head_dim, bits, compute_bits, scaled, decoded)
    if not plain and block_n > 64:
        # An option's arithmetic takes the registers of a wider tile.
        block_n = 64
    needed = max(16, 1 << (rows - 1).bit_length())
    if needed < block_m:
        # A tile of few rows has no work for more than four warps.
        block_m, block_n = needed, min(block_n, 64)
        num_warps = min(num_warps, 4) if compute_bits == 16 and needed <= 32 else num_warps
    if arch.startswith("gfx"):
        return AttentionConfig(block_m, block_n, num_warps, num_stages=1)
    return AttentionConfig(block_m, block_n, num_warps, num_stages=1 if compute_bits == 32 else 2, max_registers=255)


def _prefill_tile(arch: str, head_dim: int, bits: int, compute_bits: int, scaled: bool, decoded: bool) -> tuple[int, int, int]:
    """(block_m, block_n, warps): of those that compile without spills the one with fewest instructions, where there is one."""
    size, quantised = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2, bits <= 8
    if head_dim > 256:
        if arch.startswith("gfx9"):
            return (16, 16, 4) if quantised or compute_bits == 32 else (64, 16, 8)
        if arch.startswith("gfx") or compute_bits == 32:
            return 16, 16, 8
        return (16, 32, 8) if quantised else (32, 32, 8)
    if compute_bits == 32:
        if arch.startswith("gfx9") and decoded and size == 2:
            return 16, 16, 4
        # IEEE products hold both operands in registers.
        return [(32, 32, 8), (16, 16, 8), (16, 16, 8)][size] if quantised else [(32, 32, 8), (32, 32, 8), (16, 16, 8)][size]
    if arch.startswith("gfx9"):
        if bits == 4 or decoded:
            return [(64, 32, 8), (32, 32, 4), (32, 16, 4)][size]
        return [(128, 32 if scaled else 64, 8), (128, 32, 8), (64, 16 if scaled or arch == "gfx90a" else 32, 8)][size]
    if arch.startswith("gfx"):
        return [(64, 32, 8), (64, 16, 8), (32, 16, 8)][size]
    if quantised and size == 2 and head_dim & (head_dim - 1):
        # Rows in two runs have twice as many pieces.
        return 16, 32, 4
    # From sm90 on the matrix unit reads its second operand from shared memory; before, every warp unpacks all of a quantised tile.
    if arch == "sm90":
        return [(128, 64, 8), (128, 32, 8), (32, 32, 8)][size] if quantised else [(128, 128, 8), (128, 128, 8), (128, 32, 8)][size]
    if arch in ("sm100", "sm103"):
        if quantised:
            return [(128, 32, 8), (64, 32, 8), (32, 32, 8)][size] if scaled else [(128, 64, 8), (128, 32, 8), (32, 32, 8)][size]
        return [(128, 64, 8), (128, 64, 8), (64, 32, 8)][size]
    if quantised:
        return [(128, 64, 8), (32, 32 if decoded or bits == 4 else 64, 4), (32, 32, 4)][size]
    return [(128, 128, 8), (128, 32 if arch in ("sm86", "sm89") else 64, 8), (32, 32, 8)][size]


def deterministic_plan(config: AttentionConfig, max_keys: int, seq_bytes: int, scratch_bytes: int) -> tuple[int, int, int]:
    """Splits of one length, whatever the batch: enough for every sequence that the table can hold.

    Args:
        config: the launch's config.
        max_keys: visible keys of the longest sequence that the table can hold, hints aside.
        seq_bytes: of the partial results of one split of one sequence.
        scratch_bytes: that partial results of a launch may take.

    Returns:
        (splits, tiles of a split, sequences of a launch, at least 1).

    Example:
        >>> deterministic_plan(AttentionConfig(16, 64, 4, 2), max_keys=131072, seq_bytes=32 * 129 * 4, scratch_bytes=2**28)
        (128, 16, 127)
    """
    per_split = max(1, (config.split_len or DETERMINISTIC_SPLIT_LEN) // config.block_n)
    splits = max(1, -(-max_keys // (per_split * config.block_n)))
    return splits, per_split, max(1, scratch_bytes // (splits * max(seq_bytes, 1)))


def split_plan(
    config: AttentionConfig, num_programs: int, max_keys: int, num_sms: int, part_bytes: int, scratch_bytes: int = MAX_SCRATCH_BYTES
) -> tuple[int, int]:
    """How many splits to launch for, and the tiles of a split.

    A split's length is one for the whole batch; every sequence uses as many as its own length needs. It is chosen so that programs fill
    the GPU a few times, is at most `MAX_SPLIT_LEN`, and grows where the partial results would take more memory than they may.

    Args:
        config: the launch's config.
        num_programs: programs of a launch without splits.
        max_keys: visible keys of the longest sequence, as far as hints say.
        num_sms: of the GPU.
        part_bytes: of the partial results of one split of every sequence.
        scratch_bytes: that partial results may take.

    Returns:
        (splits, tiles of a split); splits is 1 where partial results are not needed.

    Example:
        >>> config = AttentionConfig(16, 64, 4, 2)
        >>> split_plan(config, num_programs=8, max_keys=32768, num_sms=132, part_bytes=4096)
        (64, 8)
    """
    tiles = -(-max_keys // config.block_n)
    if config.split_len is not None:
        per_split = config.split_len // config.block_n
    else:
        wanted = max(1, -(-4 * num_sms // num_programs))
        per_split = min(max(-(-tiles // wanted), -(-256 // config.block_n)), MAX_SPLIT_LEN // config.block_n)
    splits = min(max(1, -(-tiles // per_split)), max(1, scratch_bytes // max(part_bytes, 1)), 65535)
    return splits, max(per_split, 1)
