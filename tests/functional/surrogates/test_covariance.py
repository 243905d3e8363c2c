"""Clip-Cov and KL-Cov: which tokens they choose, how many, and what happens to the others."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.ratios import token_ratio
from areal_lab.functional.surrogates.clip import clip_surrogate
from areal_lab.functional.surrogates.covariance import (
    advantage_covariance,
    clip_cov_surrogate,
    kl_cov_surrogate,
)
from areal_lab.functional.surrogates.reinforce import importance_surrogate
from tests.reference import surrogates as reference

SHAPE = (5, 8)


def draw(seed=0):
    """logprobs, anchor, advantages, noise, mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(SHAPE, generator=generator, dtype=torch.double)
    anchor = logprobs + 0.3 * torch.randn(SHAPE, generator=generator, dtype=torch.double)
    advantages = torch.randn(SHAPE, generator=generator, dtype=torch.double)
    noise = torch.rand(SHAPE, generator=generator, dtype=torch.double)
    return logprobs, anchor, advantages, noise, torch.rand(SHAPE, generator=generator) > 0.3


def with_gradient(surrogate, logprobs, anchor, advantages, mask):
    leaf = logprobs.clone().requires_grad_()
    result = surrogate(token_ratio(leaf, anchor, mask), advantages)
    return result.value.detach(), result.clipped, torch.autograd.grad(result.value.sum(), leaf)[0]


def positions(mask, chosen):
    """Positions among the unmasked tokens, as the reference counts them."""
    return set(chosen[mask].nonzero()[:, 0].tolist())


def test_the_covariance_of_each_token():
    logprobs, anchor, advantages, _, mask = draw()
    shares = advantage_covariance(token_ratio(logprobs, anchor, mask), advantages)
    expected = reference.covariance(logprobs[mask].tolist(), advantages[mask].tolist())
    torch.testing.assert_close(shares[mask], torch.tensor(expected, dtype=torch.double))
    assert (shares[~mask] == 0).all()
    kept = torch.stack([logprobs[mask], advantages[mask]])
    torch.testing.assert_close(shares[mask].mean(), torch.cov(kept, correction=0)[0, 1])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    fraction=st.sampled_from([0.0, 1e-6, 0.05, 0.1, 0.25, 1.0]),
    band=st.sampled_from([(0.0, 5.0), (0.1, 0.5), (-9.0, 9.0), (7.0, 9.0)]),
)
def test_clip_cov_chooses_as_the_reference(seed, fraction, band):
    logprobs, anchor, advantages, noise, mask = draw(seed)
    tokens = (logprobs, anchor, advantages, mask)
    surrogate = partial(clip_cov_surrogate, noise=noise, fraction=fraction, band=band)
    value, clipped, gradient = with_gradient(surrogate, *tokens)
    base, base_clipped, base_gradient = with_gradient(clip_surrogate, *tokens)
    expected = reference.clip_cov_tokens(
        logprobs[mask].tolist(),
        advantages[mask].tolist(),
        noise[mask].tolist(),
        base_clipped[mask].tolist(),
        fraction=fraction,
        band=band,
    )
    assert positions(mask, clipped & ~base_clipped) == expected
    chosen = clipped & ~base_clipped
    assert torch.equal(value, torch.where(chosen, 0.0, base))
    assert torch.equal(gradient, torch.where(chosen, 0.0, base_gradient))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), fraction=st.sampled_from([0.0, 1e-6, 0.05, 0.1, 0.25, 1.0]))
def test_kl_cov_chooses_as_the_reference(seed, fraction):
    logprobs, anchor, advantages, _, mask = draw(seed)
    tokens = (logprobs, anchor, advantages, mask)
    surrogate = partial(kl_cov_surrogate, fraction=fraction, penalty=0.7)
    value, clipped, gradient = with_gradient(surrogate, *tokens)
    base, _, base_gradient = with_gradient(importance_surrogate, *tokens)
    expected = reference.kl_cov_tokens(
        logprobs[mask].tolist(), advantages[mask].tolist(), fraction=fraction
    )
    assert positions(mask, gradient != base_gradient) == expected
    moved = torch.where(gradient != base_gradient, logprobs - anchor, 0.0)
    torch.testing.assert_close(value, base - 0.7 * moved.abs())
    torch.testing.assert_close(gradient, base_gradient - 0.7 * moved.sign())
    assert not clipped.any()


def test_any_of_the_eligible_can_be_chosen():
    """The one of the least noise is: over all noises each has its turn."""
    logprobs, anchor, advantages, _, mask = draw()
    policy = token_ratio(logprobs, anchor, mask)
    shares = advantage_covariance(policy, advantages)
    eligible = mask & (shares >= 0.1) & (shares <= 5) & ~clip_surrogate(policy, advantages).clipped
    assert eligible.sum() >= 3
    for place in eligible.nonzero().tolist():
        noise = torch.ones(SHAPE)
        noise[tuple(place)] = 0.5
        ours = clip_cov_surrogate(policy, advantages, noise=noise, fraction=1e-4, band=(0.1, 5.0))
        assert ours.value[tuple(place)] == 0
        assert ours.clipped[tuple(place)]


