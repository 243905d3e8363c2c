"""Proximal policies without a second pass: interpolation by age, averages of weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.corrections.proximal import (
    a3po_proximal_logprobs,
    ema_update,
    ema_weights,
    linear_proximal_logprobs,
)
from areal_lab.functional.losses.policy import decoupled_ppo
from tests.reference import proximal as reference

BOTH = {
    "log-linear": (a3po_proximal_logprobs, reference.log_linear),
    "linear": (linear_proximal_logprobs, reference.linear),
}
VERSION = 6
VERSIONS = torch.tensor([[-1, 0, 3, 4], [5, 6, 7, 6]])
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])


def logprobs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    theta = -torch.randn(2, 4, generator=generator, dtype=torch.double).abs()
    moved = theta + 0.5 * torch.randn(2, 4, generator=generator, dtype=torch.double)
    return theta, moved.clamp(max=-1e-3)


@pytest.mark.parametrize(("ours", "slow"), BOTH.values(), ids=BOTH)
def test_interpolation_equals_the_reference(ours, slow):
    theta, behavior = logprobs()
    result = ours(theta, behavior, VERSIONS, MASK, trainer_version=VERSION)
    for row, column in MASK.nonzero().tolist():
        place = (row, column)
        expected = slow(
            theta[place].item(), behavior[place].item(), VERSIONS[place].item(), VERSION
        )
        assert result[place].item() == pytest.approx(expected, rel=1e-12)
    assert result[1, 3] == 0  # masked


@pytest.mark.parametrize(
    ("version", "share"),
    [
        (-1, 0.0),  # a prompt
        (10, 0.0),  # lag 0
        (9, 0.0),  # lag 1: the proximal policy is the one that sampled
        (8, 1 / 2),
        (6, 3 / 4),
        (0, 9 / 10),
        (11, 0.0),  # from the future, which no run has
    ],
)
def test_the_share_of_theta_by_hand(version, share):
    theta, behavior = torch.tensor([-1.0]), torch.tensor([-3.0])
    result = a3po_proximal_logprobs(
        theta, behavior, torch.tensor([version]), torch.tensor([True]), trainer_version=10
    )
    assert result.item() == pytest.approx(-3.0 + 2.0 * share)


def test_counted_from_the_weights_before_the_batch_the_share_is_that_of_the_next_version():
    """`trainer_version + 1`: fresh data is behavior itself, lag 1 half of the way."""
    one = torch.ones(1)
    results = [
        a3po_proximal_logprobs(
            0 * one, -one, torch.tensor([10 - lag]), one > 0, trainer_version=10 + 1
        ).item()
        for lag in range(4)
    ]
    assert results == pytest.approx([-1.0, -1 / 2, -1 / 3, -1 / 4])


@pytest.mark.parametrize(("ours", "slow"), BOTH.values(), ids=BOTH)
def test_an_impossible_log_prob_counts_only_with_a_share(ours, slow):  # noqa: ARG001
    """Fresh tokens and those of lag 1 have the behavior's; -infinity there stays."""
    never, fine = -math.inf, -3.0
    versions = torch.tensor([10, 9, 8, 8, 9, 8])
    theta = torch.tensor([never, never, never, -1.0, -1.0, never])
    behavior = torch.tensor([fine, fine, fine, never, never, never])
    result = ours(theta, behavior, versions, theta < 0, trainer_version=10).tolist()
    if ours is a3po_proximal_logprobs:
        assert result == [fine, fine, never, never, never, never]
    else:  # half of a probability is left
        assert result == pytest.approx(
            [fine, fine, fine - math.log(2), -1 - math.log(2), never, never]
        )


@settings(max_examples=30)
@given(seed=st.integers(0, 9), version=st.integers(0, 9))
def test_an_interpolation_lies_between_and_the_linear_one_is_above(seed, version):
    theta, behavior = logprobs(seed)
    log_linear, linear = (
        ours(theta, behavior, VERSIONS, MASK, trainer_version=version) for ours, _ in BOTH.values()
    )
    low, high = torch.minimum(theta, behavior), torch.maximum(theta, behavior)
    for result in (log_linear, linear):
        assert ((result >= low - 1e-12) & (result <= high + 1e-12))[MASK].all()
    assert (linear >= log_linear - 1e-12).all()


@pytest.mark.parametrize(("ours", "slow"), BOTH.values(), ids=BOTH)
def test_older_tokens_are_nearer_to_theta(ours, slow):  # noqa: ARG001
    theta, behavior = torch.full((8,), -1.0), torch.full((8,), -3.0)
    result = ours(theta, behavior, torch.arange(8), theta < 0, trainer_version=7)
    assert (result[:-2].diff() < 0).all()


@pytest.mark.parametrize(("ours", "slow"), BOTH.values(), ids=BOTH)
def test_nothing_gets_a_gradient_and_masked_values_do_not_matter(ours, slow):  # noqa: ARG001
    theta, behavior = (values.requires_grad_() for values in logprobs())
    result = ours(theta, behavior, VERSIONS, MASK, trainer_version=VERSION)
    assert not result.requires_grad
    for garbage in (float("nan"), float("inf"), -float("inf")):
        spoiled = ours(
            torch.where(MASK, theta, garbage),
            torch.where(MASK, behavior, garbage),
            torch.where(MASK, VERSIONS, 99),
            MASK,
            trainer_version=torch.tensor(VERSION),
        )
        assert torch.equal(spoiled, result)


