"""Tables of advantages: colors, sums, frames of what changed; curves over the success rate."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from areal_lab.widgets.advantage_charts import (
    Curves,
    advantage_tables,
    compact,
    rate_curves,
)
from areal_lab.widgets.chart_parts import BLUE, ORANGE
from tests.widgets.chart_rows import rows_of

NOW = {"GRPO": np.array([[2.0, -0.5], [0.0, 0.25]]), "RLOO": np.zeros((2, 2))}
BEFORE = {"GRPO": np.array([[2.0, -0.5], [1.0, 0.25]]), "RLOO": np.zeros((2, 2))}


def tiles(**numbers):
    """Style and text of each cell, by estimator, prompt and column."""
    page = ElementTree.fromstring(advantage_tables(NOW, names=["A", "B"], **numbers))
    return {
        (one.findtext("caption"), row.findtext("th"), column): (cell.get("style", ""), text(cell))
        for one in page
        for row in one.findall("tr")[1:]
        for column, cell in enumerate(row.findall("td"), start=1)
    }


def text(cell):
    return "".join(cell.itertext())


def opacity(style):
    return int(re.search(r"background:#\w{6}(\w\w);", style)[1], 16)


def test_a_tile_has_the_sign_and_strength_of_its_advantage():
    found = tiles()
    assert len(found) == 2 * 2 * 3
    up, down, none = (found["GRPO", *place] for place in (("A", 1), ("A", 2), ("B", 1)))
    assert BLUE in up[0]
    assert ORANGE in down[0]
    assert opacity(up[0]) == pytest.approx(4 * opacity(down[0]), abs=4)
    assert opacity(none[0]) == 0
    assert (up[1], down[1], none[1]) == ("2.0", "-.50", "0")


def test_sums_of_squares_stand_beside_the_rows():
    found = tiles()
    assert found["GRPO", "A", 3][1] == "4.2"
    assert found["GRPO", "B", 3][1] == ".06"
    assert found["RLOO", "A", 3][1] == "0"


def test_what_changed_is_framed():
    changed = [place for place, (style, _) in tiles(before=BEFORE).items() if "currentC" in style]
    assert changed == [("GRPO", "B", 1)]
    assert not any("currentC" in style for style, _ in tiles().values())


def test_names_cannot_bring_markup():
    page = advantage_tables({"<b>": np.zeros((1, 1))}, names=["<i>"])
    assert "&lt;b&gt;" in page
    assert "&lt;i&gt;" in page


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
    charts = rate_curves([0.0, 1.0], weights, sizes)
    pale, drawn, nothing, _ = (rows for chart in charts for rows in rows_of(chart))
    assert [row["value"] for row in pale] == [4.0, 5.0]
    assert [(row["name"], row["p"], row["value"]) for row in drawn] == [
        ("GRPO", 0.0, 2.0),
        ("GRPO", 1.0, 3.0),
        ("RLOO", 0.0, 1.0),
        ("RLOO", 1.0, 1.0),
    ]
    assert nothing == []
    specs = [chart.to_dict() for chart in charts]
    assert {(spec["background"], spec["width"]) for spec in specs} == {("transparent", "container")}
    axes = [spec["layer"][1]["encoding"]["y"] for spec in specs]
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
