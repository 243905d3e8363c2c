"""Divergences from samples, the summary of a batch, and the same by age."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from areal_lab.functional import decoupled_ppo
from areal_lab.functional.corrections.weights import behavior_weight, mask_outside
from areal_lab.functional.divergences.sampled import (
    chi_square,
    jensen_shannon,
    kl_from_sampler,
    kl_to_sampler,
    log_ratio_histogram,
    total_variation,
)
from areal_lab.functional.segments import Segments
from areal_lab.functional.staleness.diagnostics import divergence_by_lag, off_policy_diagnostics
from areal_lab.functional.staleness.gradient_spread import (
    gradient_alignment_by_lag,
    gradient_spread_by_lag,
)
from areal_lab.functional.staleness.lag import effective_sample_share
from tests.functional.corrections.test_weights import padded
from tests.functional.test_table import flat
from tests.reference import diagnostics as reference

POLICY = [0.1, 0.2, 0.05, 0.4, 0.25]
SAMPLER = [0.15, 0.25, 0.1, 0.2, 0.3]


def exactly_sampled():
    """Log ratios of 20 tokens in which each symbol is as frequent as the sampler makes it."""
    counts = [round(20 * q) for q in SAMPLER]
    logs = [math.log(p / q) for p, q in zip(POLICY, SAMPLER, strict=True)]
    values = torch.tensor(logs, dtype=torch.double).repeat_interleave(torch.tensor(counts))
    return values, torch.ones(20, dtype=torch.bool)


def test_unbiased_estimates_are_the_divergences_themselves():
    """With every symbol as often as the sampler has it, a mean is the expectation."""
    exact = reference.divergences(POLICY, SAMPLER)
    batch = exactly_sampled()
    ours = {
        "kl_from_sampler": [kl_from_sampler(*batch).k1, kl_from_sampler(*batch).k3],
        "kl_to_sampler": [kl_to_sampler(*batch).k1, kl_to_sampler(*batch).k3],
        "chi_square": [chi_square(*batch)],
        "total_variation": [total_variation(*batch)],
        "jensen_shannon": [jensen_shannon(*batch)],
    }
    for name, estimates in ours.items():
        for estimate in estimates:
            assert estimate.item() == pytest.approx(exact[name], rel=1e-12), name


def test_the_directions_differ_and_turn_with_the_sampler():
    """Sampled from the policy instead, with the ratio turned over, the directions change places."""
    logs, mask = exactly_sampled()
    counts = torch.tensor([round(20 * p) for p in POLICY])
    turned = -torch.tensor(POLICY).double().div(torch.tensor(SAMPLER)).log()
    turned = turned.repeat_interleave(counts)
    for one, other in [
        (kl_from_sampler(logs, mask).k3, kl_to_sampler(turned, mask).k3),
        (kl_to_sampler(logs, mask).k3, kl_from_sampler(turned, mask).k3),
        (jensen_shannon(logs, mask), jensen_shannon(turned, mask)),
        (total_variation(logs, mask), total_variation(turned, mask)),
    ]:
        assert one.item() == pytest.approx(other.item(), rel=1e-6)
    assert kl_from_sampler(logs, mask).k3 != kl_to_sampler(logs, mask).k3


def test_the_unweighted_k3_of_the_other_ratio_is_neither_direction():
    logs, _ = exactly_sampled()
    unweighted = (torch.expm1(-logs) + logs).mean().item()
    exact = reference.divergences(POLICY, SAMPLER)
    assert abs(unweighted - exact["kl_from_sampler"]) > 0.005
    assert abs(unweighted - exact["kl_to_sampler"]) > 0.005
    # as its docstring has it: E[1 / rho] - 1 - KL(sampler || policy)
    inverse = sum(q * q / p for p, q in zip(POLICY, SAMPLER, strict=True))
    assert unweighted == pytest.approx(inverse - 1 - exact["kl_from_sampler"])


LOGPROBS = st.floats(-4.0, -0.01)
PAIRS = st.lists(
    st.lists(st.tuples(LOGPROBS, LOGPROBS), max_size=5), min_size=1, max_size=5
).filter(any)


@given(PAIRS)
@settings(max_examples=50)
def test_the_summary_equals_the_reference(rows):
    proximal = [[p for p, _ in row] for row in rows]
    behavior = [[b for _, b in row] for row in rows]
    ratios = [p - b for row in rows for p, b in row]
    if any(abs(x - math.log(bound)) < 1e-9 for x in ratios for bound in (0.7, 1.5)):
        return  # the last bit of exp decides
    values, mask = padded(proximal)
    other, _ = padded(behavior)
    ours = off_policy_diagnostics(values, other, mask, bounds=(0.7, 1.5), quantiles=(0.0, 0.5, 1.0))
    expected = reference.off_policy(proximal, behavior, 0.7, 1.5)
    assert set(expected) | {"weight_quantiles"} == set(ours._fields)
    for name, value in expected.items():
        field = getattr(ours, name)
        found = [x.item() for x in field] if isinstance(field, tuple) else field.item()
        assert found == pytest.approx(value, rel=1e-9, abs=1e-12), name
    weights = torch.tensor(ratios, dtype=torch.double).exp()
    levels = torch.tensor([0.0, 0.5, 1.0]).double()
    torch.testing.assert_close(ours.weight_quantiles, torch.quantile(weights, levels))


def test_of_the_same_policy_everything_is_nothing():
    logprobs, mask = padded([[-1.0, -0.3], [-2.0], []])
    ours = off_policy_diagnostics(logprobs, logprobs.clone(), mask)
    assert ours.tokens == 3
    for name in ("mean_weight", "effective_sample_share", "sequence_effective_sample_share"):
        assert getattr(ours, name) == 1
    for name in ("multiplicative_error", "perplexity_ratio"):
        assert getattr(ours, name) == 1
    assert ours.weight_quantiles.tolist() == [1, 1, 1]
    nothing = {"share_below", "share_above", "mean_absolute_log_ratio", "chi_square"}
    nothing |= {"largest_absolute_log_ratio", "sequence_chi_square", "total_variation"}
    nothing |= {"probability_gap", "jensen_shannon"}
    assert all(getattr(ours, name) == 0 for name in nothing)
    assert all(x == 0 for x in (*ours.kl_behavior_proximal, *ours.kl_proximal_behavior))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_equal_policies_do_not_drown_in_rounding(dtype):
    behavior = torch.full((4, 5), -1.0, dtype=dtype)
    proximal = behavior + torch.finfo(dtype).eps
    step = float(torch.finfo(dtype).eps)
    ours = off_policy_diagnostics(proximal, behavior, behavior < 0)
    assert ours.kl_behavior_proximal.k3.item() == pytest.approx(step**2 / 2, rel=0.01)
    assert ours.kl_proximal_behavior.k3.item() == pytest.approx(step**2 / 2, rel=0.01)
    assert ours.chi_square.item() == pytest.approx(2 * step, rel=0.01)
    assert ours.sequence_chi_square.item() == pytest.approx(10 * step, rel=0.1)


def test_nothing_unmasked_gives_zero_and_no_quantiles():
    logprobs = torch.full((2, 3), math.nan)
    ours = off_policy_diagnostics(logprobs, logprobs, torch.zeros(2, 3, dtype=torch.bool))
    assert ours.weight_quantiles.isnan().all()
    rest = ours._replace(weight_quantiles=torch.zeros(1))
    numbers = [x for field in rest for x in (field if isinstance(field, tuple) else (field,))]
    assert all(x == 0 for x in numbers)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_values_do_not_matter(garbage):
    rows = [[-1.0, -0.3, -2.0], [-0.5]]
    others = [[-1.1, -0.2, -1.5], [-0.9]]
    clean = off_policy_diagnostics(padded(rows, 0.0)[0], padded(others, -3.0)[0], padded(rows)[1])
    ours = off_policy_diagnostics(
        padded(rows, garbage)[0], padded(others, garbage)[0], padded(rows)[1]
    )
    assert repr(ours) == repr(clean)


def test_the_summary_has_no_gradient():
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    ours = off_policy_diagnostics(*leaves, leaves[0] < 9)
    numbers = [x for field in ours for x in (field if isinstance(field, tuple) else (field,))]
    assert not any(x.requires_grad for x in numbers)
    lag = torch.zeros(2, 3, dtype=torch.long)
    by_lag = divergence_by_lag(*leaves, leaves[0] < 9, lag, bins=2)
    assert not any(x.requires_grad for x in by_lag)


def test_far_policies_have_statistics_too():
    """exp(2000) is infinite in float64: what overflows is infinite, never NaN."""
    behavior = torch.full((1, 2), -2000.0)
    ours = off_policy_diagnostics(torch.zeros(1, 2), behavior, behavior < 0)
    numbers = [x for field in ours for x in (field if isinstance(field, tuple) else (field,))]
    assert not any(x.isnan().any() for x in numbers)
    assert ours.effective_sample_share == 1
    assert ours.sequence_effective_sample_share == 1
    turned = off_policy_diagnostics(behavior, torch.zeros(1, 2), behavior < 0)
    assert turned.total_variation == 0.5
    assert turned.jensen_shannon.item() == pytest.approx(math.log(2) / 2)
    assert turned.kl_behavior_proximal.k1 == 2000


def test_the_share_survives_when_every_weight_is_dropped():
    """A share of 0, where a mean over the weights that are left would divide by zero."""
    logs = torch.tensor([[0.1, 0.2]])
    weight = mask_outside(5.0, 6.0)(behavior_weight(logs, 0 * logs, logs > 0)).weight
    assert effective_sample_share(weight, logs > 0) == 0


def test_each_age_is_a_batch_of_its_own():
    generator = torch.Generator().manual_seed(1)
    proximal = -torch.rand(6, 7, generator=generator).double()
    behavior = proximal + 0.3 * torch.randn(6, 7, generator=generator).double()
    mask = torch.rand(6, 7, generator=generator) > 0.3
    lag = torch.randint(0, 6, (6, 7), generator=generator)
    lag[lag == 2] = 5  # an age without a token
    ours = divergence_by_lag(proximal, behavior, mask, lag, bins=4)
    for age in range(4):
        chosen = mask & ((lag == age) if age < 3 else (lag >= 3))
        alone = off_policy_diagnostics(proximal, behavior, chosen)
        assert ours.tokens[age] == alone.tokens
        expected = [
            alone.mean_weight,
            alone.mean_absolute_log_ratio,
            alone.kl_behavior_proximal.k3,
            alone.chi_square,
            alone.effective_sample_share,
        ]
        torch.testing.assert_close([x[age] for x in ours[1:]], expected)
    assert [x[2].item() for x in ours] == [0] * 6


@settings(max_examples=30)
@given(st.lists(st.floats(-3, 3, width=32), max_size=30), st.integers(1, 9))
def test_histogram_equals_the_reference(values, bins):
    values = [round(v * 16) / 16 for v in values]  # many on an edge
    tensor = torch.tensor([*values, math.nan])
    mask = torch.tensor([True] * len(values) + [False])
    ours = log_ratio_histogram(tensor, mask, low=-1.0, high=1.0, bins=bins)
    assert ours.sum() == len(values)
    edges = [(-1 + 2 * i / bins) for i in range(bins + 1)]
    if not any(abs(v - e) < 1e-9 and (e * 16) % 1 for v in values for e in edges):
        assert ours.tolist() == reference.histogram(values, -1.0, 1.0, bins)


def test_histogram_has_room_for_everything():
    values = torch.tensor([-math.inf, -5.0, 0.0, 0.5, 1.0, math.inf, math.nan])
    ours = log_ratio_histogram(values, torch.ones(7, dtype=torch.bool), low=-1.0, high=1.0, bins=4)
    assert ours.tolist() == [2, 0, 1, 4]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: off_policy_diagnostics(x, x[:1], m), r"behavior_logprobs has shape \(1,\)"),
        (lambda x, m: off_policy_diagnostics(x, x, m.long()), "mask has dtype"),
        (lambda x, m: off_policy_diagnostics(x, x, m, bounds=(2.0, 0.5)), "low is 2.0"),
        (lambda x, m: off_policy_diagnostics(x, x, m, quantiles=(1.5,)), "quantiles are"),
        (
            lambda x, m: off_policy_diagnostics(
                x, x, m, sequences=Segments(torch.zeros(2, dtype=torch.long), 1)
            ),
            r"sequences.ids has shape \(2,\)",
        ),
        (lambda x, m: divergence_by_lag(x, x, m, x, bins=2), "lag has dtype"),
        (lambda x, m: kl_from_sampler(x[:1], m), r"log_ratio has shape \(1,\)"),
        (lambda x, m: log_ratio_histogram(x, m, bins=0), "bins is 0"),
        (lambda x, m: log_ratio_histogram(x, m, low=1.0, high=1.0), "low is 1.0 and high 1.0"),
        (lambda x, m: log_ratio_histogram(x, m, high=math.inf), "both finite"),
    ],
)
def test_bad_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_no_tokens_give_zeros_and_no_quantiles(shape):
    empty = torch.zeros(shape)
    summary = off_policy_diagnostics(empty, empty, empty > 0)
    assert summary.weight_quantiles.isnan().all()
    rest = summary._replace(weight_quantiles=torch.zeros(3))
    assert all((x == 0).all() for x in flat(rest))


@pytest.mark.parametrize("which", [0, 1])
def test_a_token_that_one_policy_cannot_draw_gives_limits_and_no_nan(which):
    logprobs = torch.tensor([-1.0, -0.5, -2.0]).repeat(2, 1).double()
    logprobs[which, 1] = -torch.inf
    summary = off_policy_diagnostics(*logprobs, torch.ones(3) > 0)
    assert not any(x.isnan().any() for x in flat(summary))
    assert summary.kl_behavior_proximal.k3 == torch.inf
    gap = math.exp(-0.5) / 3
    torch.testing.assert_close(summary.probability_gap, torch.tensor(gap).double())
    if which == 0:
        # rho = 0: 0 log 0 = 0, and the others have rho = 1.
        torch.testing.assert_close(
            [summary.jensen_shannon, *summary.kl_proximal_behavior],
            [torch.tensor(x).double() for x in (math.log(2) / 6, 0.0, 0.0, 1 / 3)],
        )
    else:
        assert summary.jensen_shannon > 1e300


def draw(samples=12, parameters=5):
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(samples, parameters, generator=generator, dtype=torch.double)
    return gradients, torch.arange(samples) % 4


def test_spread_equals_the_covariance_of_each_lag():
    gradients, lag = draw()
    spread = gradient_spread_by_lag(gradients, lag, bins=4)
    for k in range(4):
        chosen = gradients[lag == k]
        assert spread.samples[k] == len(chosen) > 1
        torch.testing.assert_close(spread.norm[k], chosen.mean(0).norm())
        torch.testing.assert_close(spread.variance[k], torch.cov(chosen.T).trace())


def test_many_samples_are_compared_with_their_mean_in_blocks():
    gradients, lag = draw(samples=302, parameters=1000)
    spread = gradient_spread_by_lag(gradients, lag, bins=4)
    for k in range(4):
        chosen = gradients[lag == k]
        torch.testing.assert_close(spread.variance[k], torch.cov(chosen.T).trace())


def test_the_last_bin_holds_all_that_is_older_and_empty_bins_are_zero():
    gradients, lag = draw()
    two = gradient_spread_by_lag(gradients, lag, bins=2)
    chosen = gradients[lag >= 1]
    torch.testing.assert_close(two.variance[1], torch.cov(chosen.T).trace())
    many = gradient_spread_by_lag(gradients, lag, bins=6)
    assert many.samples[5] == many.norm[5] == many.variance[5] == 0


def test_a_constant_added_to_all_gradients_moves_the_mean_only():
    gradients, lag = draw()
    before = gradient_spread_by_lag(gradients, lag, bins=4)
    after = gradient_spread_by_lag(gradients + 1e6, lag, bins=4)
    torch.testing.assert_close(after.variance, before.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        after.norm, torch.full((4,), 5**0.5 * 1e6).double(), rtol=1e-5, atol=0
    )


def test_the_mean_of_per_sample_gradients_is_the_gradient_of_the_mean():
    torch.manual_seed(0)
    batch = (*(0.3 * torch.randn(4, 6, 7, dtype=torch.double)), torch.rand(6, 7) > 0.2)
    each = vmap(grad(lambda *row: decoupled_ppo(*row).loss))(*batch)
    spread = gradient_spread_by_lag(each, torch.zeros(6, dtype=torch.long), bins=1)
    whole = grad(lambda lp: vmap(lambda *row: decoupled_ppo(*row).loss)(lp, *batch[1:]).mean())
    # d(mean of losses)/d(logprobs) has one row per sample; per-sample gradients live on their own.
    torch.testing.assert_close(whole(batch[0]) * 6, each)
    assert spread.samples.tolist() == [6]


def test_alignment_is_the_cosine_with_the_mean_of_each_lag():
    gradients, lag = draw()
    reference = torch.arange(5, dtype=torch.double) - 1
    found = gradient_alignment_by_lag(gradients, lag, reference, bins=5)
    for k in range(4):
        mean = gradients[lag == k].mean(0)
        torch.testing.assert_close(found[k], mean @ reference / mean.norm() / reference.norm())
    assert found[4] == 0  # no samples
    third = gradients[lag == 3].mean(0)
    assert gradient_alignment_by_lag(gradients, lag, -2 * third, bins=5)[3] == pytest.approx(-1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("reference", [torch.zeros(4), torch.zeros(1, 5)])
def test_a_reference_of_another_size_is_refused(reference):
    with pytest.raises(ValueError, match="reference has shape"):
        gradient_alignment_by_lag(*draw(), reference, bins=2)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("gradients", "lag", "bins", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), 2, r"gradients has shape \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), 2, r"lag \(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), 2, "lag has dtype torch.float32"),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), 0, "bins is 0"),
    ],
)
def test_bad_input_is_refused(gradients, lag, bins, message):
    with pytest.raises(ValueError, match=message):
        gradient_spread_by_lag(gradients, lag, bins=bins)
