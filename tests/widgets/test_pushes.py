"""Arrows: their direction, their length, and what has no gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areal_lab.widgets.pushes import push_arrows, push_curves, push_fields, ratio_paths
from tests.widgets.chart_rows import rows_of


def rows(chart):
    """The rows of the largest data set of a chart."""
    return max(rows_of(chart), key=len)


def test_an_arrow_ends_at_its_push_or_at_the_edge():
    a, b, c = rows(push_arrows({"a": 1.5, "b": -40.0, "c": 0.0}, unclipped=2.0))
    assert (a["push"], a["kind"], a["words"]) == (1.5, "up", "+1.50")
    assert (b["push"], b["kind"], b["words"]) == (-6.0, "down", "-40.00")
    assert (c["push"], c["kind"], c["words"]) == (0.0, "none", "0, no gradient")
    assert {row["pale"] for row in (a, b, c)} == {2.0}


def test_fields_have_an_arrow_for_each_place_and_a_dot_without_a_gradient():
    ratios, weights = [0.5, 1.0, 2.0], [0.5, 2.0]
    field = np.array([[0.0, 4.0], [-1.0, 1.0], [0.25, 0.0]])
    drawn = rows(push_fields({"some loss": field}, ratios, weights)[0])
    assert len(drawn) == 6
    at = {(row["r"], row["w"]): row for row in drawn}
    assert at[0.5, 0.5]["kind"] == at[2.0, 2.0]["kind"] == "none"
    lengths = {place: math.log(row["to"] / row["r"]) for place, row in at.items()}
    assert lengths[1.0, 0.5] < 0 < lengths[1.0, 2.0]
    # Four times the push is twice as long, and the longest does not reach the next place.
    assert lengths[0.5, 2.0] == pytest.approx(2 * lengths[1.0, 2.0])
    assert lengths[2.0, 0.5] == pytest.approx(lengths[1.0, 2.0] / 2)
    assert lengths[0.5, 2.0] < math.log(2)


def test_fields_without_any_push_are_dots():
    drawn = rows(push_fields({"none": np.zeros((2, 2))}, [0.5, 2.0], [0.5, 2.0])[0])
    assert {row["kind"] for row in drawn} == {"none"}


@pytest.mark.parametrize(
    "chart",
    [
        push_arrows({"a": 1.0}, unclipped=1.0),
        *push_fields({"a": np.ones((2, 2))}, [0.5, 2.0], [0.5, 2.0]),
        push_curves([0.5, 2.0], [1.0, 0.0], [1.0, 1.0]),
        ratio_paths([1.0, 1.2], [1.0, 1.4], clip_epsilon=0.2),
    ],
)
def test_charts_follow_the_page(chart):
    spec = chart.to_dict()
    assert spec["background"] == "transparent"
    assert spec["width"] == "container"
    assert spec["usermeta"]["embedOptions"]["renderer"] == "svg"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: push_arrows({}, unclipped=1.0), "pushes is empty"),
        (lambda: push_arrows({"PPO": math.nan}, unclipped=1.0), "the push of PPO is nan"),
        (
            lambda: push_fields({"PPO": np.ones((3, 2))}, [0.5, 2.0], [0.5, 2.0]),
            r"the field of PPO has shape \(3, 2\), but the grid \(2, 2\)",
        ),
        (
            lambda: push_curves([0.5, 2.0], [1.0], [1.0, 1.0]),
            "'as retold' has 1 values, but there are 2 places",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
