"""Activity of processes in equal cells of time, for any number of processes.

    activity(log) --states_by_cell--> rows of cells: main state of a process in each cell
                  --shares_by_cell--> shares of each state in each cell, over many processes

Work grows with the number of stretches plus that of cells, not with their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_lab.runlog.activity import AFTER, BEFORE, NOTHING_TO_SCORE, WAIT_EVENTS, Stretch

BLANK = frozenset({BEFORE, AFTER, NOTHING_TO_SCORE, WAIT_EVENTS})
"""Idle time that is not a loss; pictures leave it blank."""
_MOST_STATES = 256


class State(NamedTuple):  # not a dataclass: hashed for every stretch
    """Activity of a process, or its cause of idleness."""

    name: str
    """Activity or cause of idleness; `activity.label` returns the displayed text."""
    busy: bool

    @property
    def blank(self) -> bool:
        """True if it is idle time that pictures leave blank."""
        return not self.busy and self.name in BLANK


@dataclass(frozen=True, slots=True)
class Cells:
    """Equal pieces of time."""

    start_s: float
    length_s: float
    count: int

    @property
    def edges_s(self) -> NDArray[np.float64]:
        """The `count + 1` times between cells."""
        return self.start_s + self.length_s * np.arange(self.count + 1, dtype=np.float64)


def cells_of(window: tuple[float, float], count: int) -> Cells:
    """Divide a window, in seconds, into `count` cells."""
    start_s, end_s = window
    if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s < end_s):
        raise ValueError(f"the window is {start_s} to {end_s} s, but must end after it starts")
    if count < 1:
        raise ValueError(f"got {count} cells, but needs at least 1")
    return Cells(start_s, (end_s - start_s) / count, count)


def state_seconds(activities: Mapping[str, Sequence[Stretch]]) -> dict[State, float]:
    """Seconds of each state over all processes, the busy ones first, then the longest."""
    seconds: dict[tuple[str, bool], float] = {}
    for stretches in activities.values():
        for one in stretches:
            key = (one.name, one.busy)
            seconds[key] = seconds.get(key, 0.0) + one.end_s - one.start_s
    ordered = sorted(seconds.items(), key=lambda item: (not item[0][1], -item[1]))
    return {State(*key): found_s for key, found_s in ordered}


def without_idle_rows(
    activities: Mapping[str, Sequence[Stretch]],
) -> dict[str, Sequence[Stretch]]:
    """Only the processes with any activity or wait: no row of a picture stays empty."""
    return {
        process: stretches
        for process, stretches in activities.items()
        if any(one.busy or one.name not in BLANK for one in stretches)
    }


def states_by_cell(
    activities: Mapping[str, Sequence[Stretch]], states: Sequence[State], cells: Cells
) -> dict[str, NDArray[np.uint8]]:
    """For each process the number of the state that takes most of each cell.

    `states`, at most 256, are the distinguished ones; the first one also counts all others. Returns
    an array of `cells.count` numbers per process; of two equal states the first.
    """
    if not 1 <= len(states) <= _MOST_STATES:
        raise ValueError(f"got {len(states)} states, but needs 1 to {_MOST_STATES}")
    rows = {}
    for process, stretches in activities.items():
        most = np.zeros(cells.count)
        row = np.zeros(cells.count, dtype=np.uint8)
        for code, state in enumerate(states):
            found = _seconds([one for one in stretches if _is(one, state)], cells)
            if found is not None:
                # Rounding must not decide between two equal ones.
                longer = found > most + 1e-9 * cells.length_s
                row[longer], most = code, np.maximum(most, found)
        rows[process] = row
    return rows


def shares_by_cell(
    activities: Mapping[str, Sequence[Stretch]], states: Sequence[State], cells: Cells
) -> NDArray[np.float64]:
    """Share of the processes' time that each state takes in each cell, of shape (states, cells).

    With all states a column sums to 1 where every process has a log.
    """
    shares = np.zeros((len(states), cells.count))
    by_state: dict[tuple[str, bool], list[Stretch]] = {}
    for stretches in activities.values():
        for one in stretches:
            by_state.setdefault((one.name, one.busy), []).append(one)
    for code, state in enumerate(states):
        found = _seconds(by_state.get((state.name, state.busy), []), cells)
        if found is not None:
            shares[code] = found / (cells.length_s * max(1, len(activities)))
    return shares


def _is(stretch: Stretch, state: State) -> bool:
    return stretch.busy == state.busy and stretch.name == state.name


def _seconds(stretches: Sequence[Stretch], cells: Cells) -> NDArray[np.float64] | None:
    r"""Seconds of each cell that stretches cover together; None without stretches.

    Up to a time t they cover $$ \sum_i \min(t, e_i) - \min(t, s_i), $$ which is looked up in sorted
    starts and ends at every edge.
    """
    if not stretches:
        return None
    edges = cells.edges_s
    covered = _clipped_sum([one.end_s for one in stretches], edges)
    covered -= _clipped_sum([one.start_s for one in stretches], edges)
    return np.diff(covered)


def _clipped_sum(times_s: Sequence[float], edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of min(time, edge) over all times, for every edge."""
    ordered = np.sort(np.asarray(times_s, dtype=float))
    before = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, edges_s)
    return before[count] + (len(ordered) - count) * edges_s
