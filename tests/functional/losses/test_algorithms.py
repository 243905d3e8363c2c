"""Named losses: value and gradient from the papers, limits that tie the family together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from areal_lab import functional
from areal_lab.functional.aggregate import prompt_mean
from areal_lab.functional.corrections.proximal import a3po_proximal_logprobs
from areal_lab.functional.corrections.second_moment import second_moment_mask
from areal_lab.functional.corrections.sequence import sequence_product
from areal_lab.functional.corrections.weights import chain, keep, mask_outside, truncate
from areal_lab.functional.losses.clipped import (
    clip_cov,
    dapo,
    dr_grpo,
    dual_clip_ppo,
    grpo,
    kl_cov,
)
from areal_lab.functional.losses.corrected import (
    a3po,
    geometric_mis,
    icepop,
    kpop,
    m2po,
    sequence_mis,
    sequence_tis,
    token_tis,
    trm,
)
from areal_lab.functional.losses.divergence import dppo_kl, dppo_tv, dro, kimi, prime_rl
from areal_lab.functional.losses.policy import PolicyLoss, decoupled_ppo, policy_loss, ppo
from areal_lab.functional.losses.reinforce import (
    aipo,
    cispo,
    importance_sampling,
    positive_nll,
    reinforce,
    topr,
    truncated_reinforce,
)
from areal_lab.functional.losses.sequence import gmpo, gspo, gspo_token, luspo, sapo, vespo
from areal_lab.functional.losses.stale import mu_grpo, r2vpo, sat
from areal_lab.functional.segments import Segments, padded_sequence_ids
from areal_lab.functional.surrogates.clip import clip_surrogate
from areal_lab.functional.surrogates.reinforce import importance_surrogate
from tests.reference import algorithms as slow
from tests.reference.proximal import share_of_theta

TRAINER_VERSION = 5


class Batch(NamedTuple):
    logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


def draw(seed=0, *, by_sequence=False):
    """Six rows of seven tokens, one without a token, one with holes; ratios on both sides."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale, *shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0, 6, 7).abs() - 0.05
    proximal = (logprobs + normal(0.3, 6, 7)).clamp(max=-0.01)
    behavior = (proximal + normal(0.3, 6, 7)).clamp(max=-0.01)
    advantages = normal(1.0, 6, 1).expand(6, 7) if by_sequence else normal(1.0, 6, 7)
    mask = torch.arange(7) < torch.tensor([7, 3, 0, 1, 6, 5])[:, None]
    mask[0, 2:4] = False
    return Batch(logprobs, proximal, behavior, advantages.clone(), mask)


def drawn_versions():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-1, TRAINER_VERSION + 2, (6, 7), generator=generator)


NOISE = torch.rand(6, 7, generator=torch.Generator().manual_seed(8), dtype=torch.double)
VERSIONS = drawn_versions()
A3PO = partial(a3po, versions=VERSIONS, trainer_version=TRAINER_VERSION)


class Named(NamedTuple):
    """A loss, the objective of the reference (of a row, or of the rows), and the share of a row."""

    loss: Callable[..., Any]
    objective: Callable[..., Any]
    share: Callable[..., float]
    of_batch: bool = False


