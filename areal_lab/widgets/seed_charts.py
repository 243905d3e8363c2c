"""Training with several losses and seeds: bands of reward over steps, and final rewards.

A loss has the same color in all charts: it depends on the list of all losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from areal_lab.runlog.intervals import MeanInterval
from areal_lab.runlog.seeds import RewardCurve
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
    words,
)

_COLORS: Final = (BLUE, RED, GREEN, PURPLE, "#A07800", GREY)
_DASHES: Final = ([1, 0], [7, 3], [2, 2], [7, 3, 2, 3], [10, 4], [1, 3])


@quickly()
def reward_bands(
    curves: Mapping[str, RewardCurve],
    *,
    losses: Sequence[str],
    most: float = 0.8,
    height: int = 270,
) -> alt.TopLevelMixin:
    """Mean reward of each loss over the steps of training, as a line in its 95 % interval."""
    _check_listed(curves, losses)
    rows = [
        {"loss": name, "step": step, "reward": mean, "low": low, "high": high}
        for name, curve in curves.items()
        for step, mean, low, high in zip(
            curve.steps, curve.mean, curve.low, curve.high, strict=True
        )
    ]
    last = max((curve.steps[-1] for curve in curves.values()), default=1)
    steps = alt.Scale(domain=[0, last], nice=False)
    x = alt.X("step:Q", scale=steps, axis=plain_axis(title="training step", tickMinStep=1))
    rewards = alt.Scale(domain=[0, most])
    y = alt.Y("reward:Q", scale=rewards, axis=plain_axis(title="reward (running mean)"))
    shown = list(curves)
    chart = alt.Chart(table(rows)).encode(x=x)
    lines = chart.mark_line(strokeWidth=2.2, clip=True).encode(
        y=y,
        color=_color(losses, shown),
        strokeDash=_dash(losses, shown),
        tooltip=["loss:N", alt.Tooltip("step:Q"), *_numbers("reward", "low", "high")],
    )
    bands = chart.mark_area(opacity=0.2, clip=True).encode(
        y=alt.Y("low:Q", scale=rewards, title=""),
        y2=alt.Y2("high:Q"),
        color=_color(losses, shown),
    )
    return on_page(alt.layer(bands, lines), height=height)


@quickly()
def final_reward_rows(
    rewards: Mapping[str, MeanInterval],
    *,
    losses: Sequence[str],
    start: float | None = None,
    most: float = 0.8,
    row_height: int = 30,
) -> alt.TopLevelMixin:
    """Held-out reward of each loss after training: a dot with its 95 % interval and its numbers."""
    _check_listed(rewards, losses)
    rows = [
        {
            "loss": name,
            "mean": one.mean,
            "low": one.mean - (one.ci95 or 0.0),
            "high": one.mean + (one.ci95 or 0.0),
            "words": f"{one.mean:.3f}" + ("" if one.ci95 is None else f" ± {one.ci95:.3f}"),
        }
        for name, one in rewards.items()
    ]
    y = alt.Y("loss:N", sort=list(rewards), axis=plain_axis(title=None, ticks=False, domain=False))
    scale = alt.Scale(domain=[0, most])
    x = alt.X("mean:Q", scale=scale, axis=plain_axis(title=None, tickCount=5))
    color = alt.Color("loss:N", scale=_scale(losses, _COLORS), legend=None)
    chart = alt.Chart(table(rows)).encode(y=y)
    layers: list[Any] = [
        chart.mark_rule(strokeWidth=3, opacity=0.6, clip=True).encode(
            x=alt.X("low:Q", scale=scale, title=""), x2=alt.X2("high:Q"), color=color
        ),
        chart.mark_point(filled=True, size=110, opacity=1).encode(
            x=x, color=color, tooltip=["loss:N", *_numbers("mean", "low", "high")]
        ),
        words(chart, align="left", dx=8).encode(x=alt.value("width"), text=alt.Text("words:N")),
    ]
    if start is not None:
        before = alt.Chart(table([{"mean": start}]))
        layers.append(before.mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=x))
    title = "held-out reward after training" + ("" if start is None else "\ndashed: before")
    return on_page(alt.layer(*layers), height=row_height * max(1, len(rows)), title=titled(title))


@quickly()
def gradient_panels(
    cosines: Mapping[str, Sequence[float]],
    variances: Mapping[str, Sequence[float]],
    *,
    losses: Sequence[str],
    height: int = 180,
) -> list[alt.TopLevelMixin]:
    """Direction and spread of the gradients of samples of each age, a chart each.

    `cosines` are between the mean gradient of each lag and an unbiased one, by the name of the
    loss; `variances` those of one sample's gradient at each lag, where 1 is that of PPO at lag 0.
    """
    _check_listed({**cosines, **variances}, losses)
    return [
        on_page(
            _by_lag(values, losses, shown=list(cosines), least=least, most=most),
            height=height,
            title=titled(title),
        )
        for values, title, least, most in (
            (cosines, "cosine with the unbiased gradient", 0.0, 1.08),
            (variances, "variance of a sample (fresh PPO: 1)", 0.0, None),
        )
    ]


def _by_lag(
    values: Mapping[str, Sequence[float]],
    losses: Sequence[str],
    *,
    shown: Sequence[str],
    least: float,
    most: float | None,
) -> Any:
    rows = [
        {"loss": name, "lag": lag, "value": value}
        for name, of_lags in values.items()
        for lag, value in enumerate(of_lags)
    ]
    highest = max((value for of_lags in values.values() for value in of_lags), default=1.0)
    scale = alt.Scale(domain=[least, 1.1 * highest if most is None else most], nice=False)
    return (
        alt.Chart(table(rows))
        .mark_line(strokeWidth=2.2, point={"filled": True, "size": 60})
        .encode(
            x=alt.X("lag:Q", axis=plain_axis(title="lag (versions)", tickMinStep=1)),
            y=alt.Y("value:Q", scale=scale, axis=plain_axis(title=None)),
            color=_color(losses, shown),
            strokeDash=_dash(losses, shown),
            tooltip=["loss:N", alt.Tooltip("lag:Q"), *_numbers("value")],
        )
    )


def _check_listed(shown: Mapping[str, object], losses: Sequence[str]) -> None:
    for name in shown:
        if name not in losses:
            raise ValueError(f"{name!r} is not one of the losses: {', '.join(losses)}")


def _scale(losses: Sequence[str], values: Sequence[Any]) -> alt.Scale:
    return alt.Scale(
        domain=list(losses), range=[values[i % len(values)] for i in range(len(losses))]
    )


def _legend(losses: Sequence[str], shown: Sequence[str]) -> alt.Legend:
    return alt.Legend(
        orient="top",
        title=None,
        values=[name for name in losses if name in shown],
        labelFontSize=13,
        labelLimit=260,
        symbolType="stroke",
        symbolSize=500,
        symbolStrokeWidth=3,
        symbolOpacity=1,
        columns=2,
    )


def _color(losses: Sequence[str], shown: Sequence[str]) -> alt.Color:
    return alt.Color("loss:N", scale=_scale(losses, _COLORS), legend=_legend(losses, shown))


def _dash(losses: Sequence[str], shown: Sequence[str]) -> alt.StrokeDash:
    return alt.StrokeDash("loss:N", scale=_scale(losses, _DASHES), legend=_legend(losses, shown))


def _numbers(*fields: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{field}:Q", format=".3f") for field in fields]
