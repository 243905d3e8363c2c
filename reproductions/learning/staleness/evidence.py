"""What is known of where staleness hurts: the map, the rule made from it, cells that test it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from reproductions.learning.runs import Run
from reproductions.learning.setting import OBJECTIVES
from reproductions.learning.staleness.cells import (
    PREDICTORS,
    Cell,
    Cells,
    apart_from,
    cells_of,
    objective_noise,
)
from reproductions.learning.staleness.rule import ROUND, Verdicts, best_threshold, verdicts

LIMITS: Final = (0.02, 0.05)
"""Losses of held-out reward that are told from smaller ones; the rule of thumb is for the first."""
DRIFT: Final = PREDICTORS["drift"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The map and its tests."""

    made_from: Cells
    """The map: the rule is made from these cells only."""
    tests: Mapping[str, Cells]
    """By set."""
    thresholds: Mapping[tuple[str, float], float]
    """Drift by objective and limit; without those of which the map says nothing."""
    noise: float
    """Difference of two runs of the map with one seed that have the same objective by two names
    (eta 0): the root mean square, in reward; nan without such pairs."""

    @property
    def tested(self) -> list[Cell]:
        """All stale cells that the rule was not made from."""
        return [cell for cells in self.tests.values() for cell in cells.stale]

    def set_of(self, cell: Cell) -> str:
        """Name of the set of a tested cell."""
        return next(
            name for name, own in self.tests.items() if any(cell is one for one in own.stale)
        )

    @property
    def left_out(self) -> int:
        """Stale runs without a synchronous partner."""
        return self.made_from.left_out + sum(cells.left_out for cells in self.tests.values())

    def scored(self, cells: Sequence[Cell], objective: str, limit: float) -> Verdicts:
        """What the rule says of the cells with this objective; of none if there is no rule."""
        threshold = self.thresholds.get((objective, limit))
        if threshold is None:
            return Verdicts()
        return verdicts(of(cells, objective), threshold, limit, DRIFT)

    def wrong(self, cells: Sequence[Cell], limit: float) -> tuple[list[Cell], list[Cell]]:
        """Misses and false alarms among the cells, those farthest from the limit first."""
        known = [cell for cell in cells if (cell.objective, limit) in self.thresholds]
        misses, alarms = list[Cell](), list[Cell]()
        for cell in known:
            above = cell.drift > self.thresholds[cell.objective, limit]
            if above != (cell.loss > limit):
                (alarms if above else misses).append(cell)
        return sorted(misses, key=lambda cell: -cell.loss), sorted(alarms, key=lambda c: c.loss)


def evidence_of(
    made_from: Sequence[Run],
    own_task: Mapping[str, Sequence[Run]],
    other_tasks: Mapping[str, Sequence[Run]],
) -> Evidence:
    """Make the rule from the runs of the map.

    Args:
        made_from: the map.
        own_task: sets of runs on the task of the map; only settings and seeds that the map does
            not have are a test of it.
        other_tasks: sets of runs on other tasks.
    """
    cells = cells_of(made_from)
    found = {
        (objective, limit): best_threshold(of(cells.stale, objective), limit, DRIFT, ROUND)
        for objective in OBJECTIVES
        for limit in LIMITS
    }
    return Evidence(
        made_from=cells,
        tests={
            **{name: apart_from(runs, made_from) for name, runs in own_task.items()},
            **{name: cells_of(runs) for name, runs in other_tasks.items()},
        },
        thresholds={key: value for key, value in found.items() if value is not None},
        noise=objective_noise(made_from),
    )


def of(cells: Sequence[Cell], objective: str) -> list[Cell]:
    """The cells with this objective."""
    return [cell for cell in cells if cell.objective == objective]
