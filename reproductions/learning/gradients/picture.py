"""Picture of gradients by lag: direction, variance and clipped tokens, in two rows of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    VERMILION,
    finished,
    new_figure,
)
from reproductions.learning.gradients.bias_and_variance import FIRST, LAST, Point
from reproductions.learning.gradients.per_sample import ANCHOR, DECOUPLED, IMPORTANCE, NAIVE
from reproductions.learning.gradients.pooled import Points, cosine, mean_of, minibatch_cosine
from simulator.stats.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

LOOKS: Final = MappingProxyType(
    {
        NAIVE: (VERMILION, "o", "-"),
        DECOUPLED: (BLUE, "s", "-"),
        ANCHOR: (GREEN, "^", "--"),
        IMPORTANCE: (BLACK, "x", ":"),
    }
)
"""Color, marker and line of each loss."""


def _variance(own: Sequence[Point]) -> Estimate:
    return mean_of(own, lambda one: one.variance)


_MOST_VARIANCE: Final = 8.0
"""Upper end of that axis; what is above is written there."""
_PANELS: Final[Sequence[tuple[str, Callable[[Sequence[Point]], Estimate]]]] = (
    ("mean gradient: cosine to on-policy", cosine),
    ("variance of a sample, times on-policy", _variance),
    ("one minibatch: cosine to on-policy", minibatch_cosine),
    ("clipped tokens, %", lambda own: mean_of(own, lambda one: 100 * one.clipped)),
)


@finished
def draw(points: Points, lr: float) -> Picture:
    """Four panels over lag, at the weights before the first and before the last minibatch."""
    figure = new_figure(12.5, 6.0)
    panels = figure.subplots(2, len(_PANELS), sharex=True, sharey="col")
    for row, place in enumerate((FIRST, LAST)):
        for axes, (name, value) in zip(panels[row], _PANELS, strict=True):
            _draw_panel(axes, points, (lr, place), value)
            if row == 0:
                axes.set_title(name)
            else:
                axes.set_xlabel("lag, versions")
        panels[row][0].set_ylabel(f"before the {place}")
        panels[row][0].axhline(1, color="black", linewidth=0.8)
        panels[row][1].axhline(1, color="black", linewidth=0.8)
    panels[0][0].set_ylim(-0.25, 1.25)
    panels[0][1].set_yscale("log", base=2)
    panels[0][1].set_ylim(0.5, _MOST_VARIANCE)
    panels[0][1].yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    panels[0][2].set_ylim(-0.25, 0.75)
    panels[0][3].set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOKS))
    return figure


def _draw_panel(
    axes: Axes,
    points: Points,
    cell: tuple[float, str],
    value: Callable[[Sequence[Point]], Estimate],
) -> None:
    lags = points.lags
    for number, (loss, (color, marker, line)) in enumerate(LOOKS.items()):
        found = [value(points.of(*cell, lag, loss)) for lag in lags]
        means = [one.mean for one in found]
        # Side by side: at lag 0 all are equal.
        places = [place + 0.09 * (number - 1.5) for place in range(len(lags))]
        halves = [one.half_width if math.isfinite(one.half_width) else 0.0 for one in found]
        axes.errorbar(
            places,
            means,
            yerr=halves,
            color=color,
            marker=marker,
            linestyle=line,
            markersize=4.5,
            linewidth=1.4,
            elinewidth=0.9,
            capsize=2,
            label=loss,
        )
        if value is _variance:
            for place, mean in zip(places, means, strict=True):
                if mean > _MOST_VARIANCE:
                    text = f"{mean:.0f}x ↑"
                    written = axes.text(place, 0.9 * _MOST_VARIANCE, text, color=color)
                    written.set(ha="right", va="top", backgroundcolor="white")
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.grid(visible=False, axis="x")
