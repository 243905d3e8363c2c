"""Losses of pairs: DPO, IPO, Bradley-Terry, and the log-probs of whole answers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional import Segments, packed_sequences
from areal_lab.functional.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    logistic_objective,
    preference_loss,
    sequence_logprob_means,
    sequence_logprob_sums,
    squared_objective,
)
from tests.reference import preference as reference

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e300]
LOSSES = {
    "dpo": partial(dpo_loss, beta=0.3, label_smoothing=0.1),
    "ipo": partial(ipo_loss, beta=0.2),
}


@pytest.fixture
def pairs():
    """l_c, l_r, f_c, f_r of five pairs."""
    generator = torch.Generator().manual_seed(0)
    return tuple(-3 * torch.rand(4, 5, generator=generator, dtype=torch.double))


def as_lists(tensors):
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dpo_equals_the_reference(pairs, beta, smoothing):
    ours = dpo_loss(*pairs, beta=beta, label_smoothing=smoothing)
    slow = reference.dpo_loss(*as_lists(pairs), beta=beta, smoothing=smoothing)
    assert ours.loss.item() == pytest.approx(slow, rel=1e-12)
    assert ours.preference.tolist() == pytest.approx(reference.preferences(*as_lists(pairs)))
    torch.testing.assert_close(ours.chosen_log_ratio, pairs[0] - pairs[2])
    torch.testing.assert_close(ours.rejected_log_ratio, pairs[1] - pairs[3])


@pytest.mark.parametrize("tau", [0.1, 0.7])
def test_ipo_equals_the_reference(pairs, tau):
    slow = reference.ipo_loss(*as_lists(pairs), tau=tau)
    assert ipo_loss(*pairs, beta=tau).loss.item() == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry_equals_the_reference(pairs, with_margin):
    chosen, rejected, margin, _ = pairs
    margins = -margin if with_margin else torch.zeros_like(margin)
    ours = bradley_terry_loss(chosen, rejected, margin=margins if with_margin else None)
    slow = reference.bradley_terry_loss(*as_lists((chosen, rejected, margins)))
    assert ours.loss.item() == pytest.approx(slow, rel=1e-12)
    torch.testing.assert_close(ours.preference, chosen - rejected)


def test_centered_scores_equal_the_reference(pairs):
    chosen, rejected, margin, _ = pairs
    ours = bradley_terry_loss(chosen, rejected, margin=-margin, center=0.3)
    slow = reference.bradley_terry_loss(*as_lists((chosen, rejected, -margin)), center=0.3)
    assert ours.loss.item() == pytest.approx(slow, rel=1e-12)
    moved = bradley_terry_loss(chosen + 1, rejected + 1, center=0.3)
    assert moved.preference == pytest.approx(chosen - rejected)
    assert moved.loss != bradley_terry_loss(chosen, rejected, center=0.3).loss
    with pytest.raises(ValueError, match="center is -1"):
        bradley_terry_loss(chosen, rejected, center=-1.0)


def test_an_undecided_policy_costs_log_two(pairs):
    chosen, rejected, *_ = pairs
    same = dpo_loss(chosen, rejected, chosen, rejected)
    assert same.loss.item() == pytest.approx(math.log(2))
    assert bradley_terry_loss(chosen, chosen).loss.item() == pytest.approx(math.log(2))


def test_dpo_is_bradley_terry_on_implicit_rewards(pairs):
    dpo = dpo_loss(*pairs, beta=0.4)
    rewards = 0.4 * dpo.chosen_log_ratio, 0.4 * dpo.rejected_log_ratio
    torch.testing.assert_close(dpo.loss, bradley_terry_loss(*rewards).loss)


def test_half_the_labels_smoothed_teaches_no_preference():
    h = torch.tensor([-2.0, 2.0], dtype=torch.double, requires_grad=True)
    loss = logistic_objective(h, beta=1.0, label_smoothing=0.5)
    assert loss[0] == loss[1]
    assert logistic_objective(torch.zeros(1), beta=1.0, label_smoothing=0.5).item() < loss[0]


def test_ipo_stops_at_its_distance_and_dpo_does_not():
    there = torch.tensor([5.0], dtype=torch.double)
    zeros = torch.zeros(1, dtype=torch.double)
    leaf = there.clone().requires_grad_()
    loss = ipo_loss(leaf, zeros, zeros, zeros, beta=0.1).loss
    assert loss.item() == 0
    assert torch.autograd.grad(loss, leaf)[0].item() == 0
    loss = dpo_loss(leaf, zeros, zeros, zeros, beta=0.1).loss
    assert torch.autograd.grad(loss, leaf)[0].item() < -0.03


@settings(max_examples=30)
@given(st.floats(-30, 30), st.floats(0.01, 2))
def test_swapping_the_answers_swaps_the_smoothing(h, beta):
    preference = torch.tensor([h], dtype=torch.double)
    one = logistic_objective(preference, beta=beta, label_smoothing=0.2)
    # sigma(-x) in place of sigma(x): a label is wrong with 1 - s.
    other = 0.8 * logistic_objective(preference, beta=beta) + 0.2 * logistic_objective(
        -preference, beta=beta
    )
    torch.testing.assert_close(one, other)


def test_a_constant_added_to_both_answers_changes_nothing(pairs):
    chosen, rejected, *references = pairs
    for loss in LOSSES.values():
        moved = loss(chosen + 7, rejected + 7, *references)
        torch.testing.assert_close(moved.loss, loss(*pairs).loss)


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_extreme_preferences_stay_finite(scale):
    h = torch.tensor([-scale, scale], requires_grad=True)
    loss = logistic_objective(h, beta=1.0)
    assert loss.tolist() == [scale, 0.0]
    loss.sum().backward()
    assert h.grad.tolist() == [-1.0, 0.0]


def test_an_own_objective_plugs_in(pairs):
    """SLiC's hinge: max(0, 1 - beta h)."""
    loss = preference_loss(*pairs, objective=lambda h: torch.relu(1 - 0.5 * h)).loss
    slow = [max(0.0, 1 - 0.5 * h) for h in reference.preferences(*as_lists(pairs))]
    assert loss.item() == pytest.approx(sum(slow) / len(slow))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_only_the_policy_gets_a_gradient(pairs, loss):
    leaves = [x.clone().requires_grad_() for x in pairs]
    result = loss(*leaves)
    result.loss.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, True, False, False]
    assert not any(diagnostic.requires_grad for diagnostic in result[1:])


