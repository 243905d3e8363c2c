"""Activity of processes over time as rows for a strip, of real and simulated runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from areal_lab.plots.looks import Looks
from areal_lab.runlog.activity import activity
from areal_lab.runlog.records import Log
from areal_lab.runlog.time_cells import (
    State,
    cells_of,
    state_seconds,
    states_by_cell,
    without_idle_rows,
)

if TYPE_CHECKING:
    from areal_lab.widgets.strip import Strip

_MOST_STATES: Final = 255
_NOTHING: Final = State("", busy=False)


class TimelineRows(TypedDict):
    """Arguments of `Strip`, and of `Strip.show` for an existing strip."""

    rows: list[NDArray[np.uint8]]
    names: list[str]
    colors: list[str]
    labels: list[str]
    start: float
    cell: float


def timeline_rows(
    log: Log, *, window: tuple[float, float] | None = None, cells: int = 4000
) -> TimelineRows:
    """A row per process with any activity, a cell per piece of time.

    A cell shows the main activity of the process in it, in the colors of the pictures; idle time
    has patterns. Time before and after training is blank. `window` is in seconds; None takes the
    whole log. `cells` is the number of equal pieces, which also limits the resolution of a zoom.
    """
    activities = without_idle_rows(activity(log))
    pieces = cells_of(window or (0.0, max(log.end_s, 1.0)), cells)
    seconds = state_seconds(activities)
    looks = Looks(seconds)
    states = [_NOTHING, *looks.of][:_MOST_STATES]  # the first takes blank time
    rows = states_by_cell(activities, states, pieces)
    return TimelineRows(
        rows=list(rows.values()),
        names=list(rows),
        colors=["transparent", *(looks.cell_color(state) for state in states[1:])],
        labels=["", *(looks.cell_label(state) for state in states[1:])],
        start=pieces.start_s,
        cell=pieces.length_s,
    )


def timeline_strip(
    log: Log,
    *,
    title: str = "What each process does",
    window: tuple[float, float] | None = None,
    cells: int = 4000,
) -> Strip:
    """A strip of `timeline_rows`, in seconds."""
    from areal_lab.widgets.strip import Strip

    return Strip(title=title, unit="s", **timeline_rows(log, window=window, cells=cells))
