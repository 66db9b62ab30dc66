"""Online softmax and the merge of partial results: s = ln sum e^x, v = sum e^(x - s) v.

A row's scores are kept *raw*: `x * scale` is the score in units of log2, with one positive scale a row. Raw maxima are exact, and
`shift_of` them is rounded down, so that a lifted probability is at most 2^LIFT, however large the scores are.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def anchor_of(best):
    """A maximum that is safe to subtract: 0 where nothing has been seen."""
    return tl.where(best == -float("inf"), 0.0, best)


@triton.jit
def shift_of(best, scale, LIFT: tl.constexpr):
    """What is added to scores in units of log2 before they are exponents: LIFT - best, a little less where rounding could lift the sum."""
    most = anchor_of(best) * scale
    return LIFT - (most + tl.abs(most) * 2.384185791015625e-07)


@triton.jit
def softmax_step(x, best, total, scale, LIFT: tl.constexpr):
    """Probabilities of a tile of raw scores, times 2^LIFT, and the state of the rows after it.

    Returns (p [BLOCK_M, BLOCK_N], decay of what was summed before, new best, new total).
    """
    new_best = tl.maximum(best, tl.max(x, axis=1))
    shift = shift_of(new_best, scale, LIFT)
    p = tl.exp2(x * scale[:, None] + shift[:, None])
    decay = tl.where(best == -float("inf"), 0.0, tl.exp2(shift - shift_of(best, scale, LIFT)))
    return p, decay, new_best, total * decay + tl.sum(p, axis=1)


@triton.jit
def lse_of(best, total, scale, LIFT: tl.constexpr):
    """Natural-log LSE of rows, -inf where nothing was seen."""
    # NaN is not 0: what is not finite shows.
    seen = total != 0
    return tl.where(seen, (tl.log2(tl.where(seen, total, 1.0)) - shift_of(best, scale, LIFT)) * LN_2, -float("inf"))


@triton.jit
def add_sink(lse, sink_logit):
    """LSE with one more term e^sink_logit, and the factor that the output shrinks by."""
    best = tl.maximum(lse, sink_logit)
    anchor = anchor_of(best)
    joined = anchor + tl.log(tl.exp(lse - anchor) + tl.exp(sink_logit - anchor))
    joined = tl.where(best == -float("inf"), best, joined)
    return joined, tl.exp(lse - anchor_of(joined))


@triton.jit
def merge_step(out_ptrs, in_dims, lse, best, total, acc):
    """Add parts, lse [BLOCK_PARTS] and out [BLOCK_PARTS, BLOCK_D], to a merged state. An empty part's out is not loaded."""
    new_best = tl.maximum(best, tl.max(lse, axis=0))
    anchor = anchor_of(new_best)
    weights = tl.exp(lse - anchor)
    mask = (weights > 0)[:, None] & in_dims[None, :]
    outs = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    decay = tl.exp(best - anchor)
    return new_best, total * decay + tl.sum(weights, axis=0), acc * decay + tl.sum(weights[:, None] * outs, axis=0)