# By default everywhere the numbers of the paper; the second entries of a kind are other numbers.
NAMED = {
    "grpo": Named(grpo, slow.ppo_clip(0.2, 0.2), slow.per_sequence),
    "grpo, other clip": Named(
        partial(grpo, clip_epsilon=(0.1, 0.3)), slow.ppo_clip(0.1, 0.3), slow.per_sequence
    ),
    "dr_grpo": Named(
        partial(dr_grpo, max_tokens=9), slow.ppo_clip(0.2, 0.2), slow.per_fixed_length(9)
    ),
    "dapo": Named(dapo, slow.ppo_clip(0.2, 0.28), slow.per_token),
    "dual_clip_ppo": Named(dual_clip_ppo, slow.dual_clip(0.2, 0.2, 3.0), slow.per_token),
    "dual_clip_ppo, c 1.3": Named(
        partial(dual_clip_ppo, dual_clip=1.3), slow.dual_clip(0.2, 0.2, 1.3), slow.per_token
    ),
    "clip_cov": Named(
        partial(clip_cov, noise=NOISE),
        partial(
            slow.clip_cov, low=0.2, high=0.2, fraction=2e-4, band=(1, 5), noise=NOISE.flatten()
        ),
        slow.per_token,
        of_batch=True,
    ),
    "clip_cov, other numbers": Named(
        partial(clip_cov, noise=NOISE, fraction=0.2, band=(0.1, 9.0), clip_epsilon=0.5),
        partial(
            slow.clip_cov, low=0.5, high=0.5, fraction=0.2, band=(0.1, 9), noise=NOISE.flatten()
        ),
        slow.per_token,
        of_batch=True,
    ),
    "kl_cov": Named(
        kl_cov, partial(slow.kl_cov, fraction=2e-4, penalty=1.0), slow.per_token, of_batch=True
    ),
    "kl_cov, other numbers": Named(
        partial(kl_cov, fraction=0.3, penalty=0.5),
        partial(slow.kl_cov, fraction=0.3, penalty=0.5),
        slow.per_token,
        of_batch=True,
    ),
    "token_tis": Named(token_tis, slow.ppo_clip(0.2, 0.2, slow.capped(2.0)), slow.per_token),
    "token_tis, cap 0.9": Named(
        partial(token_tis, cap=0.9), slow.ppo_clip(0.2, 0.2, slow.capped(0.9)), slow.per_token
    ),
    "sequence_tis": Named(
        sequence_tis, slow.ppo_clip(0.2, 0.2, slow.product_capped(2.0)), slow.per_token
    ),
    "sequence_tis, cap 0.9": Named(
        partial(sequence_tis, cap=0.9),
        slow.ppo_clip(0.2, 0.2, slow.product_capped(0.9)),
        slow.per_token,
    ),
    "icepop": Named(icepop, slow.ppo_clip(0.2, 0.2, slow.banded(0.5, 5.0)), slow.per_token),
    "icepop, 0.9 to 1.1": Named(
        partial(icepop, low=0.9, high=1.1),
        slow.ppo_clip(0.2, 0.2, slow.banded(0.9, 1.1)),
        slow.per_token,
    ),
    "sequence_mis": Named(
        sequence_mis, slow.ppo_clip(0.2, 0.2, slow.product_banded(0, 3.0)), slow.per_token
    ),
    "sequence_mis, 0.5 to 1.1": Named(
        partial(sequence_mis, low=0.5, high=1.1),
        slow.ppo_clip(0.2, 0.2, slow.product_banded(0.5, 1.1)),
        slow.per_token,
    ),
    "geometric_mis": Named(
        geometric_mis, slow.ppo_clip(0.2, 0.2, slow.geometric_banded(0.99, 1.01)), slow.per_token
    ),
    "geometric_mis, 0.8 to 1.1": Named(
        partial(geometric_mis, low=0.8, high=1.1),
        slow.ppo_clip(0.2, 0.2, slow.geometric_banded(0.8, 1.1)),
        slow.per_token,
    ),
    "kpop": Named(
        partial(kpop, delta=0.05),
        slow.ppo_clip(0.2, 0.2, slow.near_by_binary_kl(0.05)),
        slow.per_token,
    ),
    "kpop, 0.01 and cap 1.1": Named(
        partial(kpop, delta=0.01, cap=1.1),
        slow.ppo_clip(0.2, 0.2, slow.near_by_binary_kl(0.01, 1.1)),
        slow.per_token,
    ),
    "trm": Named(
        partial(trm, delta=0.1),
        slow.ppo_clip(0.2, 0.2, slow.near_by_largest_kl(0.1)),
        slow.per_token,
    ),
    "trm, 0.2 and cap 0.9": Named(
        partial(trm, delta=0.2, cap=0.9),
        slow.ppo_clip(0.2, 0.2, slow.near_by_largest_kl(0.2, 0.9)),
        slow.per_token,
    ),
    "sat": Named(
        sat,
        partial(slow.sat, low=0.2, high=0.2, share=0.9, exponent=2),
        slow.per_token,
        of_batch=True,
    ),
    "sat, other numbers": Named(
        partial(sat, clip_epsilon=(0.3, 0.5), quantile=0.4, exponent=3.0),
        partial(slow.sat, low=0.3, high=0.5, share=0.4, exponent=3),
        slow.per_token,
        of_batch=True,
    ),
    "mu_grpo": Named(partial(mu_grpo, threshold=1.2), slow.mu_grpo(0.2, 0.2, 1.2), slow.per_token),
    "mu_grpo, a wide clip": Named(
        partial(mu_grpo, threshold=1.05, clip_epsilon=(0.5, 4.0)),
        slow.mu_grpo(0.5, 4.0, 1.05),
        slow.per_token,
    ),
    "r2vpo": Named(
        partial(r2vpo, variance=0.04, rate=0.1, penalty=0.5), slow.r2vpo(0.5), slow.per_token
    ),
    "r2vpo, with a dual variable": Named(
        partial(r2vpo, variance=0.04, rate=0.1, dual_variable=2.0), slow.r2vpo(2.0), slow.per_token
    ),
    "m2po": Named(m2po, partial(slow.m2po, threshold=0.04), slow.per_token, of_batch=True),
    "a3po": Named(A3PO, slow.a3po(TRAINER_VERSION, 0.2, 0.2, share_of_theta), slow.per_token),
    "reinforce": Named(reinforce, slow.reinforce(), slow.per_token),
    "cispo": Named(cispo, slow.cispo(1.0, 4.0), slow.per_token),
    "cispo, 0.1 and 0.2": Named(
        partial(cispo, clip_epsilon=(0.1, 0.2)), slow.cispo(0.1, 0.2), slow.per_token
    ),
    "truncated_reinforce": Named(
        truncated_reinforce, slow.truncated_reinforce(1.0), slow.per_token
    ),
    "importance_sampling": Named(importance_sampling, slow.importance_sampling(), slow.per_token),
    "aipo": Named(aipo, slow.aipo(2.0), slow.per_token),
    "aipo, cap 1.1": Named(partial(aipo, cap=1.1), slow.aipo(1.1), slow.per_token),
    "topr": Named(topr, slow.topr(1.0), slow.per_sequence_sum),
    "dppo_tv": Named(dppo_tv, slow.dppo_tv(0.15), slow.per_token),
    "dppo_tv, delta 0.05": Named(
        partial(dppo_tv, divergence=0.05), slow.dppo_tv(0.05), slow.per_token
    ),
    "dppo_kl": Named(dppo_kl, slow.dppo_kl(0.05), slow.per_token),
    "dppo_kl, delta 0.01": Named(
        partial(dppo_kl, divergence=0.01), slow.dppo_kl(0.01), slow.per_token
    ),
    "prime_rl": Named(prime_rl, slow.dppo_tv(0.2, penalty=1e-3), slow.per_token),
    "kimi": Named(kimi, slow.kimi(0.1), slow.per_sequence_sum),
    "dro": Named(partial(dro, beta=0.3), slow.dro(0.3), slow.per_token),
    "gspo": Named(gspo, slow.gspo(3e-4, 4e-4, False), slow.per_sequence),
    "gspo, 0.1 and 0.2": Named(
        partial(gspo, clip_epsilon=(0.1, 0.2)), slow.gspo(0.1, 0.2, False), slow.per_sequence
    ),
    "gspo_token": Named(gspo_token, slow.gspo(3e-4, 4e-4, True), slow.per_sequence),
    "gspo_token, 0.1 and 0.2": Named(
        partial(gspo_token, clip_epsilon=(0.1, 0.2)), slow.gspo(0.1, 0.2, True), slow.per_sequence
    ),
    "luspo": Named(luspo, slow.gspo(2e-3, 2.5e-3, False), slow.per_sequence_sum),
    "gmpo": Named(gmpo, slow.gmpo(0.4, 0.4), slow.per_sequence),
    "gmpo, 0.1 and 0.2": Named(
        partial(gmpo, log_clip_epsilon=(0.1, 0.2)), slow.gmpo(0.1, 0.2), slow.per_sequence
    ),
    "sapo": Named(sapo, slow.sapo(1.0, 1.05), slow.per_sequence),
    "vespo": Named(vespo, slow.vespo((2, 3), (3, 2)), slow.per_token),
}
# Each public name once, with its defaults (the required numbers bound).
LOSSES = {name: named for name, named in NAMED.items() if "," not in name}
FAMILIES = ("clipped", "corrected", "divergence", "reinforce", "sequence", "stale")
OF_BATCH = {name for name, named in LOSSES.items() if named.of_batch}