def test_other_surrogates_can_be_thinned():
    """The paper's Clip-Cov has no PPO clip under it."""
    logprobs, anchor, advantages, noise, mask = draw()
    ours = clip_cov_surrogate(
        token_ratio(logprobs, anchor, mask),
        advantages,
        noise=noise,
        fraction=0.1,
        band=(0.0, 5.0),
        surrogate=importance_surrogate,
    )
    assert ours.clipped.sum() == math.floor(0.1 * int(mask.sum()))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_masked_tokens_do_not_matter(garbage):
    *tokens, mask = draw()

    def results(logprobs, anchor, advantages, noise):
        clip_cov = partial(clip_cov_surrogate, noise=noise, fraction=0.1, band=(0.0, 5.0))
        kl_cov = partial(kl_cov_surrogate, fraction=0.1)
        return [
            output
            for surrogate in (clip_cov, kl_cov)
            for output in with_gradient(surrogate, logprobs, anchor, advantages, mask)
        ]

    clean = results(*tokens)
    for index in range(4):
        spoiled = [*tokens]
        spoiled[index] = torch.where(mask, spoiled[index], garbage)
        for one, other in zip(clean, results(*spoiled), strict=True):
            assert torch.equal(one, other)


def test_an_empty_mask_gives_zeros():
    logprobs, anchor, advantages, noise, mask = draw()
    nothing = torch.zeros_like(mask)
    for surrogate in (partial(clip_cov_surrogate, noise=noise), kl_cov_surrogate):
        outputs = with_gradient(surrogate, logprobs, anchor, advantages, nothing)
        assert all((output == 0).all() for output in outputs)


def test_a_chosen_token_without_an_advantage_was_not_clipped():
    """Its covariance may be in the band, but there is no gradient to remove."""
    logprobs = torch.tensor([-2.0, -0.1, -0.1], dtype=torch.double)
    advantages = torch.tensor([0.0, 2.0, 4.0], dtype=torch.double)
    policy = token_ratio(logprobs, logprobs, torch.tensor([True, True, True]))
    assert advantage_covariance(policy, advantages)[0] > 1
    noise = torch.tensor([0.0, 0.5, 0.5])
    assert not clip_cov_surrogate(policy, advantages, noise=noise).clipped.any()


def test_the_penalty_of_kl_cov_does_not_need_an_advantage():
    logprobs, anchor, advantages, _, mask = draw()
    surrogate = partial(kl_cov_surrogate, fraction=1.0)
    _, _, gradient = with_gradient(surrogate, logprobs, anchor, 0 * advantages, mask)
    assert (gradient[mask].abs() == 1).all()
    _, _, on_policy = with_gradient(surrogate, logprobs, logprobs, 0 * advantages, mask)
    assert (on_policy == 0).all()


def test_only_logprobs_get_a_gradient():
    *tokens, mask = draw()
    logprobs, anchor, advantages, noise = (x.clone().requires_grad_() for x in tokens)
    policy = token_ratio(logprobs, anchor, mask)
    clip_cov = clip_cov_surrogate(policy, advantages, noise=noise, fraction=0.1)
    kl_cov = kl_cov_surrogate(policy, advantages, fraction=0.1)
    (clip_cov.value.sum() + kl_cov.value.sum()).backward()
    assert logprobs.grad is not None
    assert all(x.grad is None for x in (anchor, advantages, noise))


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (partial(kl_cov_surrogate, fraction=-0.1), "fraction is -0.1"),
        (partial(kl_cov_surrogate, fraction=1.1), "fraction is 1.1"),
        (partial(kl_cov_surrogate, penalty=-1.0), "penalty is -1.0"),
        (partial(clip_cov_surrogate, noise=torch.zeros(SHAPE), fraction=2.0), "fraction is 2.0"),
        (partial(clip_cov_surrogate, noise=torch.zeros(SHAPE), band=(5.0, 1.0)), "band is"),
    ],
)
def test_numbers_out_of_range_are_refused(surrogate, message):
    logprobs, anchor, advantages, _, mask = draw()
    with pytest.raises(ValueError, match=message):
        surrogate(token_ratio(logprobs, anchor, mask), advantages)


@pytest.mark.usefixtures("unchecked_shapes")
def test_noise_of_another_shape_is_refused():
    logprobs, anchor, advantages, noise, mask = draw()
    with pytest.raises(ValueError, match=r"noise has shape \(5, 1\) and mask \(5, 8\)"):
        clip_cov_surrogate(token_ratio(logprobs, anchor, mask), advantages, noise=noise[:, :1])
