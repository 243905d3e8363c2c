"""KL estimators in value and in gradient, in the loss and in the reward.

Expectations are exact: sums over a vocabulary of five, no sampling.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional import Segments, sequence_mean, token_mean
from areal_lab.functional.advantages.kl_rewards import adaptive_kl_coefficient, kl_shaped_rewards
from areal_lab.functional.advantages.returns import terminal_rewards
from areal_lab.functional.divergences.kl import (
    absolute,
    clamped,
    full_kl,
    k1,
    k2,
    k3,
    kl_loss,
    kl_penalty,
    straight_through,
)
from tests.reference import formulas
from tests.reference import kl as reference

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "absolute": absolute}
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e300]


@pytest.fixture
def batch():
    """log pi_theta, log pi_ref, log pi_s, mask; one sequence is shorter, one without a token."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(4, 6, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0).abs() - 0.1
    mask = torch.rand(4, 6, generator=generator) > 0.3
    mask[3] = False
    mask[1, 4:] = False
    return logprobs, logprobs + normal(0.5), logprobs + normal(0.3), mask


class Vocabulary:
    """A policy, a reference and a sampler over five tokens, by their logits."""

    theta = torch.tensor([0.3, -0.8, 1.1, 0.0, -1.5], dtype=torch.double)
    ref = torch.tensor([-0.5, 0.2, 0.9, -1.0, 0.7], dtype=torch.double)
    sampler = torch.tensor([0.1, 0.4, -0.3, 0.8, -0.2], dtype=torch.double)
    p = formulas.softmax(theta.tolist())
    q = formulas.softmax(ref.tolist())


def expected(estimator, *, drawn_from=Vocabulary.theta, weighted=False):
    """Exact mean over tokens of the estimate, and of its gradient with respect to the logits."""
    probabilities = drawn_from.softmax(-1)
    sampling = drawn_from.log_softmax(-1) if weighted else None

    def mean(logits):
        penalty = kl_penalty(
            logits.log_softmax(-1),
            Vocabulary.ref.log_softmax(-1),
            torch.ones(5, dtype=torch.bool),
            estimator=estimator,
            sampling_logprobs=sampling,
        )
        return (probabilities * penalty).sum()

    logits = Vocabulary.theta.clone().requires_grad_()
    value = mean(logits)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient.tolist()


REVERSE = reference.kl(Vocabulary.p, Vocabulary.q)
REVERSE_GRADIENT = reference.reverse_kl_gradient(Vocabulary.p, Vocabulary.q)
FORWARD_GRADIENT = reference.forward_kl_gradient(Vocabulary.p, Vocabulary.q)
L1_GRADIENT = reference.l1_gradient(Vocabulary.p, Vocabulary.q)

VALUES = {"k1": REVERSE, "k3": REVERSE, "straight-through": REVERSE}
GRADIENTS = {
    "k1": [0.0] * 5,
    "k2": REVERSE_GRADIENT,
    "k3": FORWARD_GRADIENT,
    "absolute": L1_GRADIENT,
    "straight-through": REVERSE_GRADIENT,
}
WITH_STRAIGHT_THROUGH = {**ESTIMATORS, "straight-through": straight_through()}


@pytest.mark.parametrize("name", VALUES)
def test_the_mean_of_an_unbiased_estimator_is_the_kl(name):
    value, _ = expected(WITH_STRAIGHT_THROUGH[name])
    assert value == pytest.approx(REVERSE, rel=1e-12)


@pytest.mark.parametrize("name", GRADIENTS)
def test_whose_gradient_an_estimator_has_on_average(name):
    """k2: KL(theta || ref). k3: KL(ref || theta). k1: nothing. |x|: the L1 distance."""
    _, gradient = expected(WITH_STRAIGHT_THROUGH[name])
    assert gradient == pytest.approx(GRADIENTS[name], rel=1e-12, abs=1e-14)


def test_the_gradients_of_k2_and_k3_are_not_close():
    """Else the test above would say little."""
    gap = math.dist(REVERSE_GRADIENT, FORWARD_GRADIENT)
    assert gap > 0.3 * math.hypot(*REVERSE_GRADIENT)