def test_every_named_loss_has_a_reference():
    functions = {name: getattr(functional, name) for name in functional.__all__}
    modules = [f"areal_lab.functional.losses.{family}" for family in FAMILIES]
    named = {name for name, one in functions.items() if one.__module__ in modules}
    assert named - {"positive_nll"} == set(LOSSES), "add it to NAMED; positive_nll is tested apart"


def gradient_of(loss, batch, **keywords):
    leaf = batch.logprobs.clone().requires_grad_()
    result = loss(leaf, *batch[1:], **keywords)
    return result.loss.detach(), torch.autograd.grad(result.loss, leaf)[0]


@pytest.mark.parametrize("by_sequence", [False, True], ids=["by token", "by sequence"])
@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_value_and_gradient_equal_the_reference(named, by_sequence):
    batch = draw(by_sequence=by_sequence)
    rows = slow.rows_of(*(field.tolist() for field in batch), VERSIONS.tolist())
    objective = named.objective(rows) if named.of_batch else named.objective
    expected_loss, expected = slow.loss(rows, objective, named.share)
    value, gradient = gradient_of(named.loss, batch)
    assert value.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    flat = torch.zeros(42, dtype=torch.double)
    for place, derivative in expected.items():
        flat[place] = derivative
    torch.testing.assert_close(gradient.flatten(), flat, rtol=1e-9, atol=1e-12)


def test_the_references_see_both_sides_of_every_bound():
    """The batch has what the names of the cases say: clipped, capped, masked, dropped tokens."""
    batch = draw()
    for name in ("grpo", "dual_clip_ppo, c 1.3", "gmpo, 0.1 and 0.2", "dppo_tv, delta 0.05"):
        assert NAMED[name].loss(*batch).clipped.any(), name
        assert not NAMED[name].loss(*batch).clipped[batch.mask].all(), name
    dropping = ("icepop, 0.9 to 1.1", "geometric_mis, 0.8 to 1.1", "sequence_mis, 0.5 to 1.1")
    for name in (*dropping, "kpop", "trm", "mu_grpo", "mu_grpo, a wide clip"):
        weight = NAMED[name].loss(*batch).behavior_weight[batch.mask]
        assert (weight == 0).any(), name
        assert (weight != 0).any(), name
    dropped = m2po(*batch).behavior_weight[batch.mask] == 0
    assert 0 < dropped.sum() < dropped.numel()
    lag = TRAINER_VERSION - VERSIONS
    assert ((lag > 1) & (VERSIONS >= 0)).any()
    assert (lag == 1).any()
    assert (lag < 0).any()
    assert (VERSIONS < 0).any()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov"}))
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    batch = draw(by_sequence=True)
    batch = batch._replace(proximal_logprobs=batch.logprobs, behavior_logprobs=batch.logprobs)
    rows = slow.rows_of(*(field.tolist() for field in batch), VERSIONS.tolist())
    _, gradient = gradient_of(LOSSES[name].loss, batch)
    expected = torch.zeros_like(gradient).flatten()
    for row in rows:
        for place, advantage in zip(row.places, row.advantages, strict=True):
            expected[place] = -LOSSES[name].share(row, rows) * advantage
    torch.testing.assert_close(gradient.flatten(), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_only_logprobs_get_a_gradient(name):
    batch = draw()
    leaves = batch._replace(
        **{field: getattr(batch, field).clone().requires_grad_() for field in Batch._fields[:4]}
    )
    result = LOSSES[name].loss(*leaves)
    result.loss.backward()
    assert leaves.logprobs.grad is not None
    for field in Batch._fields[1:4]:
        assert getattr(leaves, field).grad is None, field
    assert not any(diagnostic.requires_grad for diagnostic in result[1:])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_do_not_matter(name, garbage):
    batch = draw()
    value, gradient = gradient_of(LOSSES[name].loss, batch)
    for field in Batch._fields[:4]:
        spoiled = torch.where(batch.mask, getattr(batch, field), garbage)
        spoiled_value, spoiled_gradient = gradient_of(
            LOSSES[name].loss, batch._replace(**{field: spoiled})
        )
        assert torch.equal(spoiled_value, value), field
        assert torch.equal(spoiled_gradient, gradient), field
    assert (gradient[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_zero_and_no_gradient(name):
    batch = draw()
    value, gradient = gradient_of(
        LOSSES[name].loss, batch._replace(mask=torch.zeros_like(batch.mask))
    )
    assert value == 0
    assert (gradient == 0).all()


def has_keyword(loss, name):
    function = loss.func if isinstance(loss, partial) else loss
    return name in inspect.signature(function).parameters


@pytest.mark.parametrize(
    "name", [name for name, named in LOSSES.items() if has_keyword(named.loss, "correct")]
)
def test_a_correction_reaches_the_weight(name):
    batch = draw()
    halves = torch.arange(7).expand(6, 7) < 3
    result = LOSSES[name].loss(*batch, correct=keep(halves))
    assert torch.equal(result.behavior_weight == 0, batch.mask & ~halves)
    nothing = LOSSES[name].loss(*batch, correct=keep(torch.zeros_like(batch.mask)))
    assert nothing.loss == 0


def counts(loss, batch):
    """The counts of the whole batch that a loss has keywords for."""
    known = {"token_count": batch.mask.sum(), "sequence_count": batch.mask.any(1).sum()}
    names = inspect.signature(loss).parameters
    return {name: count for name, count in known.items() if name in names}


def part_of(loss, rows):
    """A loss that has the versions of some rows bound."""
    return partial(loss, versions=VERSIONS[rows]) if loss is A3PO else loss


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OF_BATCH))
def test_splitting_a_batch_under_its_counts_changes_nothing(name):
    batch, loss = draw(), LOSSES[name].loss
    whole, whole_gradient = gradient_of(loss, batch)
    parts = [
        gradient_of(
            part_of(loss, rows), Batch(*(field[rows] for field in batch)), **counts(loss, batch)
        )
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole_gradient)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - OF_BATCH))
def test_the_order_of_sequences_does_not_matter(name):
    batch, loss = draw(), LOSSES[name].loss
    order = torch.tensor([3, 1, 5, 4, 0, 2])
    shuffled = part_of(loss, order)(*(field[order] for field in batch))
    torch.testing.assert_close(shuffled.loss, loss(*batch).loss)


