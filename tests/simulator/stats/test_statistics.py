"""The interval that contains the model's error: its limits, and its coverage by simulation."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.runlog.intervals import student_t
from simulator.stats.least_squares import ROOT_TOLERANCE, root_near
from simulator.stats.statistics import (
    ModelError,
    estimate,
    log_estimate,
    model_error,
    prediction,
    with_model_error,
)
from simulator.stats.waterfall import Values, all_sets, waterfall

NONE = ModelError(spread=0.0, groups=5)


def test_the_spread_counts_each_group_once_and_keeps_a_bias() -> None:
    assert model_error([[0.5]]) == ModelError(spread=0.5, groups=1)
    many = model_error([[0.3] * 100, [-0.1]])
    assert many.groups == 2
    assert many.spread == pytest.approx(math.sqrt((0.09 + 0.01) / 2))
    assert model_error([[0.2], [], [0.2]]).groups == 2
    with pytest.raises(ValueError, match="no residual"):
        model_error([[], []])


def test_equal_seeds_leave_the_model_s_interval() -> None:
    error = ModelError(spread=0.2, groups=6)
    found = with_model_error([100.0, 100.0, 100.0], error)
    assert found.value == 100
    half = student_t(6, 0.9) * 0.2
    assert found.low == pytest.approx(100 * math.exp(-half))
    assert found.high == pytest.approx(100 * math.exp(half))
    assert found.contains(100 * math.exp(0.99 * half))
    assert not found.contains(100 * math.exp(1.01 * half))


def test_without_an_error_of_the_model_the_interval_is_that_of_the_seeds() -> None:
    values = [100.0, 101.0, 99.5, 100.4]
    found, seeds = with_model_error(values, NONE, share=0.95), estimate(values)
    assert found.low == pytest.approx(seeds.low, rel=1e-3)
    assert found.high == pytest.approx(seeds.high, rel=1e-3)
    equal = with_model_error([7.0, 7.0], NONE)
    assert (equal.low, equal.high) == (7.0, 7.0)


def test_many_groups_give_the_normal_interval() -> None:
    found = with_model_error([1.0, 1.0], ModelError(spread=0.1, groups=400))
    assert math.log(found.high) == pytest.approx(1.645 * 0.1, rel=5e-3)


def test_one_seed_says_nothing_of_its_spread() -> None:
    found = with_model_error([3.0], ModelError(spread=0.1, groups=4))
    assert (found.value, found.low, found.high) == (3.0, 0.0, math.inf)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -2.0]])
def test_values_that_have_no_logarithm_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no values|must be > 0"):
        with_model_error(values, NONE)


@pytest.mark.parametrize(("spread", "groups"), [(-0.1, 3), (math.nan, 3), (math.inf, 3), (0.1, 0)])
def test_impossible_errors_are_refused(spread: float, groups: int) -> None:
    with pytest.raises(ValueError, match="must be >="):
        ModelError(spread=spread, groups=groups)


@given(
    st.lists(st.floats(0.5, 2), min_size=2, max_size=6),
    st.floats(0, 1),
    st.integers(1, 30),
    st.floats(0.01, 100),
)
def test_units_do_not_matter_and_the_value_is_inside(
    values: list[float], spread: float, groups: int, unit: float
) -> None:
    error = ModelError(spread=spread, groups=groups)
    found = with_model_error(values, error)
    scaled = with_model_error([unit * value for value in values], error)
    assert scaled.low == pytest.approx(unit * found.low)
    assert scaled.high == pytest.approx(unit * found.high)
    assert found.low <= found.value <= found.high
    wider = with_model_error(values, error, share=0.99)
    assert wider.low <= found.low
    assert wider.high >= found.high


SEEDS = st.lists(st.floats(0.5, 2), min_size=2, max_size=6)


@given(SEEDS, st.floats(0, 1), st.integers(1, 30), st.floats(1e-3, 1e3))
def test_a_shown_interval_is_a_factor_either_way(
    values: list[float], spread: float, groups: int, unit: float
) -> None:
    error = ModelError(spread=spread, groups=groups)
    found = prediction(values, error)
    assert 0 < found.low <= found.value <= found.high < math.inf
    assert found.value == pytest.approx(estimate(values).mean)
    assert found.high / found.value == pytest.approx(found.value / found.low)
    assert found.factor == pytest.approx(found.high / found.value)
    scaled = prediction([unit * value for value in values], error)
    assert scaled.low == pytest.approx(unit * found.low)
    assert scaled.high == pytest.approx(unit * found.high)
    assert scaled.factor == pytest.approx(found.factor)


@given(SEEDS)
def test_the_interval_of_noisy_seeds_has_a_low_end_above_0(values: list[float]) -> None:
    found, seeds = log_estimate(values), estimate(values)
    assert 0 < found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(seeds.mean)


def test_a_small_spread_of_the_seeds_gives_the_same_interval_with_and_without_logarithms() -> None:
    values = [100.0, 101.0, 99.5, 100.4]
    assert log_estimate(values).low == pytest.approx(estimate(values).low, rel=1e-3)
    assert log_estimate(values).high == pytest.approx(estimate(values).high, rel=1e-3)
    assert (log_estimate([3.0]).low, log_estimate([3.0]).high) == (0.0, math.inf)


def test_two_noisy_seeds_leave_an_answer() -> None:
    """The interval over these two seeds alone is from below 0 to twice the mean."""
    values = [1.9, 2.32]
    assert estimate(values).low < 0
    found = prediction(values, ModelError(spread=0.16, groups=6))
    assert 1 < found.low < found.high < 4.5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize(("spread", "groups"), [(0.0, 5), (0.05, 3), (0.2, 6)])
def test_more_seeds_do_not_widen_the_interval_on_average(
    noise: float, spread: float, groups: int
) -> None:
    random, error, trials = np.random.default_rng(3), ModelError(spread=spread, groups=groups), 1500
    widths = []
    for seeds in (2, 3, 5, 9):
        drawn = np.exp(random.normal(0, noise, (trials, seeds))).tolist()
        widths.append(np.mean([math.log(prediction(one, error).factor) for one in drawn]))
    for fewer, more in pairwise(widths):
        assert more <= fewer * 1.01


@given(st.floats(0.5, 2), st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 30))
def test_a_shown_interval_grows_with_the_error(
    value: float, spread: float, more: float, groups: int
) -> None:
    for values in ([value], [value, value], [value, 1.3 * value, 0.9 * value]):
        small, large = (
            prediction(values, ModelError(spread=one, groups=groups))
            for one in (spread, spread + more)
        )
        assert large.low <= small.low * (1 + 1e-12)
        assert large.high >= small.high * (1 - 1e-12)
        if len(set(values)) == 1:
            assert large.low < small.low
            assert large.high > small.high


def test_one_seed_has_the_interval_of_the_model_alone() -> None:
    error = ModelError(spread=0.2, groups=6)
    assert prediction([7.0], error) == prediction([7.0, 7.0], error)
    assert prediction([7.0], NONE) == prediction([7.0, 7.0, 7.0], NONE)
    assert prediction([7.0], error).times(2).high == pytest.approx(prediction([14.0], error).high)


@pytest.mark.parametrize(("spread", "noise"), [(0.3, 0.0), (0.3, 0.01), (0.1, 0.2), (0.02, 0.2)])
def test_nine_of_ten_new_systems_are_within_the_interval(spread: float, noise: float) -> None:
    """Errors of six systems and of a seventh, from one distribution; its seeds are noisy."""
    random = np.random.default_rng(7)
    trials, inside = 2000, 0
    for _ in range(trials):
        error = model_error([[one] for one in random.normal(0, spread, 6)])
        true = math.exp(random.normal(0, spread))
        seeds = np.exp(random.normal(0, noise, 4)).tolist()  # around the model's mean, which is 1
        inside += with_model_error(seeds, error).contains(true)
    assert inside / trials == pytest.approx(0.9, abs=0.025)


def test_a_bias_of_the_other_systems_is_expected_here_too() -> None:
    random = np.random.default_rng(8)
    inside, trials = 0, 1000
    for _ in range(trials):
        error = model_error([[one] for one in random.normal(-0.4, 0.1, 6)])
        inside += with_model_error([1.0, 1.0], error).contains(math.exp(random.normal(0.4, 0.1)))
    assert inside / trials > 0.9


NAMES = ("a", "b", "c")
VALUES = st.fixed_dictionaries(
    {chosen: st.lists(st.floats(0.1, 10), min_size=3, max_size=3) for chosen in all_sets(NAMES)}
)


@given(VALUES)
def test_factors_multiply_to_the_whole(values: Values) -> None:
    found = waterfall(values, NAMES)
    product = math.prod(one.factor.mean for one in found.factors)
    assert found.first.mean * product == pytest.approx(found.last.mean, rel=1e-9)
    assert found.factors[0].start == found.first.mean
    assert found.factors[-1].end == pytest.approx(found.last.mean, rel=1e-9)
    for before, after in zip(found.factors, found.factors[1:], strict=False):
        assert before.end == after.start


@given(VALUES)
def test_the_average_is_over_all_orders_and_lies_between_their_ends(values: Values) -> None:
    found = {one.name: one for one in waterfall(values, NAMES).factors}
    by_order = [
        {one.name: one.factor.mean for one in waterfall(values, NAMES, order=order).factors}
        for order in permutations(NAMES)
    ]
    for name in NAMES:
        factors = [one[name] for one in by_order]
        mean = math.exp(math.fsum(map(math.log, factors)) / len(factors))
        assert found[name].factor.mean == pytest.approx(mean, rel=1e-9)
        assert found[name].least == pytest.approx(min(factors), rel=1e-9)
        assert found[name].most == pytest.approx(max(factors), rel=1e-9)


@given(VALUES)
def test_the_order_in_which_switches_are_shown_does_not_change_an_average(values: Values) -> None:
    one = {each.name: each.factor.mean for each in waterfall(values, NAMES).factors}
    other = {each.name: each.factor.mean for each in waterfall(values, NAMES[::-1]).factors}
    assert one == pytest.approx(other)


@given(VALUES)
def test_one_order_is_a_path(values: Values) -> None:
    found = waterfall(values, NAMES, order=("b", "c", "a"))
    on: frozenset[str] = frozenset()
    for factor in found.factors:
        on |= {factor.name}
        mean = math.exp(math.fsum(map(math.log, values[on])) / 3)
        assert factor.end == pytest.approx(mean, rel=1e-9)


def independent(factors: dict[str, float]) -> Values:
    """Values in which each switch multiplies by the same, whatever is on."""
    return {
        chosen: [2 * seed * math.prod(factors[name] for name in chosen) for seed in (1.0, 1.1)]
        for chosen in all_sets(NAMES)
    }


def test_independent_switches_have_their_own_factor_in_every_order() -> None:
    wanted = {"a": 3.0, "b": 1.0, "c": 0.5}
    for factor in waterfall(independent(wanted), NAMES).factors:
        assert factor.factor.mean == pytest.approx(wanted[factor.name])
        assert factor.least == pytest.approx(factor.most)
        # The seeds differ, but not in their ratios.
        assert factor.factor.half_width == pytest.approx(0, abs=1e-9)


def test_two_switches_that_only_work_together_share_the_gain() -> None:
    values = {chosen: [4.0 if {"a", "b"} <= chosen else 1.0] * 2 for chosen in all_sets(NAMES)}
    found = {one.name: one for one in waterfall(values, NAMES).factors}
    assert found["a"].factor.mean == pytest.approx(2)
    assert found["b"].factor.mean == pytest.approx(2)
    assert (found["a"].least, found["a"].most) == pytest.approx((1, 4))
    assert found["c"].factor.mean == pytest.approx(1)


def test_switches_that_are_not_named_stay_off() -> None:
    values = independent({"a": 3.0, "b": 5.0, "c": 7.0})
    assert waterfall(values, ["c"]).last.mean == pytest.approx(7 * 2 * math.sqrt(1.1))
    assert waterfall(values, []).factors == ()


def test_one_seed_has_no_interval() -> None:
    values = {chosen: [1.0 + len(chosen)] for chosen in all_sets(NAMES)}
    assert waterfall(values, NAMES).last.high == math.inf


def test_what_cannot_be_explained_is_refused() -> None:
    values = dict(independent(dict.fromkeys(NAMES, 1.0)))
    with pytest.raises(ValueError, match=r"order is \['a'\], but must have each of"):
        waterfall(values, NAMES, order=["a"])
    with pytest.raises(ValueError, match=r"no value for the switches \['d'\]"):
        waterfall(values, ["d"])
    with pytest.raises(ValueError, match=r"the value of \['a'\] is not positive"):
        waterfall({**values, frozenset("a"): [0.0, 1.0]}, NAMES)
    with pytest.raises(ValueError, match="needs the same seeds"):
        waterfall({**values, frozenset("a"): [1.0]}, NAMES)


@pytest.mark.parametrize("fixed", [0.0, 0.5, 3.0])
def test_a_root_near_a_guess_is_a_root_whether_the_form_holds_or_not(fixed: float) -> None:
    tried: list[float] = []

    def gap(value: float) -> float:
        tried.append(value)
        return math.log((fixed + value) / 4)

    found = root_near(gap, 1.0, lambda value, off: value * math.exp(-off), 0.05, 20)
    assert found.reached
    assert abs(math.log((fixed + found.value) / 4)) < ROOT_TOLERANCE
    assert len(tried) <= (2 if not fixed else 30)


def test_a_root_outside_of_the_range_is_the_nearer_end() -> None:
    found = root_near(
        lambda value: math.log(value / 50), 1.0, lambda value, _: 50 * value, 0.05, 20
    )
    assert not found.reached
    assert found.value == pytest.approx(20)
