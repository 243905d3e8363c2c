"""A loss as a surface: closed forms, autograd, what couples tokens, and functions of any kind."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areal_lab.functional import (
    PlainLoss,
    Segments,
    aipo,
    anchored_at_behavior,
    cispo,
    clip_cov,
    decoupled_ppo,
    dr_grpo,
    dual_clip_ppo,
    gspo,
    importance_sampling,
    loss_surface,
    ppo,
    ratio_path,
    reinforce,
    sapo,
    self_normalize,
    sequence_tis,
    token_mean,
    truncate,
)
from tests.reference import surrogates

RATIOS = torch.tensor([0.3, 0.79, 0.81, 1.0, 1.1, 1.19, 1.21, 2.9, 3.1, 8.0], dtype=torch.double)
WEIGHTS = torch.tensor([0.25, 0.9, 1.0, 1.4, 3.0], dtype=torch.double)
ADVANTAGES = torch.tensor([-2.0, -1.0, 0.0, 0.5], dtype=torch.double)
GRID = {"ratios": RATIOS, "weights": WEIGHTS, "advantages": ADVANTAGES}
LOG_PROXIMAL = math.log(0.1)


def clip(low=0.2, high=0.2, **numbers):
    return partial(surrogates.clip, low=low, high=high, **numbers)


def cispo_by_hand(theta, anchor, advantage):
    factor = min(math.exp(theta - anchor), 5.0) * advantage
    return factor * theta, factor


CLOSED = {
    "PPO": (anchored_at_behavior(ppo), True, clip()),
    "decoupled PPO": (decoupled_ppo, False, clip()),
    "decoupled PPO, wide": (partial(decoupled_ppo, clip_epsilon=(0.1, 2.0)), False, clip(0.1, 2.0)),
    "dual clip": (dual_clip_ppo, False, clip(dual=3.0)),
    "CISPO": (cispo, False, cispo_by_hand),
    "SAPO": (sapo, False, partial(surrogates.sapo, tau_positive=1.0, tau_negative=1.05)),
    "GSPO of a token": (gspo, False, clip(3e-4, 4e-4)),
    "importance sampling": (importance_sampling, True, surrogates.importance),
}
"""Loss, whether it is anchored at the behavior policy, and its surrogate in plain floats."""


@pytest.mark.parametrize("name", CLOSED)
def test_surface_equals_the_closed_form(name):
    loss, at_behavior, surrogate = CLOSED[name]
    surface = loss_surface(loss, **GRID)
    for i, r in enumerate(RATIOS.tolist()):
        for j, w in enumerate(WEIGHTS.tolist()):
            for k, advantage in enumerate(ADVANTAGES.tolist()):
                theta = LOG_PROXIMAL + math.log(r)
                anchor = LOG_PROXIMAL - (math.log(w) if at_behavior else 0.0)
                value, slope = surrogate(theta, anchor, advantage)
                weight = 1.0 if at_behavior else w
                assert surface.value[i, j, k].item() == pytest.approx(-weight * value, abs=1e-12)
                assert surface.gradient[i, j, k].item() == pytest.approx(-weight * slope, abs=1e-12)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    "loss",
    [decoupled_ppo, gspo, sapo, partial(dr_grpo, max_tokens=7), sequence_tis, aipo],
    ids=lambda loss: getattr(loss, "func", loss).__name__,
)
def test_surface_equals_autograd_of_one_response(loss, tokens):
    surface = loss_surface(loss, **GRID, response_tokens=tokens, rest_ratio=1.3, rest_weight=0.7)
    mask = torch.ones(tokens, dtype=torch.bool)
    for i, j, k in [(0, 0, 0), (3, 2, 3), (4, 3, 1), (7, 4, 3), (9, 1, 0)]:
        ratios = torch.tensor([RATIOS[i], *[1.3] * (tokens - 1)], dtype=torch.double)
        weights = torch.tensor([WEIGHTS[j], *[0.7] * (tokens - 1)], dtype=torch.double)
        proximal = torch.full((tokens,), LOG_PROXIMAL, dtype=torch.double)
        leaf = (proximal + ratios.log()).requires_grad_()
        advantages = ADVANTAGES[k].expand(tokens)
        result = loss(leaf, proximal, proximal - weights.log(), advantages, mask)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        torch.testing.assert_close(surface.value[i, j, k], result.loss.detach())
        torch.testing.assert_close(surface.gradient[i, j, k], tokens * gradient[0])


def test_decoupled_is_ppo_at_weight_one():
    one = GRID | {"weights": torch.ones(1, dtype=torch.double)}
    decoupled, plain = (
        loss_surface(decoupled_ppo, **one),
        loss_surface(anchored_at_behavior(ppo), **one),
    )
    assert torch.equal(decoupled.value, plain.value)
    assert torch.equal(decoupled.gradient, plain.gradient)


def test_ppo_depends_on_the_product_of_ratio_and_weight_alone():
    low, high = RATIOS[:5], RATIOS[5:]
    surface = loss_surface(
        anchored_at_behavior(ppo), ratios=low, weights=high, advantages=ADVANTAGES
    )
    other = loss_surface(anchored_at_behavior(ppo), ratios=high, weights=low, advantages=ADVANTAGES)
    torch.testing.assert_close(surface.value, other.value.transpose(0, 1))
    torch.testing.assert_close(surface.gradient, other.gradient.transpose(0, 1))


def test_in_a_sequence_ratio_the_others_decide():
    """GSPO keeps a token whose ratio is 3 if the geometric mean of the response stays inside."""
    rest = 3 ** (-1 / 9)
    numbers = {
        "ratios": torch.tensor([1.0, 3.0], dtype=torch.double),
        "weights": torch.ones(1, dtype=torch.double),
        "advantages": torch.ones(1, dtype=torch.double),
        "response_tokens": 10,
    }
    kept = loss_surface(gspo, **numbers, rest_ratio=rest).gradient[1]
    lost = loss_surface(gspo, **numbers, rest_ratio=1.05).gradient[0]
    assert kept.item() == pytest.approx(-1.0, rel=1e-9)
    assert lost.item() == 0.0
    assert loss_surface(decoupled_ppo, **numbers, rest_ratio=rest).gradient[1].item() == 0.0


def test_each_point_is_a_batch_of_its_own():
    """So a weight that is normalized over the batch is 1 at every point of one token."""
    loss = partial(decoupled_ppo, correct=self_normalize())
    surface = loss_surface(loss, **GRID)
    expected = loss_surface(decoupled_ppo, **GRID | {"weights": torch.ones(5, dtype=torch.double)})
    torch.testing.assert_close(surface.gradient, expected.gradient)


def with_python_branches(logprobs, proximal_logprobs, _, advantages, mask):
    ratio = torch.exp(logprobs - proximal_logprobs)
    chosen = (ratio * advantages)[mask]
    return PlainLoss(-chosen.mean() if ratio.max().item() < 2 else -2 * chosen.mean())


def test_a_function_that_cannot_be_mapped_is_called_point_by_point():
    surface = loss_surface(with_python_branches, **GRID)
    factor = torch.where(RATIOS < 2, 1.0, 2.0)[:, None, None]
    expected = -factor * RATIOS[:, None, None] * ADVANTAGES.expand(10, 5, 4)
    torch.testing.assert_close(surface.value, expected)
    torch.testing.assert_close(surface.gradient, expected)


def test_a_loss_gets_the_keywords_it_asks_for():
    seen = {}

    def loss(logprobs, _, __, advantages, mask, *, sequences, sequence_count, versions, groups):
        seen.update(sequences=sequences, count=sequence_count, versions=versions, groups=groups)
        return PlainLoss(-token_mean(logprobs * advantages, mask))

    loss_surface(loss, **GRID, response_tokens=3)
    assert isinstance(seen["sequences"], Segments)
    assert seen["count"] == seen["groups"].count == 1
    assert seen["versions"].tolist() == [0, 0, 0]


def test_a_random_loss_draws_for_each_point():
    torch.manual_seed(0)
    surface = loss_surface(partial(clip_cov, fraction=0.5), **GRID)
    assert surface.gradient.isfinite().all()


def test_surfaces_have_no_gradient():
    ratios = RATIOS.clone().requires_grad_()
    surface = loss_surface(decoupled_ppo, **GRID | {"ratios": ratios})
    assert not surface.value.requires_grad
    assert not surface.gradient.requires_grad


def test_a_step_leaves_the_clip_range_and_nothing_brings_it_back():
    path = ratio_path(decoupled_ppo, ratio=1.15, weight=1.5, advantage=1.0, step_size=0.2, steps=5)
    assert path[0].item() == pytest.approx(1.15)
    assert path[1].item() == pytest.approx(1.15 * math.exp(0.2 * 1.5 * 1.15))
    assert path[1] > 1.2
    assert torch.equal(path[2:], path[1].expand(4))


def test_a_path_of_reinforce_is_straight_in_the_log():
    path = ratio_path(
        partial(reinforce, correct=truncate(2.0)),
        ratio=1.0,
        weight=5.0,
        advantage=-0.5,
        step_size=0.1,
        steps=3,
    )
    torch.testing.assert_close(path.log(), -0.1 * torch.arange(4, dtype=torch.double))


def no_loss(*tokens):  # noqa: ARG001 - five tensors, as a loss
    return torch.zeros(())


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ratios": torch.tensor([0.0, 1.0])}, ValueError, "ratios has an entry 0.0.*positive"),
        ({"weights": torch.tensor([-1.0])}, ValueError, "weights has an entry -1.0"),
        ({"weights": torch.tensor([])}, ValueError, r"weights has shape \(0,\)"),
        ({"ratios": torch.tensor([1, 2])}, ValueError, "ratios has dtype torch.int64"),
        ({"advantages": torch.tensor([torch.nan])}, ValueError, "1 entries that are NaN"),
        ({"response_tokens": 0}, ValueError, "response_tokens is 0, but must be at least 1"),
        ({"rest_ratio": 0.0}, ValueError, "rest_ratio is 0.0, but must be positive"),
        ({"rest_weight": math.inf}, ValueError, "rest_weight is inf"),
        ({"proximal_probability": 0.5}, ValueError, r"must be in \(0, 0.125\].*ratios up to 8"),
        ({"ratios": torch.tensor([20.0])}, ValueError, r"must be in \(0, 0.05\]"),
        ({"loss": no_loss}, TypeError, "loss returned a Tensor, but must return a HasLoss"),
        ({"loss": lambda logprobs: logprobs}, TypeError, "takes other arguments"),
        ({"loss": 3}, TypeError, "3 is not a callable"),
    ],
)
def test_bad_inputs_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        loss_surface(**({"loss": decoupled_ppo, **GRID} | change))


@pytest.mark.parametrize(("step_size", "steps"), [(0.0, 1), (-1.0, 1), (math.inf, 1), (0.1, -1)])
def test_bad_steps_are_refused(step_size, steps):
    with pytest.raises(ValueError, match="step_size is"):
        ratio_path(
            decoupled_ppo, ratio=1.0, weight=1.0, advantage=1.0, step_size=step_size, steps=steps
        )