@pytest.mark.parametrize("name", LOSSES)
def test_a_trainer_can_call_every_named_loss(name):
    """Five tensors, `token_count`, and what else it asks for are words of the protocol."""
    loss = LOSSES[name].loss
    function = loss.func if isinstance(loss, partial) else loss
    parameters = inspect.signature(function).parameters
    assert tuple(parameters)[:5] == Batch._fields
    keywords = list(parameters.values())[5:]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in keywords)
    assert "token_count" in parameters
    required = {p.name for p in keywords if p.default is p.empty}
    # The trainer passes versions; the papers (or what was at hand of them) set no default.
    without_default = {"max_tokens", "beta", "delta", "threshold", "variance", "rate"}
    assert required <= {"versions", "trainer_version"} | without_default
    typed: PolicyLoss = loss
    assert typed(*draw(), token_count=20).loss.isfinite()


# --- limits that tie the family together


def ppo_at_behavior(logprobs, _, behavior_logprobs, advantages, mask, *, clip_epsilon):
    return ppo(logprobs, behavior_logprobs, advantages, mask, clip_epsilon=clip_epsilon)


def assert_same(one, other):
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("clip_epsilon", [(3e-4, 4e-4), (0.1, 0.2)])
def test_gspo_is_gspo_token_for_one_advantage_and_one_weight_per_sequence(clip_epsilon):
    batch = draw(by_sequence=True)
    on_anchor = batch._replace(behavior_logprobs=batch.proximal_logprobs)
    losses = [partial(loss, clip_epsilon=clip_epsilon) for loss in (gspo, gspo_token)]
    assert_same(*(gradient_of(loss, on_anchor) for loss in losses))
    of_sequence = chain(sequence_product, truncate(2.0))
    assert_same(*(gradient_of(partial(loss, correct=of_sequence), batch) for loss in losses))


def test_gspo_is_gspo_token_in_value_only_for_advantages_of_tokens():
    batch = draw()
    (value, gradient), (token_value, token_gradient) = (
        gradient_of(partial(loss, clip_epsilon=0.5), batch) for loss in (gspo, gspo_token)
    )
    torch.testing.assert_close(value, token_value)
    assert not torch.allclose(gradient, token_gradient)


def test_without_a_bound_the_losses_for_stale_data_are_ppo_at_the_sampler():
    batch = draw()
    expected = gradient_of(partial(ppo_at_behavior, clip_epsilon=(0.2, 0.3)), batch)
    for loss in (
        partial(sat, quantile=1.0),
        partial(mu_grpo, threshold=math.inf),
    ):
        assert_same(gradient_of(partial(loss, clip_epsilon=(0.2, 0.3)), batch), expected)


def test_without_a_bound_the_masks_are_decoupled_ppo():
    batch = draw()
    expected = gradient_of(partial(decoupled_ppo, clip_epsilon=0.3), batch)
    for loss in (kpop, trm):
        free = partial(loss, delta=math.inf, clip_epsilon=0.3)
        assert_same(gradient_of(free, batch), expected)


def test_without_a_penalty_r2vpo_is_importance_sampling():
    batch = draw()
    expected = gradient_of(importance_sampling, batch)
    assert_same(gradient_of(partial(r2vpo, variance=0.1, rate=0.1), batch), expected)


