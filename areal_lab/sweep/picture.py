"""figure.png: a figure of the cells along one axis, a line for each combination of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    entitle,
    finished,
    new_figure,
)
from areal_lab.sweep.grid import label_of
from areal_lab.sweep.read import Interval, RecordedSweep
from areal_lab.sweep.study import Value, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture
    from areal_lab.runlog.intervals import MeanInterval

_COLORS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_MARKERS: Final = "osD^vPX*"
_DASHES: Final = ("-", "--", ":")
MOST_LINES: Final = len(_COLORS) * len(_DASHES)
_SPREAD: Final = 0.3
"""Part of the distance between two values over which the lines are spread."""


@finished
def draw_sweep(
    sweep: RecordedSweep,
    metric: str | None = None,
    *,
    x: str | None = None,
    over: str | None = None,
    baseline: Mapping[str, Value] | None = None,
    width: float = 8.0,
    title: str | None = None,
) -> Picture:
    """Draw a figure with its 95 % intervals over repetitions, and each run as a small point.

    With a baseline, a second panel has the paired differences from it. Values of the horizontal
    axis are in the order of the grid, at equal distances. `metric` is one of `sweep.metrics`, `x`
    the horizontal axis and `over` the axis of the repetitions; None takes the study's.
    """
    metric = metric or str(sweep.study["metric"])
    over = over or str(sweep.study["figure"]["over"])
    found = sweep.intervals(metric, over=over, baseline=baseline)
    x = x or horizontal(sweep, over)
    if x not in sweep.axes or x == over:
        raise ValueError(f"{x!r} is not an axis of the grid; those are {', '.join(sweep.axes)}")
    lines = _by_line(found, x)
    if len(lines) > MOST_LINES:
        raise ValueError(
            f"{len(lines)} lines are too many to tell apart (at most {MOST_LINES}); set figure.x "
            "to the axis with most values"
        )
    panels = 2 if any(one.difference for one in found) else 1
    side_by_side = width >= NARROW
    figure = new_figure(width, 3.9 if side_by_side or panels == 1 else 6.4)
    shape = (1, panels) if side_by_side else (panels, 1)
    axes: Any = figure.subplots(*shape, squeeze=False).flatten()
    _draw(axes[0], sweep.axes[x], lines, "value")
    axes[0].set(xlabel="" if panels == 2 and not side_by_side else x, ylabel=metric)
    if panels == 2:
        axes[1].axhline(0, color=GREY, linewidth=1)
        _draw(axes[1], sweep.axes[x], lines, "difference")
        label = label_of(baseline or {})
        paired = f"\npaired by {over}" if over in sweep.axes else ""
        axes[1].set(xlabel=x, ylabel=f"minus {label}{paired}")
    named = [name for name in lines if name]
    if named:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(named)))
    how = _how(sweep, found, over)
    title = title or f"{metric} by {x}: {how}"
    return entitle(figure, title, alt=_said(metric, x, found, how))


def horizontal(sweep: RecordedSweep, over: str) -> str:
    """Horizontal axis: the study's, or the first one that is not the repetition."""
    names = [name for name in sweep.axes if name != over]
    chosen = str(sweep.study["figure"]["x"]) or next(iter(names), "")
    if not chosen:
        raise ValueError(f"the grid has no axis besides {over}, so there is nothing to draw")
    return chosen


def _draw(
    axes: Axes, values: Sequence[Value], lines: Mapping[str, list[Interval]], what: str
) -> None:
    places = {value: place for place, value in enumerate(values)}
    looks = zip(cycle(_COLORS), cycle(_MARKERS), strict=False)
    for number, ((name, own), (color, marker)) in enumerate(
        zip(lines.items(), looks, strict=False)
    ):
        shift = _SPREAD * ((number + 0.5) / len(lines) - 0.5)
        points = [
            (places[_x_of(one)] + shift, interval, one.runs)
            for one in own
            if (interval := _interval_of(one, what)) is not None
        ]
        if not points:
            continue
        at = [place for place, _, _ in points]
        axes.plot(
            at,
            [interval.mean for _, interval, _ in points],
            _DASHES[number // len(_COLORS) % len(_DASHES)],
            marker=marker,
            color=color,
            markersize=6,
            linewidth=1.4,
            label=name,
        )
        widths = [interval.ci95 or 0.0 for _, interval, _ in points]
        means = [interval.mean for _, interval, _ in points]
        axes.errorbar(at, means, yerr=widths, fmt="none", color=color, capsize=4, linewidth=1.4)
        if what == "value":
            for place, _, runs in points:
                if len(runs) > 1:
                    beside = [place + 0.06] * len(runs)
                    axes.plot(beside, runs, ".", color=color, alpha=0.45, markersize=4)
    axes.set_xticks(range(len(values)), [shown(value) for value in values])
    axes.set_xlim(-0.5, len(values) - 0.5)


def _by_line(found: Sequence[Interval], x: str) -> dict[str, list[Interval]]:
    """Intervals by the name of the line; each keeps its value of `x` as its last axis."""
    lines: dict[str, list[Interval]] = {}
    for one in found:
        rest = {name: value for name, value in one.choice.items() if name != x}
        name = label_of(rest) if rest else ""
        own = Interval({**rest, x: one.choice[x]}, one.runs, one.value, one.difference)
        lines.setdefault(name, []).append(own)
    return lines


def _x_of(one: Interval) -> Value:
    return list(one.choice.values())[-1]


def _interval_of(one: Interval, what: str) -> MeanInterval | None:
    return one.value if what == "value" else one.difference


def _how(sweep: RecordedSweep, found: Sequence[Interval], over: str) -> str:
    counts = sorted({one.value.n for one in found})
    if over not in sweep.axes:
        known = any(one.value.ci95 for one in found)
        return "each run with its own 95 % interval" if known else "one run each"
    if counts == [1]:
        return f"one {over} each, no intervals"
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean and 95 % interval of {span} {over}s"


def _said(metric: str, x: str, found: Sequence[Interval], how: str) -> str:
    parts = [
        f"{label_of(one.choice)}: {one.value.mean:.4g}"
        + (f" ± {one.value.ci95:.2g}" if one.value.ci95 is not None else "")
        for one in found
    ]
    return f"{metric} by {x}; {how}. {'; '.join(parts)}."
