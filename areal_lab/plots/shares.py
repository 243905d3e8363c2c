"""Shares of time by state over time, for any number of processes: an aggregated timeline.

All engines share one panel, so a picture of 24 engines takes as long as one of 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import WeightsPushed
from areal_lab.plots.looks import Looks
from areal_lab.plots.style import BLACK, NARROW, entitle, finished, new_figure, nothing_yet
from areal_lab.runlog.activity import Stretch, activity, training_window
from areal_lab.runlog.records import Log, engine_process
from areal_lab.runlog.time_cells import (
    Cells,
    cells_of,
    shares_by_cell,
    state_seconds,
    without_idle_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_LEAST_PERCENT: Final = 0.3
"""Percent of a panel's time below which a state has no entry in the legend."""
_MOST_PUSHES: Final = 60
"""Maximum weight updates that are marked."""


@finished
def draw_shares(
    log: Log,
    *,
    window: tuple[float, float] | None = None,
    cells: int = 160,
    width: float = 10.0,
    title: str | None = None,
) -> Picture:
    """Draw how engines and trainer spend their time, as shares that change over the run.

    `window` is in seconds; None takes that of training.
    """
    activities = without_idle_rows(activity(log))
    if window is None:
        start_s, end_s = training_window(log)
        window = (start_s, max(end_s, start_s + 1.0))
    pieces = cells_of(window, cells)
    pools = _pools(activities)
    states = [state for state in state_seconds(activities) if not state.blank]
    shares = {name: 100 * shares_by_cell(some, states, pieces) for name, some in pools.items()}
    largest = np.max([one.mean(axis=1) for one in shares.values()], axis=0, initial=0.0)
    looks = Looks(dict(zip(states, largest.tolist(), strict=True)) if pools else {})
    handles, labels = looks.legend(least=_LEAST_PERCENT)
    columns = 2 if width < NARROW else 4
    figure = new_figure(width, 1.0 + 1.35 * max(1, len(pools)) + 0.2 * -(-len(labels) // columns))
    panels = figure.subplots(max(1, len(pools)), 1, sharex=True, squeeze=False)[:, 0]
    pushes = [r.t_s for r in log.events if isinstance(r.event, WeightsPushed)]
    pushes = [t_s for t_s in pushes if window[0] <= t_s <= window[1]]
    said = []
    for axes, (name, percent) in zip(panels, shares.items(), strict=False):
        busy, bottom = 0.0, np.zeros(cells)
        for state, look in looks.of.items():
            share = percent[states.index(state)]
            top = bottom + share
            _fill(axes, pieces, bottom, top, look)
            bottom, busy = top, busy + share.mean() * state.busy
        said.append(f"{name} busy {busy:.0f} % of the time")
        axes.set_title(f"{name}, busy {busy:.0f} %")
        _finish_panel(axes, window, pushes)
    if not pools:
        nothing_yet(panels[0], "the log has no process")
    panels[-1].set_xlabel(
        "seconds since the start of the log"
        + ("; triangles: new weights are on the engines" if pushes else "")
    )
    figure.supylabel("share of time (%)", fontsize=9)
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    alt = f"Shares of time by activity and cause of idleness over the run: {', '.join(said)}."
    return entitle(figure, title or "How engines and trainer spend their time", alt=alt)


def _pools(
    activities: Mapping[str, Sequence[Stretch]],
) -> dict[str, dict[str, Sequence[Stretch]]]:
    """Processes by panel: the trainer, all engines together, then others."""
    engines = {p: stretches for p, stretches in activities.items() if p.startswith(_ENGINE)}
    others = {p: {p: stretches} for p, stretches in activities.items() if p not in engines}
    if not engines:
        return others
    name = next(iter(engines)) if len(engines) == 1 else f"{len(engines)} engines"
    return {name: engines, **others}


_ENGINE: Final = engine_process(0).removesuffix("0")


def _fill(
    axes: Axes,
    cells: Cells,
    bottom: NDArray[np.float64],
    top: NDArray[np.float64],
    look: Mapping[str, Any],
) -> None:
    """Fill between two values per cell, without the cells where they are equal."""
    shown = np.append(top > bottom, [False])
    shown[1:] |= shown[:-1]  # up to the edge behind the last cell
    low, high = np.append(bottom, bottom[-1]), np.append(top, top[-1])
    axes.fill_between(cells.edges_s, low, high, where=shown.tolist(), step="post", **look)


def _finish_panel(axes: Axes, window: tuple[float, float], pushes: Sequence[float]) -> None:
    axes.set(xlim=window, ylim=(0, 100), yticks=(0, 50, 100))
    axes.grid(visible=False)
    if 0 < len(pushes) <= _MOST_PUSHES:
        axes.plot(pushes, [102] * len(pushes), "v", color=BLACK, markersize=3, clip_on=False)