def test_sat_clips_what_ppo_clips_and_more():
    more = 0
    for seed in range(5):
        batch, wide = draw(seed), partial(sat, clip_epsilon=0.5)
        tight, plain = wide(*batch, quantile=0.5), wide(*batch, quantile=1.0)
        assert not (plain.clipped & ~tight.clipped).any()
        more += int((tight.clipped & ~plain.clipped).sum())
        # Its surrogate is never above PPO's, token by token, so neither is the objective.
        assert -tight.loss <= -plain.loss
    assert more > 0


def test_a_pull_back_is_not_clipped_by_sat():
    """Tokens whose advantage pulls the ratio back to 1 keep their gradient at any distance."""
    batch = draw()
    moved = batch.logprobs - batch.behavior_logprobs
    back = batch._replace(advantages=-moved.sign())
    assert not sat(*back, quantile=0.0).clipped.any()


def test_the_dual_variable_follows_the_variance_and_its_steps_add_up():
    batch = draw()
    loss = partial(r2vpo, variance=0.04, rate=0.5)
    result = loss(*batch)
    square = (result.ratio[batch.mask] - 1).square().mean()
    assert result.dual_step == pytest.approx(0.5 * (square - 0.04).item())
    assert result.dual_step > 0
    parts = [
        loss(*(field[rows] for field in batch), token_count=batch.mask.sum())
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(part.dual_step for part in parts) == pytest.approx(result.dual_step.item())
    still = batch._replace(behavior_logprobs=batch.logprobs)
    assert loss(*still).dual_step == pytest.approx(-0.5 * 0.04)


@pytest.mark.parametrize(
    ("loss", "numbers", "message"),
    [
        (sat, {"quantile": 1.5}, "quantile is 1.5"),
        (sat, {"exponent": -1.0}, "exponent is -1.0"),
        (kpop, {"delta": -0.1}, "delta -0.1"),
        (trm, {"delta": math.nan}, "high nan"),
        (mu_grpo, {"threshold": 0.0}, "threshold is 0.0"),
        (r2vpo, {"variance": -1.0, "rate": 0.1}, "variance is -1.0"),
    ],
)
def test_numbers_without_a_meaning_are_refused(loss, numbers, message):
    with pytest.raises(ValueError, match=message):
        loss(*draw(), **numbers)


def test_luspo_is_gspo_times_the_length():
    batch = draw(by_sequence=True)
    for row in (0, 1, 4):
        one = Batch(*(field[row] for field in batch))
        length = one.mask.sum()
        torch.testing.assert_close(
            luspo(*one).loss, length * gspo(*one, clip_epsilon=(2e-3, 2.5e-3)).loss
        )


def test_dr_grpo_is_grpo_when_every_answer_has_the_full_length():
    batch = draw()._replace(mask=torch.ones(6, 7, dtype=torch.bool))
    assert_same(gradient_of(partial(dr_grpo, max_tokens=7), batch), gradient_of(grpo, batch))
    assert_same(gradient_of(partial(dapo, clip_epsilon=0.2), batch), gradient_of(grpo, batch))


def test_with_sequences_of_one_token_every_ratio_is_that_of_the_token():
    batch = draw()
    single = Segments(torch.arange(42).reshape(6, 7), 42)
    expected = gradient_of(partial(decoupled_ppo, clip_epsilon=(0.1, 0.2)), batch)
    for loss in (grpo, gspo, gspo_token, luspo):
        ours = gradient_of(partial(loss, clip_epsilon=(0.1, 0.2), sequences=single), batch)
        assert_same(ours, expected)
    one = partial(sequence_tis, cap=1.1, sequences=single)
    assert_same(gradient_of(one, batch), gradient_of(partial(token_tis, cap=1.1), batch))
    one = partial(sequence_mis, low=0.8, high=1.1, sequences=single)
    other = partial(icepop, low=0.8, high=1.1)
    assert_same(gradient_of(one, batch), gradient_of(other, batch))
    one = partial(geometric_mis, low=0.8, high=1.1, sequences=single)
    assert_same(gradient_of(one, batch), gradient_of(other, batch))


@pytest.mark.parametrize(
    "open_loss",
    [
        partial(dual_clip_ppo, dual_clip=math.inf),
        partial(clip_cov, fraction=0.0, noise=NOISE),
        partial(token_tis, cap=math.inf),
        partial(icepop, low=0.0, high=math.inf),
        partial(geometric_mis, low=0.0, high=math.inf),
        partial(dapo, clip_epsilon=0.2),
        partial(clip_cov, band=(50.0, 60.0)),
    ],
)
def test_with_its_bounds_open_a_loss_is_decoupled_ppo(open_loss):
    batch = draw()
    assert_same(gradient_of(open_loss, batch), gradient_of(decoupled_ppo, batch))


def test_with_their_bounds_open_weighted_losses_have_the_gradient_of_importance_sampling():
    batch = draw()
    _, expected = gradient_of(importance_sampling, batch)
    for loss in (
        partial(aipo, cap=math.inf),
        partial(dppo_tv, divergence=1.0),
        partial(dppo_kl, divergence=math.inf),
        partial(prime_rl, divergence=1.0, penalty=0.0),
        partial(m2po, threshold=1e9),
        partial(kl_cov, fraction=0.0),
    ):
        torch.testing.assert_close(gradient_of(loss, batch)[1], expected)


def test_with_its_bounds_shut_or_its_pull_off_a_loss_is_reinforce():
    batch = draw()
    expected = gradient_of(reinforce, batch)
    assert_same(gradient_of(partial(cispo, clip_epsilon=0.0), batch), expected)
    assert_same(gradient_of(partial(dro, beta=0.0), batch), expected)
    far_above = batch._replace(proximal_logprobs=batch.logprobs - 3.0)
    assert_same(gradient_of(truncated_reinforce, far_above), gradient_of(reinforce, far_above))


def test_topr_leaves_good_answers_alone():
    batch = draw(by_sequence=True)
    good = batch._replace(advantages=batch.advantages.abs())
    _, gradient = gradient_of(topr, good)
    expected = torch.where(batch.mask, -good.advantages / 5, 0.0)
    torch.testing.assert_close(gradient, expected)


def test_sequence_weights_do_not_overflow():
    """A product of 60 ratios of e^20 is beyond every float; what is bounded stays finite."""
    far = torch.full((2, 60), -25.0, dtype=torch.double)
    mask, advantages = torch.ones(2, 60, dtype=torch.bool), torch.ones(2, 60, dtype=torch.double)
    for sign in (1, -1):
        for loss in (topr, vespo, sequence_tis, sequence_mis, gspo, gmpo, sapo):
            value, gradient = gradient_of(
                loss, Batch(far, far + 20 * sign, far, sign * advantages, mask)
            )
            assert value.isfinite()
            assert gradient.isfinite().all()


def test_a3po_is_decoupled_ppo_with_the_interpolated_anchor():
    batch = draw()
    anchor = a3po_proximal_logprobs(
        batch.logprobs, batch.behavior_logprobs, VERSIONS, batch.mask, trainer_version=5
    )
    expected = gradient_of(decoupled_ppo, batch._replace(proximal_logprobs=anchor))
    assert_same(gradient_of(A3PO, batch), expected)


@pytest.mark.parametrize("lag", [0, 1])
def test_a3po_is_ppo_on_data_of_one_version_at_most(lag):
    batch = draw()
    versions = torch.full((6, 7), TRAINER_VERSION - lag)
    ours = partial(a3po, versions=versions, trainer_version=TRAINER_VERSION)
    leaf = batch.logprobs.clone().requires_grad_()
    expected = ppo(leaf, batch.behavior_logprobs, batch.advantages, batch.mask).loss
    value, gradient = gradient_of(ours, batch)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0])