def test_scores_get_a_gradient_and_margins_none(pairs):
    chosen, rejected, margin, _ = (x.clone().requires_grad_() for x in pairs)
    result = bradley_terry_loss(chosen, rejected, margin=margin)
    result.loss.backward()
    torch.testing.assert_close(chosen.grad, -rejected.grad)
    assert (chosen.grad < 0).all()
    assert margin.grad is None
    assert not result.preference.requires_grad


def test_the_chosen_answer_is_pushed_up_most_where_it_is_preferred_least(pairs):
    leaf = pairs[0].clone().requires_grad_()
    result = dpo_loss(leaf, *pairs[1:], beta=1.0)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    order = result.preference.argsort()
    assert (gradient[order].diff() > 0).all()
    torch.testing.assert_close(gradient, -torch.sigmoid(-result.preference) / 5)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_masked_pairs_do_not_matter(pairs, loss, which, garbage):
    mask = torch.tensor([True, False, True, True, False])
    spoiled = list(pairs)
    spoiled[which] = torch.where(mask, pairs[which], garbage)
    results = []
    for chosen, *rest in (pairs, spoiled):
        leaf = chosen.clone().requires_grad_()
        result = loss(leaf, *rest, mask=mask)
        results.append((result.loss.detach(), torch.autograd.grad(result.loss, leaf)[0]))
        assert all(diagnostic.isfinite().all() for diagnostic in result)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    kept = loss(*(x[mask] for x in pairs))
    torch.testing.assert_close(results[1][0], kept.loss)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(3))
def test_masked_scores_do_not_matter(pairs, which, garbage):
    mask = torch.tensor([True, False, True, True, False])
    inputs = list(pairs[:3])
    clean = bradley_terry_loss(*inputs[:2], margin=inputs[2], mask=mask)
    inputs[which] = torch.where(mask, inputs[which], garbage)
    leaf = inputs[0].clone().requires_grad_()
    result = bradley_terry_loss(leaf, inputs[1], margin=inputs[2], mask=mask)
    assert torch.equal(result.loss, clean.loss)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


