"""The plane of a token's two ratios: where PPO's clip removes its gradient, and a point to drag.

    w = pi_prox / pi_behav
    ^         \\ . : : :     PPO with one old policy drops r w > 1 + eps     (diagonal)
    |           \\ . : :     decoupled PPO drops    r > 1 + eps              (vertical)
    +-------------+------> r = pi_theta / pi_prox

Both axes are logarithmic. For A < 0 the other side is dropped, below 1 - eps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import altair as alt

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREY,
    MARKS_ON_CANVAS,
    ORANGE,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
    words,
)

LARGEST: Final = 4.0
"""End of the axes, which begin at its inverse."""
PLACES: Final = 24
"""Places for the point on either side of 1, on both axes."""
_DRAG: Final = "[pointerdown, window:pointerup] > pointermove, pointerdown"
_SELECTION: Final = "token"
_INWARD: Final = "datum.r > 1.9 ? 'right' : datum.r < 0.5 ? 'left' : 'center'"
"""Side of the point on which its numbers end, so they stay within the plane."""


class TokenRatios(NamedTuple):
    """Position of a token."""

    ratio: float
    """pi_theta / pi_prox."""
    weight: float
    """pi_prox / pi_behav."""


def axis_places() -> list[float]:
    """Positions of the point on an axis: evenly spaced in the log, 1 in the middle."""
    return [round(LARGEST ** (k / PLACES), 2) for k in range(-PLACES, PLACES + 1)]


@quickly()
def ratio_plane(
    token: TokenRatios,
    *,
    clip_epsilon: float,
    advantage: float,
    height: int = 340,
) -> alt.TopLevelMixin:
    """The plane with the regions that each clip drops, and the token as a point to drag.

    In a notebook, show it with `mo.ui.altair_chart`, whose `selections` `dragged_token` reads. The
    point starts at the nearest place of `axis_places` to `token` on each axis.
    """
    if not 0 < clip_epsilon < 1:
        raise ValueError(f"clip_epsilon is {clip_epsilon}, but must be in (0, 1), as in 0.2")
    if advantage == 0 or not math.isfinite(advantage):
        raise ValueError(f"advantage is {advantage}, but must be a number other than 0")
    start = TokenRatios(*(_nearest(value) for value in token))
    chart = alt.layer(
        *_regions(clip_epsilon, advantage > 0),
        *_on_policy(advantage > 0),
        *_labels(clip_epsilon, advantage > 0),
        *_point(start),
    )
    return on_page(chart, height=height, usermeta=MARKS_ON_CANVAS)


def dragged_token(selections: Mapping[str, Any], start: TokenRatios) -> TokenRatios:
    """Position of the dragged token, from `mo.ui.altair_chart(...).selections`; else the start."""
    chosen = selections.get(_SELECTION, {})
    if not chosen.get("r") or not chosen.get("w"):
        return TokenRatios(*(_nearest(value) for value in start))
    return TokenRatios(float(chosen["r"][0]), float(chosen["w"][0]))


def _nearest(value: float) -> float:
    if not 1 / LARGEST <= value <= LARGEST:
        raise ValueError(f"a ratio is {value}, but the axes go from 1/{LARGEST:g} to {LARGEST:g}")
    return min(axis_places(), key=lambda place: abs(math.log(place / value)))


def _axis(title: str) -> alt.Axis:
    values = [0.25, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4]
    return plain_axis(
        **{"title": title, "titleFontSize": 13, "values": values, "format": "~g"},
        **{"labelOverlap": "greedy", "labelSeparation": 4},
    )


def _scale() -> alt.Scale:
    return alt.Scale(type="log", domain=[1 / LARGEST, LARGEST], nice=False)


# The layers share their axes: one of them has titles and ticks, and altair copies the others fast.
def _x(**settings: Any) -> alt.X:
    return alt.X("r:Q", scale=_scale(), **settings)


def _y(**settings: Any) -> alt.Y:
    return alt.Y("w:Q", scale=_scale(), **settings)


def _regions(clip_epsilon: float, positive: bool) -> list[alt.Chart]:
    """Half-planes without a gradient: straight lines, because both axes are logarithmic."""
    bound = 1 + clip_epsilon if positive else 1 - clip_epsilon
    low, high = 1 / LARGEST, LARGEST
    if positive:
        edges = [(bound / high, high), (high, bound / high)]
        far, vertical = high, {"r": bound, "r2": high}
    else:
        edges = [(low, bound / low), (bound / low, low)]
        far, vertical = low, {"r": low, "r2": bound}
    diagonal = table({"r": r, "w": w, "w2": far} for r, w in edges)
    box = table([{**vertical, "w": low, "w2": high}])
    return [
        alt.Chart(diagonal)
        .mark_area(color=ORANGE, opacity=0.28, clip=True, line={"color": ORANGE, "strokeWidth": 2})
        .encode(x=_x(), y=_y(), y2=alt.Y2("w2")),
        alt.Chart(box)
        .mark_rect(color=BLUE, opacity=0.22)
        .encode(
            x=_x(axis=_axis("ratio r: trained / proximal policy")),
            x2=alt.X2("r2"),
            y=_y(axis=_axis("weight w: proximal / behavior policy")),
            y2=alt.Y2("w2"),
        ),
        alt.Chart(table([{"r": bound}])).mark_rule(color=BLUE, strokeWidth=2).encode(x=_x()),
    ]


def _on_policy(positive: bool) -> list[alt.Chart]:
    """Lines on which the trained policy equals one of the other two."""
    low, high = 1 / LARGEST, LARGEST
    same = table([{"r": low, "w": high}, {"r": high, "w": low}])
    dash: dict[str, Any] = {"strokeDash": [3, 4], "color": GREY}
    slope = alt.expr("atan2(height, width) * 180 / PI")
    # Next to the lines, in the region where both losses learn.
    on_prox, on_behavior, side = (0.44, 0.36, 14) if positive else (2.4, 2.2, -11)
    said: list[tuple[float, float, str, dict[str, Any]]] = [
        (1.0, on_prox, "r = 1", {"angle": 270, "dy": -8}),
        (on_behavior, 1 / on_behavior, "r·w = 1", {"angle": slope, "dy": side}),
    ]
    return [
        alt.Chart(table([{"r": 1}])).mark_rule(**dash).encode(x=_x()),
        alt.Chart(same).mark_line(**dash).encode(x=_x(), y=_y()),
        *(
            words(alt.Chart(table([{"r": r, "w": w, "text": text}])), fontSize=12, **turned).encode(
                x=_x(), y=_y(), text=alt.Text("text:N")
            )
            for r, w, text, turned in said
        ),
    ]


def _labels(clip_epsilon: float, positive: bool) -> list[alt.Chart]:
    """Text of the effect in each region."""
    places = (
        [
            (0.27, 0.3, "left", "both learn"),
            (0.96 * (1 + clip_epsilon), 3.3, "right", "only decoupled"),
            (3.8, 0.29, "right", "only PPO"),
            (3.8, 3.3, "right", "neither learns"),
        ]
        if positive
        else [
            (3.8, 3.3, "right", "both learn"),
            (1.05 * (1 - clip_epsilon), 0.3, "left", "only decoupled"),
            (0.95 * (1 - clip_epsilon), 3.3, "right", "only PPO"),
            (0.27, 0.3, "left", "neither learns"),
        ]
    )
    rows = [{"r": r, "w": w, "align": align, "text": text} for r, w, align, text in places]
    return [
        words(alt.Chart(table(row for row in rows if row["align"] == align)), align=align).encode(
            x=_x(), y=_y(), text=alt.Text("text:N")
        )
        for align in ("left", "right")
    ]


def _place(field: str, number: str) -> dict[str, str]:
    """Vega's expressions for a place of `axis_places` by its number, and the edges of its tile."""

    def power(shift: float) -> str:
        steps = f"clamp({number} - {PLACES - shift}, -{PLACES}, {PLACES})"
        return f"pow({LARGEST}, {steps} / {PLACES})"

    return {
        field: f"round(100 * {power(0)}) / 100",
        f"{field}1": power(-0.5),
        f"{field}2": power(0.5),
    }