def test_a_mask_of_the_whole_batch_gives_m2po_in_parts():
    batch = draw()
    log_ratio = torch.where(
        batch.mask, batch.proximal_logprobs - batch.behavior_logprobs, torch.nan
    )
    kept = second_moment_mask(log_ratio, batch.mask)
    parts = [
        policy_loss(
            *(field[rows] for field in batch),
            surrogate=importance_surrogate,
            correct=keep(kept[rows]),
        ).loss
        * batch.mask[rows].sum()
        / batch.mask.sum()
        for rows in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(parts), m2po(*batch).loss)


def test_clip_cov_draws_its_own_noise():
    batch = draw()
    torch.manual_seed(0)
    ours = partial(clip_cov, fraction=0.2, band=(0.0, 9.0))
    first, second = ours(*batch).loss, ours(*batch).loss
    torch.manual_seed(0)
    assert ours(*batch).loss == first
    assert first != second


def test_the_literal_mean_of_dapo_is_a_composition():
    """The docstring's way to the mean over a prompt's tokens."""
    batch = draw()
    prompts = Segments(padded_sequence_ids(batch.mask) // 2, 3)
    literal = policy_loss(
        *batch,
        surrogate=partial(clip_surrogate, clip_epsilon=(0.2, 0.28)),
        aggregate=partial(prompt_mean, groups=prompts),
    )
    by_prompt = [dapo(*(field[2 * p : 2 * p + 2] for field in batch)).loss for p in range(3)]
    torch.testing.assert_close(literal.loss, sum(by_prompt) / 3)


def test_packed_sequences_give_the_same():
    batch = draw(by_sequence=True)
    rows = padded_sequence_ids(batch.mask)[batch.mask]
    packed = Batch(*(field[batch.mask] for field in batch))
    for name, named in LOSSES.items():
        loss = named.loss
        function = loss.func if isinstance(loss, partial) else loss
        keywords: dict[str, Any] = {}
        if "sequences" in inspect.signature(function).parameters:
            keywords["sequences"] = Segments(rows, 6)
        if loss is A3PO:
            keywords["versions"] = VERSIONS[batch.mask]
        if function is clip_cov:
            keywords["noise"] = NOISE[batch.mask]
        ours = loss(*packed, **keywords)
        torch.testing.assert_close(ours.loss, loss(*batch).loss, msg=name)


# --- VAPO's term


def test_positive_nll_is_the_mean_over_tokens_of_good_answers():
    logprobs = torch.tensor([[-1.0, -3.0, torch.nan], [-5.0, -5.0, -5.0], [-8.0, 0.0, 0.0]])
    rewards = torch.tensor([1.0, 0.0, 0.5])[:, None].expand(3, 3)
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    leaf = logprobs.requires_grad_()
    term = positive_nll(leaf, rewards, mask)
    assert term.item() == pytest.approx(0.1 * (1 + 3 + 8) / 3)
    (gradient,) = torch.autograd.grad(term, leaf)
    torch.testing.assert_close(
        gradient, -0.1 / 3 * torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 0]])
    )
    assert positive_nll(logprobs, rewards, mask, coefficient=1.0, token_count=6) == 2
    assert positive_nll(logprobs, -rewards, mask) == 0


