"""merge_states joins partial results as if their keys had been one set."""

import pytest
import torch
from caches import poison_
from hypothesis import given
from hypothesis import strategies as st
from problems import effort, test_device

import tkv
from tkv import reference

DEVICE = test_device()
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def states(parts, shape, dim, dtype=torch.float32, spread=3.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    outs, lses = torch.randn(parts, *shape, dim, generator=rng).to(dtype), torch.randn(parts, *shape, generator=rng) * spread
    return outs.to(DEVICE), lses.to(DEVICE)


def check(outs, lses):
    """Merge, compare with the reference, give (out, lse)."""
    stack = [torch.stack(list(t)) for t in (outs, lses)]
    ref, ref_lse = (t.cpu() for t in reference.merge_states(*stack))
    size, _ = (t.cpu() for t in reference.merge_states(stack[0].double().abs(), stack[1]))
    out, lse = tkv.merge_states(outs, lses)
    assert out.dtype == stack[0].dtype and lse.dtype == torch.float32
    assert out.shape == ref.shape and lse.shape == ref_lse.shape
    error = (out.cpu().double() - ref).abs()
    # Weights are exp of float32 differences of LSEs, which are right to a step of the LSE itself.
    step = 2.0**-23 * stack[1].cpu().double().masked_fill(stack[1].cpu().isinf(), 0.0).abs().amax(0)[..., None]
    assert bool((error <= (1e-6 + ROUNDING[out.dtype] + step) * size + (2.0**-24 if out.dtype == torch.float16 else 0.0)).all())
    empty = ref_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    error = (lse.cpu().double() - ref_lse).masked_fill(empty, 0.0).abs()
    assert bool((error <= 1e-6 + 2.0**-22 * ref_lse.masked_fill(empty, 0.0).abs()).all())
    return out, lse


@effort(25)
@given(
    parts=st.one_of(st.integers(1, 5), st.sampled_from([16, 17, 40])),
    shape=st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2)]),
    dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128, 256, 512])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    spread=st.sampled_from([0.0, 3.0, 80.0, 1e5]),
    empty=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_any_states_agree_with_the_reference(parts, shape, dim, dtype, spread, empty, seed):
    if not shape:
        shape = (1,)
    outs, lses = states(parts, shape, dim, dtype, spread, seed)
    none = torch.rand(lses.shape, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE) < empty
    outs, lses = outs.masked_fill(none[..., None], torch.nan), lses.masked_fill(none, -torch.inf)
    before = outs.clone(), lses.clone()
    check(outs, lses)
    torch.testing.assert_close((outs, lses), before, rtol=0, atol=0, equal_nan=True)


def test_two_halves_of_equal_weight_give_their_mean():
    outs = torch.tensor([[[1.0] * 16], [[3.0] * 16]], device=DEVICE)
    out, lse = tkv.merge_states(outs, torch.zeros(2, 1, device=DEVICE))
    assert out.tolist() == [[2.0] * 16] and lse.item() == pytest.approx(0.693147, abs=1e-6)


def test_one_part_is_returned_as_it_is():
    outs, lses = states(1, (3, 2), 80)
    out, lse = tkv.merge_states(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_lists_and_stacks_are_the_same():
    outs, lses = states(3, (2, 4), 48, torch.float16)
    a, b, c = tkv.merge_states(outs, lses), tkv.merge_states(list(outs), list(lses)), tkv.merge_states(tuple(outs), list(lses))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and torch.equal(a[0], c[0]) and torch.equal(a[1], c[1])


def test_the_order_of_parts_and_their_grouping_do_not_matter():
    outs, lses = states(4, (5,), 32)
    whole = check(outs, lses)
    turned = check(outs.flip(0), lses.flip(0))
    halves = [tkv.merge_states(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
    nested = check([half[0] for half in halves], [half[1] for half in halves])
    for other in (turned, nested):
        torch.testing.assert_close(other, whole, rtol=1e-5, atol=1e-6)


def test_views_are_read_with_their_strides():
    wide = poison_(torch.empty(3, 4, 7, 96, device=DEVICE))
    outs, lses = states(3, (4, 5), 80)
    wide[:, :, 1:6, 8:88] = outs
    spread = poison_(torch.empty(4, 5, 3, 2, device=DEVICE))
    spread[..., 1] = lses.permute(1, 2, 0)
    a = tkv.merge_states(wide[:, :, 1:6, 8:88], spread[..., 1].permute(2, 0, 1))
    b = tkv.merge_states(outs, lses)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    turned = outs.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert turned.stride(-1) != 1 and torch.equal(tkv.merge_states(turned, lses)[0], b[0])


def test_no_rows_are_fine():
    out, lse = tkv.merge_states(torch.zeros(2, 0, 16, device=DEVICE), torch.zeros(2, 0, device=DEVICE))
    assert out.shape == (0, 16) and lse.shape == (0,)
