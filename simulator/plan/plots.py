"""The picture of a plan: time against money with the front, and a tornado plot of sensitivity."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    entitle,
    finished,
    new_figure,
    nothing_yet,
    save_picture,
)
from simulator.plan.result import Input, Outcome, Plan
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.summary import (
    AIMS,
    hours,
    money,
    recommendation_lines,
    sensitivity_lines,
    with_unit,
)
from simulator.stats.format import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_NOTHING: Final = 0.002
"""Relative change below which a bar is invisible."""
_WIDE: Final = 6
"""Ratio of an axis's ends from which it has only three ticks per decade."""
_TYPE_COLORS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)


def draw_plan(plan: Plan, path: Path) -> Path:
    """Draw both panels and write the file; returns its path."""
    return save_picture(_both(plan), path)


@finished
def _both(plan: Plan) -> Picture:
    figure = new_figure(13, 5)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _front(left, plan)
    _tornado(right, plan)
    right.set_title(f"Sensitivity of {_recommended(plan)}")
    said = f"{_front_in_words(plan)} {_tornado_in_words(plan)}"
    return entitle(figure, f"{plan.config.name}: {_run(plan)}", alt=said)


@finished
def draw_front(plan: Plan, *, width: float = 7.0, title: str | None = None) -> Picture:
    """Draw the time and money of the candidates, and those that no other one beats.

    Args:
        plan: a plan, complete or not.
        width: in inches.
        title: in place of the picture's own.
    """
    figure = new_figure(width, 0.68 * width)
    _front(figure.subplots(), plan)
    return entitle(figure, title or _run(plan), alt=_front_in_words(plan))


@finished
def draw_tornado(plan: Plan, *, width: float = 7.0, title: str | None = None) -> Picture:
    """Draw how the recommendation's hours or dollars change with each input.

    Args:
        plan: a plan with its sensitivity.
        width: in inches.
        title: in place of the picture's own.
    """
    rows = 3 if plan.sensitivity is None else len(plan.sensitivity.inputs)
    figure = new_figure(width, 1.6 + 0.36 * rows)
    axes = figure.subplots()
    _tornado(axes, plan, narrow=width < _WIDE)
    told = title or f"Sensitivity of {_recommended(plan)}: {_run(plan)}"
    return entitle(figure, told, alt=_tornado_in_words(plan))


def tornado_content(plan: Plan) -> tuple[object, ...]:
    """All that `draw_tornado` draws: plans whose contents are equal have the same picture."""
    found = plan.sensitivity
    if found is None:
        return (plan.best is None,)
    name = measure(plan.config.objective)
    bars = tuple((one.name, tuple(_ends(one, found.base, name))) for one in found.inputs)
    heads = (_recommended(plan), _run(plan), _tornado_in_words(plan))
    return (*heads, name, found.base.value(name), _limit(plan, name), bars)


def _ends(one: Input, own: Outcome, name: str) -> Iterator[tuple[float, str, str]]:
    """Value, color and text of the ends of an input at which the recommendation can run."""
    for end, color in ((one.low, SKY), (one.high, ORANGE)):
        there = at_end(end, own)
        if there is not None:
            changes = end.best is None or end.best.candidate is not own.candidate
            yield there.value(name), color, end.value + (" †" if changes else "")


def _limit(plan: Plan, name: str) -> float:
    limits = plan.config.limits
    return {"hours": limits.deadline_h, "dollars": limits.budget_dollars}[name]


def _recommended(plan: Plan) -> str:
    found = plan.sensitivity
    own = "" if found is None else f" ({found.base.candidate.hardware})"
    return f"the recommendation{own}"


def _run(plan: Plan) -> str:
    return f"{plan.config.steps:,} steps of {plan.config.base.model}, simulated"


def _front_in_words(plan: Plan) -> str:
    if not plan.front:
        return "No candidate to show."
    told = "; ".join(f"{one.candidate.hardware}: {hours(one)}, {money(one)}" for one in plan.front)
    return f"The front: {told}. Recommendation: {' '.join(recommendation_lines(plan))}."


def _tornado_in_words(plan: Plan) -> str:
    lines = list(sensitivity_lines(plan))
    return f"Sensitivity: {'; '.join(lines)}." if lines else "No sensitivity."


