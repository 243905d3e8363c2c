"""Which inputs of a loss get a gradient: the named losses are sound, planted errors are found."""

from __future__ import annotations

import pytest
import torch

from areal_lab.functional import (
    PlainLoss,
    a3po,
    anchored_at_behavior,
    decoupled_ppo,
    gradient_check,
    ppo,
    token_mean,
)
from areal_lab.training.objective.loss import check_loss
from tests.functional.losses.test_algorithms import NAMED

# a3po and clip_cov are bound there to tensors of another batch
LOSSES = {
    name: NAMED[name].loss for name in NAMED if name.split(",")[0] not in ("a3po", "clip_cov")
}


@pytest.mark.parametrize("name", LOSSES)
def test_named_losses_give_a_gradient_to_logprobs_alone(name):
    loss = LOSSES[name]
    check_loss(loss, name)
    found = gradient_check(loss)
    assert found.problems == []
    assert found.inputs["logprobs"].largest > 0
    assert all(found.inputs[other].largest == 0 for other in list(found.inputs)[1:])


@pytest.mark.parametrize("loss", [anchored_at_behavior(ppo), a3po])
def test_losses_of_another_signature_are_sound(loss):
    assert gradient_check(loss).problems == []


def attached_weight(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    weight = torch.exp(proximal_logprobs - behavior_logprobs)
    ratio = torch.exp(logprobs - proximal_logprobs.detach())
    return PlainLoss(-token_mean(weight * ratio * advantages.detach(), mask))


def detached(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # noqa: ARG001
    return PlainLoss(-token_mean(logprobs.detach() * advantages.detach(), mask))


def nothing_attached(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # noqa: ARG001
    return PlainLoss(torch.zeros(()))


def multiplied_mask(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # noqa: ARG001
    ratio = torch.exp(logprobs - behavior_logprobs.detach())
    return PlainLoss(-(ratio * advantages.detach() * mask).sum() / mask.sum())


def no_mask(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # noqa: ARG001
    return PlainLoss(-(logprobs * advantages.detach()).mean())


def infinite(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # noqa: ARG001
    distance = (logprobs - proximal_logprobs.detach()).abs()
    return PlainLoss(token_mean(distance.sqrt(), mask))  # its slope at 0 is not finite


@pytest.mark.parametrize(
    ("loss", "problems"),
    [
        (attached_weight, ["proximal_logprobs gets a gradient", "behavior_logprobs gets a"]),
        (detached, ["logprobs gets no gradient"]),
        (nothing_attached, ["logprobs gets no gradient"]),
        (multiplied_mask, ["NaN at masked tokens reaches the loss"]),
        (no_mask, ["masked tokens of logprobs get a gradient", "NaN at masked tokens"]),
        (
            infinite,
            ["the gradient of logprobs is NaN or infinite", "masked tokens of", "NaN at masked"],
        ),
    ],
)
def test_planted_errors_are_found(loss, problems):
    found = gradient_check(loss).problems
    assert len(found) == len(problems)
    for sentence, beginning in zip(found, problems, strict=True):
        assert sentence.startswith(beginning)


def test_the_largest_gradient_is_that_of_the_weight():
    found = gradient_check(attached_weight).inputs
    assert found["behavior_logprobs"] == found["proximal_logprobs"]
    assert found["advantages"].largest == 0


def test_a_batch_of_ones_choice_with_its_keywords():
    seen = []

    def loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask, *, scale):  # noqa: ARG001
        seen.append(scale)
        return PlainLoss(scale * token_mean(logprobs, mask))

    batch = [torch.zeros(2, 3, dtype=torch.double) for _ in range(4)]
    found = gradient_check(loss, [*batch, torch.ones(2, 3, dtype=torch.bool)], scale=3.0)
    assert found.inputs["logprobs"].largest == pytest.approx(0.5)
    assert found.inputs["logprobs"].largest_masked == 0  # there are no masked tokens
    assert set(seen) == {3.0}


@pytest.mark.parametrize(
    ("loss", "batch", "error", "message"),
    [
        (decoupled_ppo, [torch.zeros(3)], ValueError, "batch has 1 tensors, but must have 5"),
        (
            decoupled_ppo,
            [*[torch.zeros(3)] * 3, torch.zeros(3, 1), torch.ones(3) > 0],
            ValueError,
            r"advantages has shape \(3, 1\)",
        ),
        (decoupled_ppo, [torch.zeros(3)] * 5, ValueError, "mask has dtype torch.float32"),
        (token_mean, None, TypeError, "takes other arguments"),
        (lambda *tokens: tokens[0].sum(), None, TypeError, "must return a HasLoss"),
    ],
)
def test_bad_inputs_are_refused(loss, batch, error, message):
    with pytest.raises(error, match=message):
        gradient_check(loss, batch)
