"""Charts of tokens for notebooks: what the clip drops by age, where two runs part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import altair as alt

from areal_lab.widgets.chart_parts import BLUE, RED, on_page, plain_axis, table, words

if TYPE_CHECKING:
    import pandas

_LOSSES: Final = {"standard_ppo": "standard PPO", "decoupled_ppo": "decoupled PPO"}
_MOST: Final = 0.5
"""End of the axis: half of all tokens move against their advantage, and those are not dropped."""


def clipping_chart(
    by_lag: pandas.DataFrame, reference: pandas.DataFrame, *, width: int = 400, height: int = 200
) -> alt.TopLevelMixin:
    """Bars: the share of tokens that the clip drops, by lag, for standard and decoupled PPO.

    Args:
        by_lag: from `clipped_by_lag`.
        reference: the same for another clip range, drawn as pale marks.
        width: in pixels, as is `height`.
    """
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
        text=alt.Text("share:Q", format=".1%"), color=alt.value("currentColor")
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
    return on_page(layers, width=width, height=height)


def _bars(by_lag: pandas.DataFrame) -> list[dict[str, Any]]:
    return [
        {"lag": int(lag), "loss": name, "share": float(row[loss]), "tokens": int(row["tokens"])}
        for lag, row in by_lag.iterrows()
        for loss, name in _LOSSES.items()
    ]


def parting_chart(pairs: pandas.DataFrame, *, height: int = 180) -> alt.TopLevelMixin:
    """Points: how many tokens the responses of two runs share before they differ, by group.

    Args:
        pairs: from `paired_samples`.
        height: in pixels; the chart is as wide as its column.
    """
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
    return on_page(
        points.mark_circle(size=45, opacity=0.7, color=BLUE), width="container", height=height
    )
