"""The factors of switches: they multiply to the whole, and follow the axioms of Shapley."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.stats.waterfall import Values, all_sets, waterfall

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
