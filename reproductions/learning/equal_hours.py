"""Reward at equal simulated hours: fixed eta, the eta that a drift bound permits, and regret.

    cells by eta --hours that all have--> reward at these hours
                 --drift <= bound-------> largest permitted eta --> regret against the best eta

A faster cell has done more steps by then. The reward is the time average of the held-out reward
over the last quarter of the hours, linear between two measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reproductions.learning.compare import BySeed
from reproductions.learning.runs import Run
from reproductions.learning.setting import BOUNDS, ORACLE, Setting
from simulator.stats.statistics import Estimate, estimate

ETAS: Final = (ORACLE, *BOUNDS)
BOUNDS_OF_DRIFT: Final = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.07, 0.08, 0.09),
    *(0.1, 0.12, 0.14, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7),
)
"""Values of a bound on drift to choose from, in nats."""
_LAST: Final = 0.75
_POINTS: Final = 101
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class AtHours:
    """The cells of one task, learning rate and objective after the same simulated hours."""

    name: str
    hours: float
    """Of the shortest run."""
    reward: Mapping[str, Mapping[int, float]]
    """Held-out reward at these hours, by eta and seed."""
    drift: Mapping[str, float]
    """Mean |log pi_theta - log pi_behav| of the whole runs, by eta."""
    speed: Mapping[str, float]
    """Steps per simulated hour over those of eta 0, by eta."""

    @property
    def etas(self) -> list[str]:
        """Values of eta that were run, in order."""
        return list(self.reward)

    def mean(self, eta: str) -> float:
        """Reward over seeds."""
        return fmean(self.reward[eta].values())

    @property
    def best(self) -> str:
        """The eta with the highest mean reward, in hindsight."""
        return max(self.etas, key=self.mean)

    def permitted(self, max_drift: float) -> str:
        """Largest eta such that it and every smaller one drift at most this far; else eta 0."""
        found = ORACLE
        for eta in self.etas:
            if self.drift[eta] > max_drift:
                break
            found = eta
        return found

    def regret(self, eta: str) -> float:
        """Reward of the best eta minus that of this one, over seeds."""
        return self.mean(self.best) - self.mean(eta)


def reward_at_hours(run: Run, hours: float) -> float:
    """Time average of the held-out reward from three quarters of `hours` to `hours`.

    A run that ended before keeps its last measurement.
    """
    measured = np.array([(at, reward) for _, at, reward in run.curve])
    when = np.linspace(_LAST * hours, hours, _POINTS)
    return float(np.interp(when, measured[:, 0], measured[:, 1]).mean())


def at_equal_hours(name: str, cells: Mapping[str, BySeed]) -> AtHours:
    """Compare cells at the hours of the shortest run.

    Args:
        name: of the setting.
        cells: runs by seed, by eta, from eta 0 on.

    Raises:
        ValueError: without runs of eta 0.
    """
    if not cells.get(ORACLE):
        raise ValueError(f"{name} has no runs with eta 0, against which speed is measured")
    hours = min(run.hours for runs in cells.values() for run in runs.values())
    pace = {eta: fmean(run.steps / run.hours for run in own.values()) for eta, own in cells.items()}
    return AtHours(
        name=name,
        hours=hours,
        reward={
            eta: {seed: reward_at_hours(run, hours) for seed, run in own.items()}
            for eta, own in cells.items()
        },
        drift={eta: fmean(run.drift for run in own.values()) for eta, own in cells.items()},
        speed={eta: pace[eta] / pace[ORACLE] for eta in cells},
    )


def of_settings(settings: Sequence[Setting], objective: str) -> list[AtHours]:
    """The settings with all of their values of eta, for one objective."""
    found = []
    for setting in settings:
        cells = {eta: setting.of(objective, eta) for eta in ETAS}
        known = {eta: own for eta, own in cells.items() if own}
        if ORACLE in known and len(known) > 1:
            found.append(at_equal_hours(setting.name, known))
    return found


@dataclass(frozen=True, slots=True)
class Rule:
    """What one rule for all settings costs against the best eta of each."""

    name: str
    chosen: Sequence[str]
    """Eta by setting."""
    regret: float
    """Mean over settings, in reward."""
    worst: float
    speed: float
    """Mean over settings of steps per hour over those of eta 0."""
    reward: float
    """Mean over settings."""


def by_bound(settings: Sequence[AtHours], max_drift: float) -> Rule:
    """The largest eta of each setting that a bound on drift permits."""
    return _rule(f"drift {max_drift:g}", settings, [one.permitted(max_drift) for one in settings])


def by_eta(settings: Sequence[AtHours], eta: str) -> Rule:
    """One eta for all settings.

    Raises:
        KeyError: a setting was not run with it.
    """
    return _rule(f"eta {eta}", settings, [eta for _ in settings])


def shared_etas(settings: Sequence[AtHours]) -> list[str]:
    """Values of eta that every setting was run with."""
    return [eta for eta in ETAS if all(eta in one.etas for one in settings)]


def left_out(settings: Sequence[AtHours]) -> tuple[float, float]:
    """Mean regret of a bound and of one eta that are chosen on the other settings.

    Each setting in turn is left out of the choice, and the regret is its own.
    """
    bounds, etas = [], []
    for place, own in enumerate(settings):
        others = [one for other, one in enumerate(settings) if other != place]
        bound = min(BOUNDS_OF_DRIFT, key=lambda value: by_bound(others, value).regret)
        eta = min(shared_etas(settings), key=lambda value: by_eta(others, value).regret)
        bounds.append(own.regret(own.permitted(bound)))
        etas.append(own.regret(eta))
    return fmean(bounds), fmean(etas)


def gain_of_bound(settings: Sequence[AtHours], max_drift: float, eta: str) -> Estimate:
    """Reward under a drift bound minus that with one eta, mean over settings.

    The interval holds 95 % of the means over seeds that are drawn again with replacement, by
    setting; that the settings are few is not in it.
    """
    generator = np.random.default_rng(0)
    means, drawn = list[float](), list[NDArray[np.float64]]()
    for one in settings:
        ours, theirs = one.reward[one.permitted(max_drift)], one.reward[eta]
        pairs = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
        means.append(float(pairs.mean()))
        drawn.append(pairs[generator.integers(0, len(pairs), (_RESAMPLES, len(pairs)))].mean(1))
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return Estimate(fmean(means), float(low), float(high))


def minus_at_hours(runs: BySeed, others: BySeed, hours: float) -> Estimate:
    """Difference of rewards at these hours, over the seeds that both have.

    Raises:
        ValueError: if they have none in common.
    """
    shared = [seed for seed in runs if seed in others]
    return estimate(
        [reward_at_hours(runs[one], hours) - reward_at_hours(others[one], hours) for one in shared]
    )


def _rule(name: str, settings: Sequence[AtHours], chosen: Sequence[str]) -> Rule:
    pairs = list(zip(settings, chosen, strict=True))
    regrets = [one.regret(eta) for one, eta in pairs]
    return Rule(
        name=name,
        chosen=chosen,
        regret=fmean(regrets),
        worst=max(regrets),
        speed=fmean(one.speed[eta] for one, eta in pairs),
        reward=fmean(one.mean(eta) for one, eta in pairs),
    )
