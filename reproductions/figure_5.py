"""Figures 5a and 5b: learning curves by eta, and reward against simulated hours.

The runs of Table 2 (`reproductions.table_2`), drawn over steps and over hours. Bands are 95 %
intervals over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from areal_lab.plots.style import BLACK, BLUE, VERMILION, finished, new_figure
from benchmarks.harness import Arguments
from reproductions import table_2
from reproductions.learning.compare import BySeed, written
from reproductions.learning.runs import Data
from reproductions.learning.setting import BOUNDS, OBJECTIVES, ORACLE, Setting, settings_of
from reproductions.report.harness import main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load
from simulator.stats.statistics import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

COMPARED: Final = ("2", "8", "inf")
"""Values of eta whose hours are compared with those of the synchronous run."""
DRAWN: Final = "8"
WHY: Final = (
    "The hours are those of the simulated cluster: 96 GPUs generate and 32 train in the preset, "
    "scaled to the batch. A synchronous step takes 590 s, an asynchronous one 197 s from eta 2 on, "
    "where the trainer is the bottleneck.",
    "The paper's curves are training rewards, from samples up to eta versions old. Our curves are "
    "rewards of the newest weights on held-out problems.",
    "Hours to a reward are read from each run's curve, smoothed over three measurements, at the "
    "mean reward of the asynchronous run over the last quarter of its steps.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """From the runs of Table 2; those that are missing are run."""
    return build(table_2.measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """From the runs of Table 2 that are packaged."""
    saved = load("table_2")
    return build(saved.data, saved.origin)


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction from the runs of Table 2."""
    found = settings_of(data)
    return Reproduction(
        name="figure_5",
        claim=(
            "Without the decoupled objective training rewards fall as eta grows; with it, curves "
            "of eta up to 8 lie on that of synchronous training (Figures 5a and 5b)."
        ),
        rows=[row for setting in found for row in _rows(setting)],
        parameters=(),
        why=WHY,
        findings=[finding(setting) for setting in found],
        figure=lambda: draw(found),
        title=f"Held-out reward over steps and hours; bands: 95 % over seeds, at eta 0 and {DRAWN}",
        origin=origin,
    )


def finding(setting: Setting) -> str:
    """What asynchrony gains in hours at equal reward."""
    parts = [
        f"{objective} PPO "
        + ", ".join(
            f"{written(setting.hours_gained(objective, eta))} (eta {eta})"
            for eta in COMPARED
            if eta in setting.bounds
        )
        for objective in reversed(OBJECTIVES)
    ]
    return (
        f"{setting.name}: hours of synchronous training to the reward that an asynchronous run "
        f"ends at, over its own: {'; '.join(parts)}."
    )


def _rows(setting: Setting) -> list[Row]:
    return [
        Row(
            name=f"{setting.name}: {objective}, eta {eta}, hours to equal reward",
            paper=None,
            ours=setting.hours_gained(objective, eta),
            unit="times",
        )
        for objective in OBJECTIVES
        for eta in COMPARED
        if eta in setting.bounds
    ]


@finished
def draw(found: Sequence[Setting]) -> Picture:
    """A row for each setting: naive and decoupled over steps, both over hours."""
    figure = new_figure(10, 0.7 + 2.5 * len(found))
    panels = figure.subplots(len(found), 3, squeeze=False)
    for row, setting in zip(panels, found, strict=True):
        for axes, objective in zip(row, OBJECTIVES, strict=False):
            _draw_steps(axes, setting, objective)
        _draw_hours(row[2], setting)
        means = [y for axes in row for line in axes.lines for y in np.asarray(line.get_ydata())]
        room = 0.1 * (max(means) - min(means))
        row[0].set_ylim(min(means) - room, max(means) + room)
        for axes in row[1:]:
            axes.sharey(row[0])
    for axes in panels[-1][:2]:
        axes.set_xlabel("training steps")
    panels[-1][2].set_xlabel("simulated hours")
    panels[0][2].legend(loc="lower right")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _draw_steps(axes: Axes, setting: Setting, objective: str) -> None:
    import matplotlib as mpl

    colors = mpl.colormaps["plasma"].resampled(len(BOUNDS) + 2)
    for eta in (ORACLE, *setting.bounds):
        color = BLACK if eta == ORACLE else colors(1 + BOUNDS.index(eta))
        band = eta in (ORACLE, DRAWN)  # seven of them hide each other
        _draw_curve(axes, setting.of(objective, eta), 0, color, f"eta {eta}", band=band)
    axes.set_title(f"{setting.name}: {objective} PPO")
    axes.set_ylabel("held-out reward")


def _draw_hours(axes: Axes, setting: Setting) -> None:
    lines = (("decoupled", BLUE), ("naive", VERMILION)) if DRAWN in setting.bounds else ()
    _draw_curve(axes, setting.of("decoupled", ORACLE), 1, BLACK, "eta 0")
    for objective, color in lines:
        _draw_curve(axes, setting.of(objective, DRAWN), 1, color, f"eta {DRAWN}, {objective}")
    axes.set_title(f"{setting.name}: over hours")


def _draw_curve(
    axes: Axes, runs: BySeed, column: int, color: object, label: str, *, band: bool = True
) -> None:
    """Mean and interval over seeds at each measurement, at their mean hours."""
    curves = [run.curve for run in runs.values()]
    points = list(zip(*curves, strict=True))
    along = [sum(one[column] for one in point) / len(point) for point in points]
    found = [estimate([one[2] for one in point]) for point in points]
    means = [one.mean for one in found]
    axes.plot(along, means, color=color, linewidth=1.3, label=label)
    if band and all(math.isfinite(one.half_width) for one in found):
        low, high = [one.low for one in found], [one.high for one in found]
        axes.fill_between(along, low, high, color=color, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=table_2.SEEDS)
