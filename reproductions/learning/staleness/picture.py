"""The picture: loss against drift, and the map below it; a column per objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from areal_lab.plots.style import BLACK, GREY, finished, new_figure
from reproductions.learning.setting import COLORS, OBJECTIVES, ORACLE
from reproductions.learning.staleness.cells import Cell
from reproductions.learning.staleness.evidence import LIMITS, Evidence, of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_MARKERS: Final = "sD^vP"
"""Of the sets that test the rule; the map has dots."""
_DARK: Final = 0.6
"""Share of the color scale above which letters are white."""


@finished
def draw_map(evidence: Evidence) -> Picture:
    """Draw both; with the map alone if nothing tests it, and empty panels if there is nothing."""
    rows = max(1, len(_lines(evidence.made_from.stale)))
    figure = new_figure(10, 4.6 + 1.2 + 0.36 * rows)
    panels = figure.subplots(2, 2, sharey="row", height_ratios=(4.6, 1.2 + 0.36 * rows))
    for column, objective in enumerate(OBJECTIVES):
        _draw_losses(panels[0][column], evidence, objective)
        _draw_cells(panels[1][column], evidence, objective)
    panels[0][0].set_ylabel("held-out reward lost against eta 0\n(standard error over seeds)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        panels[0][0].legend(
            handles, labels, loc="upper left", frameon=True, framealpha=0.9, edgecolor="white"
        )
    return figure


def _draw_losses(axes: Axes, evidence: Evidence, objective: str) -> None:
    color = COLORS[objective]
    sets = {"the map": evidence.made_from.stale}
    sets.update({name: cells.stale for name, cells in evidence.tests.items() if cells.stale})
    for number, (name, cells) in enumerate(sets.items()):
        own = of(cells, objective)
        axes.errorbar(
            [cell.drift for cell in own],
            [cell.loss for cell in own],
            yerr=[0.0 if math.isnan(cell.error) else cell.error for cell in own],
            fmt=_MARKERS[(number - 1) % len(_MARKERS)] if number else "o",
            color=color,
            markerfacecolor="white" if number else color,
            markersize=5.5,
            linewidth=1,
            label=name,
        )
    # With one minibatch drift is zero at eta 0, which a log scale has no place for.
    synchronous = [cell for cell in of(evidence.made_from.synchronous, objective) if cell.drift > 0]
    axes.plot(
        [cell.drift for cell in synchronous],
        [0.0] * len(synchronous),
        "|",
        color=BLACK,
        markersize=10,
        label="the map at eta 0",
    )
    axes.axhline(0, color=GREY, linewidth=0.8)
    threshold = evidence.thresholds.get((objective, LIMITS[0]))
    title = objective
    if threshold is not None:
        axes.axvline(threshold, color=color, linestyle="--", linewidth=1.4)
        axes.axhline(LIMITS[0], color=GREY, linestyle="--", linewidth=1)
        title += f": drift above {threshold:g} loses more than {LIMITS[0]:g}"
    axes.set_xscale("log")
    ticks = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks((), minor=True)
    stale = [cell.drift for cell in (*evidence.made_from.stale, *evidence.tested)]
    if stale:
        axes.set_xlim(0.6 * min(stale), 1.25 * max(stale))
    axes.set(title=title, xlabel="drift, mean |log pi_theta - log pi_behav|, log scale")


def _draw_cells(axes: Axes, evidence: Evidence, objective: str) -> None:
    """Loss by color, and in figures with the drift below: settings down, eta across."""
    cells = {cell.setting: cell for cell in evidence.made_from.stale}
    lines = _lines(evidence.made_from.stale)
    etas = list(dict.fromkeys(staleness for _, _, staleness, _ in cells))
    axes.grid(visible=False)
    if not cells:
        axes.set_axis_off()
        return
    losses = np.full((len(lines), len(etas)), np.nan)
    most = max(0.01, *(cell.loss for cell in cells.values()))
    for row, (rate, minibatches) in enumerate(lines):
        for column, eta in enumerate(etas):
            cell = cells.get((rate, minibatches, eta, objective))
            if cell is not None:
                losses[row, column] = cell.loss
                white = cell.loss > _DARK * most
                text = f"{cell.loss:+.3f}   drift {cell.drift:.3f}"
                axes.text(
                    column,
                    row,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if white else BLACK,
                )
    axes.imshow(losses, aspect="auto", cmap="Oranges", vmin=0, vmax=most)
    axes.set_xticks(range(len(etas)), [f"eta {eta}" for eta in etas])
    axes.set_yticks(
        range(len(lines)), [f"rate {rate}, {minibatches:>2} mb" for rate, minibatches in lines]
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"the map, {objective}: reward lost, and drift (mb: minibatches)")


def _lines(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Learning rate and minibatches of all cells that are not synchronous."""
    found = {cell.setting[:2]: cell for cell in cells if cell.setting[2] != ORACLE}
    return sorted(found, key=lambda one: (float(one[0]), int(one[1])))
