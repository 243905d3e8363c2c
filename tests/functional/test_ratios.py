"""Anchor ratios: values, who gets which gradient, and where a segment ends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.aggregate import sequence_mean
from areal_lab.functional.losses.policy import policy_loss
from areal_lab.functional.ratios import (
    segment_ratio,
    sequence_product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from areal_lab.functional.segments import Segments, packed_sequences, unmasked_runs
from areal_lab.functional.surrogates.clip import clip_surrogate
from tests.reference import surrogates as reference

RATIOS = [
    token_ratio,
    sequence_ratio,
    sequence_token_ratio,
    segment_ratio,
    sequence_product_ratio,
]
MASK = torch.tensor(
    [
        [1, 1, 0, 1, 1, 1],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ],
    dtype=torch.bool,
)


def draw(seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(MASK.shape, generator=generator, dtype=torch.double)
    return logprobs, logprobs + scale * torch.randn(
        MASK.shape, generator=generator, dtype=torch.double
    )


def expected_log_ratio(ratio, logprobs, anchor, mask):
    """By sequence, with loops."""
    rows = []
    for theta, before, chosen in zip(
        logprobs.tolist(), anchor.tolist(), mask.tolist(), strict=True
    ):
        members = [t for t, keep in enumerate(chosen) if keep]
        row = [0.0] * len(theta)
        for t in members:
            if ratio is token_ratio:
                row[t] = theta[t] - before[t]
            elif ratio is segment_ratio:
                (run,) = (run for run in reference.runs(chosen) if t in run)
                row[t] = reference.mean_log_ratio(theta, before, run)
            else:
                row[t] = reference.mean_log_ratio(theta, before, members)
                row[t] *= len(members) if ratio is sequence_product_ratio else 1
        rows.append(row)
    return torch.tensor(rows, dtype=torch.double)


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_equal_the_reference(ratio):
    logprobs, anchor = draw()
    policy = ratio(logprobs, anchor, MASK)
    torch.testing.assert_close(
        policy.log_ratio, expected_log_ratio(ratio, logprobs, anchor, MASK), rtol=1e-12, atol=1e-14
    )
    assert torch.equal(policy.logprobs, torch.where(MASK, logprobs, 0.0))
    assert torch.equal(policy.anchor_logprobs, torch.where(MASK, anchor, 0.0))


@pytest.mark.parametrize("ratio", RATIOS)
def test_packed_equals_padded(ratio):
    logprobs, anchor = draw()
    lengths = torch.tensor([6, 4, 1, 5])
    exists = torch.arange(6) < lengths[:, None]
    boundaries = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = ratio(logprobs[exists], anchor[exists], MASK[exists], packed_sequences(boundaries, 16))
    padded = ratio(logprobs, anchor, MASK & exists)
    torch.testing.assert_close(packed.log_ratio, padded.log_ratio[exists], rtol=1e-12, atol=1e-15)


@settings(max_examples=30)
@given(rows=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=5))
def test_segments_never_join_sequences(rows):
    """Packed, of any lengths and masks: a log ratio of 2^t tells which tokens are in a mean."""
    mask = torch.tensor([m for row in rows for m in row], dtype=torch.bool)
    boundaries = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    powers = 2.0 ** torch.arange(mask.numel(), dtype=torch.double)
    policy = segment_ratio(powers, 0 * powers, mask, packed_sequences(boundaries, mask.numel()))
    expected, start = [0.0] * mask.numel(), 0
    for row in rows:
        for run in reference.runs(row):
            for t in run:
                expected[start + t] = sum(2.0 ** (start + u) for u in run) / len(run)
        start += len(row)
    assert policy.log_ratio.tolist() == pytest.approx(expected)


def test_segments_by_hand():
    """One mask, as two sequences and as one: only the end of a sequence cuts the second run."""
    logprobs = torch.tensor([9, 1, 3, 9, 9, 1, 2, 6, 9], dtype=torch.double)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0]).bool()
    sequences = Segments(torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1]), 2)
    anchor = torch.zeros_like(logprobs)
    assert segment_ratio(logprobs, anchor, mask, sequences).log_ratio.tolist() == [
        *[0, 2, 2, 0, 0, 1],
        *[4, 4, 0],
    ]
    joined = segment_ratio(logprobs, anchor, mask).log_ratio
    assert joined.tolist() == [0, 2, 2, 0, 0, 3, 3, 3, 0]


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradient_of_each_ratio(ratio):
    """d log r_s / d log pi_t: 1/n within the segment, 1, or the identity."""
    logprobs, anchor = draw()
    row, mask = logprobs[0], MASK[0]
    jacobian = torch.func.jacrev(lambda lp: ratio(lp, anchor[0], mask).log_ratio)(row)
    expected = torch.zeros(6, 6, dtype=torch.double)
    for s in range(6):
        for t in range(6):
            if not (mask[s] and mask[t]):
                continue
            if ratio in (token_ratio, sequence_token_ratio):
                expected[s, t] = float(s == t)
            elif ratio is sequence_ratio:
                expected[s, t] = 1 / 5
            elif ratio is segment_ratio:
                expected[s, t] = ((s < 2) == (t < 2)) / (2 if s < 2 else 3)
            else:
                expected[s, t] = 1.0
    torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize("ratio", RATIOS)
def test_only_logprobs_get_a_gradient(ratio):
    logprobs, anchor = (x.requires_grad_() for x in map(torch.clone, draw()))
    policy = ratio(logprobs, anchor, MASK)
    (policy.log_ratio.sum() + policy.logprobs.sum()).backward()
    assert logprobs.grad is not None
    assert anchor.grad is None
    assert not policy.anchor_logprobs.requires_grad


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("ratio", RATIOS)
def test_masked_tokens_do_not_matter(ratio, garbage):
    def values_and_gradient(logprobs, anchor):
        leaf = logprobs.clone().requires_grad_()
        policy = ratio(leaf, anchor, MASK)
        weights = torch.arange(24.0, dtype=torch.double).reshape(4, 6)
        (weights * policy.log_ratio.exp()).sum().backward()
        return policy.log_ratio.detach(), leaf.grad

    logprobs, anchor = draw()
    clean = values_and_gradient(logprobs, anchor)
    for spoiled in (
        (torch.where(MASK, logprobs, garbage), anchor),
        (logprobs, torch.where(MASK, anchor, garbage)),
    ):
        for one, other in zip(clean, values_and_gradient(*spoiled), strict=True):
            assert torch.equal(one, other)
    assert (clean[0][~MASK] == 0).all()
    assert (clean[1][~MASK] == 0).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_row_without_tokens_has_ratio_one(ratio):
    logprobs, anchor = draw()
    assert (ratio(logprobs, anchor, MASK).log_ratio[2] == 0).all()
    assert (ratio(logprobs, anchor, torch.zeros_like(MASK)).log_ratio == 0).all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing_in_nothing_out(ratio, shape):
    empty = torch.zeros(shape)
    assert ratio(empty, empty, empty.bool()).log_ratio.shape == shape


@pytest.mark.parametrize("ratio", RATIOS)
def test_single_tokens_are_their_own_segments(ratio):
    logprobs, anchor = (x.reshape(24, 1) for x in draw())
    mask = MASK.reshape(24, 1)
    torch.testing.assert_close(
        ratio(logprobs, anchor, mask).log_ratio, token_ratio(logprobs, anchor, mask).log_ratio
    )


@pytest.mark.parametrize("ratio", RATIOS[:-1])
def test_a_constant_ratio_is_its_own_geometric_mean(ratio):
    logprobs, _ = draw()
    policy = ratio(logprobs, logprobs - 0.25, MASK)
    torch.testing.assert_close(policy.log_ratio, torch.where(MASK, 0.25, 0.0).double())


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_order_of_sequences_does_not_matter(ratio):
    logprobs, anchor = draw()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = ratio(logprobs[order], anchor[order], MASK[order])
    assert torch.equal(shuffled.log_ratio, ratio(logprobs, anchor, MASK).log_ratio[order])


@pytest.mark.parametrize("ratio", [sequence_ratio, sequence_token_ratio, sequence_product_ratio])
def test_the_order_of_tokens_does_not_matter_to_a_sequence(ratio):
    logprobs, anchor = draw()
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    shuffled = ratio(logprobs[:, order], anchor[:, order], MASK[:, order])
    torch.testing.assert_close(
        shuffled.log_ratio, ratio(logprobs, anchor, MASK).log_ratio[:, order]
    )


def loss_and_gradient(ratio, advantages, **numbers):
    logprobs, anchor = draw(scale=0.1)
    leaf = logprobs.clone().requires_grad_()
    result = policy_loss(
        leaf,
        anchor,
        anchor,
        advantages,
        MASK,
        ratio=ratio,
        surrogate=partial(clip_surrogate, **numbers),
        aggregate=sequence_mean,
    )
    return result.loss.detach(), torch.autograd.grad(result.loss, leaf)[0]


def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage():
    advantages = torch.tensor([1.5, 0.7, 1.0, -0.4], dtype=torch.double)[:, None].expand(4, 6)
    one = loss_and_gradient(sequence_ratio, advantages, clip_epsilon=0.01)
    other = loss_and_gradient(sequence_token_ratio, advantages, clip_epsilon=0.01)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert (one[1] != 0).any()
    assert (one[1][MASK] == 0).any()  # some sequences are clipped, one is not


def test_gspo_token_differs_where_tokens_have_their_own_advantages():
    generator = torch.Generator().manual_seed(4)
    advantages = torch.randn(MASK.shape, generator=generator, dtype=torch.double)
    value, gradient = loss_and_gradient(sequence_ratio, advantages, clip_epsilon=(1.0, 9.0))
    other_value, other = loss_and_gradient(
        sequence_token_ratio, advantages, clip_epsilon=(1.0, 9.0)
    )
    torch.testing.assert_close(value, other_value)
    # Summed over a sequence they agree; through s every token has the mean, else its own.
    torch.testing.assert_close(gradient.sum(1), other.sum(1))
    torch.testing.assert_close(gradient[3], gradient[3].mean().expand(6))
    torch.testing.assert_close(other[3] / advantages[3], (other[3] / advantages[3])[:1].expand(6))


def test_an_infinite_log_ratio_leaves_no_nan_in_gspo_token():
    logprobs = torch.tensor([-0.5, -float("inf"), -0.2], dtype=torch.double, requires_grad=True)
    anchor = torch.tensor([-0.4, -0.3, -0.2], dtype=torch.double)
    policy = sequence_token_ratio(logprobs, anchor, torch.tensor([True, True, True]))
    policy.log_ratio.exp().sum().backward()
    assert policy.log_ratio.exp().tolist() == [0, 0, 0]  # a sequence that cannot be
    assert logprobs.grad.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("ratio", RATIOS)
def test_bad_shapes_are_refused(ratio):
    logprobs, anchor = draw()
    with pytest.raises(ValueError, match=r"anchor_logprobs has shape \(4, 1\) and mask \(4, 6\)"):
        ratio(logprobs, anchor[:, :1], MASK)
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64"):
        ratio(logprobs, anchor, MASK.long())
    with pytest.raises(ValueError, match=r"sequences.ids has shape \(24,\)"):
        ratio(logprobs, anchor, MASK, Segments(torch.zeros(24, dtype=torch.long), 1))
    with pytest.raises(ValueError, match=r"sequences.count is -1"):
        ratio(logprobs, anchor, MASK, Segments(torch.zeros(4, 6, dtype=torch.long), -1))


def test_turns_make_up_for_holes_that_are_not_packed():
    """What a trainer packs: only the chosen tokens, and the turn of each."""
    logprobs, anchor = draw()
    whole = segment_ratio(logprobs, anchor, MASK)
    runs = unmasked_runs(MASK)
    rows = torch.arange(4)[:, None].expand(MASK.shape)
    packed = (logprobs[MASK], anchor[MASK], torch.ones(int(MASK.sum()), dtype=torch.bool))
    sequences = Segments(rows[MASK], 4)
    turns = Segments(runs.ids[MASK], runs.count)
    ours = segment_ratio(*packed, sequences, turns=turns)
    torch.testing.assert_close(ours.log_ratio, whole.log_ratio[MASK])
    assert ours.sequences is sequences
    blind = segment_ratio(*packed, sequences)
    torch.testing.assert_close(blind.log_ratio, sequence_ratio(*packed, sequences).log_ratio)
    assert not torch.allclose(blind.log_ratio, ours.log_ratio)


@pytest.mark.usefixtures("unchecked_shapes")
def test_turns_of_another_shape_are_refused():
    logprobs, anchor = draw()
    with pytest.raises(ValueError, match=r"ids has shape \(24,\)"):
        segment_ratio(logprobs, anchor, MASK, turns=Segments(torch.zeros(24).long(), 1))


@pytest.mark.parametrize("ratio", RATIOS)
def test_bfloat16_is_widened_before_it_is_subtracted(ratio):
    logprobs = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    anchor = torch.tensor([[-(2.0**-9)]]).bfloat16()
    policy = ratio(logprobs, anchor, torch.tensor([[True]]))
    assert policy.log_ratio.item() == -1 + 2.0**-9  # in bfloat16: -1
    assert policy.logprobs.dtype == policy.anchor_logprobs.dtype == torch.float32
    (gradient,) = torch.autograd.grad(policy.log_ratio.sum(), logprobs)
    assert gradient.dtype == torch.bfloat16
