"""Advantages as tables of colored numbers, one per estimator, and curves over the success rate.

Blue is above 0 and orange below; the stronger the color, the larger the advantage. 0 has no color,
so tables look alike on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
)
from areal_lab.widgets.figure import Markup

_FULL_COLOR: Final = 2.5
_OPACITY: Final = 0.75
_CHANGED: Final = 1e-4
_SUM: Final = "ΣA²"
_TABLE: Final = (
    "border-collapse:separate;border-spacing:2px;table-layout:fixed;width:100%;margin:0;"
    "text-align:center;font-size:12px;line-height:20px"
)
_GRID: Final = (
    "display:grid;gap:0.8rem 1.4rem;grid-template-columns:"
    "repeat(auto-fill,minmax(min(100%,270px),1fr))"
)
_LINES: Final = (RED, BLUE, GREEN, PURPLE, ORANGE, GREY)

Table = NDArray[np.floating[Any]]


def advantage_tables(
    tables: Mapping[str, Table],
    *,
    names: Sequence[str],
    before: Mapping[str, Table] | None = None,
) -> Markup:
    """A table of advantages for each estimator, with the sum of squares of each prompt.

    `tables` are `[prompts, samples]` by the name of the estimator, `before` the same at an earlier
    time: changed tiles get a frame.
    """
    shapes = {each.shape for each in (*tables.values(), *(before or {}).values())}
    prompts, samples = min(shapes, default=(0, 0))
    if len(shapes) != 1 or prompts != len(names):
        raise ValueError(
            f"tables have shapes {sorted(shapes)}, but all must have {len(names)} rows"
        )
    head = f'<tr><th></th><th colspan="{samples}"></th><th>{_SUM}</th></tr>'
    found = []
    for estimator, values in tables.items():
        changed = np.abs(values - (before or {}).get(estimator, values)) > _CHANGED
        rows = "".join(
            f"<tr><th>{escape(name)}</th>{''.join(map(_tile, values[i].tolist(), changed[i]))}"
            f"<td><b>{compact(float(np.square(values[i]).sum()))}</b></td></tr>"
            for i, name in enumerate(names)
        )
        found.append(
            f'<table style="{_TABLE}"><caption style="text-align:left">{escape(estimator)}'
            f"</caption>{head}{rows}</table>"
        )
    return Markup(f'<div style="{_GRID}">{"".join(found)}</div>')


def _tile(value: float, changed: bool) -> str:
    strength = _OPACITY * min(1.0, abs(value) / _FULL_COLOR)
    color = f"{BLUE if value > 0 else ORANGE}{round(255 * strength):02x}"
    frame = "1.5px solid currentColor" if changed else f"1px solid {GREY}55"
    style = f"background:{color};border:{frame};border-radius:3px"
    return f'<td style="{style}" title="{value:.4f}">{compact(value)}</td>'


class Curves(NamedTuple):
    """Content of one picture of `rate_curves`."""

    title: str
    """Title of the vertical axis."""
    values: Mapping[str, Sequence[float]]
    """One value per rate, by name."""
    largest: float
    """End of the vertical axis, which begins at 0; larger values are cut off."""
    pale: Mapping[str, Sequence[float]] | None = None
    """Values of some of the names for comparison, drawn thin."""


@quickly()
def rate_curves(
    rates: Sequence[float], *pictures: Curves, height: int = 190
) -> list[alt.TopLevelMixin]:
    """Curves over the success rate of a prompt, a chart for each picture."""
    if not pictures or any(list(one.values) != list(pictures[0].values) for one in pictures):
        raise ValueError("pictures must be at least one, all with the same names of curves")
    names = list(pictures[0].values)
    if len(names) > len(_LINES):
        raise ValueError(f"there are {len(names)} curves, but colors for {len(_LINES)}")
    x = alt.X(
        "p:Q",
        scale=alt.Scale(domain=[0, 1]),
        axis=plain_axis(title="success rate p", values=[0, 0.2, 0.4, 0.6, 0.8, 1], format="~g"),
    )
    color = alt.Color(
        "name:N",
        scale=alt.Scale(domain=names, range=list(_LINES[: len(names)])),
        legend=alt.Legend(
            title=None,
            orient="top",
            labelFontSize=13,
            symbolType="stroke",
            symbolStrokeWidth=3,
            symbolOpacity=1,
            columns=2,
        ),
    )
    tooltip = [
        alt.Tooltip("name:N"),
        alt.Tooltip("p:Q", format=".2f"),
        alt.Tooltip("value:Q", format=".3f"),
    ]
    charts: list[alt.TopLevelMixin] = []
    for picture in pictures:
        y = alt.Y(
            "value:Q",
            scale=alt.Scale(domain=[0, picture.largest]),
            axis=plain_axis(title=picture.title),
        )
        layers: list[alt.Chart] = [
            alt.Chart(table(_points(rates, picture.pale or {}))).mark_line(
                clip=True, strokeWidth=1.2, opacity=0.45
            ),
            alt.Chart(table(_points(rates, picture.values))).mark_line(clip=True, strokeWidth=2.4),
        ]
        drawn = (layer.encode(x=x, y=y, color=color, tooltip=tooltip) for layer in layers)
        charts.append(on_page(alt.layer(*drawn), height=height))
    return charts


def compact(value: float) -> str:
    """A number in four characters or less, without a 0 before the point: 2.5, .88, -.35, 56."""
    size = abs(value)
    if size < 5e-3:
        return "0"
    text = f"{value:.0f}" if size >= 9.95 else f"{value:.1f}" if size >= 0.995 else f"{value:.2f}"
    return text.replace("0.", ".", 1)


def _points(
    rates: Sequence[float], curves: Mapping[str, Sequence[float]]
) -> list[dict[str, object]]:
    for name, values in curves.items():
        if len(values) != len(rates):
            raise ValueError(f"{name} has {len(values)} values, but there are {len(rates)} rates")
    return [
        {"p": p, "value": value, "name": name}
        for name, values in curves.items()
        for p, value in zip(rates, values, strict=True)
    ]
