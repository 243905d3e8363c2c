"""Effect of losses on a token, as arrows: of one token, over the plane of ratios, along the ratio.

A push is minus the gradient of a loss by log pi_theta: descent moves the token's log-prob, and with
it the ratio r = pi_theta / pi_prox, in the direction of the arrow. A push above 0 makes the token
more likely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt
import numpy as np
from numpy.typing import NDArray

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREY,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
    titled,
    words,
)

_LARGEST_ARROW: Final = 6.0
_ZERO: Final = 1e-9


@quickly()
def push_arrows(
    pushes: Mapping[str, float], *, unclipped: float, row_height: int = 28
) -> alt.TopLevelMixin:
    """One arrow for each loss, from 0; beyond 6 it ends at the edge, with its number.

    `unclipped` is r w A, the push of plain importance sampling; a pale bar behind each arrow.
    """
    if not pushes:
        raise ValueError("pushes is empty, but must have at least one loss")
    rows = []
    for name, push in pushes.items():
        if not math.isfinite(push):
            raise ValueError(f"the push of {name} is {push}, but must be finite")
        rows.append(
            {
                "loss": name,
                "push": _within(push),
                "pale": _within(unclipped),
                "words": f"{push:+.2f}" if abs(push) > _ZERO else "0, no gradient",
                "kind": _kind(push),
            }
        )
    y = alt.Y("loss:N", sort=list(pushes), axis=plain_axis(title=None, ticks=False, domain=False))
    scale = alt.Scale(domain=[-_LARGEST_ARROW, _LARGEST_ARROW])
    title = "push:  less likely  ←  0  →  more likely"
    x = alt.X("push:Q", scale=scale, axis=plain_axis(title=title))
    chart = alt.Chart(table(rows))
    layers: list[Any] = [
        chart.mark_bar(color=GREY, opacity=0.3, size=row_height - 10).encode(
            x=alt.X("pale:Q", scale=scale), y=y
        ),
        alt.Chart(table([{"push": 0}])).mark_rule(color=GREY).encode(x=x),
        chart.mark_rule(color=BLUE, strokeWidth=4).encode(x=x, y=y, x2=alt.X2Datum(0)),
        chart.transform_filter("datum.kind != 'none'")
        .mark_point(filled=True, size=150, color=BLUE, opacity=1)
        .encode(x=x, y=y, shape=_heads()),
        chart.transform_filter("datum.kind == 'none'")
        .mark_point(size=70, color=GREY)
        .encode(x=x, y=y),
    ]
    for kind, align, shift in (("up", "left", 10), ("none", "left", 10), ("down", "right", -10)):
        layers.append(
            words(chart.transform_filter(f"datum.kind == '{kind}'"), align=align, dx=shift).encode(
                x=x, y=y, text=alt.Text("words:N")
            )
        )
    return on_page(alt.layer(*layers), height=row_height * len(rows))


def push_fields(
    fields: Mapping[str, NDArray[np.floating[Any]]],
    ratios: Sequence[float],
    weights: Sequence[float],
    *,
    height: int = 140,
) -> list[alt.TopLevelMixin]:
    """A chart for each loss, a plane of arrows; a hollow dot where the loss has no gradient.

    The length of an arrow grows with the root of its push: four times the push is twice as long.
    `fields` has pushes by the name of the loss, `[ratios, weights]`.
    """
    shape = (len(ratios), len(weights))
    for name, field in fields.items():
        if field.shape != shape:
            raise ValueError(f"the field of {name} has shape {field.shape}, but the grid {shape}")
    spacing = math.log(ratios[-1] / ratios[0]) / (len(ratios) - 1)
    strongest = max(float(np.abs(field).max()) for field in fields.values()) or 1.0
    charts: list[alt.TopLevelMixin] = []
    for name, field in fields.items():
        rows: list[dict[str, object]] = []
        for (i, j), push in np.ndenumerate(field):
            length = 0.95 * spacing * math.sqrt(abs(push) / strongest)
            rows.append(
                {
                    "r": ratios[i],
                    "w": weights[j],
                    "to": ratios[i] * math.exp(math.copysign(length, push)),
                    "kind": _kind(float(push)),
                    "push": round(float(push), 3),
                }
            )
        charts.append(_plane(name, rows, ratios, weights, height))
    return charts


@quickly()
def _plane(
    name: str,
    rows: Sequence[Mapping[str, object]],
    ratios: Sequence[float],
    weights: Sequence[float],
    height: int,
) -> alt.TopLevelMixin:
    across = _log_axis("ratio r (log)", ratios)
    chart = alt.Chart().encode(
        x=alt.X("r:Q", **across),
        y=alt.Y("w:Q", **_log_axis("weight w (log)", weights)),
        tooltip=[
            alt.Tooltip("r:Q", format=".2f"),
            alt.Tooltip("w:Q", format=".2f"),
            alt.Tooltip("push:Q"),
        ],
    )
    pushed = chart.transform_filter("datum.kind != 'none'")
    layers = alt.layer(
        alt.Chart().mark_rule(strokeDash=[3, 4], color=GREY, opacity=0.6).encode(x=alt.datum(1)),
        pushed.mark_rule(color=BLUE, strokeWidth=1.6).encode(x2=alt.X2("to")),
        pushed.mark_point(filled=True, size=30, color=BLUE, opacity=1).encode(
            x=alt.X("to:Q", **across), shape=_heads()
        ),
        chart.transform_filter("datum.kind == 'none'").mark_point(size=16, color=GREY),
        data=table(rows),
    )
    return on_page(layers, height=height, title=titled(name))


def _log_axis(title: str, places: Sequence[float]) -> dict[str, Any]:
    """Scale and axis of places that are evenly spaced in the log, with half a place around them."""
    half = (places[-1] / places[0]) ** (0.5 / (len(places) - 1))
    return {
        "scale": alt.Scale(type="log", domain=[places[0] / half, places[-1] * half], nice=False),
        "axis": plain_axis(title=title, values=[0.25, 0.5, 1, 2, 4], format="~g"),
    }


def _kind(push: float) -> str:
    return "none" if abs(push) <= _ZERO else "up" if push > 0 else "down"


@quickly()
def push_curves(
    ratios: Sequence[float],
    retold: Sequence[float],
    actual: Sequence[float],
    *,
    names: tuple[str, str] = ("as retold", "as it is"),
    height: int = 170,
) -> alt.TopLevelMixin:
    """Push along the ratio, in a retelling (dashed) and in the loss itself (solid)."""
    chart = _two_lines(
        list(ratios),
        (retold, actual),
        names,
        x={
            "title": "ratio r",
            "scale": alt.Scale(type="log", domain=[ratios[0], ratios[-1]], nice=False),
            "axis": plain_axis(values=[0.25, 0.5, 0.8, 1, 1.2, 2, 4], format="~g"),
        },
        y_title="push",
    )
    return on_page(chart, height=height)


@quickly()
def ratio_paths(
    retold: Sequence[float],
    actual: Sequence[float],
    *,
    clip_epsilon: float,
    names: tuple[str, str] = ("as retold", "as it is"),
    height: int = 170,
) -> alt.TopLevelMixin:
    """Ratio of a token after each step of descent, in a retelling (dashed) and in the loss
    (solid).
    """
    edge = alt.Chart(table([{"edge": 1 + clip_epsilon}]))
    chart = alt.layer(
        edge.mark_rule(color=GREY).encode(y=alt.Y("edge:Q")),
        _two_lines(
            list(range(len(actual))),
            (retold, actual),
            names,
            x={"title": "step of descent", "axis": plain_axis(tickMinStep=1)},
            y_title="ratio r",
        ),
    )
    return on_page(chart, height=height)


def _two_lines(
    at: Sequence[float],
    lines: tuple[Sequence[float], Sequence[float]],
    names: tuple[str, str],
    *,
    x: Mapping[str, Any],
    y_title: str,
) -> Any:
    for name, line in zip(names, lines, strict=True):
        if len(line) != len(at):
            raise ValueError(f"{name!r} has {len(line)} values, but there are {len(at)} places")
    across = alt.X("at:Q", **x)
    up = alt.Y("value:Q", title=y_title, axis=plain_axis(), scale=alt.Scale(zero=False))
    layers: list[Any] = []
    styles: tuple[dict[str, Any], ...] = ({"color": RED, "strokeDash": [6, 4]}, {"color": BLUE})
    for number, (name, line, style) in enumerate(zip(names, lines, styles, strict=True)):
        rows = [{"at": a, "value": v, "name": name} for a, v in zip(at, line, strict=True)]
        tooltip = [
            alt.Tooltip("name:N"),
            alt.Tooltip("at:Q", title=x["title"], format=".2f"),
            alt.Tooltip("value:Q", title=y_title, format=".2f"),
        ]
        chart = alt.Chart(table(rows)).encode(x=across, y=up, tooltip=tooltip)
        layers.append(chart.mark_line(strokeWidth=2.4, **style))
        # A legend of two words, in the colors of the lines, above the picture.
        said = alt.Chart(table([{"name": name}])).mark_text(
            align="left", baseline="bottom", fontSize=13, color=style["color"], clip=False
        )
        layers.append(
            said.encode(x=alt.value(2 + 90 * number), y=alt.value(-4), text=alt.Text("name:N"))
        )
    return alt.layer(*layers)


def _within(push: float) -> float:
    return max(-_LARGEST_ARROW, min(_LARGEST_ARROW, push))


def _heads() -> alt.Shape:
    scale = alt.Scale(domain=["up", "down"], range=["triangle-right", "triangle-left"])
    return alt.Shape("kind:N", scale=scale, legend=None)