# --- bad input


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (partial(grpo, clip_epsilon=-0.1), "clip_epsilon is -0.1"),
        (partial(gspo, clip_epsilon=(0.1, -0.1)), "clip_epsilon is"),
        (partial(gmpo, log_clip_epsilon=-0.1), "log_clip_epsilon is -0.1"),
        (partial(dual_clip_ppo, dual_clip=0.9), "dual_clip is 0.9"),
        (partial(dr_grpo, max_tokens=0), "max_tokens is 0"),
        (partial(grpo, sequence_count=0), "sequence_count is 0"),
        (partial(dapo, token_count=-1), "token_count is -1"),
        (partial(token_tis, cap=0.0), "cap is 0.0"),
        (partial(aipo, cap=-1.0), "cap is -1.0"),
        (partial(icepop, low=2.0, high=1.0), "low is 2.0 and high 1.0"),
        (partial(m2po, threshold=0.0), "threshold is 0.0"),
        (partial(kimi, tau=-1.0), "tau is -1.0"),
        (partial(dro, beta=-1.0), "beta is -1.0"),
        (partial(prime_rl, penalty=-1.0), "penalty is -1.0"),
        (partial(sapo, tau_positive=0.0), "tau_positive is 0.0"),
        (partial(vespo, positive=(0.0, 1.0)), "positive is"),
        (partial(kl_cov, fraction=2.0), "fraction is 2.0"),
        (partial(A3PO, versions=VERSIONS.double()), "versions has dtype torch.float64"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_numbers_out_of_range_are_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        loss(*draw())


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", LOSSES)
def test_bad_shapes_are_refused(name):
    batch = draw()
    with pytest.raises(ValueError, match=r"advantages has shape \(6, 1\) and mask \(6, 7\)"):
        LOSSES[name].loss(*batch._replace(advantages=batch.advantages[:, :1]))
    with pytest.raises(ValueError, match=r"mask has dtype torch\.float64"):
        LOSSES[name].loss(*batch._replace(mask=batch.mask.double()))


# --- dropped tokens

INF = math.inf
BAND = mask_outside(0.5, 5.0)
DROPPING = {
    "icepop": icepop,
    "m2po": partial(m2po, threshold=0.5),
    "grpo": partial(grpo, correct=BAND),
    "dual_clip_ppo": partial(dual_clip_ppo, correct=BAND),
    "kl_cov": partial(kl_cov, correct=BAND),
    "reinforce": partial(reinforce, correct=BAND),
    "cispo": partial(cispo, correct=BAND),
    "kimi": partial(kimi, correct=BAND),
    "dro": partial(dro, beta=0.1, correct=BAND),
    "gspo": partial(gspo, correct=BAND),
    "gspo_token": partial(gspo_token, correct=BAND),
    "gmpo": partial(gmpo, correct=BAND),
    "sapo": partial(sapo, correct=BAND),
}
FAR = {  # log pi_theta, log pi_prox, log pi_behav of the second token, which is dropped
    "a ratio beyond float32": (-1.0, -200.0, -2.0),
    "outside of the top-p of both": (-INF, -INF, -2.0),
    "outside of the proximal top-p": (-3.0, -INF, -2.0),
    "no log-prob at all": (math.nan, math.nan, -2.0),
}


def of_two_tokens(loss, second):
    """Result and gradient for an on-policy token, and a second one of these three log-probs."""
    tokens = [torch.tensor([-1.0, x]) for x in second]
    leaf = tokens[0].requires_grad_()
    result = loss(leaf, *tokens[1:], torch.tensor([1.0, -1.0]), torch.tensor([True, True]))
    return result, torch.autograd.grad(result.loss, leaf)[0]


@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
@pytest.mark.parametrize("loss", DROPPING.values(), ids=DROPPING)
def test_a_dropped_token_without_a_finite_ratio_counts_as_on_policy(loss, far):
    result, gradient = of_two_tokens(loss, far)
    assert result.behavior_weight.tolist() == [1, 0]
    assert gradient[0] != 0
    assert gradient[1] == 0
    other, its_gradient = of_two_tokens(loss, (-2.0, -2.0, -8.0))  # a weight of 403, a ratio of 1
    assert other.behavior_weight.tolist() == [1, 0]
    torch.testing.assert_close(result.loss, other.loss)
    torch.testing.assert_close(gradient[0], its_gradient[0])


OF_SEQUENCES = {"kimi", "gspo", "gspo_token", "gmpo"}


@pytest.mark.parametrize("name", sorted(set(DROPPING) - OF_SEQUENCES - {"kl_cov"}))
def test_a_dropped_token_adds_nothing_to_a_loss_of_tokens(name):
    """Whatever its ratio: the gradient of the other token is the same, its own is 0."""
    near, far = (of_two_tokens(DROPPING[name], (x, -2.0, -8.0)) for x in (-1.9, -6.0))
    assert near[0].behavior_weight.tolist() == [1, 0]
    assert near[1][1] == far[1][1] == 0
    assert_same((near[0].loss, near[1]), (far[0].loss, far[1]))
    assert not far[0].clipped.any()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "sapo", "cispo"])
def test_to_drop_a_token_is_to_give_it_no_advantage(name):
    """Its ratio still counts in that of its sequence, as in slime and TRL."""
    batch = draw()
    lost = batch.mask & (torch.arange(7) % 3 == 1)
    far = torch.where(lost, batch.proximal_logprobs - 10, batch.behavior_logprobs)
    within = mask_outside(0.0, 1e4)
    dropped = partial(DROPPING[name].func, correct=within)
    assert (dropped(*batch._replace(behavior_logprobs=far)).behavior_weight == 0).eq(lost).all()
    ours = gradient_of(dropped, batch._replace(behavior_logprobs=far))
    without = torch.where(lost, 0.0, batch.advantages)
    assert_same(ours, gradient_of(dropped, batch._replace(advantages=without)))


