"""Magnitudes of the numbers that share a scale, in constant memory: the largest of them, and a histogram.

Bins are those of a float with 8 bits of mantissa: their centres are ``2^e (1 + j / 256)``, 256 to an octave, so a magnitude is known to
1/512 of itself, and one that is a bfloat16 exactly. The 16 octaves below the smallest power of two above the largest magnitude are
kept; what is smaller counts in one bin. When a larger magnitude comes, the octaves move up and the lowest join that bin, so the histogram
depends on what was seen alone, not on its order.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from tkv.errors import UnsupportedError
from tkv.formats import KVFormat

BINS_PER_OCTAVE = 256
OCTAVES = 16
# The last bin of the window; bin 0 holds all that is smaller.
NUM_BINS = BINS_PER_OCTAVE * OCTAVES
CLIPS_PER_OCTAVE = 256
CLIP_OCTAVES = 8
# Numbers of a batch that are looked at at once: bounds the scratch.
CHUNK = 2**21
MIN_SCALE, MAX_SCALE = 1e-30, 1e30
# The dimensions of [num_tokens, num_kv_heads, head_dim] that share a scale.
_SHARED: dict[str | None, tuple[int, ...]] = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}
_MANTISSA_SHIFT = 15


class Magnitudes:
    """What was seen of the numbers of K or V of one layer, for each number of the scale.

    Args:
        kind: the format, one with static scales.
        num_kv_heads, head_dim: the shape of a token.
        histogram: whether to count magnitudes, or to keep the largest alone.
        device: where the state lives.
    """

    def __init__(self, kind: KVFormat, num_kv_heads: int, head_dim: int, histogram: bool, device: torch.device) -> None:
        self.kind, self.num_kv_heads, self.head_dim = kind, num_kv_heads, head_dim
        self.shared = _SHARED[kind.scale]
        self.shape = torch.Size(size for dim, size in ((1, num_kv_heads), (2, head_dim)) if dim not in self.shared)
        groups = self.shape.numel()
        # -1 until a finite number was seen.
        self.absmax = torch.full((groups,), -1.0, device=device)
        # A channel has one number a token, so 2^31 of them are tokens enough; a tensor has thousands.
        count = torch.int32 if kind.scale == "channel" else torch.int64
        self.counts = torch.zeros(groups, NUM_BINS + 1, dtype=count, device=device) if histogram else None

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Count the finite numbers of ``[num_tokens, num_kv_heads, head_dim]``, of tokens that `mask` has if it is given."""
        rows = max(1, CHUNK // (self.num_kv_heads * self.head_dim))
        for start in range(0, len(x), rows):
            part = x[start : start + rows].to(self.absmax.device).float().abs()
            seen = part.isfinite()
            if mask is not None:
                seen &= mask[start : start + rows, None, None].to(seen.device)
            self._observe(part, seen)

    def _observe(self, magnitude: torch.Tensor, seen: torch.Tensor) -> None:
        largest = magnitude.where(seen, -1.0).amax(self.shared).reshape(-1)
        before, self.absmax = self.absmax, torch.maximum(self.absmax, largest)
        if self.counts is None:
            return
        tops = _window_top(self.absmax)
        self.counts = _moved_up(self.counts, tops - _window_top(before))
        group = torch.arange(len(tops), device=tops.device).view(*self.shape, *[1] * (2 - len(self.shape)))
        bins = (_key(magnitude.where(seen, 0.0)) - (tops[group] - NUM_BINS) + 1).clamp_(min=0)
        index = group * (NUM_BINS + 1) + bins
        weight = seen.to(self.counts.dtype)
        self.counts.view(-1).scatter_add_(0, index.reshape(-1), weight.reshape(-1))

    def saw_nothing(self) -> bool:
        """Whether no finite number was seen at all. Waits for the device."""
        return bool((self.absmax < 0).all())

    def scale(self, method: str, percentile: float) -> torch.Tensor:
        """The scale by a method, in the format's shape; 1.0 where nothing but zeros was seen."""
        if method == "absmax":
            clip = self.absmax.double()
        elif self.counts is None:
            raise UnsupportedError(f"method: {method!r} needs the counts of magnitudes, which were not kept")
        else:
            clip = self._percentile(self.counts, percentile) if method == "percentile" else self._least_error(self.counts)
        scale = (clip / largest_code(self.kind)).clamp(MIN_SCALE, MAX_SCALE).float()
        return scale.where(self.absmax > 0, 1.0).reshape(self.shape)

    def _percentile(self, counts: torch.Tensor, percentile: float) -> torch.Tensor:
        """The centre of the bin that holds the magnitude which that share of magnitudes does not pass."""
        total = counts.sum(1, dtype=torch.int64)
        rank = (total.double() * percentile / 100).ceil().clamp(min=1)
        cumulative = counts.cumsum(1, dtype=torch.int64)
        bins = (cumulative < rank[:, None]).sum(1)
        keys = (_window_top(self.absmax) - NUM_BINS - 1 + bins).clamp(min=0)
        centre = (keys.int() << _MANTISSA_SHIFT).view(torch.float32)
        return torch.minimum(centre, self.absmax).where(rank < total, self.absmax).double()

    def _least_error(self, counts: torch.Tensor) -> torch.Tensor:
        """The clipping magnitude with the least sum of squared errors; the largest magnitude if no smaller one is better."""
        counts = counts.float()
        clips, errors = _error_table(self.kind)
        errors = errors.to(counts.device)
        # 2^(top / 256 - 127) as a float64, which has room for the power of two above the largest float32.
        top = torch.exp2(_window_top(self.absmax).double() / BINS_PER_OCTAVE - 127)
        unit = (self.absmax.double() / top).clamp(min=2.0**-OCTAVES).float()
        best, at = (counts @ errors).min(1)
        # The largest magnitude is known exactly, and does not saturate where its bin's centre would.
        centres = torch.minimum(_centres().to(unit.device), unit[:, None])
        unclipped = (counts * _squared_errors(centres, unit[:, None] / largest_code(self.kind), self.kind)).sum(1)
        return torch.where(unclipped <= best, unit, clips.to(at.device)[at]).double() * top


def largest_code(kind: KVFormat) -> float:
    """The largest number that a format of 8 bits stores, in units of its scale."""
    dtype = kind.torch_dtype
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def _key(magnitude: torch.Tensor) -> torch.Tensor:
    """The number of the nearest bin centre, counted from zero on: a float32's bits without those of the fine mantissa."""
    return ((magnitude.contiguous().view(torch.int32) + (1 << (_MANTISSA_SHIFT - 1))) >> _MANTISSA_SHIFT).long()


def _window_top(absmax: torch.Tensor) -> torch.Tensor:
    """The first key after the octave of the largest magnitude's bin."""
    return (_key(absmax.clamp(min=0.0)) // BINS_PER_OCTAVE + 1) * BINS_PER_OCTAVE


def _moved_up(counts: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Counts of a window that begins ``shift`` bins higher; those below it join bin 0."""
    # On a GPU, to ask whether anything moves would cost a wait.
    if counts.device.type == "cpu" and not shift.any():
        return counts
    source = torch.arange(1, NUM_BINS + 1, device=counts.device) + shift[:, None]
    kept = counts.gather(1, source.clamp(max=NUM_BINS)).masked_fill(source > NUM_BINS, 0)
    below = (counts.sum(1, keepdim=True) - kept.sum(1, keepdim=True)).to(counts.dtype)
    return torch.cat([below, kept], 1)


@lru_cache(maxsize=1)
def _centres() -> torch.Tensor:
    """``[NUM_BINS + 1]`` centres of the bins in units of the window's top; 0 for those below the window."""
    index = torch.arange(NUM_BINS)
    octave = torch.exp2(index.div(BINS_PER_OCTAVE, rounding_mode="floor").float() - OCTAVES)
    return torch.cat([torch.zeros(1), octave * (1 + index % BINS_PER_OCTAVE / BINS_PER_OCTAVE)])


@lru_cache(maxsize=8)
def _error_table(kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipping magnitudes in units of the window's top, and the squared error of each bin's centre under each of them."""
    clips = torch.exp2(torch.arange(CLIPS_PER_OCTAVE * CLIP_OCTAVES + 1) / -CLIPS_PER_OCTAVE)
    errors = [_squared_errors(_centres()[:, None], part / largest_code(kind), kind) for part in clips.split(CLIPS_PER_OCTAVE)]
    return clips, torch.cat(errors, 1)


def _squared_errors(x: torch.Tensor, scale: torch.Tensor, kind: KVFormat) -> torch.Tensor:
    largest = largest_code(kind)
    code = (x / scale).clamp(-largest, largest)
    code = code.to(kind.torch_dtype).float() if kind.torch_dtype.is_floating_point else code.round()
    return (x - code * scale).square()
