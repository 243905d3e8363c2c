"""What can be done where drift is too large: how far each setting moves it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import Final

from reproductions.learning.setting import OBJECTIVES
from reproductions.learning.staleness.cells import Cell, Predictor, Setting
from reproductions.learning.staleness.evidence import Evidence, of

_AXES: Final[Mapping[str, tuple[int, Predictor]]] = {
    "learning rate": (0, lambda cell: cell.rate),
    "minibatches": (1, lambda cell: cell.minibatches),
    "eta": (2, lambda cell: cell.eta),
}
"""Place in a `Setting`, and the value as a number."""


def levers(evidence: Evidence) -> Iterator[str]:
    """How drift falls with each setting, and what the other objective does."""
    for objective in OBJECTIVES:
        cells = of(evidence.made_from.stale, objective)
        told = [text for name in _AXES if (text := _steps(cells, name))]
        if told:
            yield (
                f"{objective}: what lowers drift on the map, as the geometric mean over the other "
                f"settings: {'; '.join(told)}."
            )
    yield from _objectives(evidence)


def _steps(cells: Sequence[Cell], name: str) -> str:
    """Factors of drift between neighboring values of an axis, from the largest value down."""
    by_setting = {cell.setting: cell for cell in cells}
    place, value = _AXES[name]
    values = {cell.setting[place]: None for cell in sorted(cells, key=value, reverse=True)}
    told = []
    for high, low in pairwise(values):
        ratios = [
            cell.drift / lower.drift
            for setting, cell in by_setting.items()
            if setting[place] == high
            and (lower := by_setting.get(_with(setting, place, low)))
            and cell.drift > 0 < lower.drift
        ]
        if ratios:
            told.append(f"{high} to {low} divides it by {geometric_mean(ratios):.1f}")
    return f"{name} {', '.join(told)}" if told else ""


def _objectives(evidence: Evidence) -> Iterator[str]:
    stale = {cell.setting: cell for cell in evidence.made_from.stale}
    pairs = [
        (cell, other)
        for setting, cell in stale.items()
        if cell.objective == "decoupled"
        and (other := stale.get((*setting[:3], "naive")))
        and cell.drift > 0 < other.drift
    ]
    if pairs:
        less = sum(cell.loss < other.loss for cell, other in pairs)
        change = fmean(other.loss - cell.loss for cell, other in pairs)
        drift = geometric_mean([cell.drift / other.drift for cell, other in pairs])
        yield (
            f"In the same setting the decoupled objective loses less than the naive one in {less} "
            f"of {len(pairs)} cells of the map; over all of them it loses {abs(change):.3f} "
            f"{'less' if change > 0 else 'more'} on average. Its drift is {drift:.2f} times that "
            "of the naive one (geometric mean)."
        )


def _with(setting: Setting, place: int, value: str) -> Setting:
    changed = list(setting)
    changed[place] = value
    rate, minibatches, staleness, objective = changed
    return rate, minibatches, staleness, objective
