"""Tables of advantages: colors, sums, frames of what changed; curves over the success rate."""

from __future__ import annotations

import numpy as np
import pytest

from areal_lab.widgets.advantage_charts import (
    Curves,
    advantage_tables,
    compact,
    rate_curves,
)
from tests.widgets.chart_rows import rows_of

NOW = {"GRPO": np.array([[2.0, -0.5], [0.0, 0.25]]), "RLOO": np.zeros((2, 2))}
BEFORE = {"GRPO": np.array([[2.0, -0.5], [1.0, 0.25]]), "RLOO": np.zeros((2, 2))}


def tiles(**numbers):
    rows = rows_of(advantage_tables(NOW, names=["A", "B"], **numbers))[0]
    return {(row["estimator"], row["prompt"], row["column"]): row for row in rows}


def test_a_tile_has_the_sign_and_strength_of_its_advantage():
    found = tiles()
    assert len(found) == 2 * 2 * 3
    up, down, none = (found["GRPO", *place] for place in (("A", "1"), ("A", "2"), ("B", "1")))
    assert (up["sign"], down["sign"]) == ("up", "down")
    assert up["strength"] == pytest.approx(4 * down["strength"])
    assert none["strength"] == 0
    assert (up["words"], down["words"], none["words"]) == ("2.0", "-.50", "0")


def test_sums_of_squares_stand_beside_the_rows():
    found = tiles()
    assert found["GRPO", "A", "ΣA²"]["words"] == "4.2"
    assert found["GRPO", "B", "ΣA²"]["words"] == ".06"
    assert found["RLOO", "A", "ΣA²"]["words"] == "0"


def test_what_changed_is_framed():
    changed = [place for place, row in tiles(before=BEFORE).items() if row.get("changed")]
    assert changed == [("GRPO", "B", "1")]
    assert not any(row.get("changed") for row in tiles().values())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (-0.004, "0"),
        (0.354, ".35"),
        (-0.354, "-.35"),
        (0.996, "1.0"),
        (-1.02, "-1.0"),
        (2.47, "2.5"),
        (9.96, "10"),
        (10.04, "10"),
        (56.0, "56"),
        (100.0, "100"),
    ],
)
def test_numbers_are_short(value, words):
    assert compact(value) == words


def test_curves_are_drawn_over_pale_ones():
    weights = Curves("weight", {"GRPO": [2.0, 3.0], "RLOO": [1.0, 1.0]}, 8, {"GRPO": [4.0, 5.0]})
    sizes = Curves("size", {"GRPO": [0.5, 0.0], "RLOO": [0.0, 0.0]}, 2)
    chart = rate_curves([0.0, 1.0], weights, sizes)
    pale, drawn, nothing, _ = rows_of(chart)
    assert [row["value"] for row in pale] == [4.0, 5.0]
    assert [(row["name"], row["p"], row["value"]) for row in drawn] == [
        ("GRPO", 0.0, 2.0),
        ("GRPO", 1.0, 3.0),
        ("RLOO", 0.0, 1.0),
        ("RLOO", 1.0, 1.0),
    ]
    assert nothing == []
    spec = chart.to_dict()
    assert spec["background"] == "transparent"
    axes = [one["layer"][1]["encoding"]["y"] for one in spec["hconcat"]]
    assert [axis["scale"]["domain"] for axis in axes] == [[0, 8], [0, 2]]
    assert [axis["axis"]["title"] for axis in axes] == ["weight", "size"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantage_tables(NOW, names=["A"]), r"shapes \[\(2, 2\)\].*must have 1 rows"),
        (
            lambda: advantage_tables(NOW | {"GPG": np.zeros((2, 3))}, names=["A", "B"]),
            r"shapes \[\(2, 2\), \(2, 3\)\]",
        ),
        (
            lambda: rate_curves([0.0, 1.0], Curves("weight", {"GRPO": [1.0]}, 1)),
            "GRPO has 1 values, but there are 2 rates",
        ),
        (
            lambda: rate_curves([], Curves("weight", {str(k): [] for k in range(7)}, 1)),
            "there are 7 curves, but colors for 6",
        ),
        (lambda: rate_curves([0.0]), "at least one, all with the same names"),
        (
            lambda: rate_curves([0.0], Curves("a", {"x": [1.0]}, 1), Curves("b", {"y": [1.0]}, 1)),
            "at least one, all with the same names",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
