"""Learning curves of cells with their intervals, and what goes with the reward that is lost.

Numbers of notebook 10; `reproductions.learning.charts` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from reproductions.learning.compare import BySeed, mean
from reproductions.learning.runs import Run
from reproductions.learning.setting import OBJECTIVES, ORACLE, PRESET, Setting
from reproductions.learning.staleness.rule import rank_correlation
from simulator.stats.statistics import Estimate, estimate


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a cell."""

    step: int
    hours: float
    """Simulated; mean over seeds, whose hours differ if lengths come from the model."""
    reward: Estimate
    """Held-out reward over seeds."""


def points(runs: BySeed) -> list[Point]:
    """The learning curve of a cell, from its runs by seed, which were measured at the same steps.

    Raises:
        ValueError: if they were not.
    """
    measured = zip(*(run.curve for run in runs.values()), strict=True)
    return [
        Point(one[0][0], fmean(hours for _, hours, _ in one), estimate([one_[2] for one_ in one]))
        for one in measured
    ]


def reward_at(runs: BySeed, hours: float) -> Estimate:
    """Held-out reward after `hours` of simulated time, linear between two measurements.

    Args:
        runs: by seed.
        hours: from 0; a run that ended before is at its last measurement.

    Raises:
        ValueError: if there is no run.
    """
    return estimate([_at(run, hours)[1] for run in runs.values()])


def step_at(runs: BySeed, hours: float) -> float:
    """Steps done after `hours` of simulated time, mean over seeds; arguments as of `reward_at`."""
    return fmean(_at(run, hours)[0] for run in runs.values())


def _at(run: Run, hours: float) -> tuple[float, float]:
    for (step, start, reward), (next_step, end, next_reward) in pairwise(run.curve):
        if start <= hours <= end and start < end:
            share = (hours - start) / (end - start)
            return step + share * (next_step - step), reward + share * (next_reward - reward)
    step, _, reward = run.curve[-1]
    return step, reward


@dataclass(frozen=True, slots=True)
class Extent:
    """Axes on which every cell has room."""

    steps: float
    hours: float
    reward: tuple[float, float]


_ROOM: Final = 0.03
"""Reward left above and below the mean curves."""


def extent(found: Sequence[Setting]) -> Extent:
    """Of the mean curves of all cells of all settings."""
    curves = [points(runs) for setting in found for _, _, runs in _cells(setting)]
    rewards = [point.reward.mean for curve in curves for point in curve]
    return Extent(
        steps=max(curve[-1].step for curve in curves),
        hours=max(curve[-1].hours for curve in curves),
        reward=(min(rewards) - _ROOM, max(rewards) + _ROOM),
    )


def beginning(room: Extent, runs: Sequence[Run], steps: int) -> Extent:
    """The first steps of these axes, and down to the lowest reward of some short runs."""
    rewards = [reward for run in runs for _, _, reward in run.curve]
    return Extent(
        steps=steps,
        hours=room.hours * steps / room.steps,
        reward=(min([room.reward[0], *rewards]), room.reward[1]),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What a cell loses against synchronous training, and what may predict it."""

    setting: str
    eta: str
    objective: str
    loss: Estimate
    """Reward minus that of the synchronous run, seed by seed."""
    drift: float
    """Mean |log pi_theta - log pi_behav| of trained tokens."""
    lag: float
    """Mean lag of trained tokens, in versions."""


def costs(found: Sequence[Setting]) -> list[Cost]:
    """Of all cells but the synchronous ones."""
    return [
        Cost(
            setting=setting.name,
            eta=eta,
            objective=objective,
            loss=setting.loss(objective, eta),
            drift=mean(runs, lambda run: run.drift).mean,
            lag=mean(runs, lambda run: run.lag).mean,
        )
        for setting in found
        for eta, objective, runs in _cells(setting)
        if eta != ORACLE
    ]


def rank_correlations(cells: Sequence[Cost]) -> tuple[float, float]:
    """Spearman's correlation of the reward that cells lose with their drift, and with their lag."""
    lost = [-cell.loss.mean for cell in cells]
    by_drift = rank_correlation([cell.drift for cell in cells], lost)
    by_lag = rank_correlation([cell.lag for cell in cells], lost)
    return float(by_drift), float(by_lag)


def _cells(setting: Setting) -> Iterator[tuple[str, str, BySeed]]:
    """Eta, objective and runs of the cells that were run."""
    for eta in (ORACLE, *setting.bounds, PRESET):
        for objective in OBJECTIVES:
            if runs := setting.of(objective, eta):
                yield eta, objective, runs
