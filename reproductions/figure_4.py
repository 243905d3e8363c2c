"""Figure 4: throughput by number of GPUs, of AReaL and of generating and training in turn.

    1.5B on 32 to 256 GPUs, 7B on 64 to 512, 32B on 256 and 512; 16k and 32k tokens of context

Nothing was fitted to it. The paper draws curves; the numbers at 16k are those of the picture in
AReaL's repository, whose axis has a quarter of the trained tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from benchmarks.harness import Arguments
from reproductions.calibration import CALIBRATED, MEMORY, parameters
from reproductions.report.harness import expected, length, main, run
from reproductions.report.records import Reproduction, Row
from simulator.run.result import Replicated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

COLOCATED = ("cluster.placement=colocated", "schedule.name=synchronous")
QUICK = {"1.5B": (32, 256)}
RATIO, RATE = 0.15, 0.25
"""Largest gaps to aim at, as in Table 1: of AReaL over taking turns, and of AReaL's throughput."""
SYSTEMS = ("AReaL", "verl")
_FEW_TICKS = 5
"""Ratio of an axis's ends below which it has ticks between the powers of two."""
WHY = (
    "The table compares AReaL with a system that generates on all GPUs, then trains on all of "
    "them, with AReaL's engine and trainer. This isolates the cost of taking turns. The paper "
    "compares with verl, whose settings are not printed; the table has its numbers next to ours. "
    "`measured_runs` fits verl's trainer to them.",
    "If training dominates, verl is slower than taking turns with AReaL's trainer: by a third for "
    "1.5B on 32 GPUs, by half for 32B. Most of the paper's ratio for 32B, and of our miss, comes "
    "from this difference between two trainers, not from schedules.",
    "The axis of the picture is a quarter of the trained tokens per second: four times it is 399.6 "
    "thousand for 1.5B on 128 GPUs at 16k, and Figure 5c prints 356.6 thousand for the same run "
    "with longer responses. A step has four minibatches, so the axis probably counts the tokens of "
    "one. The paper's column is four times the axis; ratios do not depend on it.",
    "Twice the GPUs halve the work of each GPU, but not the time of the longest response, which "
    "dominates a synchronous step. This time is the context times the engine's CPU time per "
    "decode step, for any number of GPUs.",
    "On few GPUs training is AReaL's bottleneck: a quarter of the GPUs trains, instead of all of "
    "them in turn. Another split removes this bottleneck, asynchrony does not. The paper keeps a "
    "split of 75/25.",
    "On many GPUs the limit of 512 running prompts leaves each engine few responses, and a decode "
    "step is never shorter than the engine's CPU time: AReaL's curve flattens, too, while the "
    "trainer waits.",
    "All models have the response lengths of the 1.5B row of Table 1, cut off at the context "
    "minus 1,024 tokens of prompt, because the paper prints no lengths.",
)


@dataclass(frozen=True, slots=True)
class Point:
    """Both systems on one number of GPUs."""

    asynchronous: Replicated
    colocated: Replicated

    def tokens_per_s(self) -> tuple[float, float]:
        """Mean throughput of both."""
        return self.asynchronous.tokens_per_s.mean, self.colocated.tokens_per_s.mean


Curves: TypeAlias = Mapping[tuple[str, str], Mapping[int, Point]]
"""By model and context, then by number of GPUs."""


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate all curves; `--quick` only the ends of those of 1.5B."""
    curves = {
        (model, context): {gpus: _point(model, context, gpus, arguments) for gpus in counts}
        for model, context, counts in _wanted(arguments)
    }
    return Reproduction(
        name="figure_4",
        claim=(
            "AReaL's throughput grows about linearly with the GPUs, that of a synchronous system "
            "does not (Figure 4; three quarters of the GPUs generate, eta 4)."
        ),
        rows=[
            row
            for (model, context), curve in curves.items()
            for gpus, point in curve.items()
            for row in _rows(model, context, gpus, point)
        ],
        parameters=(*CALIBRATED, MEMORY),
        why=WHY,
        findings=[finding(*key, curve) for key, curve in curves.items()],
        figure=lambda: draw(curves),
        title=title(curves),
    )


def _wanted(arguments: Arguments) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    printed = expected("figure_4")
    for model, counts in printed["gpus"].items():
        for context in printed["contexts"]:
            if not arguments.quick:
                yield model, context, tuple(counts)
            elif model in QUICK:
                yield model, context, QUICK[model]


def _point(model: str, context: str, gpus: int, arguments: Arguments) -> Point:
    preset = f"figure_4_{model.lower()}_{context}"
    split = (f"gpus={gpus}", f"rollout_gpus={3 * gpus // 4}")
    chosen = parameters(model)
    return Point(
        asynchronous=run(
            preset,
            chosen,
            *split,
            *length(arguments, steps=10, warmup=4, quick=(5, 3)),
            arguments=arguments,
        ),
        colocated=run(
            preset,
            chosen,
            *split,
            *COLOCATED,
            *length(arguments, steps=3, warmup=1, quick=(2, 1)),
            arguments=arguments,
        ),
    )


def _rows(model: str, context: str, gpus: int, point: Point) -> list[Row]:
    name = f"{model}, {context}, {gpus} GPUs"
    printed = {system: paper_tokens_per_s(system, model, context, gpus) for system in SYSTEMS}
    areal, verl = printed["AReaL"], printed["verl"]
    ratio = point.asynchronous.ratio(point.colocated, lambda result: result.tokens_per_s)
    return [
        Row(
            name=f"{name}: AReaL",
            paper=areal,
            ours=point.asynchronous.tokens_per_s,
            unit="trained tokens/s",
            bar=None if areal is None else RATE,
        ),
        Row(
            name=f"{name}: in turn",
            paper=verl,
            ours=point.colocated.tokens_per_s,
            unit="trained tokens/s",
        ),
        Row(
            name=f"{name}: ratio",
            paper=None if areal is None or verl is None else areal / verl,
            ours=ratio,
            unit="times",
            bar=None if areal is None else RATIO,
        ),
    ]


def paper_tokens_per_s(system: str, model: str, context: str, gpus: int) -> float | None:
    """Trained tokens per second of `AReaL` or `verl`; None where no number was read."""
    printed = expected("figure_4")
    read = printed["axis_tokens_per_s"][model][system].get(str(gpus))
    if read is None or context != printed["axis_context"]:
        return None
    return float(printed["axis_factor"] * read)


def growth(curve: Mapping[int, Point]) -> tuple[float, float]:
    """Exponent of throughput in the number of GPUs, over the whole curve; 1 is linear."""
    first, last = min(curve), max(curve)
    pairs = zip(curve[last].tokens_per_s(), curve[first].tokens_per_s(), strict=True)
    ours, other = (math.log(after / before) / math.log(last / first) for after, before in pairs)
    return ours, other


def finding(model: str, context: str, curve: Mapping[int, Point]) -> str:
    """Summary of a curve, from its ends."""
    first, last = min(curve), max(curve)
    times = {gpus: _speedup(point) for gpus, point in curve.items()}
    grown = [
        after / before
        for after, before in zip(
            curve[last].tokens_per_s(), curve[first].tokens_per_s(), strict=True
        )
    ]
    return (
        f"{model} at {context}: {last / first:.0f} times the GPUs give AReaL {grown[0]:.1f} times "
        f"the throughput, taking turns {grown[1]:.1f} times; AReaL is {times[first]:.2f} times as "
        f"fast on {first} GPUs, where its trainer is busy {_busy(curve[first]):.0%} of the time, "
        f"and {times[last]:.2f} times on {last} ({_busy(curve[last]):.0%})."
    )


def _busy(point: Point) -> float:
    """Share of time in which AReaL's trainer trains."""
    return point.asynchronous.utilization("training").mean


