"""Altair charts of notebook 10: learning curves over steps and hours, and loss by drift and lag.

Axes are those of all cells, so that they stay while a control moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import altair as alt

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREY,
    PURPLE,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
    titled,
)
from areal_lab.widgets.chart_parts import legend as color_legend
from reproductions.learning.compare import BySeed
from reproductions.learning.curves import Cost, Extent, points
from reproductions.learning.setting import ORACLE, Setting

Curves: TypeAlias = Mapping[str, BySeed]
"""Runs by seed of each line, under a name of `LINES`."""
LINES: Final = {"synchronous": "currentColor", "naive": RED, "decoupled": BLUE, "yours": PURPLE}
"""Lines and their colors; `currentColor` is black on a light page and white on a dark one."""
_PALE: Final = 0.3
_HEIGHT: Final = 250
_LAGS: Final = [1, 2, 4, 8, 16, 32, 64, 128]
_SHAPES: Final = ("circle", "square", "triangle-up", "cross", "diamond")
_SIGNS: Final = ("&#9679;", "&#9632;", "&#9650;", "&#10010;", "&#9670;")
"""The shapes as letters, in the same order."""
_TITLES: Final = {"step": "training step", "hours": "simulated hours"}


def curves_of(setting: Setting, eta: str) -> dict[str, BySeed]:
    """The synchronous runs of a setting and those of an eta with both objectives."""
    return {
        "synchronous": setting.of("decoupled", ORACLE),
        "naive": setting.of("naive", eta),
        "decoupled": setting.of("decoupled", eta),
    }


def legend(names: Sequence[str], shapes: Sequence[str] = ()) -> str:
    """One legend for charts beside one another, as HTML: lines or colors, then shapes of points."""
    return color_legend(
        {name: LINES[name] for name in names}, shapes=dict(zip(shapes, _SIGNS, strict=False))
    )


@quickly()
def learning_curves(
    curves: Curves, room: Extent, *, past: Sequence[Curves] = (), mark_hours: float | None = None
) -> tuple[alt.TopLevelMixin, alt.TopLevelMixin]:
    """Held-out reward over steps and over simulated hours: means over seeds in 95 % intervals.

    Args:
        curves: the lines.
        room: ends of the axes.
        past: drawn pale and without intervals.
        mark_hours: where to draw a vertical line over hours.
    """
    rows = [row for name, runs in curves.items() for row in _rows(name, runs, 0)]
    rows += [
        row
        for number, older in enumerate(past, start=1)
        for name, runs in older.items()
        for row in _rows(name, runs, number)
    ]
    over_steps, over_hours = (_panel(rows, room, along) for along in _TITLES)
    if mark_hours is not None:
        rule = alt.Chart(table([{"hours": mark_hours}]))
        over_hours += rule.mark_rule(color=GREY, strokeDash=[4, 3]).encode(x="hours:Q")
    return _finished(over_steps, "over steps"), _finished(over_hours, "over hours")


def _rows(name: str, runs: BySeed, past: int) -> list[dict[str, Any]]:
    return [
        {
            "line": name,
            "past": past,
            "step": point.step,
            "hours": round(point.hours, 3),
            "reward": round(point.reward.mean, 4),
            **_interval(point.reward.low, point.reward.high),
        }
        for point in points(runs)
    ]


def _interval(low: float, high: float) -> dict[str, float]:
    """None of a single seed, whose interval is infinite."""
    return {"low": round(low, 4), "high": round(high, 4)} if math.isfinite(high - low) else {}


def _panel(rows: Sequence[Mapping[str, Any]], room: Extent, along: str) -> Any:
    end = room.steps if along == "step" else room.hours
    rewards = alt.Scale(domain=list(room.reward), nice=False, zero=False)
    axis = plain_axis(tickCount=6, title="held-out reward" if along == "step" else None)
    base = alt.Chart(table(rows)).encode(
        x=alt.X(f"{along}:Q", title=_TITLES[along], axis=plain_axis(tickCount=5)).scale(
            domain=[0, end], nice=False
        ),
        color=alt.Color("line:N", legend=None).scale(
            domain=list(LINES), range=list(LINES.values())
        ),
        detail=["past:N"],
    )
    reward = alt.Y("reward:Q", scale=rewards, axis=axis)
    bands = base.transform_filter("datum.past == 0 && isValid(datum.low)").mark_area(
        opacity=0.17, clip=True
    )
    lines = base.transform_filter("datum.past == 0").mark_line(strokeWidth=2.2, clip=True)
    older = base.transform_filter("datum.past > 0").mark_line(
        strokeWidth=1.5, opacity=_PALE, clip=True
    )
    return (
        older.encode(y=reward)
        + bands.encode(y=alt.Y("low:Q", scale=rewards, axis=axis), y2="high:Q")
        + lines.encode(
            y=reward,
            tooltip=[
                alt.Tooltip("line:N"),
                alt.Tooltip("step:Q"),
                alt.Tooltip("hours:Q", title="simulated hours", format=".1f"),
                *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("reward", "low", "high")),
            ],
        )
    )


@quickly()
def loss_charts(
    cells: Sequence[Cost], *, chosen: tuple[str, str]
) -> tuple[alt.TopLevelMixin, alt.TopLevelMixin]:
    """Reward lost against synchronous training, a point for each cell, by its drift and its lag.

    Args:
        cells: as `curves.costs` gives them.
        chosen: name of a setting, and an eta; its cells have rings around them.
    """
    rows = [
        {
            "setting": cell.setting,
            "eta": cell.eta,
            "objective": cell.objective,
            "loss": round(cell.loss.mean, 4),
            "drift": round(cell.drift, 4),
            "lag": round(cell.lag, 2),
            "chosen": (cell.setting, cell.eta) == chosen,
        }
        for cell in cells
    ]
    names = list(dict.fromkeys(cell.setting for cell in cells))
    lags = alt.Scale(type="log", domain=[0.8, 1.3 * max(cell.lag for cell in cells)], nice=False)
    by_drift = _cloud(rows, names, "drift", alt.Scale(zero=True), plain_axis(tickCount=4))
    by_lag = _cloud(rows, names, "lag", lags, plain_axis(values=_LAGS, format="~g"))
    return _finished(by_drift, "by drift"), _finished(by_lag, "by mean lag (versions, log)")


def _cloud(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    along: str,
    scale: alt.Scale,
    axis: alt.Axis,
) -> Any:
    lost = plain_axis(
        tickCount=6, title="reward minus that of synchronous" if along == "drift" else None
    )
    base = alt.Chart(table(rows)).encode(
        x=alt.X(f"{along}:Q", scale=scale, title=along, axis=axis),
        y=alt.Y("loss:Q", axis=lost),
        tooltip=["setting:N", "eta:N", "objective:N", "loss:Q", "drift:Q", "lag:Q"],
    )
    dots = base.mark_point(size=70, filled=True, opacity=0.85).encode(
        color=alt.Color("objective:N", legend=None).scale(
            domain=["naive", "decoupled"], range=[RED, BLUE]
        ),
        shape=alt.Shape("setting:N", legend=None).scale(
            domain=list(names), range=[_SHAPES[i % len(_SHAPES)] for i in range(len(names))]
        ),
    )
    rings = base.transform_filter("datum.chosen").mark_point(
        shape="circle", size=240, color="currentColor", strokeWidth=1.5, opacity=1
    )
    zero = alt.Chart(table([{"loss": 0}])).mark_rule(color=GREY).encode(y="loss:Q")
    return zero + dots + rings


def _finished(chart: Any, text: str) -> alt.TopLevelMixin:
    return on_page(chart, height=_HEIGHT, title=titled(text))