def test_the_value_of_k2_is_biased_and_absolute_is_above():
    assert expected(k2)[0] != pytest.approx(REVERSE, rel=0.05)
    assert expected(absolute)[0] > REVERSE


@pytest.mark.parametrize("drawn_from", [Vocabulary.theta, Vocabulary.sampler, Vocabulary.ref])
@pytest.mark.parametrize("estimator", [k1, k3])
def test_weighted_estimators_are_right_in_value_and_gradient(estimator, drawn_from):
    value, gradient = expected(estimator, drawn_from=drawn_from, weighted=True)
    assert value == pytest.approx(REVERSE, rel=1e-12)
    assert gradient == pytest.approx(REVERSE_GRADIENT, rel=1e-12)


def test_without_the_weight_old_samples_mislead():
    value, gradient = expected(k3, drawn_from=Vocabulary.sampler)
    assert value != pytest.approx(REVERSE, rel=0.05)
    assert gradient != pytest.approx(REVERSE_GRADIENT, rel=0.05)


def test_the_reference_gradients_are_those_of_autograd():
    logits = Vocabulary.theta.clone().requires_grad_()
    p, q = logits.softmax(-1), Vocabulary.ref.softmax(-1)
    for value, by_hand in [
        ((p * (p / q).log()).sum(), REVERSE_GRADIENT),
        ((q * (q / p).log()).sum(), FORWARD_GRADIENT),
        ((p - q).abs().sum(), L1_GRADIENT),
    ]:
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert gradient.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_full_kl_is_the_kl_with_its_gradient():
    logits = Vocabulary.theta.clone().requires_grad_()
    value = full_kl(logits[None], Vocabulary.ref[None], torch.tensor([True]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.tolist() == pytest.approx([REVERSE], rel=1e-12)
    assert gradient.tolist() == pytest.approx(REVERSE_GRADIENT, rel=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_penalties_equal_the_reference(batch, name):
    logprobs, ref, _, mask = batch
    ours = kl_penalty(logprobs, ref, mask, estimator=ESTIMATORS[name])
    for position in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
        i, t = position
        slow = reference.estimate(name, logprobs[i, t].item(), ref[i, t].item())
        assert ours[i, t].item() == pytest.approx(slow if mask[i, t] else 0.0, rel=1e-9, abs=1e-15)


@settings(max_examples=30)
@given(st.floats(-50, 50))
def test_estimators_order_and_signs(x):
    """k3 and k2 are never negative; k3 is above k2 exactly where x < 0; all vanish at 0."""
    log_ratio = torch.tensor([x], dtype=torch.double)
    one, two, three, size = (e(log_ratio).item() for e in (k1, k2, k3, absolute))
    assert two >= 0
    assert three >= 0
    assert size == abs(one)
    if abs(x) > 1e-3:
        assert (three > two) == (x < 0)
    assert not any(e(0 * log_ratio).item() for e in (k1, k2, k3, absolute))


def test_k3_is_exact_near_the_reference():
    """exp(-x) - 1 + x in float32 is off by its whole value at x = 1e-4; ours by 0.1 %."""
    x = torch.tensor([1e-4, -1e-4, 1e-3])
    exact = [math.expm1(-v) + v for v in x.double().tolist()]
    assert k3(x).tolist() == pytest.approx(exact, rel=2e-3)
    assert (torch.exp(-x) - 1 + x).tolist() != pytest.approx(exact, rel=0.5)


def test_straight_through_has_one_value_and_the_other_gradient():
    x = torch.tensor([-1.3, 0.4, 2.0], dtype=torch.double, requires_grad=True)
    mixed = straight_through(absolute, k3)(x)
    assert torch.equal(mixed, x.abs())
    (gradient,) = torch.autograd.grad(mixed.sum(), x)
    (own,) = torch.autograd.grad(k3(x).sum(), x)
    assert torch.equal(gradient, own)


def test_clamps_bound_the_value_and_end_the_gradient():
    x = torch.tensor([-30.0, -1.0, 0.5, 30.0], dtype=torch.double, requires_grad=True)
    both = clamped(k3, log_ratio_bound=20.0, value_bound=10.0)
    assert both(x).tolist() == pytest.approx([10.0, math.e - 2, math.exp(-0.5) - 0.5, 10.0])
    (gradient,) = torch.autograd.grad(both(x).sum(), x)
    assert gradient[[0, 3]].tolist() == [0.0, 0.0]
    assert clamped(k1, log_ratio_bound=20.0)(x).tolist() == [-20.0, -1.0, 0.5, 20.0]
    assert torch.equal(clamped(k3)(x), k3(x))


def test_one_set_of_logprobs_as_sampler_keeps_the_value_and_adds_the_score(batch):
    logprobs, ref, _, mask = batch
    leaf = logprobs.clone().requires_grad_()
    weighted = kl_penalty(leaf, ref, mask, estimator=k3, sampling_logprobs=leaf)
    assert torch.equal(weighted, kl_penalty(leaf, ref, mask, estimator=k3))
    (gradient,) = torch.autograd.grad(weighted.sum(), leaf)
    x = logprobs - ref
    by_hand = torch.where(mask, (1 - torch.exp(-x)) + k3(x), 0.0)
    torch.testing.assert_close(gradient, by_hand)


def test_the_loss_is_the_coefficient_times_the_aggregate(batch):
    logprobs, ref, _, mask = batch
    slow = [
        [reference.estimate("k3", x, f) for x, f in zip(*rows, strict=True)]
        for rows in zip(logprobs.tolist(), ref.tolist(), strict=True)
    ]
    by_sequence = kl_loss(logprobs, ref, mask, coefficient=0.04, aggregate=sequence_mean)
    assert by_sequence.loss.item() == pytest.approx(
        0.04 * formulas.sequence_mean(slow, mask.tolist()), rel=1e-9
    )
    result = kl_loss(logprobs, ref, mask, coefficient=torch.tensor(0.5), estimator=k2)
    assert result.loss.item() == pytest.approx(0.5 * result.kl[mask].mean().item())
    assert torch.equal(result.kl, kl_penalty(logprobs, ref, mask, estimator=k2))


def test_splitting_a_batch_under_one_token_count_changes_nothing(batch):
    logprobs, ref, _, mask = batch
    whole = kl_loss(logprobs, ref, mask, coefficient=0.1).loss
    mean = partial(token_mean, token_count=mask.sum())
    parts = [
        kl_loss(logprobs[i], ref[i], mask[i], coefficient=0.1, aggregate=mean).loss
        for i in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_adding_the_loss_is_the_penalty_inside_the_mean(batch):
    """GRPO writes it inside; without importance weights the two are one."""
    logprobs, ref, objective, mask = batch
    inside = sequence_mean(-objective + 0.04 * kl_penalty(logprobs, ref, mask), mask)
    added = kl_loss(logprobs, ref, mask, coefficient=0.04, aggregate=sequence_mean).loss
    torch.testing.assert_close(-sequence_mean(objective, mask) + added, inside)


@pytest.mark.parametrize("with_sampler", [False, True])
def test_only_logprobs_get_a_gradient(batch, with_sampler):
    logprobs, ref, sampling = (x.clone().requires_grad_() for x in batch[:3])
    result = kl_loss(
        logprobs,
        ref,
        batch[3],
        coefficient=0.1,
        sampling_logprobs=sampling if with_sampler else None,
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert ref.grad is None
    assert sampling.grad is None
    assert not result.kl.requires_grad


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("estimator", [k1, k3, straight_through(), clamped(k3, value_bound=1.0)])
def test_masked_tokens_do_not_matter(batch, estimator, which, garbage):
    *logs, mask = batch
    spoiled = list(logs)
    spoiled[which] = torch.where(mask, logs[which], garbage)
    results = []
    for theta, ref, sampling in (logs, spoiled):
        leaf = theta.clone().requires_grad_()
        loss = kl_loss(
            leaf, ref, mask, coefficient=0.1, estimator=estimator, sampling_logprobs=sampling
        ).loss
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~mask] == 0).all()


def test_an_estimator_that_is_not_zero_at_zero_is_zero_where_masked(batch):
    logprobs, ref, _, mask = batch
    penalty = kl_penalty(logprobs, ref, mask, estimator=torch.exp)
    assert (penalty[~mask] == 0).all()
    assert (penalty[mask] > 0).all()


def test_an_empty_mask_gives_zero_and_no_gradient(batch):
    logprobs, ref, _, mask = batch
    leaf = logprobs.clone().requires_grad_()
    result = kl_loss(leaf, ref, torch.zeros_like(mask), coefficient=1.0)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert result.loss == 0
    assert not gradient.any()


# --- tokens that have become all but impossible


def test_k3_is_infinite_at_both_infinities_with_its_gradient():
    x = torch.tensor([-torch.inf, torch.inf], requires_grad=True)
    value = k3(x)
    assert value.tolist() == [math.inf, math.inf]
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert gradient.tolist() == [-math.inf, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("theta", [-5.0, -90.0, -120.0, -400.0, -2000.0, -math.inf])
def test_weighted_k3_has_its_limits(theta, dtype):
    """pi / pi_s times k3 is pi_ref / pi_s - w (1 - x), of which w x is the gradient."""
    ref, sampler = -1.0, -2.0
    leaf = torch.tensor([theta], dtype=dtype, requires_grad=True)
    others = [torch.tensor([number], dtype=dtype) for number in (ref, sampler)]
    ones = torch.tensor([True])
    value = kl_penalty(leaf, others[0], ones, sampling_logprobs=others[1])
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    weight, x = math.exp(theta - sampler), max(theta - ref, -1e300)
    assert value.item() == pytest.approx(math.exp(ref - sampler) - weight * (1 - x), rel=1e-6)
    assert gradient.item() == pytest.approx(weight * x, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("estimator", WITH_STRAIGHT_THROUGH.values(), ids=WITH_STRAIGHT_THROUGH)
def test_no_weighted_estimate_of_an_impossible_token_is_nan(estimator):
    leaf = torch.full((2,), -math.inf, requires_grad=True)
    others = torch.tensor([-1.0, -math.inf])
    value = kl_penalty(leaf, others, leaf < 0, estimator=estimator, sampling_logprobs=others)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert value.isfinite().all()
    assert gradient.tolist() == [0, 0]


# --- in the reward


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("with_token_rewards", [False, True])
def test_shaped_rewards_equal_the_reference(batch, name, with_token_rewards):
    logprobs, ref, extra, mask = batch
    terminal = torch.tensor([1.0, -0.5, 2.0, 7.0], dtype=torch.double)
    result = kl_shaped_rewards(
        terminal,
        logprobs,
        ref,
        mask,
        coefficient=0.3,
        estimator=ESTIMATORS[name],
        token_rewards=extra if with_token_rewards else None,
    )
    slow = reference.shaped_rewards(
        terminal.tolist(),
        logprobs.tolist(),
        ref.tolist(),
        mask.tolist(),
        name=name,
        beta=0.3,
        token_rewards=extra.tolist() if with_token_rewards else None,
    )
    torch.testing.assert_close(result.rewards, torch.tensor(slow, dtype=torch.double))


def test_the_sum_of_shaped_rewards_is_reward_minus_penalty(batch):
    logprobs, ref, _, mask = batch
    terminal = torch.tensor([1.0, -0.5, 2.0, 7.0], dtype=torch.double)
    result = kl_shaped_rewards(terminal, logprobs, ref, mask, coefficient=0.3)
    total = torch.where(mask.any(1), terminal, 0.0) - 0.3 * result.kl.sum(1)
    torch.testing.assert_close(result.rewards.sum(1), total)


def test_a_coefficient_of_zero_leaves_the_terminal_rewards():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    zeros = torch.zeros(3, 3)
    result = kl_shaped_rewards(torch.tensor([1.0, 2.0, 3.0]), zeros, zeros, mask, coefficient=0.0)
    assert result.rewards.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]


def test_turns_as_sequences_are_paid_at_the_end_of_each_turn():
    mask = torch.tensor([True, True, False, True, True])
    turns = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)
    zeros = torch.zeros(5)
    result = kl_shaped_rewards(
        torch.tensor([1.0, 2.0]), zeros, zeros, mask, coefficient=0.1, sequences=turns
    )
    assert result.rewards.tolist() == [0, 1, 0, 0, 2]


def test_one_sequence_takes_a_scalar_reward():
    mask, zeros = torch.tensor([True, True, False]), torch.zeros(3)
    result = kl_shaped_rewards(torch.tensor(5.0), zeros, zeros, mask, coefficient=0.1)
    assert result.rewards.tolist() == [0, 5, 0]


def test_shaped_rewards_have_no_gradient_and_do_not_see_masked_values(batch):
    logprobs, ref, extra, mask = batch
    terminal = torch.tensor([1.0, -0.5, 2.0, 7.0], dtype=torch.double)
    clean = kl_shaped_rewards(terminal, logprobs, ref, mask, coefficient=0.3, token_rewards=extra)
    spoiled = [torch.where(mask, x, torch.nan).requires_grad_() for x in (logprobs, ref, extra)]
    result = kl_shaped_rewards(
        terminal.requires_grad_(),
        *spoiled[:2],
        mask,
        coefficient=torch.tensor(0.3, requires_grad=True, dtype=torch.double),
        token_rewards=spoiled[2],
    )
    assert torch.equal(result.rewards, clean.rewards)
    assert not result.rewards.requires_grad
    assert not result.kl.requires_grad


@pytest.mark.parametrize("measured", [0.1, 4.0, 6.0, 6.6, 60.0])
def test_the_adaptive_coefficient_equals_the_reference(measured):
    ours = adaptive_kl_coefficient(
        0.2, torch.tensor(measured, dtype=torch.double), target_kl=6.0, gain=0.1
    )
    slow = reference.next_coefficient(0.2, measured, 6.0, 0.1, 0.2)
    assert ours.item() == pytest.approx(slow, rel=1e-6)


def test_the_adaptive_coefficient_moves_towards_its_target():
    def after(kl):
        return adaptive_kl_coefficient(1.0, kl, target_kl=6.0, gain=0.1).item()

    assert after(3.0) == pytest.approx(0.98)
    assert after(6.0) == 1.0
    assert after(1e9) == pytest.approx(1.02)


# --- over the whole vocabulary


def test_full_kl_equals_the_reference_and_is_zero_where_masked():
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 2, 3, 5, dtype=torch.double)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    ours = full_kl(logits, ref, mask, temperature=0.7)
    for i in range(2):
        for t in range(3):
            p, q = (formulas.softmax((z[i, t] / 0.7).tolist()) for z in (logits, ref))
            slow = reference.kl(p, q) if mask[i, t] else 0.0
            assert ours[i, t].item() == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_logits_do_not_matter(garbage):
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 3, 5, dtype=torch.double)
    mask = torch.tensor([True, False, True])
    spoiled = [torch.where(mask[:, None], z, garbage) for z in (logits, ref)]
    leaf = spoiled[0].requires_grad_()
    value = full_kl(leaf, spoiled[1].requires_grad_(), mask)
    value.sum().backward()
    assert torch.equal(value, full_kl(logits, ref, mask))
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[1].any()
    assert spoiled[1].grad is None


def test_tokens_that_cannot_be_drawn():
    mask = torch.tensor([True])
    some = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    every = torch.zeros(1, 3)
    value = full_kl(some, every, mask)
    assert value.item() == pytest.approx(math.log(1.5))
    (gradient,) = torch.autograd.grad(value.sum(), some)
    torch.testing.assert_close(gradient, torch.zeros(1, 3))
    assert full_kl(some, some, mask).item() == 0.0
    assert full_kl(every, some, mask).item() == math.inf


def test_bfloat16_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 3, 5).bfloat16()
    value = full_kl(logits, ref, torch.ones(3, dtype=torch.bool))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, full_kl(logits.float(), ref.float(), torch.ones(3) > 0))