def test_an_empty_mask_gives_zero_and_no_gradient(pairs):
    nothing = torch.zeros(5, dtype=torch.bool)
    for loss in (
        *LOSSES.values(),
        lambda c, r, *_, mask: bradley_terry_loss(c, r, mask=mask),
    ):
        leaf = pairs[0].clone().requires_grad_()
        result = loss(leaf, *pairs[1:], mask=nothing)
        assert result.loss == 0
        assert not torch.autograd.grad(result.loss, leaf)[0].any()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_splitting_a_batch_under_one_pair_count_changes_nothing(pairs, loss):
    parts = [
        loss(*(x[rows] for x in pairs), pair_count=5).loss for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(sum(parts), loss(*pairs).loss)


# --- log-probs of whole answers


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(4, 6, generator=generator, dtype=torch.double)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    mask[2] = False
    return logprobs, mask


def test_sums_and_means_equal_the_reference(tokens):
    logprobs, mask = tokens
    sums = reference.sequence_sums(logprobs.tolist(), mask.tolist())
    assert sequence_logprob_sums(logprobs, mask).tolist() == pytest.approx(sums)
    means = [s / max(1, n) for s, n in zip(sums, mask.sum(1).tolist(), strict=True)]
    assert sequence_logprob_means(logprobs, mask).tolist() == pytest.approx(means)
    assert sums[2] == means[2] == 0


def test_packed_answers_equal_padded_ones(tokens):
    logprobs, mask = tokens
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    packed = packed_sequences(cu_seqlens, int(mask.sum()))
    for function in (sequence_logprob_sums, sequence_logprob_means):
        ours = function(logprobs[mask], torch.ones(len(packed.ids), dtype=torch.bool), packed)
        assert torch.equal(ours, function(logprobs, mask))


def test_chosen_and_rejected_answers_in_one_packed_row(tokens):
    """One forward pass for all answers: the even ones were chosen."""
    logprobs, mask = tokens
    rows = Segments(torch.arange(4)[:, None].expand(4, 6), 4)
    sums = sequence_logprob_sums(logprobs, mask, rows)
    zeros = torch.zeros(2, dtype=torch.double)
    result = dpo_loss(sums[0::2], sums[1::2], zeros, zeros, beta=0.1)
    torch.testing.assert_close(result.preference, sums[0::2] - sums[1::2])


def test_sums_and_means_give_different_ipo_losses(tokens):
    """The caller's choice: it changes h, and with it how far it is from 1 / (2 beta)."""
    logprobs, mask = tokens
    losses = []
    for function in (sequence_logprob_sums, sequence_logprob_means):
        answers = function(logprobs, mask)
        zeros = torch.zeros(2, dtype=torch.double)
        losses.append(ipo_loss(answers[0::2], answers[1::2], zeros, zeros).loss.item())
    assert abs(losses[0] - losses[1]) > 0.1


def test_bfloat16_log_probs_are_summed_exactly():
    logprobs = torch.full((1, 1000), -1.0).bfloat16()
    assert sequence_logprob_sums(logprobs, torch.ones(1, 1000) > 0).tolist() == [-1000.0]


def test_a_small_preference_between_long_responses_keeps_its_sign():
    """-0.001, of one token; sums of 32k log-probs are 0.004 apart in float32."""
    generator = torch.Generator().manual_seed(0)
    reference = -2 * torch.rand(2, 32_768, generator=generator)
    policy = reference.clone()
    policy[0, 0] -= 0.001
    mask = torch.ones(2, 32_768, dtype=torch.bool)
    sums = [sequence_logprob_sums(x, mask) for x in (policy, reference)]
    h = dpo_loss(*sums[0], *sums[1]).preference
    assert h.item() == pytest.approx(-0.001, rel=1e-3)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_tokens_do_not_matter(tokens, garbage):
    logprobs, mask = tokens
    for function in (sequence_logprob_sums, sequence_logprob_means):
        leaf = torch.where(mask, logprobs, garbage).requires_grad_()
        answers = function(leaf, mask)
        assert torch.equal(answers, function(logprobs, mask))
        (gradient,) = torch.autograd.grad(answers.sum(), leaf)
        assert gradient.isfinite().all()
        assert not gradient[~mask].any()


# --- bad input


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected_logprobs": torch.zeros(3)}, r"rejected_logprobs has shape \(3,\) and chosen"),
        ({"reference_chosen_logprobs": torch.zeros(2, 1)}, r"reference_chosen_logprobs has shape"),
        ({"reference_rejected_logprobs": torch.zeros(())}, r"reference_rejected_logprobs has"),
        ({"mask": torch.ones(2)}, "mask has dtype torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask has shape \(3,\)"),
        ({"pair_count": 0}, "pair_count is 0"),
        ({"pair_count": math.nan}, "pair_count is nan"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"beta": math.nan}, "beta is nan"),
    ],
)
@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_bad_pairs_are_refused(loss, change, message):
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    inputs = {f"{name}_logprobs": torch.zeros(2) for name in names}
    with pytest.raises(ValueError, match=message):
        loss(**{**inputs, **change})


@pytest.mark.parametrize("smoothing", [-0.1, 0.6, math.nan])
def test_bad_smoothing_is_refused(smoothing):
    with pytest.raises(ValueError, match="label_smoothing is"):
        logistic_objective(torch.zeros(1), beta=1.0, label_smoothing=smoothing)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf])
def test_bad_distances_are_refused(beta):
    with pytest.raises(ValueError, match="beta is"):
        squared_objective(torch.zeros(1), beta=beta)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match=r"rejected_scores has shape \(2, 1\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"margin has shape \(1,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), margin=torch.zeros(1))
    with pytest.raises(ValueError, match="pair_count is -1"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), pair_count=-1)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_answers_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    for function in (sequence_logprob_sums, sequence_logprob_means):
        with pytest.raises(ValueError, match=r"logprobs has shape \(2, 1\)"):
            function(torch.zeros(2, 1), mask)
        with pytest.raises(ValueError, match="mask has dtype"):
            function(torch.zeros(2, 3), mask.float())