def test_the_ratio_of_a_dropped_token_counts_in_its_sequence():
    result, gradient = of_two_tokens(DROPPING["gspo"], (-2.0001, -2.0, -8.0))
    assert result.ratio.tolist() == pytest.approx([math.exp(-0.00005)] * 2, rel=1e-6)
    # Each token has half of the sequence's gradient; only the first one's objective is left.
    assert gradient.tolist() == pytest.approx([-0.25, -0.25], rel=1e-3)
    gmpo_loss = of_two_tokens(DROPPING["gmpo"], (-2.2, -2.0, -8.0))[0].loss
    assert gmpo_loss.item() == pytest.approx(-math.exp(-0.1) / 2)
    kimi_loss = of_two_tokens(DROPPING["kimi"], (-2.5, -2.0, -8.0))[0].loss
    # -A log pi + tau / 2 log r_t log r(y) of the first token, which is on policy: log r_t is 0.
    assert kimi_loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "loss", [cispo, sequence_mis, token_tis, reinforce, grpo], ids=lambda loss: loss.__name__
)
def test_what_the_proximal_policy_cannot_draw_has_weight_zero(loss):
    """Top-p: a sampled token is outside of what the trainer's policies would draw."""
    logprobs = torch.tensor([-1.0, -INF], requires_grad=True)
    proximal, behavior = torch.tensor([-1.0, -INF]), torch.tensor([-1.0, -2.0])
    result = loss(logprobs, proximal, behavior, torch.tensor([1.0, -1.0]), proximal < 0)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert result.behavior_weight[1] == 0
    assert result.loss.isfinite()
    assert gradient[0].isfinite()
    assert gradient[1] == 0


@pytest.mark.parametrize("loss", [vespo, dppo_kl, dppo_tv, importance_sampling, aipo])
def test_what_the_sampler_says_it_cannot_draw_makes_no_nan(loss):
    logprobs = torch.tensor([-1.0, -0.5], requires_grad=True)
    behavior = torch.tensor([-1.0, -INF])
    result = loss(logprobs, behavior, behavior, torch.ones(2), behavior < 0)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert not result.loss.isnan()
    assert result.behavior_weight.tolist() == [1, 1]
    assert not gradient.isnan().any()


IMPOSSIBLE = {  # which of log pi_theta, log pi_prox, log pi_behav are -infinity
    "theta": (True, False, False),
    "theta, proximal": (True, True, False),
    "theta, behavior": (True, False, True),
    "proximal": (False, True, False),
    "proximal, behavior": (False, True, True),
    "behavior": (False, False, True),
    "all": (True, True, True),
}


def with_impossible_token(batch, which, sign, value=-INF):
    """The last unmasked token with an advantage of this sign has these log-probs."""
    of_sign = batch.mask & (batch.advantages.sign() == sign)
    place = (torch.arange(42) == of_sign.flatten().nonzero()[-1]).view(6, 7)
    tokens = [
        torch.where(place, value, field) if impossible else field
        for field, impossible in zip(batch[:3], which, strict=True)
    ]
    return type(batch)(*tokens, *batch[3:])


@pytest.mark.parametrize("name", LOSSES)
def test_an_impossible_token_makes_no_nan(name):
    for which, sign, dtype in product(IMPOSSIBLE, (1, -1), (torch.float32, torch.float64)):
        batch = with_impossible_token(draw(by_sequence=True), IMPOSSIBLE[which], sign)
        batch = type(batch)(*(field.to(dtype) for field in batch[:4]), batch.mask)
        value, gradient = gradient_of(LOSSES[name].loss, batch)
        assert not value.isnan(), (which, sign, dtype)
        assert not gradient.isnan().any(), (which, sign, dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - OF_BATCH))
def test_a_log_prob_of_minus_infinity_is_a_limit(name, sign):
    """Of value and gradient: infinite ones have the sign that large ones have on the way."""
    batch, which = draw(by_sequence=True), IMPOSSIBLE["theta"]
    at, near = (
        gradient_of(LOSSES[name].loss, with_impossible_token(batch, which, sign, value))
        for value in (-INF, -1e8)
    )
    for limit, large in zip(at, near, strict=True):
        finite = limit.isfinite()
        torch.testing.assert_close(large[finite], limit[finite])
        assert (large[~finite].abs() > 100).all()
        assert torch.equal(large[~finite].sign(), limit[~finite].sign())


def test_bfloat16_log_probs_are_subtracted_and_summed_in_float32():
    """GSPO's range of 3e-4 is a tenth of the gap between neighboring bfloat16 near 1."""
    proximal = torch.full((4, 64), -1.0, dtype=torch.bfloat16)
    logprobs = proximal.clone()
    logprobs[:, 0] -= 2**-4
    batch = (logprobs, proximal, proximal, torch.ones_like(proximal), proximal < 0)
    result = gspo(*batch)
    assert result.loss.dtype == result.ratio.dtype == torch.float32
    assert result.ratio[0, 0].item() == pytest.approx(math.exp(-(2**-4) / 64), abs=1e-6)
    many = torch.ones(5000, dtype=torch.bfloat16)
    chosen = many > 0
    assert reinforce(-many, -many, -many, many, chosen, token_count=1).loss == 5000


@pytest.mark.parametrize("surrogate_loss", [grpo, dapo, gspo, cispo])
def test_a_clip_range_may_come_as_a_list(surrogate_loss):
    batch = draw()
    listed = gradient_of(partial(surrogate_loss, clip_epsilon=[0.1, 0.3]), batch)
    assert_same(listed, gradient_of(partial(surrogate_loss, clip_epsilon=(0.1, 0.3)), batch))
