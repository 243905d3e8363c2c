"""The chart of candidates by money and time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.widgets.pareto import chosen_number, pareto_chart

POINT: dict[str, Any] = {
    **{"number": 1, "x": 2000.0, "y": 20.0, "y_low": 19.0, "y_high": 21.0, "level": "front"},
    **{"group": "H100", "kind": "asynchronous", "label": "32", "named": 0, "best": True},
}
TITLES = ("dollars", "hours")


def spec(*points: dict[str, Any], **settings: Any) -> dict[str, Any]:
    chart = pareto_chart(points, groups=["A100", "H100"], titles=TITLES, **settings)
    told: dict[str, Any] = json.loads(chart.to_json())
    return told


def marks(told: dict[str, Any]) -> list[str]:
    return [
        layer["mark"]["type"] if isinstance(layer["mark"], dict) else layer["mark"]
        for layer in told["layer"]
    ]


def domains(told: dict[str, Any]) -> tuple[list[float], list[float]]:
    encoding = told["layer"][-1]["encoding"]
    return encoding["x"]["scale"]["domain"], encoding["y"]["scale"]["domain"]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9)), min_size=1, max_size=9))
def test_all_points_are_within_round_ends(places: list[tuple[float, float]]) -> None:
    points = [POINT | {"x": x, "y": y} for x, y in places]
    for axis, (low, high) in enumerate(domains(spec(*points))):
        values = [place[axis] for place in places]
        assert low < min(values) <= max(values) < high
        assert min(values) / low < 3
        assert high / max(values) < 3
        for end in (low, high):
            digits = end / 10.0 ** math.floor(math.log10(end) + 1e-9)
            assert min(abs(digits - step) for step in (1, 2, 5)) < 1e-6


def test_axes_stay_where_they_are_told() -> None:
    assert domains(spec(POINT, x_domain=(1, 9000), y_domain=(3, 40))) == ([1, 9000], [3, 40])


def test_limits_are_shown_within_the_axes_only() -> None:
    without = marks(spec(POINT)).count("rule")
    assert marks(spec(POINT, limits={"y": 24.0, "x": math.inf})).count("rule") == without + 1
    assert marks(spec(POINT, limits={"y": 24.0, "x": 2100.0})).count("rule") == without + 2
    assert marks(spec(POINT, limits={"y": 1e6})).count("rule") == without


def test_the_point_before_is_an_additional_pale_mark() -> None:
    with_it, without = spec(POINT, before=POINT | {"x": 3000.0}), spec(POINT)
    assert len(with_it["layer"]) == len(without["layer"]) + 1


def test_every_group_keeps_its_color_whatever_is_shown() -> None:
    scales = [
        channel["scale"]
        for layer in spec(POINT)["layer"]
        for name, channel in layer["encoding"].items()
        if name == "color"
    ]
    assert len(scales) == 3
    assert all(scale["domain"] == ["A100", "H100"] for scale in scales)
    assert len(set(scales[0]["range"])) == 2


def test_texts_under_the_pointer_have_their_titles() -> None:
    told = spec(POINT | {"told": "x"}, tooltips={"told": "a title"})
    (tooltip,) = [
        layer["encoding"]["tooltip"] for layer in told["layer"] if "tooltip" in layer["encoding"]
    ]
    assert tooltip == [{"field": "told", "title": "a title", "type": "nominal"}]


def test_a_click_selects_by_number() -> None:
    (parameter,) = spec(POINT)["params"]
    assert parameter["name"] == "candidate"
    assert parameter["select"]["fields"] == ["number"]
    assert chosen_number({"candidate": {"number": [58], "vlPoint": [1]}}) == 58
    assert chosen_number({"candidate": {}}) is None
    assert chosen_number({}) is None


def test_what_a_logarithmic_axis_cannot_show_is_refused() -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        spec(POINT | {"x": 0.0})
    with pytest.raises(ValueError, match="no point"):
        spec()
