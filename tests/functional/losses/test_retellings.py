"""Popular retellings of losses, each refuted; docs/retellings.md names these tests."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areal_lab.functional import (
    PolicyLoss,
    anchored_at_behavior,
    cispo,
    decoupled_ppo,
    dual_clip_ppo,
    gradient_check,
    grpo,
    gspo,
    loss_surface,
    ppo,
    ratio_path,
    truncate,
)
from areal_lab.functional.losses.retellings import (
    attached_weight,
    both_sides_clipped,
    clipped_product,
    pulled_back,
)

RATIOS = torch.tensor([0.25, 0.5, 0.79, 0.9, 1.0, 1.1, 1.21, 1.5, 2.0, 4.0], dtype=torch.double)
WEIGHTS = torch.tensor([0.5, 0.81, 1.0, 1.5, 3.0], dtype=torch.double)
SIGNS = torch.tensor([1.0, -1.0], dtype=torch.double)
INSIDE = (RATIOS > 0.8) & (RATIOS < 1.2)
BOUNDED_CISPO = partial(cispo, clip_epsilon=(1.0, 0.2))


def push(loss, **numbers):
    """Minus the gradient, `[ratios, weights, (+1, -1)]`."""
    grid = {"ratios": RATIOS, "weights": WEIGHTS, "advantages": SIGNS} | numbers
    return -loss_surface(loss, **grid).gradient


def test_decoupled_ppo_does_not_clip_the_product_of_both_ratios():
    """A stale token at r = 1 is clipped by the product before the first step, and not by r."""
    real, retold = push(decoupled_ppo), push(clipped_product())
    at_one = RATIOS == 1
    stale = WEIGHTS > 1.2
    torch.testing.assert_close(real[at_one, :, 0][0], WEIGHTS)
    assert (retold[at_one, :, 0][0, stale] == 0).all()
    # The clip of the real loss does not look at the weight.
    assert ((real == 0) == (real[:, 2:3] == 0)).all()
    assert torch.equal(retold, push(anchored_at_behavior(ppo)))


def test_the_clip_does_not_bound_the_weight():
    """Nothing does but a correction, which is asked for."""
    assert push(decoupled_ppo)[RATIOS == 1].max().item() == pytest.approx(3.0)
    assert push(partial(decoupled_ppo, correct=truncate(2.0)))[
        RATIOS == 1
    ].max().item() == pytest.approx(2.0)


def test_the_clip_of_ppo_has_one_side_for_each_sign():
    real, retold = push(decoupled_ppo)[:, 2], push(both_sides_clipped)[:, 2]
    assert torch.equal(real[:, 0] != 0, RATIOS < 1.2)
    assert torch.equal(real[:, 1] != 0, RATIOS > 0.8)
    assert torch.equal(retold[:, 0] != 0, INSIDE)
    assert torch.equal(retold[:, 1] != 0, INSIDE)
    # A good token that has become unlikely is pushed up all the same.
    assert real[0, 0] == pytest.approx(0.25)


def test_the_clip_does_not_keep_the_ratio_inside():
    """The push has its full size up to the edge, and one step may end far beyond."""
    at = {"weight": 1.5, "advantage": 1.0, "step_size": 0.3, "steps": 4}
    path = ratio_path(decoupled_ppo, ratio=1.1, **at)
    assert path[1].item() == pytest.approx(1.1 * math.exp(0.3 * 1.5 * 1.1))
    assert path[1] > 1.8


def test_a_clipped_token_is_not_pulled_back():
    at = {"weight": 1.0, "advantage": 1.0, "step_size": 0.3, "steps": 4}
    assert torch.equal(
        ratio_path(decoupled_ppo, ratio=1.8, **at), torch.full((5,), 1.8, dtype=torch.double)
    )
    retold = ratio_path(pulled_back, ratio=1.8, **at)
    assert (retold.diff() < 0).all()
    assert (retold > 1.2).all()


def test_the_clip_does_not_bound_the_push_of_a_bad_token():
    """It grows with the ratio where A < 0; the second clip ends it."""
    real = push(decoupled_ppo)[:, 2, 1]
    assert real[-1].item() == pytest.approx(-4.0)
    assert real.abs().max() > 1.2
    dual = push(dual_clip_ppo)[:, 2, 1]
    assert dual[-1] == 0
    assert torch.equal(dual[:-1], real[:-1])


def test_cispo_drops_no_token():
    real, retold = push(BOUNDED_CISPO), push(both_sides_clipped)
    assert (real != 0).all()
    assert (retold[~INSIDE] == 0).all()
    expected = RATIOS.clamp(max=1.2)[:, None, None] * WEIGHTS[:, None] * SIGNS
    torch.testing.assert_close(real, expected)


def test_the_weight_gets_no_gradient():
    assert gradient_check(decoupled_ppo).problems == []
    wrong = gradient_check(attached_weight).inputs
    assert wrong["proximal_logprobs"].largest > 0
    assert wrong["behavior_logprobs"].largest > 0


def test_a_weight_with_a_gradient_doubles_the_push():
    """In the first minibatch of a step, where the proximal policy is the trained one."""
    behavior = torch.tensor([-1.5], dtype=torch.double)
    mask, one = torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.double)
    for loss, factor in ((decoupled_ppo, 1.0), (attached_weight, 2.0)):
        leaf = torch.tensor([-1.0], dtype=torch.double, requires_grad=True)
        loss(leaf, leaf, behavior, one, mask).loss.backward()
        assert leaf.grad.item() == pytest.approx(-factor * math.exp(0.5))


def test_gspo_is_not_ppo_with_a_mean_over_the_response():
    """Its clip looks at the whole response, and its push on a token does not know its ratio."""
    response = {"response_tokens": 100, "weights": torch.ones(1, dtype=torch.double)}
    mean_of_ppo = push(grpo, **response)[:, 0, 0]
    real = push(gspo, **response)[:, 0, 0]
    torch.testing.assert_close(mean_of_ppo, torch.where(RATIOS < 1.2, RATIOS, 0.0))
    edge = math.exp(100 * math.log1p(4e-4))  # 1.041, where the other tokens are at 1
    assert torch.equal(real != 0, edge > RATIOS)
    sequence_ratio = RATIOS ** (1 / 100)
    torch.testing.assert_close(real, torch.where(edge > RATIOS, sequence_ratio, 0.0))


def test_the_clip_of_gspo_is_on_another_scale():
    """With PPO's 0.2 a token of a response of 100 would need a ratio of 8e7 to be clipped."""
    wide = partial(gspo, clip_epsilon=0.2)
    numbers = {
        "ratios": torch.tensor([8e7, 9e7], dtype=torch.double),
        "weights": torch.ones(1, dtype=torch.double),
        "response_tokens": 100,
        "proximal_probability": 1e-8,
    }
    assert (push(wide, **numbers)[:, 0, 0] != 0).tolist() == [True, False]


def test_retold_losses_have_the_signature_of_a_loss_and_see_no_masked_nan():
    losses: list[PolicyLoss] = [both_sides_clipped, pulled_back, attached_weight, clipped_product()]
    assert all(not gradient_check(loss).sees_masked_nan for loss in losses)
