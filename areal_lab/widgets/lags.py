"""Lags of trained tokens: their distribution, samples as rows of tokens, and curves over eta.

The distribution of lags as inline SVG, made in a millisecond, for every move of a slider.

An altair chart takes 65 ms, most of them in checks of its schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Final, Protocol, TypedDict

import altair as alt
import numpy as np
from numpy.typing import NDArray

from areal_lab.capacity import check_eta
from areal_lab.runlog.trained_samples import TrainedSample
from areal_lab.widgets.chart_parts import (
    BLUE,
    GREY,
    RED,
    on_page,
    plain_axis,
    quickly,
    table,
    titled,
)
from areal_lab.widgets.figure import Svg

_BLUE, _RED, _GREY = "#2787C9", "#D55E00", "#8C8C8C"
"""As in `chart_parts`, which imports altair."""
_PLACES: Final = 11
"""Number of lags with a fixed place; the axis stays while eta changes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 8.0, 22.0, 190.0
"""Pixels left and right of the bars; their upper and lower end."""
_HEIGHT: Final = 232
_TICKS: Final = (0, 25, 50, 75, 100)
_LEAST: Final = 0.0005
"""Smallest share with a number, 0.1 % when rounded."""


class Interval(Protocol):
    """A mean with the ends of its interval, such as `simulator.Estimate`."""

    @property
    def mean(self) -> float:
        """The mean."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


def lag_bars(
    shares: Mapping[int, Interval],
    *,
    eta: float,
    before: Mapping[int, Interval] = MappingProxyType({}),
) -> Svg:
    """Shares of trained tokens by lag, those beyond eta in red; pale: before the latest change.

    `shares` are means and intervals by lag in versions, from 0 to 1.
    """
    places = max([_PLACES, *(lag + 1 for lag in (*shares, *before))])
    band = 100 / places  # in percent of the width, so that letters keep their size on any page
    parts = [*_ticks(places, band)]
    for lag, share in before.items():
        parts.append(_bar(lag, share.mean, band, 0.92, _GREY, opacity=0.3))
    for lag, share in shares.items():
        parts += _bar_with_interval(lag, share, band, _RED if lag > eta else _BLUE)
    if eta < places:
        x = (int(eta) + 1) * band
        parts.append(
            f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="{_TOP - 14}" y2="{_BOTTOM}" stroke="{_RED}" '
            f'stroke-dasharray="4 3"/>'
            f'<text x="{x:.2f}%" dx="5" y="{_TOP - 6}">η = {eta:g}</text>'
        )
    told = ", ".join(f"lag {lag}: {share.mean:.1%}" for lag, share in shares.items())
    alt = escape(f"Bars: share of the trained tokens by lag. eta is {eta:g}. {told}.", quote=True)
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{alt}" '
        f'fill="currentColor" font-size="12" width="100%" height="{_HEIGHT}" '
        f'style="display: block; box-sizing: border-box; overflow: visible; '
        f'padding: 0 {_RIGHT}px 0 {_LEFT}px">{_TITLES}{"".join(parts)}</svg>'
    )


def _y(share: float) -> float:
    return _BOTTOM - min(1.0, max(0.0, share)) * (_BOTTOM - _TOP)


def _bar(
    lag: int, share: float, band: float, part: float, color: str, *, opacity: float = 1.0
) -> str:
    x, y = (lag + (1 - part) / 2) * band, _y(share)
    return (
        f'<rect x="{x:.2f}%" y="{y:.1f}" width="{part * band:.2f}%" height="{_BOTTOM - y:.1f}" '
        f'fill="{color}" fill-opacity="{opacity:g}"/>'
    )


def _bar_with_interval(lag: int, share: Interval, band: float, color: str) -> Iterator[str]:
    yield _bar(lag, share.mean, band, 0.6, color)
    middle = (lag + 0.5) * band
    top = _y(max(share.high, share.mean))
    if share.low < share.high:
        yield (
            f'<line x1="{middle:.2f}%" x2="{middle:.2f}%" y1="{_y(share.low):.1f}" '
            f'y2="{top:.1f}" stroke="currentColor" stroke-width="1.5"/>'
        )
    if share.mean >= _LEAST:
        yield (
            f'<text x="{middle:.2f}%" y="{top - 5:.1f}" text-anchor="middle">'
            f"{100 * share.mean:.1f}</text>"
        )


def _ticks(places: int, band: float) -> Iterator[str]:
    for tick in _TICKS:
        y = _y(tick / 100)
        yield (
            f'<line x2="100%" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="{0.5 if tick == 0 else 0.12}"/>'
            f'<text x="-7" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for lag in range(places):
        x = (lag + 0.5) * band
        yield f'<text x="{x:.2f}%" y="{_BOTTOM + 16}" text-anchor="middle">{lag}</text>'


_MIDDLE: Final = (_TOP + _BOTTOM) / 2
_TITLES: Final = (
    f'<text x="50%" y="{_BOTTOM + 35}" text-anchor="middle">lag of a trained token (versions)'
    f'</text><text x="{14 - _LEFT}" y="{_MIDDLE}" text-anchor="middle" '
    f'transform="rotate(-90 {14 - _LEFT} {_MIDDLE})">share of tokens (%)</text>'
)


_WITHIN: Final = ("#B3D4EE", "#2165A3")
_BEYOND: Final = ("#F2A33A", "#B5390A")
"""Colors of the newest and the oldest; all are visible on white and on dark."""


class LagRows(TypedDict):
    """Arguments of `Strip`, and of `Strip.show` for an existing strip."""

    rows: list[NDArray[np.uint8]]
    names: list[str]
    colors: list[str]
    labels: list[str]


def lag_rows(samples: Sequence[TrainedSample], *, eta: float) -> LagRows:
    """A row per sample, a cell per token; the code of a cell is the token's lag.

    Show them with `merge="highest"`: a pixel with several tokens shows the oldest. Tokens with a
    lag above `eta`, in versions, have other colors.
    """
    check_eta(eta)
    rows = [one.lags for one in samples]
    largest = max((int(row.max()) for row in rows if len(row)), default=0)
    within = min(largest, math.floor(min(eta, largest)))
    colors = [*_between(*_WITHIN, within + 1), *_between(*_BEYOND, largest - within)]
    labels = [
        f"lag {lag}" + (", older than eta" if lag > eta else "") for lag in range(largest + 1)
    ]
    return LagRows(rows=rows, names=[one.name for one in samples], colors=colors, labels=labels)


def _between(first: str, last: str, count: int) -> list[str]:
    """Colors from the first to the last in equal steps; a single one is the last."""
    ends = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in (first, last)]
    colors = []
    for number in range(count):
        part = 1.0 if count == 1 else number / (count - 1)
        mixed = [round(low + part * (high - low)) for low, high in zip(*ends, strict=True)]
        colors.append("#" + "".join(f"{value:02x}" for value in mixed))
    return colors


_COLORS: Final = (RED, BLUE, "#009E73")
_DASHES: Final = ((1, 0), (1, 0), (3, 3))
_WIDTHS: Final = (2.4, 8.0, 2.4)
_OPACITIES: Final = (1.0, 0.4, 1.0)


@quickly()
def order_curves(
    oldest: Mapping[str, Mapping[float, int]],
    seconds: Mapping[str, Mapping[float, Interval]],
) -> list[alt.TopLevelMixin]:
    """Effect of eta with each batch order, two charts: the oldest trained token, seconds of a step.

    Orders with equal values are visible at once: the second line is wide and pale, the third thin.

    `seconds` has the duration of a training step by eta for each order.
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
        orient="bottom",
        title=None,
        labelFontSize=12,
        labelLimit=300,
        symbolType="stroke",
        columns=1,
    )
    widths = alt.Scale(domain=names, range=list(_WIDTHS[: len(names)]))
    opacities = alt.Scale(domain=names, range=list(_OPACITIES[: len(names)]))
    base = alt.Chart(table(rows)).encode(
        x=alt.X("eta:Q", title="eta (versions)", axis=plain_axis(tickMinStep=1)),
        color=alt.Color("order:N", scale=scale, legend=legend),
        strokeDash=alt.StrokeDash("order:N", scale=dash, legend=legend),
        strokeWidth=alt.StrokeWidth("order:N", scale=widths, legend=legend),
        opacity=alt.Opacity("order:N", scale=opacities, legend=legend),
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
        base.mark_line(point=points).encode(
            y=alt.Y("oldest:Q", title="", axis=plain_axis(tickMinStep=1))
        ),
    )
    right = alt.layer(
        base.mark_rule().encode(
            y=alt.Y("low:Q"),
            y2=alt.Y2("high:Q"),
            strokeDash=alt.value([1, 0]),
            strokeWidth=alt.value(1.5),
        ),
        base.mark_line(point=points).encode(
            y=alt.Y("seconds:Q", title="", axis=plain_axis(), scale=alt.Scale(zero=True))
        ),
    )
    titles = ("oldest trained token (versions)", "seconds of a training step")
    return [
        on_page(chart, height=230, title=titled(title))
        for chart, title in zip((left, right), titles, strict=True)
    ]
