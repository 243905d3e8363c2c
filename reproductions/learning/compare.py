"""Compare the runs of a study: by seed, in pairs, with 95 % intervals.

Runs with one seed see the same problems in the same order and begin with the same weights, so the
difference of two of them says more than the difference of two means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from reproductions.learning.runs import Run
from simulator.stats.statistics import Estimate, estimate

BySeed = Mapping[int, Run]
Value = Callable[[Run], float]
reward: Final[Value] = attrgetter("reward")


def chosen(runs: Sequence[Run], **choice: str) -> dict[int, Run]:
    """The runs with these values on the axes of their study, by seed."""
    wanted = choice.items()
    return {run.seed: run for run in runs if wanted <= run.choice.items()}


def mean(runs: BySeed, value: Value = reward) -> Estimate:
    """Mean over seeds.

    Raises:
        ValueError: if there is no run.
    """
    return estimate([value(run) for run in runs.values()])


def minus(runs: BySeed, others: BySeed, value: Value = reward) -> Estimate:
    """Mean difference over the seeds that both have.

    Raises:
        ValueError: if they have none in common.
    """
    return estimate([value(run) - value(others[seed]) for seed, run in _paired(runs, others)])


def over(runs: BySeed, others: BySeed, ratio: Callable[[Run, Run], float]) -> Estimate:
    """Mean of a ratio of two runs with the same seed.

    Raises:
        ValueError: if they have no seed in common.
    """
    return estimate([ratio(run, others[seed]) for seed, run in _paired(runs, others)])


def written(found: Estimate, *, sign: str = "") -> str:
    """`0.731 ± 0.012`; without an interval, the mean alone."""
    if found.high == found.low or found.half_width == float("inf"):
        return f"{found.mean:{sign}.3f}"
    return f"{found.mean:{sign}.3f} ± {found.half_width:.3f}"


def is_below_zero(found: Estimate) -> bool:
    """Whether the whole interval is."""
    return found.high < 0


def covers_zero(found: Estimate) -> bool:
    """Whether the interval does."""
    return found.low <= 0 <= found.high


def _paired(runs: BySeed, others: BySeed) -> list[tuple[int, Run]]:
    return [(seed, run) for seed, run in runs.items() if seed in others]
