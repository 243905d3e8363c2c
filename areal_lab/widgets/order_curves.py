"""What each batch order makes of eta: the oldest trained token, and the duration of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import altair as alt

from areal_lab.widgets.chart_parts import BLUE, GREY, RED, on_page, plain_axis, quickly, table
from areal_lab.widgets.lag_bars import Interval

_COLORS: Final = (RED, BLUE, "#009E73")
_DASHES: Final = ((1, 0), (6, 3), (2, 2))


@quickly
def order_curves(
    oldest: Mapping[str, Mapping[float, int]],
    seconds: Mapping[str, Mapping[float, Interval]],
    *,
    width: int = 255,
) -> alt.TopLevelMixin:
    """What each batch order makes of eta: the oldest trained token, and the seconds of a step.

    Args:
        oldest: for each order the largest lag by eta.
        seconds: for each order the duration of a training step by eta.
        width: pixels of each of the two panels.
    """
    names = list(oldest)
    scale = alt.Scale(domain=names, range=list(_COLORS[: len(names)]))
    dash = alt.Scale(domain=names, range=[list(one) for one in _DASHES[: len(names)]])
    rows = [
        {
            "order": name,
            "eta": one,
            "oldest": lag,
            "seconds": seconds[name][one].mean,
            "low": seconds[name][one].low,
            "high": seconds[name][one].high,
        }
        for name in names
        for one, lag in oldest[name].items()
    ]
    legend = alt.Legend(
        orient="bottom", title=None, labelFontSize=12, labelLimit=300, symbolSize=200
    )
    base = alt.Chart(table(rows)).encode(
        x=alt.X("eta:Q", title="eta (versions)", axis=plain_axis(tickMinStep=1)),
        color=alt.Color("order:N", scale=scale, legend=legend),
        strokeDash=alt.StrokeDash("order:N", scale=dash, legend=legend),
        tooltip=[
            alt.Tooltip("order:N"),
            alt.Tooltip("eta:Q"),
            alt.Tooltip("oldest:Q"),
            alt.Tooltip("seconds:Q", format=".2f"),
        ],
    )
    etas = [one for lags in oldest.values() for one in lags]
    ends = [min(etas), max(etas)]
    naive = alt.Chart(table([{"eta": one, "oldest": one} for one in ends]))
    points = {"filled": True, "size": 45}
    left = alt.layer(
        naive.mark_line(color=GREY, strokeWidth=7, opacity=0.35).encode(
            x=alt.X("eta:Q"), y=alt.Y("oldest:Q")
        ),
        base.mark_line(strokeWidth=2.2, point=points).encode(
            y=alt.Y("oldest:Q", title="", axis=plain_axis(tickMinStep=1))
        ),
    ).properties(width=width, height=230, title=_titled("oldest trained token (versions)"))
    right = alt.layer(
        base.mark_rule(strokeWidth=1.5).encode(
            y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), strokeDash=alt.value([1, 0])
        ),
        base.mark_line(strokeWidth=2.2, point=points).encode(
            y=alt.Y("seconds:Q", title="", axis=plain_axis(), scale=alt.Scale(zero=True))
        ),
    ).properties(width=width, height=230, title=_titled("seconds of a training step"))
    panels = alt.hconcat(left, right, spacing=60, bounds="flush").configure_view(stroke=None)
    return on_page(panels)


def _titled(text: str) -> alt.TitleParams:
    return alt.TitleParams(text, anchor="start", fontSize=13, fontWeight="normal")