# --- bad input


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference_logprobs": torch.zeros(2, 1)}, r"reference_logprobs has shape \(2, 1\)"),
        ({"sampling_logprobs": torch.zeros(3)}, r"sampling_logprobs has shape \(3,\)"),
        ({"mask": torch.ones(2, 3)}, r"mask has dtype torch.float32"),
        ({"coefficient": -0.1}, "coefficient is -0.1"),
        ({"coefficient": math.nan}, "coefficient is nan"),
        ({"coefficient": math.inf}, "coefficient is inf"),
    ],
)
def test_bad_inputs_of_the_loss_are_refused(change, message):
    inputs = {
        "logprobs": torch.zeros(2, 3),
        "reference_logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "coefficient": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        kl_loss(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"terminal_rewards": torch.zeros(2, 3)},
            r"terminal_rewards has shape \(2, 3\)",
        ),
        ({"terminal_rewards": torch.tensor([0.0, math.nan])}, "terminal_rewards .* 1 entries"),
        ({"token_rewards": torch.zeros(2)}, r"token_rewards has shape \(2,\)"),
        ({"coefficient": -1.0}, "coefficient is -1.0"),
    ],
)
def test_bad_inputs_of_the_reward_are_refused(change, message):
    inputs = {
        "terminal_rewards": torch.zeros(2),
        "logprobs": torch.zeros(2, 3),
        "reference_logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "coefficient": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        kl_shaped_rewards(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("shape", "other", "temperature", "message"),
    [
        ((2, 3, 5), (2, 3, 4), 1.0, r"reference_logits has shape \(2, 3, 4\)"),
        ((2, 5), (2, 5), 1.0, r"logits have shape \(2, 5\) and mask \(2, 3\)"),
        ((2, 3, 5), (2, 3, 5), 0.0, "temperature is 0.0"),
        ((2, 3, 5), (2, 3, 5), math.nan, "temperature is nan"),
    ],
)
def test_bad_logits_are_refused(shape, other, temperature, message):
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        full_kl(torch.zeros(shape), torch.zeros(other), mask, temperature=temperature)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", ["log_ratio_bound", "value_bound"])
def test_bounds_must_be_positive(name, bound):
    with pytest.raises(ValueError, match=f"{name} is"):
        clamped(k3, **{name: bound})


