"""PPO and decoupled PPO: value, limits, gradients, and what must not matter."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from areal_lab.functional import (
    AnchoredPolicy,
    PlainLoss,
    PolicyLoss,
    Surrogate,
    anchored_at_behavior,
    chain,
    clip_surrogate,
    decoupled_ppo,
    mask_above,
    policy_loss,
    ppo,
    sequence_mean,
    token_mean,
    token_ratio,
    truncate,
)
from tests.reference import formulas


class Batch(NamedTuple):
    logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(5, 7, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0).abs()
    proximal = logprobs + normal(0.3)
    mask = torch.rand(5, 7, generator=generator) > 0.3
    return Batch(logprobs, proximal, proximal + normal(0.5), normal(1.0), mask)


def as_lists(batch):
    return [field.tolist() for field in batch]


@pytest.mark.parametrize("clip_epsilon", [0.2, (0.2, 0.28), (0.05, 0.4), 0.0])
def test_ppo_equals_the_reference(batch, clip_epsilon):
    low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
    logprobs, old, _, advantages, mask = batch
    result = ppo(logprobs, old, advantages, mask, clip_epsilon=clip_epsilon)
    rows = [field.tolist() for field in (logprobs, old, advantages, mask)]
    assert result.loss.item() == pytest.approx(
        formulas.ppo_loss(*rows, low=low, high=high), rel=1e-12
    )


@pytest.mark.parametrize(
    ("correct", "bound"),
    [
        (truncate(float("inf")), lambda w: w),
        (truncate(1.1), lambda w: min(w, 1.1)),
        (mask_above(1.1), lambda w: w if w <= 1.1 else 0.0),
        (chain(mask_above(1.5), truncate(1.1)), lambda w: min(w, 1.1) if w <= 1.5 else 0.0),
    ],
)
def test_decoupled_ppo_equals_the_reference(batch, correct, bound):
    result = decoupled_ppo(*batch, clip_epsilon=(0.1, 0.3), correct=correct)
    expected = formulas.decoupled_loss(*as_lists(batch), low=0.1, high=0.3, bound=bound)
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    weights = torch.exp(batch.proximal_logprobs - batch.behavior_logprobs)[batch.mask]
    assert result.behavior_weight[batch.mask].tolist() == pytest.approx(
        [bound(w) for w in weights.tolist()]
    )


def test_the_weight_is_applied_without_a_bound_by_default(batch):
    expected = formulas.decoupled_loss(*as_lists(batch), low=0.2, high=0.2, bound=lambda w: w)
    assert decoupled_ppo(*batch).loss.item() == pytest.approx(expected, rel=1e-12)


def test_decoupled_is_ppo_when_proximal_is_behavior(batch):
    same = batch._replace(behavior_logprobs=batch.proximal_logprobs)
    decoupled = decoupled_ppo(*same, correct=truncate(5.0))
    plain = ppo(batch.logprobs, batch.proximal_logprobs, batch.advantages, batch.mask)
    for one, other in zip(decoupled, plain, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(decoupled.behavior_weight, torch.ones_like(batch.logprobs))


def test_on_policy_the_gradient_is_that_of_reinforce(batch):
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = decoupled_ppo(logprobs, logprobs, logprobs, batch.advantages, batch.mask).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.where(batch.mask, -batch.advantages, 0.0) / batch.mask.sum()
    torch.testing.assert_close(gradient, expected)


def test_all_lag_zero_is_on_policy(batch):
    same = decoupled_ppo(
        *batch._replace(proximal_logprobs=batch.logprobs, behavior_logprobs=batch.logprobs)
    )
    assert torch.equal(same.ratio, torch.ones_like(batch.logprobs))
    assert not same.clipped.any()
    assert same.loss.item() == pytest.approx(-batch.advantages[batch.mask].mean().item())


def test_only_logprobs_get_a_gradient(batch):
    leaves = batch._replace(
        **{name: getattr(batch, name).clone().requires_grad_() for name in Batch._fields[:4]}
    )
    result = decoupled_ppo(*leaves, correct=truncate(1.1))
    result.loss.backward()
    assert leaves.logprobs.grad is not None
    assert leaves.proximal_logprobs.grad is None
    assert leaves.behavior_logprobs.grad is None
    assert leaves.advantages.grad is None
    assert not any(diagnostic.requires_grad for diagnostic in result[1:])


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_first_and_second_derivatives_are_right(batch, check):
    def loss(logprobs):
        return decoupled_ppo(logprobs, *batch[1:], correct=truncate(1.1)).loss

    assert check(loss, (batch.logprobs.clone().requires_grad_(),))


def gradient_of(loss, logprobs, *rest):
    leaf = logprobs.clone().requires_grad_()
    result = loss(leaf, *rest)
    return result.loss.detach(), torch.autograd.grad(result.loss, leaf)[0]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("field", Batch._fields[:4])
@pytest.mark.parametrize("loss", [decoupled_ppo, anchored_at_behavior(ppo)])
def test_masked_tokens_do_not_matter(batch, loss, field, garbage):
    value, gradient = gradient_of(loss, *batch)
    spoiled = torch.where(batch.mask, getattr(batch, field), garbage)
    value_spoiled, gradient_spoiled = gradient_of(loss, *batch._replace(**{field: spoiled}))
    assert torch.equal(value, value_spoiled)
    assert torch.equal(gradient, gradient_spoiled)
    assert (gradient_spoiled[~batch.mask] == 0).all()
    result = loss(*batch._replace(**{field: spoiled}))
    assert all(diagnostic.isfinite().all() for diagnostic in result)


def test_an_overflowing_ratio_has_no_nan_gradient(batch):
    far = batch._replace(logprobs=batch.proximal_logprobs + 2000.0, advantages=batch.mask.double())
    value, gradient = gradient_of(decoupled_ppo, *far)
    assert value.isfinite()
    assert torch.equal(gradient, torch.zeros_like(gradient))  # all beyond the clip range


def test_tokens_without_an_advantage_add_nothing_however_far(batch):
    far = batch._replace(
        logprobs=batch.proximal_logprobs + 2000.0, advantages=torch.zeros_like(batch.advantages)
    )
    value, gradient = gradient_of(decoupled_ppo, *far)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert not decoupled_ppo(*far).clipped.any()  # there was no gradient to remove


def test_a_weight_at_the_cap_is_kept():
    zeros, mask = torch.zeros(2, dtype=torch.double), torch.ones(2, dtype=torch.bool)
    proximal = torch.tensor([0.0, 1e-9], dtype=torch.double)
    result = decoupled_ppo(proximal, proximal, zeros, zeros, mask, correct=mask_above(1.0))
    assert result.behavior_weight.tolist() == [1.0, 0.0]


def test_the_order_of_sequences_does_not_matter(batch):
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = Batch(*(field[order] for field in batch))
    torch.testing.assert_close(decoupled_ppo(*shuffled).loss, decoupled_ppo(*batch).loss)


def test_splitting_a_batch_under_one_token_count_changes_nothing(batch):
    count = int(batch.mask.sum())
    whole, whole_gradient = gradient_of(decoupled_ppo, *batch)
    parts = [
        gradient_of(partial(decoupled_ppo, token_count=count), *(field[rows] for field in batch))
        for rows in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole_gradient)
    as_tensor = decoupled_ppo(*batch, token_count=batch.mask.sum()).loss
    torch.testing.assert_close(as_tensor, whole)


def test_packed_equals_padded(batch):
    packed = Batch(*(field[batch.mask] for field in batch))
    padded, packed_result = decoupled_ppo(*batch), decoupled_ppo(*packed)
    torch.testing.assert_close(packed_result.loss, padded.loss)
    assert torch.equal(packed_result.ratio, padded.ratio[batch.mask])
    assert torch.equal(packed_result.behavior_weight, padded.behavior_weight[batch.mask])
    assert torch.equal(packed_result.clipped, padded.clipped[batch.mask])


def test_an_empty_mask_gives_zero_and_no_gradient(batch):
    nothing = torch.zeros_like(batch.mask)
    value, gradient = gradient_of(decoupled_ppo, *batch._replace(mask=nothing))
    assert value == 0
    assert (gradient == 0).all()


def test_clipped_says_where_the_gradient_is_gone(batch):
    leaf = batch.logprobs.clone().requires_grad_()
    result = decoupled_ppo(leaf, *batch[1:])
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert result.clipped.any()
    assert torch.equal(result.clipped, (gradient == 0) & batch.mask)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped"),
    [
        (1.5, 1.0, 1.28, True),  # above the range and would go further: stopped
        (1.5, -1.0, -1.5, False),  # above the range, pulled back: not stopped
        (0.5, 1.0, 0.5, False),
        (0.5, -1.0, -0.8, True),
        (1.1, 2.0, 2.2, False),
    ],
)
def test_clip_by_hand(ratio, advantage, value, clipped):
    log_ratio = torch.tensor([ratio], dtype=torch.double).log()
    policy = token_ratio(log_ratio, 0 * log_ratio, torch.tensor([True]))
    surrogate = clip_surrogate(
        policy, torch.tensor([advantage], dtype=torch.double), clip_epsilon=(0.2, 0.28)
    )
    assert surrogate.value.item() == pytest.approx(value)
    assert surrogate.clipped.item() is clipped


def test_a_low_bound_of_one_never_clips():
    log_ratio = torch.tensor([-50.0])
    policy = token_ratio(log_ratio, 0 * log_ratio, torch.tensor([True]))
    surrogate = clip_surrogate(policy, torch.tensor([-1.0]), clip_epsilon=(1.0, 0.2))
    assert not surrogate.clipped.any()


def test_parts_compose_to_another_loss(batch):
    """REINFORCE on log-probs with sequence means: every part replaced but the ratio."""

    def reinforce(policy: AnchoredPolicy, advantages: Tensor) -> Surrogate:
        advantages = torch.where(policy.mask, advantages, 0.0)
        return Surrogate(policy.logprobs * advantages, torch.zeros_like(policy.mask))

    result = policy_loss(
        *batch, surrogate=reinforce, correct=truncate(1.0), aggregate=sequence_mean
    )
    weight = torch.exp(batch.proximal_logprobs - batch.behavior_logprobs).clamp(max=1.0)
    values = weight * batch.logprobs * batch.advantages
    expected = -formulas.sequence_mean(values.tolist(), batch.mask.tolist())
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)


def test_an_own_loss_has_the_signature_of_the_protocol(batch):
    def own_ppo(
        logprobs, proximal_logprobs, behavior_logprobs, advantages, mask, *, token_count=None
    ):
        """Without a clip, but with a proximal term."""
        ratio = torch.exp(logprobs - behavior_logprobs)
        distance = (logprobs - proximal_logprobs).square()
        values = 0.1 * distance - ratio * advantages
        return PlainLoss(token_mean(values, mask, token_count=token_count))

    own: PolicyLoss = own_ppo
    losses: list[PolicyLoss] = [own, decoupled_ppo, anchored_at_behavior(ppo, clip_epsilon=0.1)]
    assert all(loss(*batch, token_count=20).loss.isfinite() for loss in losses)


def test_standard_ppo_is_anchored_at_the_behavior_policy(batch):
    anchored = anchored_at_behavior(ppo, clip_epsilon=0.1)(*batch, token_count=9)
    logprobs, _, behavior, advantages, mask = batch
    direct = ppo(logprobs, behavior, advantages, mask, clip_epsilon=0.1, token_count=9)
    assert torch.equal(anchored.loss, direct.loss)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(5, 1)}, r"advantages has shape \(5, 1\) and mask \(5, 7\)"),
        ({"logprobs": torch.zeros(7)}, r"logprobs has shape \(7,\)"),
        ({"proximal_logprobs": torch.zeros(5, 6)}, r"proximal_logprobs has shape \(5, 6\)"),
        ({"behavior_logprobs": torch.zeros(35)}, r"behavior_logprobs has shape \(35,\)"),
        ({"mask": torch.ones(5, 7)}, r"mask has dtype torch.float32.*mask.bool\(\)"),
    ],
)
def test_bad_shapes_are_refused(batch, change, message):
    with pytest.raises(ValueError, match=message):
        decoupled_ppo(*batch._replace(**change))


@pytest.mark.parametrize("clip_epsilon", [-0.1, (-0.1, 0.2), (0.2, -0.1), float("nan")])
def test_negative_clip_ranges_are_refused(batch, clip_epsilon):
    with pytest.raises(ValueError, match="clip_epsilon is"):
        decoupled_ppo(*batch, clip_epsilon=clip_epsilon)


@pytest.mark.parametrize("token_count", [0, -3, float("nan")])
def test_token_counts_must_be_positive(batch, token_count):
    with pytest.raises(ValueError, match="token_count is"):
        decoupled_ppo(*batch, token_count=token_count)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("correction", [truncate, mask_above])
def test_caps_must_be_positive(correction, cap):
    with pytest.raises(ValueError, match="cap is"):
        correction(cap)
