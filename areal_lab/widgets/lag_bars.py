"""The distribution of lags as inline SVG, made in a millisecond, for every move of a slider.

An altair chart takes 65 ms, most of them in checks of its schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from types import MappingProxyType
from typing import Final, Protocol

from areal_lab.widgets.figure import Svg

_BLUE, _RED, _GREY = "#2787C9", "#D55E00", "#8C8C8C"
"""As in `chart_parts`, which imports altair."""
_PLACES: Final = 11
"""Lags from 0 with a place of their own; the axis stays while eta changes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 692.0, 22.0, 190.0
_HEIGHT: Final = 232
_WIDTH: Final = 700
_TICKS: Final = (0, 25, 50, 75, 100)
_LEAST: Final = 0.0005
"""Smallest share that is written, 0.1 % when rounded."""


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

    Args:
        shares: mean and interval by lag in versions, from 0 to 1.
        eta: staleness bound; marked by a line.
        before: the shares that were shown before.
    """
    places = max([_PLACES, *(lag + 1 for lag in (*shares, *before))])
    band = (_RIGHT - _LEFT) / places
    parts = [*_axes(places, band)]
    for lag, share in before.items():
        parts.append(_bar(lag, share.mean, band, 0.92, _GREY, opacity=0.3))
    for lag, share in shares.items():
        parts += _bar_with_interval(lag, share, band, _RED if lag > eta else _BLUE)
    if eta < places:
        x = _LEFT + (int(eta) + 1) * band
        parts.append(
            f'<path d="M{x:.1f} {_TOP - 14} V{_BOTTOM}" stroke="{_RED}" stroke-dasharray="4 3"/>'
            f'<text x="{x + 5:.1f}" y="{_TOP - 6}">η = {eta:g}</text>'
        )
    told = ", ".join(f"lag {lag}: {share.mean:.1%}" for lag, share in shares.items())
    alt = escape(f"Bars: share of the trained tokens by lag. eta is {eta:g}. {told}.", quote=True)
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{alt}" fill="currentColor" font-size="12" '
        f'style="display: block; width: 100%; max-width: 860px">{"".join(parts)}</svg>'
    )


def _y(share: float) -> float:
    return _BOTTOM - min(1.0, max(0.0, share)) * (_BOTTOM - _TOP)


def _bar(
    lag: int, share: float, band: float, part: float, color: str, *, opacity: float = 1.0
) -> str:
    x, y = _LEFT + (lag + (1 - part) / 2) * band, _y(share)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{part * band:.1f}" height="{_BOTTOM - y:.1f}" '
        f'fill="{color}" fill-opacity="{opacity:g}"/>'
    )


def _bar_with_interval(lag: int, share: Interval, band: float, color: str) -> Iterator[str]:
    yield _bar(lag, share.mean, band, 0.6, color)
    middle = _LEFT + (lag + 0.5) * band
    top = _y(max(share.high, share.mean))
    if share.low < share.high:
        yield (
            f'<path d="M{middle:.1f} {_y(share.low):.1f} V{top:.1f}" stroke="currentColor" '
            'stroke-width="1.5"/>'
        )
    if share.mean >= _LEAST:
        yield (
            f'<text x="{middle:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
            f"{100 * share.mean:.1f} %</text>"
        )


def _axes(places: int, band: float) -> Iterator[str]:
    for tick in _TICKS:
        y = _y(tick / 100)
        yield (
            f'<path d="M{_LEFT} {y:.1f} H{_RIGHT}" stroke="currentColor" '
            f'stroke-opacity="{0.5 if tick == 0 else 0.12}"/>'
            f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for lag in range(places):
        x = _LEFT + (lag + 0.5) * band
        yield f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{lag}</text>'
    middle_x, middle_y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
    yield (
        f'<text x="{middle_x}" y="{_BOTTOM + 35}" text-anchor="middle">'
        "lag of a trained token (versions)</text>"
        f'<text x="14" y="{middle_y}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle_y})">share of tokens (%)</text>'
    )
