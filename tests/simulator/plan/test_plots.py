"""The pictures of a plan."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from simulator.plan.plots import draw_front, draw_plan, draw_tornado
from simulator.plan.result import Plan
from simulator.plan.schema import load_plan
from simulator.plan.search import find_plan


def solved() -> Plan:
    settings = ("simulation=small", "steps=100", "search.sensitivity=1", "candidates.gpus=[4]")
    return find_plan(load_plan(None, settings))


def test_the_values_of_an_input_at_its_ends_stand_side_by_side() -> None:
    """Also if one end changes nothing, or both change the result in the same direction."""
    plan = solved()
    assert plan.sensitivity is not None
    own, inputs = plan.sensitivity.base, plan.sensitivity.inputs
    length = next(one for one in inputs if one.name == "mean length")
    nothing = dataclasses.replace(length.high, outcomes=(own,))
    rows = [
        length,
        dataclasses.replace(length, low=nothing),
        dataclasses.replace(length, high=nothing),
        dataclasses.replace(length, low=nothing, high=nothing),
        dataclasses.replace(length, low=length.high),
        dataclasses.replace(length, high=length.low),
    ]
    sensitivity = dataclasses.replace(plan.sensitivity, inputs=tuple(rows))
    figure = draw_tornado(dataclasses.replace(plan, sensitivity=sensitivity))
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 2 * len(rows)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("width", [6.0, 7.0, 12.0])
def test_pictures_are_finished_with_title_description_and_letters_that_can_be_read(
    width: float,
) -> None:
    plan = solved()
    assert plan.best is not None
    front, tornado = draw_front(plan, width=width), draw_tornado(plan, width=width, title="Mine")
    for picture in (front, tornado):
        FigureCanvasAgg(picture).draw()
        assert picture.get_figwidth() == width
        assert picture.get_suptitle()
        shown = [one for one in picture.findobj(Text) if one.get_text() and one.get_visible()]
        assert min(one.get_fontsize() for one in shown) >= 9
    assert tornado.get_suptitle() == "Mine"
    assert plan.best.candidate.hardware in front.alt
    assert "matters most" in tornado.alt


def test_a_plan_without_candidates_or_sensitivity_is_drawn_as_such(tmp_path: Path) -> None:
    none = find_plan(load_plan(None, ["simulation=small", "candidates.gpus=[1]"]))
    assert draw_front(none).alt == "No candidate to show."
    assert draw_tornado(none).alt == "No sensitivity."
    assert draw_plan(none, tmp_path / "plan.png").stat().st_size > 0