@pytest.mark.parametrize("change", [{"target_kl": 0.0}, {"gain": -0.1}, {"error_bound": 0.0}])
def test_bad_targets_are_refused(change):
    with pytest.raises(ValueError, match="target_kl is"):
        adaptive_kl_coefficient(0.1, 1.0, **{"target_kl": 6.0, "gain": 0.1, **change})


def test_micro_batches_of_the_kl_term_sum_to_the_batch_under_its_counts(batch):
    logprobs, reference, _, mask = batch[:4]
    whole = kl_loss(logprobs, reference, mask, coefficient=0.1).loss
    counted = partial(token_mean, token_count=mask.sum())

    def parts(**keywords):
        rows = [slice(0, 1), slice(1, 4)]
        terms = [
            kl_loss(logprobs[i], reference[i], mask[i], coefficient=0.1, **keywords) for i in rows
        ]
        return sum(term.loss for term in terms)

    torch.testing.assert_close(parts(aggregate=counted), whole)
    assert parts() > 1.5 * whole  # a mean per micro-batch: about twice as much


def test_bfloat16_log_probs_are_subtracted_in_float32():
    theta, reference = torch.tensor([-1.0]).bfloat16(), torch.tensor([-(2.0**-9)]).bfloat16()
    penalty = kl_penalty(theta, reference, torch.tensor([True]), estimator=k1)
    assert penalty.dtype == torch.float32
    assert penalty.item() == -1 + 2.0**-9


def test_rewards_are_placed_as_terminal_rewards_places_them():
    zeros = torch.zeros(4)
    sequences = Segments(torch.tensor([0, 1, 0, 1]), 3)
    rewards = torch.tensor([2.0, 3.0, torch.nan])  # the third has no token
    mask = torch.tensor([True, True, True, False])
    ours = kl_shaped_rewards(rewards, zeros, zeros, mask, coefficient=0.1, sequences=sequences)
    assert torch.equal(ours.rewards, terminal_rewards(rewards, mask, sequences=sequences))
    assert ours.rewards.tolist() == [0, 3, 2, 0]


@pytest.mark.usefixtures("unchecked_shapes")
def test_whole_numbers_as_terminal_rewards_are_refused():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"terminal_rewards has dtype torch.int64"):
        kl_shaped_rewards(torch.tensor([1, 0]), zeros, zeros, zeros == 0, coefficient=0.1)
