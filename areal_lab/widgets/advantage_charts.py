"""Advantages as tables of colored numbers, one per estimator, and curves over the success rate.

Blue is above 0 and orange below; the stronger the color, the larger the advantage. 0 has no color,
so tables look alike on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    table,
    words,
)

_FULL_COLOR: Final = 2.5
_OPACITY: Final = 0.75
_CHANGED: Final = 1e-4
_SUM: Final = "ΣA²"
_LINES: Final = (RED, BLUE, GREEN, PURPLE, ORANGE, GREY)

Table = NDArray[np.floating[Any]]


def advantage_tables(
    tables: Mapping[str, Table],
    *,
    names: Sequence[str],
    before: Mapping[str, Table] | None = None,
    columns: int = 2,
    tile: tuple[int, int] = (30, 24),
) -> alt.TopLevelMixin:
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
    rows: list[dict[str, object]] = []
    for estimator, values in tables.items():
        old = (before or {}).get(estimator, values)
        for i, prompt in enumerate(names):
            for k, value in enumerate(values[i].tolist()):
                rows.append(
                    {
                        "estimator": estimator,
                        "prompt": prompt,
                        "column": str(k + 1),
                        "words": compact(value),
                        "sign": "up" if value > 0 else "down",
                        "strength": _OPACITY * min(1.0, abs(value) / _FULL_COLOR),
                        "changed": bool(abs(value - old[i, k]) > _CHANGED),
                        "A": round(value, 4),
                    }
                )
            total = float(np.square(values[i]).sum())
            place = {"estimator": estimator, "prompt": prompt, "column": _SUM}
            rows.append({**place, "words": compact(total), "strength": -1})
    order = [*(str(k + 1) for k in range(samples)), _SUM]
    quiet = {"title": None, "ticks": False, "domain": False}
    chart = alt.Chart().encode(
        x=alt.X(
            "column:N",
            sort=order,
            scale=alt.Scale(paddingInner=0.08, paddingOuter=0),
            axis=plain_axis(**quiet, orient="top", labelAngle=0, values=[_SUM]),
        ),
        y=alt.Y(
            "prompt:N",
            sort=list(names),
            scale=alt.Scale(paddingInner=0.08, paddingOuter=0),
            axis=plain_axis(**quiet, labelFontWeight="bold"),
        ),
    )
    tiles = chart.transform_filter("datum.strength >= 0")
    color = alt.Color(
        "sign:N", scale=alt.Scale(domain=["up", "down"], range=[BLUE, ORANGE]), legend=None
    )
    layers = alt.layer(
        tiles.mark_rect(cornerRadius=3).encode(
            color=color,
            opacity=alt.Opacity("strength:Q", scale=None),
            tooltip=[alt.Tooltip("prompt:N"), alt.Tooltip("A:Q")],
        ),
        tiles.mark_rect(cornerRadius=3, filled=False, color=GREY, opacity=0.45, strokeWidth=0.6),
        tiles.transform_filter("datum.changed").mark_rect(
            cornerRadius=3, filled=False, color="currentColor", opacity=0.85, strokeWidth=1.2
        ),
        words(tiles, fontSize=12).encode(text=alt.Text("words:N")),
        words(
            chart.transform_filter("datum.strength < 0"), fontSize=12, fontWeight="bold", dx=5
        ).encode(text=alt.Text("words:N")),
        data=table(rows),
    ).properties(width=tile[0] * (samples + 1), height=tile[1] * prompts)
    header = alt.Header(
        title=None, labelFontSize=13, labelAnchor="start", labelPadding=2, labelLimit=300
    )
    facet = alt.Facet("estimator:N", sort=list(tables), header=header)
    return on_page(
        layers.facet(facet=facet, columns=columns, spacing={"row": 6, "column": 22})
        .resolve_axis(x="independent")
        .configure_view(stroke=None)
    )


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


def rate_curves(
    rates: Sequence[float], *pictures: Curves, width: int = 225, height: int = 190
) -> alt.TopLevelMixin:
    """Curves over the success rate of a prompt, in adjacent pictures with one legend."""
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
        ),
    )
    tooltip = [
        alt.Tooltip("name:N"),
        alt.Tooltip("p:Q", format=".2f"),
        alt.Tooltip("value:Q", format=".3f"),
    ]
    charts: list[Any] = []
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
        charts.append(alt.layer(*drawn).properties(width=width, height=height))
    return on_page(alt.hconcat(*charts, spacing=16))


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