def _speedup(point: Point) -> float:
    ours, other = point.tokens_per_s()
    return ours / other


def title(curves: Curves) -> str:
    """Summary of all curves."""
    growths = [growth(curve) for curve in curves.values()]
    ours, other = (sum(each) / len(growths) for each in zip(*growths, strict=True))
    return (
        f"Twice the GPUs: {2**ours:.2f} times the throughput for AReaL, {2**other:.2f} times for "
        "taking turns (mean of the curves)"
    )


@finished
def draw(curves: Curves) -> Picture:
    """A panel per model and context; the numbers above points are AReaL's speed-up."""
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(model for model, _ in curves))
    contexts = list(dict.fromkeys(context for _, context in curves))
    figure = new_figure(3.3 * len(models), 2.9 * len(contexts) + 0.4)
    panels = figure.subplots(len(contexts), len(models), squeeze=False)
    for row, context in enumerate(contexts):
        for column, model in enumerate(models):
            axes = panels[row][column]
            if (model, context) not in curves:
                axes.set_axis_off()
                continue
            _panel(axes, curves[model, context])
            _paper(axes, model, context, curves[model, context])
            axes.set_title(f"{model}, {context} tokens of context")
            if column == 0:
                axes.set_ylabel("trained tokens per second (thousands)")
            if row == len(contexts) - 1:
                axes.set_xlabel("GPUs")
    handles, labels = panels[0][0].get_legend_handles_labels()
    handles.append(Line2D([], [], linewidth=0, marker="$1.5x$", markersize=18, color=BLUE))
    labels.append("throughput of AReaL over that of taking turns")
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _panel(axes: Axes, curve: Mapping[int, Point]) -> None:
    from matplotlib.ticker import LogLocator

    gpus = sorted(curve)
    sides = (
        ("AReaL, eta 4", BLUE, [curve[one].asynchronous.tokens_per_s for one in gpus]),
        (
            "generating and training in turn",
            VERMILION,
            [curve[one].colocated.tokens_per_s for one in gpus],
        ),
    )
    first = sides[0][2][0].mean / 1e3
    axes.plot(gpus, [first * one / gpus[0] for one in gpus], ":", color=GREY, label="linear")
    for name, color, estimates in sides:
        means = [each.mean / 1e3 for each in estimates]
        axes.plot(gpus, means, "o-", color=color, label=name, markersize=4)
        axes.fill_between(
            gpus,
            [each.low / 1e3 for each in estimates],
            [each.high / 1e3 for each in estimates],
            color=color,
            alpha=0.25,
            linewidth=0,
        )
    for one in gpus:
        axes.annotate(
            f"{_speedup(curve[one]):.1f}x",
            (one, max(curve[one].tokens_per_s()) / 1e3),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=BLUE,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lowest, highest = axes.get_ylim()
    if highest < _FEW_TICKS * lowest:  # powers of two would be one or two ticks
        axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    axes.set_xticks(gpus, [str(one) for one in gpus])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.margins(0.12)


def _paper(axes: Axes, model: str, context: str, curve: Mapping[int, Point]) -> None:
    """The numbers of AReaL's picture, where there are some."""
    for system, color in zip(SYSTEMS, (BLUE, VERMILION), strict=True):
        read = {gpus: paper_tokens_per_s(system, model, context, gpus) for gpus in sorted(curve)}
        known = {gpus: value / 1e3 for gpus, value in read.items() if value is not None}
        if known:
            axes.plot(
                list(known),
                list(known.values()),
                "D",
                color=color,
                mfc="none",
                label=f"{system} in AReaL's picture",
            )


if __name__ == "__main__":
    main(reproduce, __doc__)