def _point(start: TokenRatios) -> list[alt.Chart]:
    """Invisible tiles that catch the pointer, and the chosen place with its numbers.

    Tiles, because Vega finds the nearest of many points with as many polygons: twice the elements.
    Vega counts and places them: 2,401 rows as text were 98 % of what a page got for each change.
    """
    side = 2 * PLACES + 1
    places = {**_place("r", f"(datum.at % {side})"), **_place("w", f"floor(datum.at / {side})")}
    grid = alt.Chart(alt.sequence(0, side * side, as_="at")).transform_calculate(**places)
    picked = alt.selection_point(
        name=_SELECTION,
        fields=["r", "w"],
        on=_DRAG,
        empty=False,
        clear=False,
        value=[{"r": start.ratio, "w": start.weight}],
    )
    # From the selection itself: a filter would look at each tile for each move of the pointer.
    chosen = (
        alt.Chart(alt.sequence(1))
        .transform_calculate(**{field: f"{_SELECTION}.{field}[0]" for field in ("r", "w")})
        .encode(x=_x(), y=_y())
    )
    numbered = chosen.transform_calculate(
        words="'r = ' + format(datum.r, '.2f') + ', w = ' + format(datum.w, '.2f')"
        " + ', r·w = ' + format(datum.r * datum.w, '.2f')"
    )
    return [
        # Not by opacity, for which browsers keep a layer for each tile; nothing to read aloud.
        grid.mark_rect(color="transparent", cursor="grab", aria=False)
        .encode(
            x=alt.X("r1:Q", scale=_scale()),
            x2=alt.X2("r2"),
            y=alt.Y("w1:Q", scale=_scale()),
            y2=alt.Y2("w2"),
        )
        .add_params(picked),
        chosen.mark_point(
            filled=True, size=240, color=RED, opacity=1, stroke="white", strokeWidth=2
        ),
        words(numbered, dy=-16, fontWeight="bold", align=alt.expr(_INWARD)).encode(
            text=alt.Text("words:N")
        ),
    ]
