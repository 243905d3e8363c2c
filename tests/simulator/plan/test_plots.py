"""The picture of a plan."""

from __future__ import annotations

import dataclasses
from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg

from areal_lab.plots.style import new_figure
from simulator.plan.plots import draw_tornado
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
    figure = new_figure(7, 5)
    axes = figure.subplots()
    draw_tornado(axes, dataclasses.replace(plan, sensitivity=sensitivity))
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 2 * len(rows)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
