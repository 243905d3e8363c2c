"""Picture of all rows: measured and predicted gain, and the predicted step over the measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from reproductions.measured_runs.score import Number, Scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture


@finished
def draw(scored: Sequence[Scored]) -> Picture:
    """A line per row: gains on the left, steps on the right, both on a logarithmic axis."""
    from matplotlib.lines import Line2D

    gains = [(one.of.row.id, one.gain) for one in scored if one.gain is not None]
    steps = [(one.of.row.id, one.step_s) for one in scored if not one.of.is_fitted]
    figure = new_figure(11, 1.6 + 0.24 * max(len(gains), len(steps)))
    left, right = figure.subplots(1, 2)
    for place, (_, gain) in enumerate(gains):
        color = VERMILION if gain.sign_is_right is False else BLUE
        _bar(left, place, gain, 1.0, color)
        left.plot(gain.measured, place, "D", color="black", mfc="none")
    for place, (_, step) in enumerate(steps):
        _bar(right, place, step, step.measured, BLUE if step.covered else VERMILION)
    for axes, names, label in (
        (left, gains, "gain: synchronous / asynchronous seconds per step"),
        (right, steps, "predicted / measured seconds per step"),
    ):
        axes.set_xscale("log", base=2)
        axes.axvline(1, color=GREY, linewidth=0.8)
        axes.set_yticks(range(len(names)), [name for name, _ in names])
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter("{x:g}")
    handles = [
        Line2D([], [], linewidth=0, marker="D", mfc="none", color="black"),
        Line2D([], [], marker="o", color=BLUE),
        Line2D([], [], marker="o", color=VERMILION),
    ]
    labels = [
        "measured",
        "predicted, with the 90 % interval",
        "the same: wrong sign (left), outside the interval (right)",
    ]
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _bar(axes: Axes, place: int, number: Number, over: float, color: str) -> None:
    predicted = number.predicted
    ends = [predicted.low / over, predicted.high / over]
    axes.plot(ends, [place, place], color=color, linewidth=1.5)
    axes.plot(predicted.value / over, place, "o", color=color)
