"""Charts of one run, for a page that follows it: reward and lag of its steps, idle time by cause.

They use only the log, so they work for running and ended runs, and for a run at any earlier moment
(`Log.until`). Axes stay while steps are added: the last 100 steps are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import altair as alt

from areal_lab.control.ledger import mean_lag
from areal_lab.runlog.activity import ProcessUse, Stretch, activity, label, training_window
from areal_lab.runlog.incidents import in_words, requests
from areal_lab.runlog.lags import total, trained_batches
from areal_lab.runlog.records import Log
from areal_lab.runlog.replay import eta_changes
from areal_lab.runlog.time_cells import BLANK
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

if TYPE_CHECKING:
    import pandas


SHOWN_STEPS: Final = 100
MEAN_OVER: Final = 10
"""Steps of the running mean."""
_AROUND: Final = 0.4
"""Half the height of one lag in a bar, so a batch with a single lag has a bar."""
_LEAST_SHARE: Final = 0.005
"""Share of the run below which a cause of idleness has no bar."""
_LAG_HEIGHT, _REWARD_HEIGHT = 200, 130
"""Pixels of the planes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOfRun:
    """Data of one finished training step."""

    step: int
    done_s: float
    """Seconds since the start of the log."""
    reward: float | None
    """Mean over the scored samples; None without any."""
    running_mean: float | None
    """Mean of the rewards of the last 10 steps."""
    lag_min: int
    lag_mean: float
    lag_max: int
    """Largest lag of the trained tokens, in versions."""
    eta: float
    """Staleness bound at the start of the step."""