@pytest.mark.parametrize(("ours", "slow"), BOTH.values(), ids=BOTH)
def test_the_result_keeps_the_type_of_log_probs(ours, slow):  # noqa: ARG001
    theta, behavior = (values.float() for values in logprobs())
    result = ours(theta, behavior, VERSIONS, MASK, trainer_version=VERSION)
    assert result.dtype == torch.float32


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_versions_and_shapes_are_refused():
    theta, behavior = logprobs()
    with pytest.raises(ValueError, match=r"versions has dtype torch\.float64.*\.long\(\)"):
        a3po_proximal_logprobs(theta, behavior, theta, MASK, trainer_version=1)
    with pytest.raises(ValueError, match=r"versions has shape \(4,\)"):
        a3po_proximal_logprobs(theta, behavior, VERSIONS[0], MASK, trainer_version=1)
    with pytest.raises(ValueError, match=r"behavior_logprobs has shape \(4,\)"):
        linear_proximal_logprobs(theta, behavior[0], VERSIONS, MASK, trainer_version=1)


# --- PPO-EWMA


def averaged(history, decay):
    average = ema_weights({"w": history[0]})
    for weights in history[1:]:
        average = ema_update(average, {"w": weights}, decay=decay)
    return average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("updates", [1, 2, 7])
def test_an_average_equals_the_reference(decay, updates):
    history = [torch.tensor([math.sin(i), 10.0 - i], dtype=torch.double) for i in range(updates)]
    average = averaged(history, decay)
    for i, ours in enumerate(average.weights["w"].tolist()):
        expected = reference.weighted_mean([weights[i].item() for weights in history], decay)
        assert ours == pytest.approx(expected, rel=1e-12)
    assert average.total.item() == pytest.approx(sum(decay**k for k in range(updates)))


def test_equal_weights_average_to_themselves_exactly():
    weights = torch.tensor([0.1, -1 / 3, 1e30])
    assert torch.equal(averaged([weights] * 20, 0.9).weights["w"], weights)


def test_without_memory_the_average_is_the_newest_exactly():
    history = [torch.randn(5) for _ in range(3)]
    assert torch.equal(averaged(history, 0.0).weights["w"], history[-1])


def test_the_mean_age_of_an_average():
    """beta / (1 - beta) updates in the long run: 9 for 0.9."""
    history = [torch.tensor([float(i)], dtype=torch.double) for i in range(200)]
    assert 199 - averaged(history, 0.9).weights["w"].item() == pytest.approx(9.0)


def test_nothing_is_changed_in_place():
    model = torch.nn.Linear(2, 2)
    average = ema_weights(model.state_dict())
    before = {name: tensor.clone() for name, tensor in average.weights.items()}
    with torch.no_grad():
        model.weight += 1.0
    later = ema_update(average, model.state_dict(), decay=0.5)
    for name, tensor in average.weights.items():
        assert torch.equal(tensor, before[name])
        assert not later.weights[name].requires_grad
    torch.testing.assert_close(later.weights["weight"], before["weight"] + 1 / 1.5)


def test_counters_and_types_are_kept():
    average = ema_weights({"w": torch.zeros(2), "steps": torch.tensor(1)})
    newest = {"w": torch.ones(2, dtype=torch.bfloat16), "steps": torch.tensor(5)}
    later = ema_update(average, newest, decay=torch.tensor(1.0))
    assert later.weights["w"].dtype == torch.float32
    assert later.weights["w"].tolist() == [0.5, 0.5]
    assert later.weights["steps"] == 5


def test_an_average_serves_as_the_proximal_policy():
    """PPO-EWMA in full: log-probs under averaged weights are the anchor of decoupled PPO."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    average = ema_weights(model.state_dict())
    inputs, tokens = torch.randn(6, 3), torch.randint(4, (6,))

    def score(weights):
        logits = torch.func.functional_call(model, dict(weights), inputs)
        return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    behavior = score(model.state_dict()).detach()
    for _ in range(3):
        loss = decoupled_ppo(
            score(dict(model.named_parameters())),
            score(average.weights),
            behavior,
            torch.ones(6),
            torch.ones(6, dtype=torch.bool),
        ).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        average = ema_update(average, model.state_dict(), decay=0.9)
    between = score(average.weights).mean()
    assert behavior.mean() < between < score(model.state_dict()).mean()


def test_bad_averages_are_refused():
    average = ema_weights({"w": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        ema_update(average, {"w": torch.zeros(2)}, decay=1.5)
    with pytest.raises(ValueError, match=r"differ in the names \['b'\]"):
        ema_update(average, {"w": torch.zeros(2), "b": torch.zeros(1)}, decay=0.5)
    with pytest.raises(ValueError, match=r"weights\['w'\] has shape \(1,\)"):
        ema_update(average, {"w": torch.zeros(1)}, decay=0.5)
