"""Altair charts of notebook 11: drift by eta under a bound, what a bound costs, drift by step.

Axes are those of all cells, so that they stay while a control moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

import altair as alt

from areal_lab.widgets.chart_parts import (
    BLUE,
    GREEN,
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
from reproductions.learning.bounded import BOUNDED, Cell, Evidence
from reproductions.learning.equal_hours import (
    BOUNDS_OF_DRIFT,
    ETAS,
    AtHours,
    by_bound,
    by_eta,
    shared_etas,
)

_HEIGHT: Final = 240
_COLORS: Final = (GREEN, BLUE, PURPLE, RED)
"""Of the settings, in their order."""
_DRIFTS: Final = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]


def legend(names: Sequence[str]) -> str:
    """The colors of the settings, as HTML."""
    return color_legend({name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)})


@quickly()
def drift_by_eta(settings: Sequence[AtHours], max_drift: float) -> alt.TopLevelMixin:
    """Drift of every setting by eta, with the bound; a ring marks the eta that it permits."""
    rows = [
        {
            "setting": one.name,
            "eta": eta,
            "drift": round(one.drift[eta], 4),
            "reward": round(one.mean(eta), 4),
            "speed": round(one.speed[eta], 2),
            "permitted": eta == one.permitted(max_drift),
        }
        for one in settings
        for eta in one.etas
    ]
    etas = [eta for eta in ETAS if any(row["eta"] == eta for row in rows)]
    base = alt.Chart(table(rows)).encode(
        x=alt.X("eta:N", sort=etas, title="eta, versions", axis=plain_axis(labelAngle=0)),
        y=alt.Y(
            "drift:Q",
            title="drift, nats (log)",
            axis=plain_axis(values=_DRIFTS, format="~g"),
            scale=alt.Scale(type="log", domain=[0.005, 0.8], nice=False),
        ),
        color=_by_setting(settings),
        tooltip=["setting:N", "eta:N", "drift:Q", "reward:Q", "speed:Q"],
    )
    dots = base.mark_point(size=45, filled=True, opacity=0.9)
    rings = base.transform_filter("datum.permitted").mark_point(
        size=230, strokeWidth=2.5, opacity=1, shape="circle"
    )
    chart = _bound(max_drift, "y") + base.mark_line(opacity=0.5) + dots + rings
    return _finished(chart, "drift by eta; ring: permitted")


@quickly()
def cost_of_bounds(settings: Sequence[AtHours], max_drift: float) -> alt.TopLevelMixin:
    """Reward below the best eta of each setting: of every bound, and of every single eta."""
    bounds = [
        {"bound": bound, "cost": round(by_bound(settings, bound).regret, 4)}
        for bound in BOUNDS_OF_DRIFT
    ]
    etas = [
        {"eta": f"eta {eta}", "cost": round(by_eta(settings, eta).regret, 4)}
        for eta in _best_and_worst(settings)
    ]
    axis = plain_axis(tickCount=5, title="reward below the best eta")
    x = alt.X(
        "bound:Q",
        title="bound on drift, nats (log)",
        axis=plain_axis(values=_DRIFTS, format="~g"),
        scale=alt.Scale(type="log", domain=[0.005, 0.8], nice=False),
    )
    line = (
        alt.Chart(table(bounds))
        .mark_line(color=BLUE, interpolate="step-before", strokeWidth=2.2)
        .encode(x=x, y=alt.Y("cost:Q", axis=axis), tooltip=["bound:Q", "cost:Q"])
    )
    rules = (
        alt.Chart(table(etas))
        .mark_rule(color=GREY, strokeDash=[5, 3])
        .encode(y=alt.Y("cost:Q", axis=axis), tooltip=["eta:N", "cost:Q"])
    )
    names = (
        alt.Chart(table(etas))
        .mark_text(align="left", dx=5, fontSize=12, color="currentColor")
        .encode(x=alt.value("width"), y="cost:Q", text="eta:N")
    )
    chosen = [row for row in bounds if row["bound"] == max_drift]
    dot = (
        alt.Chart(table(chosen))
        .mark_point(size=120, filled=True, color=RED)
        .encode(x=x, y="cost:Q")
    )
    chart = _bound(max_drift, "x") + rules + names + line + dot
    return _finished(chart, "cost of one bound, of one eta (dashed)")


def _best_and_worst(settings: Sequence[AtHours]) -> list[str]:
    found = sorted(shared_etas(settings), key=lambda eta: by_eta(settings, eta).regret)
    return [found[0], found[-1]]


@quickly()
def drift_by_step(
    found: Evidence, cell: Cell, arms: Sequence[str], max_drift: float
) -> alt.TopLevelMixin:
    """Drift of every step, mean over seeds: the schedule and fixed values of eta.

    Args:
        found: with the metrics of every step.
        cell: task and learning rate.
        arms: to draw, such as `eta 4`, beside the schedule.
        max_drift: the bound that the schedule had.
    """
    colors = {BOUNDED: BLUE, **dict(zip(arms, (GREY, PURPLE, RED), strict=False))}
    rows = [
        {"arm": arm, "step": step, "drift": round(value, 4)}
        for arm in colors
        for step, value in enumerate(_means(found, cell, arm), start=1)
    ]
    base = alt.Chart(table(rows)).encode(
        x=alt.X("step:Q", title="training step", axis=plain_axis(tickCount=5)),
        y=alt.Y("drift:Q", title="drift, nats", axis=plain_axis(tickCount=5)),
        color=alt.Color("arm:N", legend=alt.Legend(title=None, orient="top")).scale(
            domain=list(colors), range=list(colors.values())
        ),
        tooltip=["arm:N", "step:Q", "drift:Q"],
    )
    chart = _bound(max_drift, "y") + base.mark_line(strokeWidth=2)
    return _finished(chart, "drift by step; dashed: the bound")


def _means(found: Evidence, cell: Cell, arm: str) -> list[float]:
    own = [one.drift for one in found.of(cell, arm)]
    return [fmean(values) for values in zip(*own, strict=True)]


def _by_setting(settings: Sequence[AtHours]) -> alt.Color:
    names = [one.name for one in settings]
    colors = [_COLORS[place % len(_COLORS)] for place in range(len(names))]
    return alt.Color("setting:N", legend=None).scale(domain=names, range=colors)


def _bound(max_drift: float, along: str) -> Any:
    """A dashed line at the bound, across."""
    rule = alt.Chart(table([{"bound": max_drift}])).mark_rule(
        color="currentColor", strokeDash=[4, 3]
    )
    return rule.encode(**{along: "bound:Q"})


def _finished(chart: Any, text: str) -> alt.TopLevelMixin:
    return on_page(chart, height=_HEIGHT, title=titled(text))
