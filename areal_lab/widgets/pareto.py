"""A chart of candidates by money and time, with clicks and tooltips.

    hours ^   o excluded, at its lower bound
          |  - - - - - - - - - - - - -  deadline
          |     * . 32
          |       *  . 64     color: type of GPU; circle: asynchronous, square: synchronous
          +-------------------------> dollars

A click selects the nearest candidate: `chosen_number` reads it from `mo.ui.altair_chart`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import altair as alt

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREY,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
    words,
)

_SELECTION: Final = "candidate"
_COLORS: Final = (BLUE, RED, "#009E73", "#CC79A7", "#B8860B", "#56B4E9")
"""Okabe and Ito's colors, of which those too light for a white page are darker."""
_STEPS: Final = (1.0, 2.0, 5.0, 10.0)


@quickly()
def pareto_chart(
    points: Iterable[Mapping[str, Any]],
    *,
    groups: Sequence[str],
    titles: tuple[str, str],
    limits: Mapping[str, float] = MappingProxyType({}),
    before: Mapping[str, Any] | None = None,
    tooltips: Mapping[str, str] = MappingProxyType({}),
    x_domain: tuple[float, float] | None = None,
    y_domain: tuple[float, float] | None = None,
    height: int = 380,
) -> alt.TopLevelMixin:
    """The chart, for `mo.ui.altair_chart(..., chart_selection=False)`.

    `tooltips` are keys of the points, with their titles. An axis domain of None takes round numbers
    around the points.
    """
    rows = [dict(point) for point in points]
    if not rows:
        raise ValueError("there is no point to show; show the reasons instead")
    if any(row["x"] <= 0 or row["y"] <= 0 for row in rows):
        raise ValueError("x and y of every point must be > 0, as both axes are logarithmic")
    x_ends = x_domain or _round_ends([row["x"] for row in rows])
    y_ends = y_domain or _round_ends([row["y"] for row in rows])
    x = alt.X("x:Q", scale=_log(x_ends), axis=_axis(titles[0], x_ends))
    y = alt.Y("y:Q", scale=_log(y_ends), axis=_axis(titles[1], y_ends))
    shown = [alt.Tooltip(f"{key}:N", title=title) for key, title in tooltips.items()]
    color = alt.Color(
        "group:N",
        scale=alt.Scale(domain=list(groups), range=list(_COLORS[: len(groups)])),
        legend=alt.Legend(title=None, orient="top", labelFontSize=12, symbolOpacity=1),
    )
    shape = alt.Shape(
        "kind:N",
        scale=alt.Scale(domain=["asynchronous", "synchronous"], range=["circle", "square"]),
        legend=None,
    )
    base = alt.Chart(table(rows)).encode(x=x, y=y)
    picked = alt.selection_point(
        name=_SELECTION, fields=["number"], on="click", nearest=True, empty=False, clear="dblclick"
    )
    layers: list[Any] = [*_limits(limits, x, y, x_ends, y_ends)]
    if before is not None:
        layers.append(
            alt.Chart(table([before]))
            .mark_point(size=420, filled=False, strokeWidth=5, color=GREY, opacity=0.35)
            .encode(x=x, y=y)
        )
    layers += [
        base.transform_filter("datum.level == 'front' && isValid(datum.y_low)")
        .mark_rule(strokeWidth=1.5)
        .encode(
            y=alt.Y("y_low:Q"),
            y2=alt.Y2("y_high:Q"),
            color=color,
        ),
        base.transform_filter("datum.level == 'excluded'")
        .mark_point(size=26, filled=False, strokeWidth=1.2, opacity=0.5)
        .encode(color=color, shape=shape),
        base.transform_filter("datum.level != 'excluded'")
        .mark_point(filled=True)
        .encode(
            color=color,
            shape=shape,
            opacity=alt.OpacityValue(alt.ExprRef("datum.level == 'front' ? 1 : 0.6")),
            size=alt.SizeValue(alt.ExprRef("datum.level == 'front' ? 110 : 46")),
        ),
        base.transform_filter("datum.best || datum.named > 0")
        .mark_point(filled=False, strokeWidth=2, stroke="currentColor")
        .encode(size=alt.SizeValue(alt.ExprRef("datum.best ? 420 : 220"))),
        base.transform_filter(picked).mark_point(
            size=700, filled=False, strokeWidth=1.5, strokeDash=[3, 3], stroke="currentColor"
        ),
        _label(base.transform_filter("datum.level == 'front' && datum.named == 0")),
        # Two labels near one another are at different places of their points.
        _label(base.transform_filter("datum.named % 2 == 1 && !datum.best"), dx=13, dy=14),
        _label(
            base.transform_filter("datum.named > 0 && datum.named % 2 == 0 && !datum.best"),
            dx=0,
            dy=22,
            align="center",
        ),
        # On top of all others, where it catches the pointer.
        base.mark_point(size=60, filled=True, opacity=0).encode(tooltip=shown).add_params(picked),
    ]
    return on_page(alt.layer(*layers), height=height)


