"""Runs of one task and learning rate by staleness and objective, against the synchronous oracle.

staleness   0 (the oracle)   1   2   4   8   16   inf   one batch
objective   naive, decoupled                                            each with its seeds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isinf
from typing import TYPE_CHECKING, Final

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from reproductions.learning.compare import BySeed, chosen, mean, minus, over, written
from reproductions.learning.runs import Data, Run
from simulator.stats.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

ORACLE: Final = "0"
BOUNDS: Final = ("1", "2", "4", "8", "16", "inf")
PRESET: Final = "one batch"
"""The limit of running prompts that the simulator's preset has: one batch."""
OBJECTIVES: Final = ("naive", "decoupled")
COLORS: Final = {"naive": VERMILION, "decoupled": BLUE}


@dataclass(frozen=True)
class Setting:
    """The runs of one task and learning rate."""

    task: str
    rate: str
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """`addition, 1e-4`."""
        return f"{self.task}, {self.rate}"

    @cached_property
    def bounds(self) -> list[str]:
        """Values of eta beyond 0 that both objectives ran with."""
        return [eta for eta in BOUNDS if all(self.of(one, eta) for one in OBJECTIVES)]

    @property
    def steps(self) -> int:
        """Of each run."""
        return next(iter(self.of("naive", ORACLE).values())).steps

    def of(self, objective: str, staleness: str) -> BySeed:
        """The runs of a cell by seed."""
        return chosen(self.runs, staleness=staleness, objective=objective, rate=self.rate)

    def loss(self, objective: str, staleness: str) -> Estimate:
        """Reward minus that of the oracle, the synchronous run, seed by seed."""
        return minus(self.of(objective, staleness), self.of(objective, ORACLE))

    def hours_gained(self, objective: str, staleness: str) -> Estimate:
        """Hours of the synchronous run to the reward of an asynchronous one, over that one's.

        A run that does not get there counts with all of its hours. 0 for a reward that the
        asynchronous run began with: it has learned nothing.
        """

        def ratio(own: Run, oracle: Run) -> float:
            hours = [min(one.hours, one.hours_to(own.reward)) for one in (oracle, own)]
            return hours[0] / hours[1] if hours[1] else 0.0

        return over(self.of(objective, staleness), self.of(objective, ORACLE), ratio)

    def steps_gained(self, staleness: str) -> Estimate:
        """Steps per hour, over those of the synchronous run."""
        return over(
            self.of("decoupled", staleness),
            self.of("decoupled", ORACLE),
            lambda own, oracle: own.steps / own.hours * oracle.hours / oracle.steps,
        )


def settings_of(data: Data) -> list[Setting]:
    """The settings that were run."""
    found = []
    for task, records in data["tasks"].items():
        runs = [Run.from_json(record) for record in records]
        rates = dict.fromkeys(run.choice["rate"] for run in runs)
        found += [Setting(task, rate, runs) for rate in rates]
    return found


def table(setting: Setting) -> list[dict[str, str]]:
    """The paper's table for one setting."""
    rows = []
    for staleness in (ORACLE, *setting.bounds, PRESET):
        cells = {one: setting.of(one, staleness) for one in OBJECTIVES}
        if not all(cells.values()):
            continue
        any_run = next(iter(cells["decoupled"].values()))
        values = {"eta": staleness, "mean lag": f"{mean(cells['naive'], lambda r: r.lag).mean:.1f}"}
        values |= {one: written(mean(own)) for one, own in cells.items()}
        values |= {
            f"{one}, minus eta 0": ""
            if staleness == ORACLE
            else written(setting.loss(one, staleness), sign="+")
            for one in OBJECTIVES
        }
        values |= {
            f"drift, {one}": f"{mean(own, lambda r: r.drift).mean:.3f}"
            for one, own in cells.items()
        }
        values["h per 100 steps"] = f"{100 * any_run.hours / any_run.steps:.1f}"
        rows.append(values)
    return rows


@finished
def draw(found: Sequence[Setting]) -> Picture:
    """Reward by eta minus that of eta 0, a panel for each setting, both objectives."""
    rows, columns = (len(found) + 1) // 2, min(2, len(found))
    figure = new_figure(8, 3.0 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    etas = [eta for eta in BOUNDS if any(eta in setting.bounds for setting in found)]
    for axes, setting in zip(panels, found, strict=False):
        _draw_setting(axes, setting, etas)
    losses = [s.loss(one, eta) for s in found for one in OBJECTIVES for eta in s.bounds]
    ends = [end for loss in losses for end in (loss.low, loss.high) if isfinite(end)]
    lowest = min(-0.05, *(loss.mean for loss in losses))
    # Room for every interval, unless it is much wider than the losses.
    panels[0].set_ylim(
        max(1.1 * min([lowest, *ends]), 2 * lowest),
        min(1.1 * max([-0.1 * lowest, *ends]), -lowest),
    )
    for axes in panels[len(found) :]:
        axes.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _draw_setting(axes: Axes, setting: Setting, etas: Sequence[str]) -> None:
    oracle = setting.of("naive", ORACLE)
    gained = mean(oracle, lambda run: run.reward - run.before).mean
    axes.axhline(0, color=GREY, linewidth=1)
    for shift, objective in ((-0.08, "naive"), (0.08, "decoupled")):
        losses = [setting.loss(objective, eta) for eta in setting.bounds]
        axes.errorbar(
            [etas.index(eta) + shift for eta in setting.bounds],
            [loss.mean for loss in losses],
            yerr=[0.0 if isinf(loss.half_width) else loss.half_width for loss in losses],
            marker="o" if objective == "decoupled" else "s",
            color=COLORS[objective],
            capsize=3,
            linewidth=1.4,
            label=f"{objective} PPO",
        )
    axes.set_xticks(range(len(etas)), etas)
    axes.set_xlim(-0.4, len(etas) - 0.6)
    axes.set_title(f"{setting.name}; eta 0 gains {gained:.2f}")
    axes.set(xlabel="eta, versions", ylabel="reward minus that of eta 0")
