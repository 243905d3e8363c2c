"""Surrogates: values and slopes, limits, where a gradient is removed, and what must not matter."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_lab.functional.ratios import sequence_product_ratio, token_ratio
from areal_lab.functional.surrogates.clip import (
    Surrogate,
    clip_bounds,
    clip_surrogate,
    dual_clip_surrogate,
    sat_surrogate,
)
from areal_lab.functional.surrogates.divergence import (
    dppo_kl_surrogate,
    dppo_tv_surrogate,
    prime_rl_ipo_surrogate,
    prime_rl_surrogate,
)
from areal_lab.functional.surrogates.reinforce import (
    aipo_surrogate,
    cispo_surrogate,
    icepop_surrogate,
    importance_surrogate,
    reinforce_surrogate,
    topr_surrogate,
    truncated_reinforce_surrogate,
    weighted_logprobs,
)
from areal_lab.functional.surrogates.smooth import (
    gmpo_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)
from areal_lab.functional.surrogates.squared import (
    dro_surrogate,
    kimi_sequence_surrogate,
    kimi_surrogate,
    ratio_variance_surrogate,
)
from tests.reference import surrogates as reference

INF = math.inf


class Batch(NamedTuple):
    logprobs: Tensor
    anchor_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@pytest.fixture
def batch() -> Batch:
    """Log-probs from -2 to 0, ratios on both sides of 1 by up to a factor of 4, A of both signs."""
    generator = torch.Generator().manual_seed(1)
    shape = (6, 9)

    def uniform(low, high):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.double)

    anchor = uniform(-2.0, -0.01)
    logprobs = torch.minimum(anchor + uniform(-1.5, 1.5), torch.tensor(-0.005).double())
    advantages = uniform(-2.0, 2.0)
    advantages[0, :4] = 0.0
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[4] = False
    return Batch(logprobs, anchor, advantages, mask)


def run(surrogate, batch, ratio=token_ratio):
    """The surrogate, and the gradient of the sum of its values by log-prob."""
    leaf = batch.logprobs.clone().requires_grad_()
    result = surrogate(ratio(leaf, batch.anchor_logprobs, batch.mask), batch.advantages)
    (gradient,) = torch.autograd.grad(result.value.sum(), leaf)
    return Surrogate(result.value.detach(), result.clipped), gradient


def tis(cap):
    return partial(reference.reinforce, weight=lambda r, a: min(r, cap))  # noqa: ARG005


def token(function, **numbers):
    return reference.by_token(partial(function, **numbers))


def icepop_weight(ratio, _):
    return ratio if 0.5 <= ratio <= 1.5 else 0.0


CASES = {
    "clip": (clip_surrogate, token(reference.clip, low=0.2, high=0.2)),
    "clip higher": (
        partial(clip_surrogate, clip_epsilon=(0.2, 0.28)),
        token(reference.clip, low=0.2, high=0.28),
    ),
    "dual clip": (
        partial(dual_clip_surrogate, dual_clip=1.5),
        token(reference.clip, low=0.2, high=0.2, dual=1.5),
    ),
    "sat, every token within": (
        partial(sat_surrogate, quantile=1.0, clip_epsilon=(0.2, 0.28)),
        token(reference.clip, low=0.2, high=0.28),
    ),
    "ratio variance": (
        partial(ratio_variance_surrogate, penalty=0.7),
        token(reference.ratio_variance, penalty=0.7),
    ),
    "reinforce": (reinforce_surrogate, token(reference.reinforce, weight=lambda *_: 1.0)),
    "importance": (importance_surrogate, token(reference.importance)),
    "cispo": (
        partial(cispo_surrogate, clip_epsilon=(0.3, 0.5)),
        token(reference.reinforce, weight=lambda r, _: reference.clamp(r, 0.7, 1.5)),
    ),
    "cispo without a low bound": (
        partial(cispo_surrogate, clip_epsilon=(1.0, 0.5)),
        reference.by_token(tis(1.5)),
    ),
    "aipo": (partial(aipo_surrogate, cap=2.0), reference.by_token(tis(2.0))),
    "truncated": (truncated_reinforce_surrogate, reference.by_token(tis(1.0))),
    "icepop": (
        partial(icepop_surrogate, clip_epsilon=0.5),
        token(reference.reinforce, weight=icepop_weight),
    ),
    "topr": (
        topr_surrogate,
        token(reference.reinforce, weight=lambda r, a: min(r, 1.0) if a < 0 else 1.0),
    ),
    "sapo": (sapo_surrogate, token(reference.sapo, tau_positive=1.0, tau_negative=1.05)),
    "sapo, sharp": (
        partial(sapo_surrogate, tau_positive=6.0, tau_negative=9.0),
        token(reference.sapo, tau_positive=6.0, tau_negative=9.0),
    ),
    "gmpo": (gmpo_surrogate, partial(reference.gmpo, low=0.4, high=0.4)),
    "gmpo, two bounds": (
        partial(gmpo_surrogate, log_clip_epsilon=(0.1, 0.7)),
        partial(reference.gmpo, low=0.1, high=0.7),
    ),
    "vespo": (
        vespo_surrogate,
        partial(reference.vespo, positive=(2.0, 3.0), negative=(3.0, 2.0)),
    ),
    "dppo tv": (
        partial(dppo_tv_surrogate, divergence=(0.1, 0.2), cap=1.7),
        token(reference.dppo_tv, low=0.1, high=0.2, cap=1.7),
    ),
    "dppo kl": (
        partial(dppo_kl_surrogate, divergence=(0.02, 0.1), cap=1.7),
        token(reference.dppo_kl, low=0.02, high=0.1, cap=1.7),
    ),
    "prime-rl": (
        partial(prime_rl_surrogate, penalty=0.01),
        reference.by_token(
            reference.with_square(partial(reference.dppo_tv, low=0.2, high=0.2), 0.01)
        ),
    ),
    "prime-rl ipo": (
        partial(prime_rl_ipo_surrogate, penalty=0.01),
        reference.by_token(
            reference.with_square(partial(reference.prime_rl_ipo, low=0.1, high=0.1), 0.01)
        ),
    ),
    "kimi": (
        kimi_surrogate,
        reference.by_token(
            reference.with_square(partial(reference.reinforce, weight=lambda *_: 1.0), 0.05)
        ),
    ),
    "kimi by sequence": (kimi_sequence_surrogate, partial(reference.kimi_sequence, tau=0.1)),
    "dro": (
        partial(dro_surrogate, beta=0.4),
        reference.by_token(
            reference.with_square(partial(reference.reinforce, weight=lambda *_: 1.0), 0.2)
        ),
    ),
}
STRENGTH = {
    "prime-rl": "penalty",
    "prime-rl ipo": "penalty",
    "kimi": "tau",
    "kimi by sequence": "tau",
    "dro": "beta",
    "ratio variance": "penalty",
}
"""Surrogates with a squared ratio or log ratio, and what its factor is called."""
ALL = pytest.mark.parametrize("name", CASES)


def by_the_reference(expected, batch):
    """Values and slopes of all tokens, 0 where masked."""
    values, slopes = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs)
    for i, chosen in enumerate(batch.mask):
        places = chosen.nonzero()[:, 0].tolist()
        if not places:
            continue
        rows = [field[i, places].tolist() for field in batch[:3]]
        for t, (value, slope) in zip(places, expected(*rows), strict=True):
            values[i, t], slopes[i, t] = value, slope
    return values, slopes


@ALL
def test_values_and_gradients_equal_the_reference(batch, name):
    surrogate, expected = CASES[name]
    ours, gradient = run(surrogate, batch)
    values, slopes = by_the_reference(expected, batch)
    torch.testing.assert_close(ours.value, values, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradient, slopes, rtol=1e-11, atol=1e-13)


@ALL
def test_clipped_says_where_the_gradient_is_gone(batch, name):
    surrogate, _ = CASES[name]
    if name in STRENGTH:  # without the square, which has a gradient of its own
        surrogate = partial(surrogate, **{STRENGTH[name]: 0.0})
    ours, gradient = run(surrogate, batch)
    gone = (gradient == 0) & (batch.advantages != 0) & batch.mask
    if "gmpo" in name:  # a token without an advantage moves the mean of its sequence, too
        gone = (gradient == 0) & batch.mask
    assert torch.equal(ours.clipped, gone)
    removing = ("clip", "sat", "icepop", "gmpo", "dppo", "prime")
    assert ours.clipped.any() == name.startswith((*removing, "dual"))


@ALL
def test_on_policy_the_gradient_is_that_of_reinforce(batch, name):
    """At r = 1 they are all the same; of GMPO and VESPO with one advantage per sequence."""
    advantages = batch.advantages[:, 5:6].expand(batch.mask.shape)
    on_policy = batch._replace(anchor_logprobs=batch.logprobs, advantages=advantages)
    ours, gradient = run(CASES[name][0], on_policy)
    torch.testing.assert_close(gradient, torch.where(batch.mask, advantages, 0.0))
    assert not ours.clipped.any()


@ALL
def test_only_logprobs_get_a_gradient(batch, name):
    logprobs, anchor, advantages = (field.clone().requires_grad_() for field in batch[:3])
    ours = CASES[name][0](token_ratio(logprobs, anchor, batch.mask), advantages)
    ours.value.sum().backward()
    assert logprobs.grad is not None
    assert anchor.grad is None
    assert advantages.grad is None
    assert not ours.clipped.requires_grad


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF, 1e300])
@ALL
def test_masked_tokens_do_not_matter(batch, name, garbage):
    surrogate, _ = CASES[name]
    clean, gradient = run(surrogate, batch)
    for field in ("logprobs", "anchor_logprobs", "advantages"):
        spoiled = torch.where(batch.mask, getattr(batch, field), garbage)
        ours, its_gradient = run(surrogate, batch._replace(**{field: spoiled}))
        assert torch.equal(ours.value, clean.value)
        assert torch.equal(ours.clipped, clean.clipped)
        assert torch.equal(its_gradient, gradient)
    assert (clean.value[~batch.mask] == 0).all()
    assert not clean.clipped[~batch.mask].any()
    assert (gradient[~batch.mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [2000.0, -2000.0])
@ALL
def test_a_ratio_beyond_the_floating_type_gives_no_nan(batch, name, distance, dtype):
    """Log-probs themselves cannot be above 0, but may be far below."""
    low, high = torch.full_like(batch.logprobs, -2001.0), torch.full_like(batch.logprobs, -1.0)
    far = batch._replace(
        logprobs=high if distance > 0 else low, anchor_logprobs=low if distance > 0 else high
    )
    if "gmpo" in name:  # one advantage per sequence: infinities of both signs have no sum
        far = far._replace(advantages=batch.advantages[:, 5:6].expand(batch.mask.shape))
    far = far._replace(**{k: getattr(far, k).to(dtype) for k in Batch._fields[:3]})
    ours, gradient = run(CASES[name][0], far)
    assert not ours.value.isnan().any()
    assert not gradient.isnan().any()
    unbounded = ("clip", "sat", "importance", "gmpo", "dppo", "prime", "ratio")
    bounded = not name.startswith(unbounded)
    assert not bounded or (ours.value.isfinite().all() and gradient.isfinite().all())


@ALL
def test_without_an_advantage_only_a_penalty_is_left(batch, name):
    nothing = batch._replace(advantages=torch.zeros_like(batch.advantages))
    ours, gradient = run(CASES[name][0], nothing)
    assert not ours.clipped.any()
    if name in STRENGTH:
        assert (gradient[batch.mask] != 0).all()
    else:
        assert (ours.value == 0).all()
        assert (gradient == 0).all()


@ALL
def test_an_empty_mask_gives_zeros(batch, name):
    ours, gradient = run(CASES[name][0], batch._replace(mask=torch.zeros_like(batch.mask)))
    assert (ours.value == 0).all()
    assert (gradient == 0).all()
    assert not ours.clipped.any()


@pytest.mark.parametrize("name", sorted(set(CASES) - set(STRENGTH)))
def test_surrogates_are_proportional_to_the_advantage(batch, name):
    ours, gradient = run(CASES[name][0], batch)
    scaled, its_gradient = run(CASES[name][0], batch._replace(advantages=3 * batch.advantages))
    torch.testing.assert_close(scaled.value, 3 * ours.value)
    torch.testing.assert_close(its_gradient, 3 * gradient)
    assert torch.equal(scaled.clipped, ours.clipped)


SAME = {
    "a dual clip at infinity is the clip": (
        partial(dual_clip_surrogate, dual_clip=INF),
        clip_surrogate,
    ),
    "an endless trust region is none": (
        partial(clip_surrogate, clip_epsilon=(1.0, INF)),
        importance_surrogate,
    ),
    "AIPO at a cap of 1 is truncated REINFORCE": (
        partial(aipo_surrogate, cap=1.0),
        truncated_reinforce_surrogate,
    ),
    "AIPO is CISPO without a low bound": (
        partial(aipo_surrogate, cap=3.0),
        partial(cispo_surrogate, clip_epsilon=(1.0, 2.0)),
    ),
    "endless IcePop is endless CISPO": (
        partial(icepop_surrogate, clip_epsilon=(1.0, INF)),
        partial(cispo_surrogate, clip_epsilon=(1.0, INF)),
    ),
    "a total variation is at most 1": (
        partial(dppo_tv_surrogate, divergence=1.0),
        importance_surrogate,
    ),
    "DPPO-KL without a bound": (
        partial(dppo_kl_surrogate, divergence=INF),
        importance_surrogate,
    ),
    "prime-rl without a penalty is DPPO-TV": (
        partial(prime_rl_surrogate, penalty=0.0),
        partial(dppo_tv_surrogate, divergence=0.2),
    ),
    "prime-rl ipo without bound and penalty": (
        partial(prime_rl_ipo_surrogate, divergence=1.0, penalty=0.0),
        importance_surrogate,
    ),
    "Kimi without a pull is REINFORCE": (partial(kimi_surrogate, tau=0.0), reinforce_surrogate),
    "DRO is Kimi by another name": (
        partial(dro_surrogate, beta=0.3),
        partial(kimi_surrogate, tau=0.3),
    ),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_the_same_by_another_name(batch, pair):
    one, its_gradient = run(pair[0], batch)
    other, other_gradient = run(pair[1], batch)
    torch.testing.assert_close(one.value, other.value)
    torch.testing.assert_close(its_gradient, other_gradient)
    assert torch.equal(one.clipped, other.clipped)


def test_gradients_of_endless_weights_are_those_of_importance_sampling(batch):
    _, expected = run(importance_surrogate, batch)
    for surrogate in (
        partial(cispo_surrogate, clip_epsilon=(1.0, INF)),
        partial(aipo_surrogate, cap=INF),
        partial(sapo_surrogate, tau_positive=1e-7, tau_negative=1e-7),
    ):
        torch.testing.assert_close(run(surrogate, batch)[1], expected, rtol=1e-6, atol=1e-9)


def test_cispo_keeps_what_ppo_clips(batch):
    ours, clipped = run(clip_surrogate, batch)
    _, kept = run(cispo_surrogate, batch)
    assert (clipped[ours.clipped] == 0).all()
    assert (kept[ours.clipped] != 0).all()


def test_a_two_sided_clip_is_a_dual_clip(batch):
    """TRL's and Liger-Kernel's delta: the ratio is bounded before the minimum is taken."""

    def two_sided(policy, advantages):
        ratio = torch.exp(policy.log_ratio).clamp(max=1.5)
        advantages = torch.where(policy.mask, advantages, 0.0)
        value = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return Surrogate(value, torch.zeros_like(policy.mask))

    one, its_gradient = run(two_sided, batch)
    other, other_gradient = run(partial(dual_clip_surrogate, dual_clip=1.5), batch)
    torch.testing.assert_close(one.value, other.value)
    torch.testing.assert_close(its_gradient, other_gradient)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "slope"),
    [
        (dual_clip_surrogate, 4.0, -1.0, 0.0),  # beyond c = 3
        (dual_clip_surrogate, 2.5, -1.0, -2.5),
        (dual_clip_surrogate, 4.0, 1.0, 0.0),  # beyond 1.2
        (cispo_surrogate, 7.0, 1.0, 5.0),  # TRL's epsilon_high of 5 is our (1.0, 4.0)
        (cispo_surrogate, 0.1, -1.0, -0.1),
        (truncated_reinforce_surrogate, 2.0, 1.0, 1.0),
        (truncated_reinforce_surrogate, 0.5, 1.0, 0.5),
        (icepop_surrogate, 0.5, 1.0, 0.5),  # the bounds are inside
        (icepop_surrogate, 5.0, 1.0, 5.0),
        (icepop_surrogate, 5.01, 1.0, 0.0),
        (icepop_surrogate, 0.49, 1.0, 0.0),
        (topr_surrogate, 0.5, 1.0, 1.0),
        (topr_surrogate, 0.5, -1.0, -0.5),
        (topr_surrogate, 2.0, -1.0, -1.0),
        (vespo_surrogate, 2.0, 1.0, 4 * math.exp(-3)),  # W^2 exp(3 (1 - W))
        (vespo_surrogate, 2.0, -1.0, -8 * math.exp(-2)),
        (partial(gmpo_surrogate, log_clip_epsilon=0.5), math.exp(0.6), 1.0, 0.0),
        (partial(gmpo_surrogate, log_clip_epsilon=0.5), math.exp(0.4), 1.0, math.exp(0.4)),
        (partial(gmpo_surrogate, log_clip_epsilon=0.5), math.exp(-0.6), -1.0, 0.0),
    ],
)
def test_slopes_by_hand(surrogate, ratio, advantage, slope):
    one = Batch(
        torch.tensor([ratio], dtype=torch.double).log(),  # exact at a bound, as log1p of it is
        torch.zeros(1, dtype=torch.double),
        torch.tensor([advantage], dtype=torch.double),
        torch.tensor([True]),
    )
    ours, gradient = run(surrogate, one)
    assert gradient.item() == pytest.approx(slope)
    assert ours.clipped.item() == (slope == 0)


@pytest.mark.parametrize(
    ("p", "q", "advantage", "kept"),
    [
        (0.66, 0.5, 1.0, False),  # went up by more than 0.15 and would go further
        (0.64, 0.5, 1.0, True),
        (0.66, 0.5, -1.0, True),  # pulled back
        (0.34, 0.5, -1.0, False),
        (0.34, 0.5, 1.0, True),
        (1e-3, 1e-6, 1.0, True),  # a ratio of 1000 is nothing much
    ],
)
def test_dppo_looks_at_probabilities(p, q, advantage, kept):
    one = Batch(
        torch.tensor([p], dtype=torch.double).log(),
        torch.tensor([q], dtype=torch.double).log(),
        torch.tensor([advantage], dtype=torch.double),
        torch.tensor([True]),
    )
    ours, gradient = run(dppo_tv_surrogate, one)
    assert ours.clipped.item() is not kept
    assert gradient.item() == pytest.approx(p / q * advantage if kept else 0.0)
    pulled_back = (p - q) * advantage < 0
    _, by_band = run(partial(prime_rl_ipo_surrogate, divergence=0.15, penalty=0.0), one)
    assert (by_band.item() != 0) == (kept and not (pulled_back and abs(p - q) > 0.15))


@pytest.mark.parametrize(
    ("logprob", "anchor", "advantage", "kept"),
    [
        (0.0, 0.0, 1.0, True),  # both sure: 0 log 0
        (0.0, math.log(0.9), 1.0, False),  # the policy is sure, the anchor is not: infinite
        (0.0, math.log(0.9), -1.0, True),
        (-2000.0, math.log(0.9), -1.0, False),
        (1e-8, 1e-8, 1.0, True),  # rounding of a log-softmax
        (1e-8, math.log(0.9), 1.0, False),
        (-1.0, -INF, 1.0, False),  # the anchor cannot draw the token: D = -log(1 - p) = 0.46
    ],
)
def test_dppo_kl_at_the_ends(logprob, anchor, advantage, kept):
    one = Batch(
        *(torch.tensor([x], dtype=torch.double) for x in (logprob, anchor, advantage)),
        torch.tensor([True]),
    )
    ours, gradient = run(dppo_kl_surrogate, one)
    assert ours.clipped.item() is not kept
    assert gradient.isfinite().all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_sapo_gate_is_half_shut(advantage):
    """At tau (r - 1) = 2 arsinh(1) = 1.763 half of the gradient of r A is left."""
    tau = 4.0
    ratio = 1 + 2 * math.asinh(1.0) / tau
    one = Batch(
        torch.tensor([ratio], dtype=torch.double).log(),
        torch.zeros(1, dtype=torch.double),
        torch.tensor([advantage], dtype=torch.double),
        torch.tensor([True]),
    )
    _, gradient = run(partial(sapo_surrogate, tau_positive=tau, tau_negative=tau), one)
    assert gradient.item() == pytest.approx(ratio * advantage / 2)


@settings(max_examples=30)
@given(
    log_ratio=st.floats(-3, 3),
    positive=st.tuples(st.floats(0.5, 5), st.floats(0.5, 5)),
)
def test_the_vespo_kernel_is_largest_at_k_over_lambda(log_ratio, positive):
    power, decay = positive
    one = Batch(
        torch.tensor([log_ratio], dtype=torch.double),
        torch.zeros(1, dtype=torch.double),
        torch.ones(1, dtype=torch.double),
        torch.tensor([True]),
    )
    _, gradient = run(partial(vespo_surrogate, positive=positive), one)
    peak = (power / decay) ** power * math.exp(decay - power)
    assert 0 < gradient.item() <= peak * (1 + 1e-12)


def test_kimi_by_sequence_sums_to_the_square_of_the_answer(batch):
    without = batch._replace(advantages=torch.zeros_like(batch.advantages))
    ours, _ = run(partial(kimi_sequence_surrogate, tau=1.0), without)
    moved = torch.where(batch.mask, batch.logprobs - batch.anchor_logprobs, 0.0).sum(1)
    torch.testing.assert_close(ours.value.sum(1), -moved.square() / 2)


def test_topr_of_whole_answers(batch):
    """Paper's form: the weight of every token is the truncated ratio of its sequence."""
    bad = batch._replace(advantages=-torch.ones_like(batch.advantages))
    _, gradient = run(topr_surrogate, bad, ratio=sequence_product_ratio)
    moved = torch.where(batch.mask, batch.logprobs - batch.anchor_logprobs, 0.0).sum(1)
    weight = moved.exp().clamp(max=1.0)[:, None].expand(batch.mask.shape)
    torch.testing.assert_close(gradient, torch.where(batch.mask, -weight, 0.0))
    assert (weight < 1).any()


