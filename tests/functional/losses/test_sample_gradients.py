from __future__ import annotations

from functools import partial

import pytest
import torch

from areal_lab.functional import (
    PlainLoss,
    decoupled_ppo,
    drifting_policy,
    gradient_spread_by_lag,
    gspo,
    per_sample_gradients,
    token_mean,
    truncate,
    unbiased_gradient,
)


def policy(samples=60, **sizes):
    return drifting_policy(generator=torch.Generator().manual_seed(3), samples=samples, **sizes)


def test_samples_are_of_every_version_and_scored_against_the_last():
    drifted = policy(versions=3)
    assert drifted.lag.bincount().tolist() == [20, 20, 20]
    fresh = drifted.lag == 0
    weights = torch.exp(drifted.logprobs(drifted.logits) - drifted.behavior_logprobs)
    torch.testing.assert_close(weights[fresh], torch.ones_like(weights[fresh]))
    assert (weights[~fresh] - 1).abs().mean() > 0.1
    assert drifted.advantages.mean().abs() < 1e-6
    chosen = drifted.log_policies[2 - drifted.lag[:, None], drifted.states, drifted.actions]
    torch.testing.assert_close(chosen, drifted.behavior_logprobs)


def test_actions_are_as_frequent_as_the_version_of_the_sample_has_them():
    drifted = policy(samples=40_000, versions=2, states=3, actions=4, tokens=5)
    for lag in (0, 1):
        fresh = drifted.lag == lag
        for state, log_policy in enumerate(drifted.log_policies[1 - lag]):
            chosen = drifted.actions[fresh][drifted.states[fresh] == state]
            shares = chosen.bincount(minlength=4) / len(chosen)
            noise = (log_policy.exp() * (1 - log_policy.exp()) / len(chosen)).sqrt()
            assert ((shares - log_policy.exp()).abs() < 4 * noise).all()


def test_the_spread_of_the_logits_stays():
    drifted = policy(states=500, actions=20, versions=8)
    for log_policy in drifted.log_policies:
        assert (log_policy - log_policy.mean(-1, keepdim=True)).std() == pytest.approx(1, abs=0.05)


def five_lines(logprobs, proximal_logprobs, _behavior_logprobs, advantages, mask):
    """Detaches nothing: what is constant is the caller's business."""
    ratio = torch.exp(logprobs - proximal_logprobs)
    return PlainLoss(-token_mean(ratio * advantages, mask))


@pytest.mark.parametrize(
    "loss", [decoupled_ppo, partial(decoupled_ppo, correct=truncate(2.0)), gspo, five_lines]
)
def test_they_are_the_gradients_of_each_sample_alone(loss):
    drifted = policy(samples=7, states=5, tokens=4)
    gradients = per_sample_gradients(loss, drifted)
    for index, gradient in enumerate(gradients):
        one = slice(index, index + 1)
        logits = drifted.logits.clone().requires_grad_()
        logprobs = torch.log_softmax(logits, -1)[drifted.states[one], drifted.actions[one]]
        batch = (drifted.behavior_logprobs[one], drifted.advantages[one], drifted.mask[one])
        loss(logprobs, logprobs.detach(), *batch).loss.backward()
        torch.testing.assert_close(gradient, logits.grad.flatten())


def test_a_loss_that_cannot_be_mapped_is_called_for_each_sample():
    def branches(logprobs, *rest):
        assert logprobs.sum().item() < 0
        return decoupled_ppo(logprobs, *rest)

    drifted = policy(samples=5)
    torch.testing.assert_close(
        per_sample_gradients(branches, drifted), per_sample_gradients(decoupled_ppo, drifted)
    )


def test_stale_samples_spread_more():
    drifted = policy(samples=10_000)
    spread = gradient_spread_by_lag(
        per_sample_gradients(decoupled_ppo, drifted), drifted.lag, bins=5
    )
    assert (spread.variance[1:] > 1.2 * spread.variance[0]).all()


def test_weighted_samples_of_old_versions_point_where_fresh_ones_do():
    """The mean over many stale samples is that of as many fresh ones, within their noise."""
    stale = policy(samples=40_000, versions=3)
    fresh = stale.lag == 0
    chosen = per_sample_gradients(decoupled_ppo, stale)
    by_fresh = chosen[fresh].mean(0)
    by_old = chosen[~fresh].mean(0)
    noise = chosen[fresh].std(0).norm() / fresh.sum().sqrt()
    assert (by_fresh - by_old).norm() < 4 * noise < by_fresh.norm()
    torch.testing.assert_close(unbiased_gradient(stale), chosen.mean(0))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"versions": 0}, {"kept": 1.5}])
def test_what_cannot_be_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} is "):
        policy(**wrong)
