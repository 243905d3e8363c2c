"""Fit measured costs: common parts of all fits, training steps, and held-out errors. Seconds.

    points --is_held_out(place)--> fitted on          --fit--> coefficients of a config
                               \\-> held out           --> error

Whether a point is held out only depends on its place (a training step of the run, a row of the
file), so that the same source always gives the same fit. `simulator.calibrate.engine` has the part
of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.calibrate.work import EnginePoint
from simulator.stats.least_squares import fit_positive
from simulator.workload.recorded_run import TrainingPoint

HELD_OUT: Final = 0.25
"""Share of places that are held out."""
_GOLDEN: Final = 0.6180339887498949
_ALIKE: Final = 1.05
"""Least ratio of the largest to the smallest size to fit its cost."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFit:
    """The fit of one part of the costs."""

    name: str
    settings: Mapping[str, float]
    """Coefficients, by name of the setting."""
    places: tuple[int, ...]
    measured_s: Values
    predicted_s: Values
    note: str = ""
    """Range of the points, and what they cannot separate."""
    points: Sequence[EnginePoint] = field(default=(), repr=False)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which points are held out."""
        return np.array([is_held_out(place) for place in self.places])

    @property
    def fit_error(self) -> float:
        """Mean absolute relative error on the fitted points."""
        return self._error(~self.held_out)

    @property
    def held_out_error(self) -> float:
        """The same on the held-out points."""
        return self._error(self.held_out)

    @property
    def bias(self) -> float:
        """Total predicted over total measured seconds of the held-out points, minus 1."""
        out = self.held_out
        return float(self.predicted_s[out].sum() / self.measured_s[out].sum() - 1)

    def _error(self, chosen: NDArray[np.bool_]) -> float:
        relative = self.predicted_s[chosen] / self.measured_s[chosen] - 1
        return float(np.abs(relative).mean())


def is_held_out(place: int) -> bool:
    """Whether a training step or row is held out: 2, 5, 10, 13, 18, ..., a quarter of them.

    Multiples of the golden ratio spread evenly and do not align with periodic files.
    """
    return place * _GOLDEN % 1 < HELD_OUT


def fit_training(points: Sequence[TrainingPoint], prompt_tokens: float) -> PartFit:
    """Training steps: a constant plus a time per token of prompts and responses.

    Raises:
        ValueError: one line: there are too few steps.
    """
    check_enough([point.step for point in points], "training steps", least=3)
    tokens = np.array([point.tokens + point.samples * prompt_tokens for point in points])
    seen = np.array([not is_held_out(point.step) for point in points])
    measured = np.array([point.seconds for point in points])
    note = f"{tokens.min():,.0f} to {tokens.max():,.0f} tokens per step"
    if tokens[seen].max() < _ALIKE * tokens[seen].min():
        step_s, token_s = float(measured[seen].mean()), 0.0
        note += ": too similar to separate the time per token"
    else:
        ratio = measured[seen] / tokens[seen]
        start = (0.3 * float(measured[seen].min()), 0.5 * float(ratio.mean()))
        found = fit_positive(lambda at: at[0] + at[1] * tokens[seen], start, measured[seen])
        step_s, token_s = with_equal_total(
            found.values, found.values[0] + found.values[1] * tokens[seen], measured[seen]
        )
    return PartFit(
        name="training",
        settings={"trainer.step_s": step_s, "trainer.token_s": token_s},
        places=tuple(point.step for point in points),
        measured_s=measured,
        predicted_s=step_s + token_s * tokens,
        note=note,
    )


def with_equal_total(
    values: Sequence[float], predicted_s: Values, measured_s: Values
) -> tuple[float, ...]:
    """Coefficients times one factor, so that the total time equals the measured total.

    The fit with the least relative error is below the mean if times scatter, but a simulation sums
    many of them.
    """
    total_s = float(measured_s.sum())
    factor = total_s / float(predicted_s.sum()) if total_s > 0 else 1.0
    return tuple(factor * value for value in values)


def enough(places: Sequence[int], least: int) -> bool:
    """Whether there are at least `least` points to fit and one held out."""
    held_out = sum(map(is_held_out, places))
    return len(places) - held_out >= least and held_out >= 1


def check_enough(places: Sequence[int], what: str, least: int) -> None:
    """Refuse too few points to fit and to hold out."""
    if not enough(places, least):
        held_out = sum(map(is_held_out, places))
        raise ValueError(
            f"{what}: {len(places) - held_out} to fit and {held_out} held out, but needs at least "
            f"{least} and 1; record a longer run"
        )