def test_gmpo_of_one_token_is_a_clip(batch):
    """Sequences of length 1: PPO with bounds exp(-0.4) and exp(0.4)."""
    single = Batch(*(field.reshape(-1, 1) for field in batch))
    one, its_gradient = run(gmpo_surrogate, single)
    bounds = (1 - math.exp(-0.4), math.exp(0.4) - 1)
    other, other_gradient = run(partial(clip_surrogate, clip_epsilon=bounds), single)
    torch.testing.assert_close(one.value, other.value)
    torch.testing.assert_close(its_gradient, other_gradient)


def test_an_own_weight_needs_one_line(batch):
    """The family's base: here the square root of the ratio."""

    def tempered(policy, advantages):
        return weighted_logprobs(policy, advantages, torch.exp(policy.log_ratio / 2))

    _, gradient = run(tempered, batch)
    root = torch.exp((batch.logprobs - batch.anchor_logprobs) / 2)
    torch.testing.assert_close(gradient, torch.where(batch.mask, root * batch.advantages, 0.0))


def test_a_logprob_of_minus_infinity_without_a_weight_adds_nothing(batch):
    dead = batch._replace(logprobs=torch.full_like(batch.logprobs, -INF))
    for surrogate in (cispo_surrogate, aipo_surrogate, truncated_reinforce_surrogate):
        bound = partial(surrogate, cap=2.0) if surrogate is aipo_surrogate else surrogate
        ours, gradient = run(bound, dead)
        assert (ours.value == 0).all()
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "surrogate",
    [
        vespo_surrogate,
        partial(dppo_kl_surrogate, divergence=9.0, cap=20.0),
        partial(dppo_tv_surrogate, divergence=1.0, cap=20.0),
    ],
)
def test_an_anchor_that_cannot_draw_the_token_makes_no_nan(surrogate, sign, dtype):
    one = Batch(
        torch.tensor([-1.0, -0.5], dtype=dtype),
        torch.tensor([-1.0, -INF], dtype=dtype),
        torch.tensor([1.0, sign], dtype=dtype),
        torch.tensor([True, True]),
    )
    ours, gradient = run(surrogate, one)
    assert ours.value.isfinite().all()
    assert gradient.isfinite().all()
    if surrogate is vespo_surrogate:  # W is infinite, its kernel 0
        assert ours.value.tolist() == [0, 0]
        assert ours.clipped.all()
    else:
        assert ours.value.tolist() == [1, pytest.approx(20 * sign)]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("surrogate", [kimi_surrogate, kimi_sequence_surrogate, prime_rl_surrogate])
