"""The plane of two ratios: its regions are where the losses have no gradient; its point."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from areal_lab.functional import anchored_at_behavior, decoupled_ppo, loss_surface, ppo
from areal_lab.widgets.ratio_plane import (
    LARGEST,
    TokenRatios,
    axis_places,
    dragged_token,
    ratio_plane,
)
from tests.widgets.chart_rows import rows_of


def drawn(**numbers):
    return ratio_plane(TokenRatios(1.0, 1.5), **({"clip_epsilon": 0.2, "advantage": 1.0} | numbers))


@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize("clip_epsilon", [0.1, 0.4])
def test_the_regions_are_where_the_losses_have_no_gradient(clip_epsilon, advantage):
    diagonal, box, rule = rows_of(drawn(clip_epsilon=clip_epsilon, advantage=advantage))[:3]
    places = torch.tensor(axis_places(), dtype=torch.double)
    grid = {
        "ratios": places,
        "weights": places,
        "advantages": torch.tensor([advantage], dtype=torch.double),
    }
    plain = anchored_at_behavior(partial(ppo, clip_epsilon=clip_epsilon))
    dropped = loss_surface(plain, **grid).gradient[:, :, 0] == 0
    # The edge is straight in the logs: log r + log w is the same at both ends.
    (edge,) = {round(math.log(corner["r"] * corner["w"]), 9) for corner in diagonal}
    side = 1 if advantage > 0 else -1
    assert all(corner["w2"] == pytest.approx(LARGEST**side) for corner in diagonal)
    product = places[:, None] * places
    beyond = side * (product - math.exp(edge))
    off_the_edge = beyond.abs() > 1e-6
    assert torch.equal(dropped[off_the_edge], beyond[off_the_edge] > 0)

    decoupled = partial(decoupled_ppo, clip_epsilon=clip_epsilon)
    dropped = (loss_surface(decoupled, **grid).gradient[:, :, 0] == 0).all(1)
    (box,), (rule,) = box, rule
    assert torch.equal(dropped, (places > box["r"]) & (places <= box["r2"]) | (places == box["r"]))
    assert rule["r"] in (box["r"], box["r2"])


def test_the_point_begins_at_the_nearest_place():
    params = ratio_plane(TokenRatios(1.02, 1.47), clip_epsilon=0.2, advantage=1.0).to_dict()
    (selection,) = params["params"]
    assert selection["name"] == "token"
    assert selection["value"] == [{"r": 1.0, "w": 1.5}]


def test_places_are_one_in_the_middle_and_symmetric():
    places = axis_places()
    assert places[len(places) // 2] == 1.0
    assert places[0] == 1 / LARGEST
    assert places[-1] == LARGEST
    assert sorted(set(places)) == places


def tiles_of(spec):
    """The tiles as Vega counts and calculates them."""
    layer = next(one for one in spec["layer"] if "sequence" in one.get("data", {}))
    sequence = layer["data"]["sequence"]
    called = {
        "pow": pow,
        "floor": math.floor,
        "round": lambda value: math.floor(value + 0.5),
        "clamp": lambda value, low, high: min(max(value, low), high),
    }
    return [
        {
            one["as"]: eval(one["calculate"], called, {"datum": SimpleNamespace(at=at)})
            for one in layer["transform"]
        }
        for at in range(sequence["start"], sequence["stop"])
    ]


def test_tiles_cover_the_plane_and_each_has_its_place_inside():
    tiles = tiles_of(drawn().to_dict())
    places = axis_places()
    assert sorted((tile["r"], tile["w"]) for tile in tiles) == [
        (r, w) for r in places for w in places
    ]
    for at, low, high in (("r", "r1", "r2"), ("w", "w1", "w2")):
        edges = sorted({(tile[low], tile[at], tile[high]) for tile in tiles})
        assert all(start <= place <= end for start, place, end in edges)
        assert [end for _, _, end in edges[:-1]] == [start for start, _, _ in edges[1:]]
        assert (edges[0][0], edges[-1][2]) == (1 / LARGEST, LARGEST)


def test_a_drag_is_read_from_the_selection_of_the_chart():
    start = TokenRatios(1.0, 1.5)
    selected = {"token": {"r": [0.5], "w": [2.0], "vlPoint": {"or": [{"r": 0.5, "w": 2.0}]}}}
    assert dragged_token(selected, start) == TokenRatios(0.5, 2.0)
    assert dragged_token({}, start) == start
    assert dragged_token({"token": {}}, TokenRatios(1.02, 1.5)) == start


def test_the_chart_has_no_background_and_only_its_text_has_the_color_of_the_page():
    spec = drawn().to_dict()
    assert spec["background"] == "transparent"
    # A canvas, on which the marks are, has no color of the page.
    assert spec["usermeta"]["embedOptions"]["renderer"] == "hybrid"
    for layer in spec["layer"]:
        mark = layer["mark"]
        assert (mark["type"] == "text") == ("currentColor" in json.dumps(mark))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"clip_epsilon": 0.0}, r"clip_epsilon is 0.0, but must be in \(0, 1\)"),
        ({"clip_epsilon": 1.0}, r"clip_epsilon is 1.0"),
        ({"advantage": 0.0}, "advantage is 0.0, but must be a number other than 0"),
        ({"advantage": math.nan}, "advantage is nan"),
    ],
)
def test_bad_numbers_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        drawn(**numbers)


def test_a_point_off_the_axes_is_refused():
    with pytest.raises(ValueError, match="a ratio is 5, but the axes go from 1/4 to 4"):
        ratio_plane(TokenRatios(1.0, 5), clip_epsilon=0.2, advantage=1.0)