def _front(axes: Axes, plan: Plan) -> None:
    """Hours against dollars, or against GPU-hours if a price is missing; both logarithmic."""
    if not plan.front:
        nothing_yet(axes, "no candidate is possible")
        return
    priced = all(one.dollars is not None for one in plan.front)
    types = list(dict.fromkeys(one.candidate.config.cluster.gpu for one in plan.screened))
    color = {name: _TYPE_COLORS[k % len(_TYPE_COLORS)] for k, name in enumerate(types)}
    axes.scatter(
        [_money(one, priced=priced) for one in plan.screened],
        [one.hours.mean for one in plan.screened],
        s=7,
        color="#C8C8C8",
        label="simulated once",
    )
    for name in types:
        for stale, marker in ((True, "o"), (False, "s")):
            some = [
                one
                for one in plan.front
                if one.candidate.config.cluster.gpu == name and one.candidate.stale is stale
            ]
            if not some:
                continue
            kind = "asynchronous" if stale else "synchronous"
            axes.errorbar(
                [_money(one, priced=priced) for one in some],
                [one.hours.mean for one in some],
                yerr=_reach(some),
                fmt=marker,
                color=color[name],
                markersize=6,
                capsize=3,
                linewidth=1,
                label=f"front: {name}, {kind}",
            )
    for one in plan.front:
        axes.annotate(
            f"{one.candidate.gpus}",
            (_money(one, priced=priced), one.hours.mean),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=9,
        )
    if plan.best is not None:
        axes.scatter(
            _money(plan.best, priced=priced),
            plan.best.hours.mean,
            s=170,
            facecolors="none",
            edgecolors=BLACK,
            linewidths=1.4,
            label=f"recommendation: {AIMS[plan.config.objective]}",
        )
    axes.set(xscale="log", yscale="log")
    _limits(axes, plan, priced=priced)
    axes.set(
        xlabel="cost of all steps ($, typical price)" if priced else "GPU-hours of all steps",
        ylabel="duration of all steps (hours)",
        title="Front (numbers: GPUs; bars: 90 % intervals)",
    )
    _plain_ticks(axes)
    axes.legend(loc="best", fontsize=9, frameon=True, framealpha=0.9, edgecolor="none")


def _tornado(axes: Axes, plan: Plan, *, narrow: bool = False) -> None:
    """Hours or dollars of the recommendation with each input at either end of its range."""
    found = plan.sensitivity
    if found is None:
        why = "switched off" if plan.best is not None else "no candidate is within the limits"
        nothing_yet(axes, f"no sensitivity: {why}")
        axes.axis("off")
        return
    name, own = measure(plan.config.objective), found.base
    middle = own.value(name)
    for row, one in enumerate(found.inputs):
        _draw_input(axes, row, middle, list(_ends(one, own, name)))
    axes.axvline(middle, color=BLACK, linewidth=0.9)
    names = [
        textwrap.fill(one.name, 17, break_on_hyphens=False) if narrow else one.name
        for one in found.inputs
    ]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(found.inputs) - 0.5, -0.5)
    axes.margins(x=0.9 if narrow else 0.34)
    axes.grid(visible=False, axis="y")
    low, high = axes.get_xlim()
    if low < (limit := _limit(plan, name)) < high:
        axes.axvline(limit, color=GREY, linewidth=1, dashes=(4, 3), label="limit")
    told, unit = ("duration", "h") if name == "hours" else ("cost", "$")
    gap = "\n" if narrow else "; "
    nominal = with_unit(number(middle), name)
    axes.set_xlabel(
        f"{told} of all steps ({unit}), nominal {nominal}{gap}†: another recommendation"
    )
    axes.xaxis.set_major_formatter("{x:,g}")
    if not narrow:  # It would cover the bars, whose ends have the values of the input.
        for color, side in ((SKY, "low"), (ORANGE, "high")):
            axes.barh(0, 0, left=middle, color=color, label=f"input at its {side} end")
        axes.legend(loc="lower right")


def _draw_input(
    axes: Axes, row: int, middle: float, ends: Sequence[tuple[float, str, str]]
) -> None:
    """Draw a bar to each end, with its color and text; the larger value's text is on the right."""
    for value, color, _ in sorted(ends, key=lambda end: -abs(end[0] - middle)):
        axes.barh(row, value - middle, 0.62, left=middle, color=color)

    def place_of(end: tuple[float, str, str]) -> float:
        """The value of an end, or the middle if it changes nothing."""
        return middle if abs(end[0] / middle - 1) < _NOTHING else end[0]

    ordered = sorted(ends, key=place_of)
    for place, (value, _, text) in enumerate(ordered):
        right = value > middle if len(ordered) == 1 else place == 1
        # One text on each side of the line, even if both bars are on the same side.
        anchor = max(value, middle) if right else min(value, middle)
        axes.annotate(
            text,
            (anchor, row),
            xytext=(3 if right else -3, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=9,
        )


def _limits(axes: Axes, plan: Plan, *, priced: bool) -> None:
    limits = plan.config.limits
    if math.isfinite(limits.deadline_h):
        axes.axhline(limits.deadline_h, color=GREY, linewidth=1, dashes=(4, 3), label="limit")
    if priced and math.isfinite(limits.budget_dollars):
        axes.axvline(limits.budget_dollars, color=GREY, linewidth=1, dashes=(4, 3))


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        few = high > _WIDE * low
        subs = (1.0, 2.0, 5.0) if few else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())


def _money(one: Outcome, *, priced: bool) -> float:
    if priced and one.dollars is not None:
        return one.dollars.mean
    return math.nan if priced else one.gpu_hours.mean


def _reach(outcomes: Sequence[Outcome]) -> Any:
    found = [one.predicted_hours for one in outcomes]
    return [[one.value - one.low for one in found], [one.high - one.value for one in found]]
