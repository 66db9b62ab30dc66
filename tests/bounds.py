"""How far a result may be from the reference: the library's contract of numbers, as assertions."""

import torch

# Of |out - ref| in units of sum p |v|, by the dtype of q: P is rounded to the dots' dtype and out to its own.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Of a score, in units of what its terms add up to: some roundings of float32 sums.
UNIT = 2.0**-20
# The same where a float16 or bfloat16 q is multiplied with scales and rounded before the product.
ROUNDED_UNIT = {torch.float32: UNIT, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Where relative errors end: half a step of the smallest numbers of out's dtype, with room for one rounding in front of it.
SMALLEST = {torch.float32: 1e-37, torch.float16: 2.0**-24, torch.bfloat16: 1e-37}
# Half a step of a lifted float16 probability that is subnormal, and the unit of V's scales may be twice the largest of them.
LEAST_P = 2.0**-39


def assert_close_to_reference(out, lse, truth, q_dtype, v_size=0.0, q_is_rounded=False):
    """Assert the bound of every row: |out - ref| <= (bound + u X) sum p |v|, and of its LSE.

    The probabilities' dtype does not enter the LSE: scores and their sum are float32. What is left is the error of the scores, at most
    u X because the LSE moves by no more than its largest term does; of the sum and the logarithm, 1e-5 with room; and that the LSE is
    itself a float32 number.

    `truth` is what `tkv.reference.paged_decode` returns. `v_size`, keys times the largest |v| of each sequence, is for probabilities in
    float16, which round to nothing below about 2^-39: seen only where all keys of more weight have a zero in that dimension.
    `q_is_rounded`: the format's scales are multiplied into q before it is rounded.
    Gives the largest error of out in units of what is allowed.
    """
    ref, ref_lse, out_size, score_size = (t.cpu() for t in truth)
    got = out.detach().cpu().double()
    assert got.shape == ref.shape, f"out: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert not got.isnan().any(), f"out: NaN at {_first(got.isnan())}"
    # A row that sees nothing is zeros, not small numbers.
    unit = ROUNDED_UNIT[q_dtype] if q_is_rounded else UNIT
    allowed = (BOUND[q_dtype] + unit * score_size[..., None]) * out_size + (SMALLEST[out.dtype] + LEAST_P * v_size) * (out_size > 0)
    error = (got - ref).abs()
    wrong = error > allowed
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"out{at}: got {got[at].item():.8g}, expected {ref[at].item():.8g}; "
            f"error {error[at].item():.3g}, allowed {allowed[at].item():.3g} "
            f"(sum p |v| {out_size[at].item():.3g}, X {score_size[at[:-1]].item():.3g}); {int(wrong.sum())} of {wrong.numel()} numbers"
        )
    if lse is not None:
        assert_close_lse(lse, ref_lse, score_size, unit)
    return (error / allowed.clamp_min(1e-300)).max().item() if error.numel() else 0.0


def assert_close_lse(lse, ref_lse, score_size, unit=UNIT):
    """Assert the LSE of every row; -inf exactly where nothing is visible."""
    assert lse.dtype == torch.float32
    lse, ref_lse, score_size = lse.detach().cpu().double(), ref_lse.cpu(), score_size.cpu()
    assert lse.shape == ref_lse.shape, f"lse: shape {tuple(lse.shape)}, expected {tuple(ref_lse.shape)}"
    assert not lse.isnan().any(), f"lse: NaN at {_first(lse.isnan())}"
    empty = ref_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), f"lse: -inf in the wrong place, first at {_first((lse == -torch.inf) != empty)}"
    allowed = 1e-5 + unit * score_size + 2.0**-23 * ref_lse.abs().masked_fill(empty, 0.0)
    error = (lse - ref_lse).abs().masked_fill(empty, 0.0)
    wrong = error > allowed
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"lse{at}: got {lse[at].item():.9g}, expected {ref_lse[at].item():.9g}; "
            f"error {error[at].item():.3g}, allowed {allowed[at].item():.3g}"
        )


def _first(mask):
    return tuple(mask.nonzero()[0].tolist())
