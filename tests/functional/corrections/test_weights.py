"""Corrections of the behavior weight: values, limits, chains, overflow, what must not matter."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.corrections.rejection import (
    divergence_mask,
    off_policy_sequence_mask,
    probability_difference_mask,
    reject,
)
from areal_lab.functional.corrections.second_moment import mask_second_moment, second_moment_mask
from areal_lab.functional.corrections.sequence import (
    mask_outlier_sequences,
    mask_sequences_outside,
    max_of_sequence,
    mean_of_sequence,
    sequence_geometric_mean,
    sequence_product,
    sum_of_sequence,
)
from areal_lab.functional.corrections.weights import (
    behavior_weight,
    chain,
    drop,
    keep,
    mask_above,
    mask_outside,
    over_segments,
    replace_weight,
    self_normalize,
    truncate,
    unbounded,
)
from areal_lab.functional.divergences.kl import k1, k2, k3
from areal_lab.functional.losses.policy import decoupled_ppo, policy_loss
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import clip_surrogate
from tests.reference import corrections as reference

ROWS = st.lists(st.lists(st.floats(-1.5, 1.5), max_size=6), min_size=1, max_size=6).filter(any)


def padded(rows, fill=float("nan")):
    """[N, T] with garbage between and behind the tokens, and the mask."""
    width = 2 * max(map(len, rows)) + 1
    values = torch.full((len(rows), width), fill, dtype=torch.double)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : 2 * len(row) : 2] = torch.tensor(row, dtype=torch.double)
        mask[i, : 2 * len(row) : 2] = True
    return values, mask


def weights_of(rows, correct):
    logs, mask = padded(rows)
    result = correct(behavior_weight(logs, torch.zeros_like(logs), mask))
    assert torch.equal(result.weight[~mask], torch.ones(int((~mask).sum())).double())
    return [row[keep].tolist() for row, keep in zip(result.weight, mask, strict=True)]


def assert_close(ours, expected):
    assert [len(row) for row in ours] == [len(row) for row in expected]
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def away_from(values, *bounds):
    """Hypothesis likes to hit a bound, where the last bit of exp decides."""
    return all(abs(v - b) > 1e-9 for row in values for v in row for b in bounds)


@given(ROWS)
@settings(max_examples=40)
def test_token_corrections_equal_the_reference(rows):
    weights = reference.token_weights(rows)
    assert_close(weights_of(rows, unbounded), weights)
    assert_close(weights_of(rows, truncate(1.5)), reference.truncated(weights, 1.5))
    assert_close(weights_of(rows, truncate(1.5, floor=0.7)), reference.truncated(weights, 1.5, 0.7))
    if away_from(weights, 0.5, 2.0):
        assert_close(weights_of(rows, mask_outside(0.5, 2.0)), reference.masked(weights, 0.5, 2.0))
        assert_close(weights_of(rows, mask_above(2.0)), reference.masked(weights, 0.0, 2.0))


@given(ROWS)
@settings(max_examples=40)
def test_sequence_corrections_equal_the_reference(rows):
    product, mean = reference.product(rows), reference.geometric_mean(rows)
    assert_close(weights_of(rows, sequence_product), product)
    assert_close(weights_of(rows, sequence_geometric_mean), mean)
    assert_close(
        weights_of(rows, chain(sequence_product, truncate(1.3))), reference.truncated(product, 1.3)
    )
    if away_from(product, 0.4, 3.0):
        correct = chain(sequence_product, mask_outside(0.4, 3.0))
        assert_close(weights_of(rows, correct), reference.masked(product, 0.4, 3.0))
    if away_from(mean, 0.8, 1.2):
        ours = weights_of(rows, mask_sequences_outside(0.8, 1.2))
        assert_close(ours, reference.geometric_band(rows, 0.8, 1.2))
        ours = weights_of(rows, chain(sequence_geometric_mean, mask_outside(0.8, 1.2)))
        assert_close(ours, reference.masked(mean, 0.8, 1.2))
    if away_from(reference.token_weights(rows), 1.2):
        # The weight 1 of a masked token would be an outlier of this band.
        ours = weights_of(rows, mask_outlier_sequences(1.2, 9.0))
        assert_close(ours, reference.outlier_band(rows, 1.2, 9.0))
    if away_from(reference.token_weights(rows), 0.5, 2.0):
        ours = weights_of(rows, mask_outlier_sequences(0.5, 2.0))
        assert_close(ours, reference.outlier_band(rows, 0.5, 2.0))


def test_products_turn_the_sampler_s_expectation_into_the_policy_s():
    """All sequences of two tokens, each as often as the sampler makes it; any function of them."""
    policy, sampler = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).double().unbind()
    first, second = torch.cartesian_prod(torch.arange(3), torch.arange(3)).unbind(1)
    tokens = torch.stack([first, second], dim=1)
    under_policy = torch.stack([policy[first], sampler.flip(0)[second]], dim=1)
    under_sampler = torch.stack([sampler[first], policy[second]], dim=1)
    start = behavior_weight(under_policy.log(), under_sampler.log(), tokens >= 0)
    value = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0, -5.0]).double()
    weight = sequence_product(start).weight[:, 0]
    torch.testing.assert_close(
        (under_sampler.prod(1) * weight * value).sum(), (under_policy.prod(1) * value).sum()
    )
    # The mean of a token's own weight is 1 too, but it does not see the other token.
    own = start.weight[:, 0]
    assert not torch.isclose(
        (under_sampler.prod(1) * own * value).sum(), (under_policy.prod(1) * value).sum()
    )


ESTIMATORS = {"k1": (k1, reference.k1), "k2": (k2, reference.k2), "k3": (k3, reference.k3)}
STATISTICS = {
    "token": None,
    "sum": sum_of_sequence,
    "mean": mean_of_sequence,
    "max": max_of_sequence,
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rejection_equals_the_reference(estimator, statistic):
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 1, 0, 5, 2, 4, 8)
    rows = [(0.6 * torch.randn(n, generator=generator)).double().tolist() for n in lengths]
    ours, expected = ESTIMATORS[estimator]
    low, high = -math.inf, 0.15
    if estimator == "k1":
        low, high = (-0.5, 0.4) if statistic == "sum" else (-0.3, 0.15)
    correct = reject(ours, low=low, high=high, statistic=STATISTICS[statistic])
    weights = weights_of(rows, correct)
    assert_close(weights, reference.rejected(rows, expected, low, high, statistic))
    everything = [w for row in weights for w in row]
    assert 0 < sum(w > 0 for w in everything) < len(everything)  # the bound does something


def test_a_bound_on_k1_is_one_on_minus_log_rho():
    """0.9 to 1.2 would keep rho = 0.844 as a bound on 1 / rho; ours is in the unit that is said."""
    rows = [[math.log(0.844)], [math.log(1.137)]]
    as_divergence = reject(k1, low=math.log(0.9), high=math.log(1.2), statistic=mean_of_sequence)
    assert weights_of(rows, as_divergence) == [[pytest.approx(0.844)], [0]]
    as_ratio = mask_sequences_outside(0.9, 1.2)
    assert weights_of(rows, as_ratio) == [[0], [pytest.approx(1.137)]]


def test_the_two_k3_are_different_filters():
    rows = [[math.log(3.0)], [math.log(1 / 3.0)]]
    kept_by_ours = weights_of(rows, reject(k3, high=0.6))  # 3 - 1 - log 3 = 0.90, 1/3 ... = 0.43
    assert [w > 0 for (w,) in kept_by_ours] == [False, True]
    kept_by_other = weights_of(rows, reject(lambda x: k3(-x), high=0.6))
    assert [w > 0 for (w,) in kept_by_other] == [True, False]


@settings(max_examples=30)
@given(ROWS)
def test_weights_normalized_by_themselves_have_the_mean_one(rows):
    ours = weights_of(rows, self_normalize())
    assert_close(ours, reference.normalized(reference.token_weights(rows)))
    flat = [w for row in ours for w in row]
    assert sum(flat) / len(flat) == pytest.approx(1)


def test_normalization_of_parts_under_global_sums_is_that_of_the_whole():
    logs, mask = padded([[0.3, -1.0], [0.8], [], [1.1, 0.2, -0.4]])
    start = behavior_weight(logs, torch.zeros_like(logs), mask)
    correct = mask_above(2.5)
    whole = chain(correct, self_normalize())(start).weight
    total = correct(start).weight[mask].sum()
    count = mask.sum()
    for weight_sum, token_count in [(total, count), (total.item(), count.item())]:
        scaled = chain(correct, self_normalize(weight_sum=weight_sum, token_count=token_count))
        parts = [
            scaled(behavior_weight(logs[rows], torch.zeros_like(logs[rows]), mask[rows])).weight
            for rows in (slice(0, 1), slice(1, 4))
        ]
        torch.testing.assert_close(torch.cat(parts), whole)


@settings(max_examples=30)
@given(ROWS, st.floats(0.01, 2.0))
def test_second_moment_mask_equals_dropping_one_after_the_other(rows, threshold):
    squares = sorted(x * x for row in rows for x in row)
    means = [sum(squares[: n + 1]) / (n + 1) for n in range(len(squares))]
    if not away_from([means], threshold):
        return
    logs, mask = padded(rows)
    kept = second_moment_mask(logs, mask, threshold=threshold)
    expected = reference.second_moment_kept(rows, threshold)
    ours = [row[chosen].tolist() for row, chosen in zip(kept, mask, strict=True)]
    # Which of several equal ones goes is a matter of order; how many and how large is not.
    for one, other in ((ours, expected),):
        moments = [
            sorted(abs(x) for i, row in enumerate(rows) for j, x in enumerate(row) if keep[i][j])
            for keep in (one, other)
        ]
        assert moments[0] == pytest.approx(moments[1])
    assert not kept[~mask].any()


def test_second_moment_by_hand():
    logs = torch.tensor([0.1, -0.9, 0.2, -0.1, 55.0])
    mask = torch.tensor([True, True, True, True, False])
    assert second_moment_mask(logs, mask).tolist() == [True, False, True, True, False]
    assert second_moment_mask(logs, mask, threshold=0.3).tolist() == [True] * 4 + [False]
    # the mean of the squares has to be under the threshold, not at it
    exact = torch.tensor([0.0, 0.5])
    assert second_moment_mask(exact, exact > -1, threshold=0.125).tolist() == [True, False]


def test_the_second_moment_keeps_at_least_one_token_however_far():
    for far in (5.0, math.inf, math.nan):
        logs = torch.tensor([[math.nan, far], [far, far]])
        mask = torch.tensor([[False, True], [True, True]])
        assert second_moment_mask(logs, mask).tolist() == [[False, True], [False, False]]
    assert not second_moment_mask(logs, mask & False).any()
    assert second_moment_mask(logs[:0], mask[:0]).shape == (0, 2)


def test_the_second_moment_correction_is_its_mask():
    logs, mask = padded([[0.3, -1.0], [0.1], [0.05, 0.2, -0.4]])
    start = behavior_weight(logs, torch.zeros_like(logs), mask)
    kept = second_moment_mask(logs, mask, threshold=0.04)
    assert torch.equal(mask_second_moment(0.04)(start).weight, keep(kept)(start).weight)


THETA = [[-1.0, -2.0, -0.5], [-1.0], [-0.4, -0.3], [-2.0, -3.0]]
BEHAVIOR = [[-1.2, -1.5, -0.4], [-0.8], [-0.5, -0.3], [-1.0, -1.0]]


def masks_of(function, *inputs):
    filled = [padded(rows) for rows in inputs]
    kept = function(*(values for values, _ in filled), filled[0][1])
    assert not kept[~filled[0][1]].any()
    return [row[chosen].tolist() for row, chosen in zip(kept, filled[0][1], strict=True)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_off_policy_sequences_equal_the_reference(sign):
    advantages = [[sign, sign, -sign], [sign], [-sign, 0.0], [sign, -sign]]
    ours = masks_of(partial(off_policy_sequence_mask, threshold=0.1), THETA, BEHAVIOR, advantages)
    assert ours == reference.off_policy_sequence_kept(THETA, BEHAVIOR, advantages, 0.1)
    assert not all(map(all, ours))


def test_good_sequences_are_learned_however_unlikely_they_became():
    kept = masks_of(
        partial(off_policy_sequence_mask, threshold=0.0),
        THETA,
        BEHAVIOR,
        [[1.0] * 3, [1.0], [1.0] * 2, [1.0] * 2],
    )
    assert all(map(all, kept))


@pytest.mark.parametrize(
    ("level", "statistic"),
    [("token", None), ("geometric", mean_of_sequence), ("product", sum_of_sequence)],
)
def test_probability_differences_equal_the_reference(level, statistic):
    ours = masks_of(
        partial(probability_difference_mask, low=-0.05, high=0.03, statistic=statistic),
        THETA,
        BEHAVIOR,
    )
    assert ours == reference.probability_kept(THETA, BEHAVIOR, -0.05, 0.03, level)
    assert 0 < sum(map(sum, ours)) < 8


def test_the_kl_mask_is_a_divergence_mask_of_theta():
    ours = masks_of(partial(divergence_mask, divergence=k2, high=0.02), THETA, BEHAVIOR)
    rows = [
        [a - b for a, b in zip(*pair, strict=True)] for pair in zip(THETA, BEHAVIOR, strict=True)
    ]
    assert ours == [[x * x / 2 <= 0.02 for x in row] for row in rows]


def test_divergence_mask_of_proximal_is_the_correction():
    theta, mask = padded(THETA)
    behavior, _ = padded(BEHAVIOR)
    for statistic in STATISTICS.values():
        kept = divergence_mask(theta, behavior, mask, k3, high=0.05, statistic=statistic)
        start = behavior_weight(theta, behavior, mask)
        corrected = reject(k3, high=0.05, statistic=statistic)(start)
        assert torch.equal(corrected.weight, keep(kept)(start).weight)


# --- bounds, chains and segments


@pytest.mark.parametrize(("inclusive", "kept"), [(True, [2.0, 0.5, 1.0]), (False, [0, 0, 1.0])])
def test_weights_on_a_bound_are_within_unless_said(inclusive, kept):
    logs = torch.tensor([2.0, 0.5, 1.0]).log()
    start = behavior_weight(logs, 0 * logs, logs > -9)
    start = start._replace(weight=torch.tensor([2.0, 0.5, 1.0]))
    assert mask_outside(0.5, 2.0, inclusive=inclusive)(start).weight.tolist() == kept


def test_sequences_on_a_bound_are_kept():
    assert weights_of([[0.0, 0.0]], mask_sequences_outside(1.0, 1.0)) == [[1.0, 1.0]]
    assert weights_of([[0.0, 0.0]], mask_outlier_sequences(1.0, 1.0)) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "later",
    [truncate(3.0, floor=0.5), sequence_product, sequence_geometric_mean, self_normalize()],
)
def test_what_was_dropped_stays_dropped(later):
    rows = [[2.0, 0.1], [-0.2]]
    ours = weights_of(rows, chain(mask_above(2.0), later))
    assert ours[0][0] == 0
    assert ours[0][1] > 0
    assert ours[1][0] > 0


def test_masks_commute():
    rows = [[0.5, -0.1, 0.3], [0.05, -0.02], [1.0]]
    masks = [mask_outside(0.8, 1.4), mask_sequences_outside(0.9, 1.2), reject(k3, high=0.04)]
    assert weights_of(rows, chain(*masks)) == weights_of(rows, chain(*reversed(masks)))


def test_sequence_band_and_token_cap_together():
    """A band on the geometric mean, then a cap on the tokens of what is left."""
    rows = [[0.6, -0.5], [0.6, 0.6]]
    ours = weights_of(rows, chain(mask_sequences_outside(0.9, 1.1), truncate(1.5)))
    assert_close(ours, [[1.5, math.exp(-0.5)], [0.0, 0.0]])


@given(ROWS)
@settings(max_examples=20)
def test_on_policy_nothing_is_corrected(rows):
    ones = [[1.0] * len(row) for row in rows]
    same = [[0.0] * len(row) for row in rows]
    for correct in (
        truncate(1.0, floor=1.0),
        mask_outside(1.0, 1.0),
        sequence_product,
        sequence_geometric_mean,
        mask_sequences_outside(1.0, 1.0),
        mask_outlier_sequences(1.0, 1.0),
        reject(k3, high=0.0),
        mask_second_moment(1e-9),
        self_normalize(),
    ):
        assert weights_of(same, correct) == ones


def test_turns_instead_of_sequences():
    logs = torch.tensor([[0.1, 0.2, 0.0, -0.3, 0.4]])
    mask = torch.tensor([[True, True, False, True, True]])
    turns = Segments(torch.tensor([[0, 0, 0, 1, 1]]), 2)
    start = behavior_weight(logs, 0 * logs, mask)
    result = over_segments(turns, sequence_product)(start)
    expected = [math.exp(0.3), math.exp(0.3), 1.0, math.exp(0.1), math.exp(0.1)]
    assert result.weight[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(result.sequences.ids, start.sequences.ids)


CORRECTIONS = {
    "truncate": truncate(1.2, floor=0.9),
    "mask": mask_outside(0.8, 1.25),
    "product": chain(sequence_product, truncate(2.0)),
    "geometric": sequence_geometric_mean,
    "band": mask_sequences_outside(0.9, 1.1),
    "outlier": mask_outlier_sequences(0.6, 1.6),
    "k3": reject(k3, high=0.05),
    "k2 of sequences": reject(k2, high=0.1, statistic=mean_of_sequence),
    "m2po": mask_second_moment(0.05),
    "normalized": self_normalize(),
}


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(5, 7, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0).abs()
    proximal = logprobs + normal(0.2)
    mask = torch.rand(5, 7, generator=generator) > 0.3
    mask[2] = False  # a sequence without a token
    return logprobs, proximal, proximal + normal(0.3), normal(1.0), mask


@pytest.mark.parametrize("correct", CORRECTIONS.values(), ids=CORRECTIONS)
def test_masked_values_do_not_matter(batch, correct):
    logprobs, proximal, behavior, advantages, mask = batch
    clean = decoupled_ppo(*batch, correct=correct)
    assert torch.equal(clean.behavior_weight[~mask], torch.ones_like(logprobs)[~mask])
    for garbage in (math.nan, math.inf, -math.inf, 1e300):
        spoiled = [torch.where(mask, x, garbage) for x in (proximal, behavior)]
        leaf = logprobs.clone().requires_grad_()
        result = decoupled_ppo(leaf, *spoiled, advantages, mask, correct=correct)
        assert torch.equal(result.loss, clean.loss)
        assert torch.equal(result.behavior_weight, clean.behavior_weight)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("correct", CORRECTIONS.values(), ids=CORRECTIONS)
def test_weights_have_no_gradient(batch, correct):
    leaves = [x.clone().requires_grad_() for x in batch[:4]]
    result = decoupled_ppo(*leaves, batch[4], correct=correct)
    assert not result.behavior_weight.requires_grad
    result.loss.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False, False]


@pytest.mark.parametrize("correct", CORRECTIONS.values(), ids=CORRECTIONS)
def test_the_order_of_sequences_does_not_matter(batch, correct):
    order = torch.tensor([3, 1, 4, 0, 2])
    ours = decoupled_ppo(*batch, correct=correct)
    shuffled = decoupled_ppo(*(x[order] for x in batch), correct=correct)
    torch.testing.assert_close(shuffled.loss, ours.loss)
    torch.testing.assert_close(shuffled.behavior_weight, ours.behavior_weight[order])


@pytest.mark.parametrize("correct", CORRECTIONS.values(), ids=CORRECTIONS)
def test_an_empty_mask_and_no_tokens_at_all_are_fine(batch, correct):
    nothing = decoupled_ppo(*batch[:4], batch[4] & False, correct=correct)
    assert nothing.loss == 0
    assert torch.equal(nothing.behavior_weight, torch.ones_like(batch[0]))
    assert decoupled_ppo(*(x[:0] for x in batch), correct=correct).loss == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("far", [200.0, 1e4, -1e4])
def test_weights_stay_finite_and_positive_however_far(dtype, far):
    """exp(1e4) is infinite in every dtype, and exp(-1e4) is 0, which would mean dropped."""
    logs = torch.full((2, 3), far, dtype=dtype)
    start = behavior_weight(logs, 0 * logs, logs.isfinite())
    for correct in (unbounded, sequence_product, sequence_geometric_mean, self_normalize()):
        weight = correct(start).weight
        assert weight.dtype == torch.promote_types(dtype, torch.float32)
        assert weight.isfinite().all()
        assert (weight > 0).all()
    bounded = chain(sequence_product, truncate(2.0, floor=0.5))(start).weight
    assert bounded.unique().tolist() == [2.0 if far > 0 else 0.5]


def test_an_overflowing_weight_and_no_advantage_make_no_nan():
    zeros = torch.zeros(2, 3)
    mask = zeros == 0
    result = policy_loss(zeros, zeros, zeros - 1e4, zeros, mask, surrogate=clip_surrogate)
    assert result.loss == 0


def test_a_nan_log_prob_of_an_unmasked_token_is_dropped_by_masks_and_shown_by_the_rest():
    logs = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    start = behavior_weight(logs, torch.zeros(2, 2), logs[[1, 1]] == 0)
    for correct in (mask_outside(0.5, 2.0), reject(k3, high=0.1)):
        assert correct(start).weight.tolist() == [[1, 0], [1, 1]]
    for correct in (mask_sequences_outside(0.5, 2.0), mask_outlier_sequences(0.5, 2.0)):
        assert correct(start).weight.tolist() == [[0, 0], [1, 1]]
    assert truncate(2.0)(start).weight.isnan().tolist() == [[False, True], [False, False]]


# --- what a mean divides by


def test_a_drop_does_not_change_the_divisor_and_a_mask_does(batch):
    """Pre-rejection count by default; post-rejection by handing on what is left as the mask."""
    logprobs, proximal, behavior, advantages, mask = batch
    correct = mask_outside(0.8, 1.25)
    before = decoupled_ppo(*batch, correct=correct)
    kept = mask & (correct(behavior_weight(proximal, behavior, mask)).weight > 0)
    assert 0 < kept.sum() < mask.sum()
    after = decoupled_ppo(logprobs, proximal, behavior, advantages, kept)
    torch.testing.assert_close(before.loss * mask.sum() / kept.sum(), after.loss)
    counted = decoupled_ppo(*batch, correct=correct, token_count=kept.sum())
    torch.testing.assert_close(counted.loss, after.loss)


def test_every_weight_zero_gives_zero(batch):
    """Where a mean over the weights that are left would divide by zero."""
    nothing = chain(mask_outside(1e6, 1e7), self_normalize())
    result = decoupled_ppo(*batch, correct=nothing)
    assert result.loss == 0
    assert not result.behavior_weight[batch[4]].any()


def test_sequence_weights_do_not_depend_on_the_aggregate(batch):
    logprobs, proximal, behavior, advantages, mask = batch
    ids = torch.arange(5)[:, None].expand(5, 7)[mask]
    packed = [x[mask] for x in (logprobs, proximal, behavior, advantages, mask)]
    ours = policy_loss(
        *packed,
        surrogate=clip_surrogate,
        correct=sequence_product,
        aggregate=token_mean,
        sequences=Segments(ids, 5),
    )
    expected = decoupled_ppo(*batch, correct=sequence_product)
    torch.testing.assert_close(ours.loss, expected.loss)
    torch.testing.assert_close(ours.behavior_weight, expected.behavior_weight[mask])


# --- bad input


def two_rows():
    zeros = torch.zeros(2, 3)
    return behavior_weight(zeros, zeros, zeros == 0)


@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (-0.1, 1.0), (math.nan, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("factory", [mask_outside, mask_sequences_outside, mask_outlier_sequences])
def test_bands_of_weights_need_an_order(factory, low, high):
    with pytest.raises(ValueError, match=r"low is .* and high|high is 0"):
        factory(low, high)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: truncate(2.0, floor=3.0), "floor is 3.0 and cap 2.0"),
        (lambda: truncate(2.0, floor=-1.0), "floor is -1.0"),
        (lambda: reject(k3, high=math.nan), "high nan"),
        (lambda: reject(k3, low=1.0, high=0.0), "low is 1.0 and high 0.0"),
        (lambda: mask_second_moment(0.0), "threshold is 0.0"),
        (lambda: second_moment_mask(torch.zeros(2), torch.zeros(3) == 0), r"shape \(2,\)"),
        (lambda: keep(torch.zeros(2)), "kept has dtype"),
        (lambda: self_normalize(token_count=3), "weight_sum is None and token_count 3"),
        (
            lambda: keep(torch.zeros(2) == 0)(
                behavior_weight(torch.zeros(3), torch.zeros(3), torch.zeros(3) == 0)
            ),
            r"kept has shape \(2,\) and mask \(3,\)",
        ),
        (
            lambda: over_segments(Segments(torch.zeros(2, dtype=torch.long), 1), unbounded)(
                behavior_weight(torch.zeros(3), torch.zeros(3), torch.zeros(3) == 0)
            ),
            r"segments.ids has shape \(2,\)",
        ),
        (
            lambda: divergence_mask(
                torch.zeros(3), torch.zeros(2), torch.zeros(3) == 0, k2, high=1.0
            ),
            r"behavior_logprobs has shape \(2,\)",
        ),
        (
            lambda: off_policy_sequence_mask(
                torch.zeros(3), torch.zeros(3), torch.zeros(1), torch.zeros(3) == 0, threshold=0.1
            ),
            r"advantages has shape \(1,\)",
        ),
        (
            lambda: off_policy_sequence_mask(
                *[torch.zeros(3)] * 3, torch.zeros(3) == 0, threshold=math.nan
            ),
            "threshold nan",
        ),
        (
            lambda: probability_difference_mask(
                torch.zeros(3), torch.zeros(3), torch.zeros(3) == 0, low=0.1, high=-0.1
            ),
            "low is 0.1 and high -0.1",
        ),
        (
            lambda: drop(two_rows(), torch.ones(2, 1, dtype=torch.bool)),
            r"kept has shape \(2, 1\)",
        ),
        (
            lambda: keep(torch.ones(2, 1, dtype=torch.bool))(two_rows()),
            r"kept has shape \(2, 1\)",
        ),
        (lambda: replace_weight(two_rows(), torch.ones(2, 1)), r"new has shape \(2, 1\)"),
    ],
)
def test_bad_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_equal_log_probs_have_weight_one_and_impossible_ones_zero():
    proximal = torch.tensor([-math.inf, -math.inf, -1.0, math.nan])
    behavior = torch.tensor([-math.inf, -1.0, -math.inf, -1.0])
    start = behavior_weight(proximal, behavior, torch.ones(4, dtype=torch.bool))
    assert start.weight[:2].tolist() == [1, 0]
    assert start.weight[2] == torch.finfo(torch.float32).max
    assert start.weight[3].isnan()
    floored = truncate(2.0, floor=0.5)(start).weight
    assert floored[:3].tolist() == [1, 0, 2]


def test_bfloat16_log_probs_are_subtracted_in_float32():
    proximal = torch.tensor([-1.0, -1.0]).bfloat16()
    behavior = torch.tensor([-1.0, -(2.0**-9)]).bfloat16()
    start = behavior_weight(proximal, behavior, torch.tensor([True, True]))
    assert start.log_ratio.tolist() == [0, -1 + 2.0**-9]  # in bfloat16: -1
    kept = divergence_mask(proximal, behavior, start.mask, k1, high=0.999)
    assert kept.all()
