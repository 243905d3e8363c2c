"""Fit measured costs: what all fits share, and training steps; errors on points held out. Seconds.

    points --is_held_out(place)--> fitted on          --fit--> coefficients of a config
                               \\-> never seen by it   --> error

Which points are held out follows from their place alone (a training step of the run, a row of the
file), so that the same source always gives the same answer. `simulator.calibrate.engine` has the
engine's part.
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
"""Share of the places that is held out."""
_GOLDEN: Final = 0.6180339887498949
_ALIKE: Final = 1.05
"""Largest over smallest: what varies less does not tell what it costs."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFit:
    """One part of the costs."""

    name: str
    settings: Mapping[str, float]
    """Coefficients, by the setting that takes them."""
    places: tuple[int, ...]
    measured_s: Values
    predicted_s: Values
    note: str = ""
    """What the points say of their range, or of what they cannot tell."""
    points: Sequence[EnginePoint] = field(default=(), repr=False)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which points the fit has not seen."""
        return np.array([is_held_out(place) for place in self.places])

    @property
    def fit_error(self) -> float:
        """Mean absolute relative error on the points of the fit."""
        return self._error(~self.held_out)

    @property
    def held_out_error(self) -> float:
        """The same on the others."""
        return self._error(self.held_out)

    @property
    def bias(self) -> float:
        """Seconds predicted over seconds measured, less 1, over all points held out together."""
        out = self.held_out
        return float(self.predicted_s[out].sum() / self.measured_s[out].sum() - 1)

    def _error(self, chosen: NDArray[np.bool_]) -> float:
        relative = self.predicted_s[chosen] / self.measured_s[chosen] - 1
        return float(np.abs(relative).mean())


def is_held_out(place: int) -> bool:
    """Whether a training step or row is held out: 2, 5, 10, 13, 18, ..., a quarter of them.

    Multiples of the golden ratio spread evenly, and keep no step with what is periodic in a file.
    """
    return place * _GOLDEN % 1 < HELD_OUT


def fit_training(points: Sequence[TrainingPoint], prompt_tokens: float) -> PartFit:
    """Training steps: a constant, and their tokens of prompts and answers.

    Raises:
        ValueError: in one line, if they are too few.
    """
    check_enough([point.step for point in points], "training steps", least=3)
    tokens = np.array([point.tokens + point.samples * prompt_tokens for point in points])
    seen = np.array([not is_held_out(point.step) for point in points])
    measured = np.array([point.seconds for point in points])
    note = f"{tokens.min():,.0f} to {tokens.max():,.0f} tokens a step"
    if tokens[seen].max() < _ALIKE * tokens[seen].min():
        step_s, token_s = float(measured[seen].mean()), 0.0
        note += ": too much alike to tell what a token takes"
    else:
        ratio = measured[seen] / tokens[seen]
        start = (0.3 * float(measured[seen].min()), 0.5 * float(ratio.mean()))
        found = fit_positive(lambda at: at[0] + at[1] * tokens[seen], start, measured[seen])
        step_s, token_s = as_long_in_all(
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


def as_long_in_all(
    values: Sequence[float], predicted_s: Values, measured_s: Values
) -> tuple[float, ...]:
    """Coefficients times one factor, so that all points together take as long as they did.

    The least relative error is had a bit below the mean, the more so the more times scatter; what
    is simulated is a sum of many.
    """
    in_all_s = float(measured_s.sum())
    factor = in_all_s / float(predicted_s.sum()) if in_all_s > 0 else 1.0
    return tuple(factor * value for value in values)


def enough(places: Sequence[int], least: int) -> bool:
    """Whether there are so many to fit to, and one to hold out."""
    held_out = sum(map(is_held_out, places))
    return len(places) - held_out >= least and held_out >= 1


def check_enough(places: Sequence[int], what: str, least: int) -> None:
    """Refuse what cannot be fitted with something held out."""
    if not enough(places, least):
        held_out = sum(map(is_held_out, places))
        raise ValueError(
            f"{what}: {len(places) - held_out} to fit to and {held_out} to hold out, but at least "
            f"{least} and 1 are needed; record a longer run"
        )