def chosen_number(selections: Mapping[str, Any]) -> int | None:
    """Number of the clicked candidate, from `mo.ui.altair_chart(...).selections`."""
    numbers = selections.get(_SELECTION, {}).get("number")
    return int(numbers[0]) if numbers else None


def _label(chart: alt.Chart, *, dx: float = 11, dy: float = -9, align: str = "left") -> alt.Chart:
    return words(chart, align=align, dx=dx, dy=dy).encode(text=alt.Text("label:N"))


def _limits(
    limits: Mapping[str, float],
    x: alt.X,
    y: alt.Y,
    x_ends: tuple[float, float],
    y_ends: tuple[float, float],
) -> list[Any]:
    """Dashed lines at the limits within the axes, with their names."""
    layers: list[Any] = []
    dash: dict[str, Any] = {"strokeDash": [5, 4], "color": GREY, "strokeWidth": 1.5}
    if y_ends[0] < (limit := limits.get("y", math.inf)) < y_ends[1]:
        line = alt.Chart(table([{"y": limit, "x": x_ends[1], "text": "deadline"}]))
        layers += [
            line.mark_rule(**dash).encode(y=y),
            words(line, align="right", baseline="bottom", dx=-4, dy=-3).encode(
                x=x, y=y, text=alt.Text("text:N")
            ),
        ]
    if x_ends[0] < (limit := limits.get("x", math.inf)) < x_ends[1]:
        line = alt.Chart(table([{"x": limit, "y": y_ends[1], "text": "budget"}]))
        layers += [
            line.mark_rule(**dash).encode(x=x),
            words(line, align="left", baseline="top", dx=4, dy=3).encode(
                x=x, y=y, text=alt.Text("text:N")
            ),
        ]
    return layers


def _log(ends: tuple[float, float]) -> alt.Scale:
    return alt.Scale(type="log", domain=list(ends), nice=False)


def _axis(title: str, ends: tuple[float, float]) -> alt.Axis:
    decades = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    values = [step * 10.0**decade for decade in decades for step in _STEPS[:3]]
    return plain_axis(
        title=title,
        titleFontSize=13,
        format=",~g",
        values=[value for value in values if ends[0] <= value <= ends[1]],
        grid=True,
        gridOpacity=0.25,
    )


def _round_ends(values: Sequence[float]) -> tuple[float, float]:
    """Nearest 1, 2 or 5 times a power of ten outside of all values."""
    low, high = min(values) / 1.1, max(values) * 1.1
    below = 10.0 ** math.floor(math.log10(low))
    above = 10.0 ** math.floor(math.log10(high))
    return (
        max(step * below for step in _STEPS if step * below <= low),
        min(step * above for step in _STEPS if step * above >= high),
    )