def test_without_a_pull_an_infinite_log_ratio_is_not_squared(surrogate, advantage):
    name = "penalty" if surrogate is prime_rl_surrogate else "tau"
    one = torch.tensor([-INF, -1.0])
    batch = Batch(one, torch.tensor([-1.0, -1.0]), torch.full((2,), advantage), one < 0)
    ours, gradient = run(partial(surrogate, **{name: 0.0}), batch)
    assert not ours.value.isnan().any()
    assert gradient.isfinite().all()


def test_a_clip_range_may_be_any_sequence_of_two():
    for pair in ((0.2, 0.28), [0.2, 0.28]):
        assert clip_bounds(pair) == tuple(pair)
    assert clip_bounds(0.2) == clip_bounds([0.2, 0.2]) == (0.2, 0.2)
    with pytest.raises(ValueError, match=r"clip_epsilon is \[0.2\]"):
        clip_bounds([0.2])
    with pytest.raises(ValueError, match=r"delta is \(1.0, 2.0, 3.0\)"):
        clip_bounds((1.0, 2.0, 3.0), name="delta")


BAD = {
    "clip": (partial(clip_surrogate, clip_epsilon=-0.1), "clip_epsilon is -0.1"),
    "dual clip": (partial(dual_clip_surrogate, dual_clip=1.0), "dual_clip is 1.0"),
    "dual clip, nan": (partial(dual_clip_surrogate, dual_clip=math.nan), "dual_clip is nan"),
    "cispo": (partial(cispo_surrogate, clip_epsilon=(0.2, -1.0)), "clip_epsilon is"),
    "aipo": (partial(aipo_surrogate, cap=0.0), "cap is 0.0"),
    "truncated": (partial(truncated_reinforce_surrogate, cap=-1.0), "cap is -1.0"),
    "icepop": (partial(icepop_surrogate, clip_epsilon=math.nan), "clip_epsilon is nan"),
    "topr": (partial(topr_surrogate, cap=0.0), "cap is 0.0"),
    "sapo": (partial(sapo_surrogate, tau_positive=0.0), "tau_positive is 0.0"),
    "sapo, infinite": (partial(sapo_surrogate, tau_negative=INF), "tau_negative is inf"),
    "gmpo": (partial(gmpo_surrogate, log_clip_epsilon=-0.4), "log_clip_epsilon is -0.4"),
    "vespo": (partial(vespo_surrogate, positive=(2.0, 0.0)), "positive is"),
    "vespo, negative": (partial(vespo_surrogate, negative=(-2.0, 1.0)), "negative is"),
    "dppo tv": (partial(dppo_tv_surrogate, divergence=-0.2), "divergence is -0.2"),
    "dppo tv, cap": (partial(dppo_tv_surrogate, cap=0.0), "cap is 0.0"),
    "dppo kl": (partial(dppo_kl_surrogate, divergence=(0.1, -0.2)), "divergence is"),
    "prime-rl": (partial(prime_rl_surrogate, penalty=-1e-3), "penalty is -0.001"),
    "prime-rl ipo": (partial(prime_rl_ipo_surrogate, divergence=-0.1), "divergence is -0.1"),
    "kimi": (partial(kimi_surrogate, tau=-0.1), "tau is -0.1"),
    "kimi by sequence": (partial(kimi_sequence_surrogate, tau=math.nan), "tau is nan"),
    "dro": (partial(dro_surrogate, beta=-0.1), "beta is -0.1"),
}


@pytest.mark.parametrize(("surrogate", "message"), BAD.values(), ids=BAD)
def test_numbers_out_of_range_are_refused(batch, surrogate, message):
    with pytest.raises(ValueError, match=message):
        run(surrogate, batch)


@pytest.mark.usefixtures("unchecked_shapes")
@ALL
def test_advantages_of_another_shape_are_refused(batch, name):
    message = r"advantages has shape \(6, 1\) and mask \(6, 9\)"
    with pytest.raises(ValueError, match=message):
        run(CASES[name][0], batch._replace(advantages=batch.advantages[:, :1]))


@pytest.mark.usefixtures("unchecked_shapes")
def test_weights_of_another_shape_are_refused(batch):
    with pytest.raises(ValueError, match=r"weight has shape \(6,\)"):
        run(lambda p, a: weighted_logprobs(p, a, torch.ones(6)), batch)
