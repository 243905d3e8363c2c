"""Likelihood of demonstrations and the value function's regression."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional import sequence_mean, token_mean
from areal_lab.functional.losses.supervised import (
    half_squared_error,
    huber_error,
    sft_loss,
    squared_error,
    value_loss,
)
from tests.reference import formulas
from tests.reference import supervised as reference

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e300]


@pytest.fixture
def batch():
    """Values (or log-probs), old values, returns, mask; the third of 4 rows is masked."""
    generator = torch.Generator().manual_seed(0)
    values, shift, returns = torch.randn(3, 4, 6, generator=generator, dtype=torch.double)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    mask[2] = False
    return values, values + 0.5 * shift, returns, mask


def as_lists(batch):
    return [field.tolist() for field in batch]


def gradient_of(loss, leaf):
    leaf = leaf.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


# --- sft


def test_sft_equals_the_reference(batch):
    logprobs, weights, _, mask = batch
    nll = (-logprobs).tolist()
    plain = sft_loss(logprobs, mask)
    assert plain.loss.item() == pytest.approx(reference.token_mean(nll, mask.tolist()))
    by_sequence = sft_loss(logprobs, mask, aggregate=sequence_mean).loss.item()
    assert by_sequence == pytest.approx(formulas.sequence_mean(nll, mask.tolist()))
    weighted = sft_loss(logprobs, mask, weights=weights)
    slow = reference.token_mean((-weights * logprobs).tolist(), mask.tolist())
    assert weighted.loss.item() == pytest.approx(slow)
    assert torch.equal(weighted.nll, torch.where(mask, -logprobs, 0.0))


def test_sft_is_reinforce_with_an_advantage_of_one(batch):
    logprobs, _, _, mask = batch
    _, gradient = gradient_of(lambda leaf: sft_loss(leaf, mask).loss, logprobs)
    torch.testing.assert_close(gradient, -mask.double() / mask.sum())


def test_a_fair_coin_costs_one_bit():
    result = sft_loss(torch.full((3,), 0.5).log(), torch.ones(3, dtype=torch.bool))
    assert result.loss.item() == pytest.approx(math.log(2))


def test_only_sft_logprobs_get_a_gradient(batch):
    logprobs, weights = batch[0].clone().requires_grad_(), batch[1].clone().requires_grad_()
    result = sft_loss(logprobs, batch[3], weights=weights)
    result.loss.backward()
    assert logprobs.grad is not None
    assert weights.grad is None
    assert not result.nll.requires_grad


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_masked_tokens_do_not_matter_to_sft(batch, aggregate, which, garbage):
    logprobs, weights, _, mask = batch
    inputs = [logprobs, weights]
    spoiled = list(inputs)
    spoiled[which] = torch.where(mask, inputs[which], garbage)
    results = [
        gradient_of(
            lambda leaf, w=w: sft_loss(leaf, mask, weights=w, aggregate=aggregate).loss, theta
        )
        for theta, w in (inputs, spoiled)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~mask].any()


# --- values


def clipped_loss(values, old_values, returns, mask, **keywords):
    return value_loss(values, returns, mask, old_values=old_values, **keywords)


ERRORS = {
    "half": (half_squared_error, lambda d: d * d / 2),
    "square": (squared_error, lambda d: d * d),
    "huber": (huber_error(0.7), partial(reference.huber, delta=0.7)),
    "wide huber": (huber_error(100.0), lambda d: d * d / 2),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("clip", [0.1, 0.5, 1e6, math.inf])
def test_value_loss_equals_the_reference(batch, error, clip):
    ours, slow = ERRORS[error]
    result = clipped_loss(*batch, clip_epsilon=clip, error=ours)
    expected = reference.value_loss(*as_lists(batch), clip=clip, error=slow)
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)


def test_the_default_has_the_half(batch):
    half = clipped_loss(*batch, clip_epsilon=0.3)
    whole = clipped_loss(*batch, clip_epsilon=0.3, error=squared_error)
    torch.testing.assert_close(2 * half.loss, whole.loss)
    assert torch.equal(half.clipped, whole.clipped)


def test_without_a_clip_the_gradient_is_the_difference(batch):
    values, old, returns, mask = batch
    _, gradient = gradient_of(
        lambda v: clipped_loss(v, old, returns, mask, clip_epsilon=math.inf).loss, values
    )
    torch.testing.assert_close(gradient, torch.where(mask, values - returns, 0.0) / mask.sum())


@pytest.mark.parametrize(
    ("inputs", "loss", "gradient", "clipped"),
    [
        ((1.5, 1.0, 3.0), 0.5 * 1.8**2, 0.0, True),  # left towards the return: held at 1.2
        ((1.5, 1.0, 0.0), 0.5 * 1.5**2, 1.5, False),  # left away from it: still pulled back
        ((1.1, 1.0, 3.0), 0.5 * 1.9**2, -1.9, False),  # inside the range
        ((0.5, 1.0, -1.0), 0.5 * 1.8**2, 0.0, True),  # below, towards the return
        ((1.5, 1.0, 1.4), 0.5 * 0.2**2, 0.0, True),  # beyond the range is nearer to the return
    ],
)
def test_value_clip_by_hand(inputs, loss, gradient, clipped):
    v, *rest = torch.tensor(inputs, dtype=torch.double)[:, None].unbind()
    v.requires_grad_()
    result = clipped_loss(v, *rest, torch.tensor([True]), clip_epsilon=0.2)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert v.grad.item() == pytest.approx(gradient)
    assert result.clipped.item() is clipped


def test_clipped_says_where_the_gradient_is_gone(batch):
    values, old, returns, mask = batch
    result = clipped_loss(*batch, clip_epsilon=0.2)
    _, gradient = gradient_of(
        lambda v: clipped_loss(v, old, returns, mask, clip_epsilon=0.2).loss, values
    )
    assert result.clipped.any()
    assert torch.equal(result.clipped, (gradient == 0) & mask)


@settings(max_examples=30)
@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(-10, 10), st.floats(0.01, 5))
def test_the_clip_never_makes_the_loss_smaller(value, old, target, clip):
    v, o, r = torch.tensor([[value], [old], [target]], dtype=torch.double)
    mask = torch.tensor([True])
    free = clipped_loss(v, o, r, mask, clip_epsilon=math.inf).loss
    assert clipped_loss(v, o, r, mask, clip_epsilon=clip).loss >= free


def test_a_constant_added_to_values_and_returns_changes_nothing(batch):
    values, old, returns, mask = batch
    moved = clipped_loss(values + 3, old + 3, returns + 3, mask)
    torch.testing.assert_close(moved.loss, clipped_loss(*batch).loss)


def test_without_a_clip_no_old_values_are_needed(batch):
    values, old, returns, mask = batch
    result = value_loss(values, returns, mask, clip_epsilon=math.inf)
    expected = reference.value_loss(
        *as_lists((values, old, returns, mask)), clip=math.inf, error=lambda d: d * d / 2
    )
    assert result.loss.item() == pytest.approx(expected)
    assert not result.clipped.any()
    with pytest.raises(ValueError, match=r"old_values is None, but clip_epsilon is 0\.2"):
        value_loss(values, returns, mask)


def test_only_values_get_a_gradient(batch):
    leaves = [x.clone().requires_grad_() for x in batch[:3]]
    result = clipped_loss(*leaves, batch[3])
    result.loss.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]
    assert not result.clipped.requires_grad


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("error", [half_squared_error, huber_error(1.0)])
def test_masked_tokens_do_not_matter_to_values(batch, error, which, garbage):
    *inputs, mask = batch
    spoiled = list(inputs)
    spoiled[which] = torch.where(mask, inputs[which], garbage)
    results = [
        gradient_of(lambda v, rest=rest: clipped_loss(v, *rest, mask, error=error).loss, v)
        for v, *rest in (inputs, spoiled)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~mask].any()


def test_huber_is_linear_beyond_delta_and_does_not_overflow():
    d = torch.tensor([-1e200, -2.0, 0.5, 3e200], dtype=torch.double, requires_grad=True)
    error = huber_error(1.0)(d)
    assert error.tolist() == pytest.approx([1e200, 1.5, 0.125, 3e200])
    error.sum().backward()
    assert d.grad.tolist() == [-1.0, -1.0, 0.5, 1.0]


def test_empty_masks_give_zero(batch):
    values, old, returns, mask = batch
    nothing = torch.zeros_like(mask)
    for loss in (
        lambda v: clipped_loss(v, old, returns, nothing).loss,
        lambda v: sft_loss(v, nothing).loss,
        lambda v: sft_loss(v, nothing, aggregate=sequence_mean).loss,
    ):
        value, gradient = gradient_of(loss, values)
        assert value == 0
        assert not gradient.any()


def test_splitting_a_batch_under_one_token_count_changes_nothing(batch):
    mean = partial(token_mean, token_count=batch[3].sum())
    parts = [tuple(field[rows] for field in batch) for rows in (slice(0, 1), slice(1, 4))]
    whole = clipped_loss(*batch).loss
    torch.testing.assert_close(sum(clipped_loss(*p, aggregate=mean).loss for p in parts), whole)
    whole = sft_loss(batch[0], batch[3]).loss
    split = sum(sft_loss(p[0], p[3], aggregate=mean).loss for p in parts)
    torch.testing.assert_close(split, whole)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(2, 1)}, r"values has shape \(2, 1\)"),
        ({"old_values": torch.zeros(3)}, r"old_values has shape \(3,\)"),
        ({"returns": torch.zeros(2)}, r"returns has shape \(2,\) and mask \(2, 3\)"),
        ({"mask": torch.ones(2, 3)}, "mask has dtype torch.float32"),
        ({"clip_epsilon": 0.0}, "clip_epsilon is 0.0"),
        ({"clip_epsilon": -0.2}, "clip_epsilon is -0.2"),
        ({"clip_epsilon": math.nan}, "clip_epsilon is nan"),
    ],
)
def test_bad_values_are_refused(change, message):
    inputs = {name: torch.zeros(2, 3) for name in ("values", "old_values", "returns")}
    inputs["mask"] = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        clipped_loss(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_demonstrations_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"logprobs has shape \(6,\)"):
        sft_loss(torch.zeros(6), mask)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 1\)"):
        sft_loss(torch.zeros(2, 3), mask, weights=torch.zeros(2, 1))


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan])
def test_huber_deltas_must_be_positive(delta):
    with pytest.raises(ValueError, match="delta is"):
        huber_error(delta)