def steps_of(log: Log) -> list[StepOfRun]:
    """The finished steps of a run, in order."""
    rewards_of = {group.group: group.rewards for group in log.groups}
    etas = [(-math.inf, float(log.header.limits.get("eta") or 0.0)), *eta_changes(log)]
    found: list[StepOfRun] = []
    latest: list[float] = []
    for batch in trained_batches(log):
        rewards = [r for g in batch.groups for r in rewards_of.get(g, ()) if not math.isnan(r)]
        reward = sum(rewards) / len(rewards) if rewards else None
        latest = [*latest, *([] if reward is None else [reward])][-MEAN_OVER:]
        found.append(
            StepOfRun(
                step=batch.version,
                done_s=batch.done_s,
                reward=reward,
                running_mean=sum(latest) / len(latest) if latest else None,
                lag_min=min(batch.token_lags, default=0),
                lag_mean=mean_lag(batch.token_lags),
                lag_max=max(batch.token_lags, default=0),
                eta=[eta for since_s, eta in etas if since_s <= batch.begun_s][-1],
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class LagShare:
    """Share of the trained tokens of some batches with one lag, from 0 to 1."""

    mean: float
    """Share of all their tokens."""
    low: float
    high: float
    """Smallest (`low`) and largest share of a batch."""


def recent_lags(log: Log, *, batches: int = MEAN_OVER) -> dict[int, LagShare]:
    """Lags of the last batches, by lag: arguments of `lag_bars`."""
    latest = [batch.token_lags for batch in trained_batches(log) if batch.tokens][-batches:]
    tokens = [lags.total() for lags in latest]
    return {
        lag: LagShare(
            mean=sum(lags[lag] for lags in latest) / sum(tokens),
            low=min(lags[lag] / count for lags, count in zip(latest, tokens, strict=True)),
            high=max(lags[lag] / count for lags, count in zip(latest, tokens, strict=True)),
        )
        for lag in sorted(total(latest))
    }


@quickly()
def reward_chart(log: Log) -> alt.TopLevelMixin:
    """Reward of the last 100 training steps with its running mean, and manual requests."""
    steps = steps_of(log)[-SHOWN_STEPS:]
    rows = [
        {"step": one.step, "reward": one.reward, "mean": one.running_mean}
        for one in steps
        if one.reward is not None
    ]
    values = [value for row in rows for value in (row["reward"], row["mean"]) if value is not None]
    ends = [min(0.0, *values), max(1.0, *values)] if values else [0.0, 1.0]
    y: dict[str, Any] = {"scale": alt.Scale(domain=ends), "axis": plain_axis(tickCount=5)}
    base = alt.Chart(table(rows)).encode(
        x=_step_axis(steps),
        tooltip=[
            alt.Tooltip("step:Q"),
            alt.Tooltip("reward:Q", format=".3f"),
            alt.Tooltip("mean:Q", format=".3f"),
        ],
    )
    layers = [
        *_requests(log, steps, top=ends[1]),
        base.mark_circle(color=BLUE, opacity=0.35, size=28).encode(
            y=alt.Y("reward:Q", title="reward", **y)
        ),
        base.mark_line(color=BLUE, strokeWidth=2.5).encode(y=alt.Y("mean:Q", **y)),
    ]
    title = f"mean reward of each batch; line: of the last {MEAN_OVER}"
    return on_page(alt.layer(*layers), height=_REWARD_HEIGHT, title=titled(title))


@quickly()
def lag_chart(log: Log) -> alt.TopLevelMixin:
    """Lags of the trained tokens of the last 100 steps: youngest to oldest, red beyond eta."""
    steps = steps_of(log)[-SHOWN_STEPS:]
    rows = [
        {
            "step": one.step,
            "youngest": one.lag_min,
            "oldest": one.lag_max,
            "mean": one.lag_mean,
            "low": one.lag_min - _AROUND,
            "split": min(max(one.lag_min - _AROUND, one.eta + 0.5), one.lag_max + _AROUND),
            "high": one.lag_max + _AROUND,
            "eta": one.eta if math.isfinite(one.eta) else None,
        }
        for one in steps
    ]
    highest = max([4, *(one.lag_max for one in steps), *(_finite(one.eta) for one in steps)])
    y: dict[str, Any] = {
        "scale": alt.Scale(domain=[-0.5, highest + 2.2], nice=False),
        "axis": plain_axis(tickMinStep=1, tickCount=5),
        "title": "lag (versions)",
    }
    tooltip: list[Any] = [
        "step:Q",
        "youngest:Q",
        alt.Tooltip("mean:Q", format=".2f"),
        "oldest:Q",
        "eta:Q",
    ]
    base = alt.Chart(table(rows)).encode(x=_step_axis(steps), tooltip=tooltip)
    bar: dict[str, Any] = {"strokeWidth": 5}
    layers = [
        *_requests(log, steps, top=highest + 2.2),
        base.transform_filter("datum.split > datum.low")
        .mark_rule(color=BLUE, opacity=0.6, **bar)
        .encode(y=alt.Y("low:Q", **y), y2=alt.Y2("split:Q")),
        base.transform_filter("datum.high > datum.split")
        .mark_rule(color=RED, **bar)
        .encode(y=alt.Y("split:Q", **y), y2=alt.Y2("high:Q")),
        base.mark_circle(color="currentColor", size=12, opacity=1).encode(y=alt.Y("mean:Q", **y)),
        base.mark_line(color=GREY, strokeDash=[4, 3], interpolate="step").encode(
            y=alt.Y("eta:Q", **y)
        ),
    ]
    title = "lag of each batch, youngest to oldest token\nred: beyond eta (dashed); point: mean"
    return on_page(alt.layer(*layers), height=_LAG_HEIGHT, title=titled(title))


@quickly()
def idle_chart(log: Log, *, last_s: float = 60.0) -> alt.TopLevelMixin:
    """Idle time of each process by cause, in the last `last_s` seconds of training; pale: all of
    it.

    The causes that the run has had so far keep their places.
    """
    activities, (start_s, end_s) = activity(log), training_window(log)
    window = (max(start_s, end_s - last_s), end_s)
    whole, part = (use_between(activities, of) for of in ((start_s, end_s), window))
    rows = [
        {
            "what": f"{process}: {label(cause)}",
            "run": 100 * share,
            "now": 100 * part[process].shares().get(cause, 0.0),
        }
        for process, use in whole.items()
        for cause, share in use.shares().items()
        if cause != "busy" and cause not in BLANK and share >= _LEAST_SHARE
    ]
    places = [str(row["what"]) for row in rows]
    lines, limit = "split(datum.label, ': ')", alt.ExprRef("width < 500 ? 175 : 320")
    y = alt.Y(
        "what:N",
        title=None,
        sort=places,
        scale=alt.Scale(domain=places),
        axis=plain_axis(
            labelExpr=lines, labelOffset=-7, labelLimit=limit, ticks=False, domain=False
        ),
    )
    x: dict[str, Any] = {"scale": alt.Scale(domain=[0, 100]), "title": "% of its time"}
    base = alt.Chart(table([{**row, "text": f"{row['now']:.0f} %"} for row in rows])).encode(y=y)
    length_s = window[1] - window[0]
    layers = [
        base.mark_bar(color=GREY, opacity=0.3, height={"band": 0.9}).encode(
            x=alt.X("run:Q", axis=plain_axis(tickCount=5), **x)
        ),
        base.mark_bar(color=GREY, height={"band": 0.45}).encode(x=alt.X("now:Q", **x)),
        words(base, align="left", dx=4, fontSize=12).encode(
            x=alt.X("now:Q", **x), text=alt.Text("text:N")
        ),
    ]
    title = f"idle by cause, last {length_s:.0f} s\npale: the whole training"
    return on_page(alt.layer(*layers), height=max(40, 32 * len(rows)), title=titled(title))


def use_between(
    activities: Mapping[str, Sequence[Stretch]], window: tuple[float, float]
) -> dict[str, ProcessUse]:
    """Seconds of each process by activity and by cause of idleness, in a part of the run.

    `window` is in seconds since the start of the log.
    """
    start_s, end_s = window
    uses: dict[str, ProcessUse] = {}
    for process, stretches in activities.items():
        use = uses[process] = ProcessUse(total_s=max(0.0, end_s - start_s))
        for stretch in stretches:
            seconds = min(stretch.end_s, end_s) - max(stretch.start_s, start_s)
            if seconds > 0:
                by_name = use.busy_s if stretch.busy else use.idle_s
                by_name[stretch.name] = by_name.get(stretch.name, 0.0) + seconds
    return uses


def _step_axis(steps: Sequence[StepOfRun]) -> alt.X:
    last = steps[-1].step if steps else 0
    ends = [max(0, last - SHOWN_STEPS), max(SHOWN_STEPS, last)]
    return alt.X(
        "step:Q", title="training step", scale=alt.Scale(domain=ends), axis=plain_axis(tickCount=6)
    )


def _requests(log: Log, steps: Sequence[StepOfRun], *, top: float) -> list[alt.Chart]:
    """Lines of manual requests; those before the first shown step are left out."""
    asked: dict[float, list[str]] = {}
    for t_s, request in requests(log):
        done = [one.step for one in steps if one.done_s <= t_s]
        if done or (steps and steps[0].step == 1):
            asked.setdefault((done[-1] if done else 0) + 0.5, []).append(in_words(request))
    rows = [{"step": step, "asked": ", ".join(said), "top": top} for step, said in asked.items()]
    chart = alt.Chart(table(rows))
    x = _step_axis(steps)
    upwards = {"angle": 270, "align": "right", "baseline": "top", "dx": -3, "dy": 3}
    return [
        chart.mark_rule(color=GREY, opacity=0.7).encode(x=x),
        words(chart, fontSize=11, **upwards).encode(
            x=x, y=alt.Y("top:Q"), text=alt.Text("asked:N")
        ),
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


_LOSSES: Final = {"standard_ppo": "standard PPO", "decoupled_ppo": "decoupled PPO"}
_MOST: Final = 0.5
"""End of the axis: half of all tokens move against their advantage, and those are not dropped."""


@quickly()
def clipping_chart(
    by_lag: pandas.DataFrame, reference: pandas.DataFrame, *, height: int = 200
) -> alt.TopLevelMixin:
    """Bars: the share of tokens that the clip drops, by lag, for standard and decoupled PPO."""
    names = list(_LOSSES.values())
    under = plain_axis(
        title="lag of the token (versions)", labelAngle=0, ticks=False, labelPadding=6
    )
    color = alt.Color(
        "loss:N",
        scale=alt.Scale(domain=names, range=[RED, BLUE]),
        legend=alt.Legend(title=None, orient="top", labelFontSize=12, symbolOpacity=1),
    )
    shares = alt.Chart(table(_bars(by_lag))).encode(
        x=alt.X("lag:O", axis=under),
        y=alt.Y(
            "share:Q",
            scale=alt.Scale(domain=[0, _MOST], clamp=True),
            axis=plain_axis(title="tokens that the clip drops", format="%", tickCount=5),
        ),
        xOffset=alt.XOffset("loss:N", sort=names),
        color=color,
        tooltip=[
            alt.Tooltip("loss:N", title="clipped by"),
            alt.Tooltip("share:Q", format=".2%"),
            alt.Tooltip("tokens:Q", title="tokens of this lag"),
        ],
    )
    numbers = words(shares, dy=-7, fontSize=11).encode(
        text=alt.Text("percent:Q", format=".1f"), color=alt.value("currentColor")
    )
    pale = alt.Chart(table(_bars(reference))).encode(
        x=alt.X("lag:O", axis=under),
        y=alt.Y("share:Q"),
        xOffset=alt.XOffset("loss:N", sort=names),
        color=color,
    )
    layers = alt.layer(
        pale.mark_tick(orient="horizontal", opacity=0.4, thickness=2), shares.mark_bar(), numbers
    )
    return on_page(layers, height=height)


def _bars(by_lag: pandas.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            **{"lag": int(lag), "loss": name, "tokens": int(row["tokens"])},
            **{"share": float(row[loss]), "percent": 100 * float(row[loss])},
        }
        for lag, row in by_lag.iterrows()
        for loss, name in _LOSSES.items()
    ]


@quickly()
def parting_chart(pairs: pandas.DataFrame, *, height: int = 180) -> alt.TopLevelMixin:
    """Points: how many tokens the responses of two runs share before they differ, by group."""
    shown = ["group_first", "about", "sample", "same_tokens", "tokens_first", "tokens_second"]
    points = alt.Chart(table(pairs[shown].to_dict("records"))).encode(
        x=alt.X("group_first:Q", axis=plain_axis(title="group, in the order of the first run")),
        y=alt.Y("same_tokens:Q", axis=plain_axis(title="tokens until they differ", tickCount=5)),
        tooltip=[
            alt.Tooltip("about:N", title="prompt"),
            alt.Tooltip("sample:Q"),
            alt.Tooltip("same_tokens:Q", title="same tokens"),
            alt.Tooltip("tokens_first:Q", title="of the first run"),
            alt.Tooltip("tokens_second:Q", title="of the second run"),
        ],
    )
    return on_page(points.mark_circle(size=45, opacity=0.7, color=BLUE), height=height)
