"""Fit measured costs: decode steps, prefills, training steps; errors on points held out. Seconds.

    points --is_held_out(place)--> fitted on          --fit--> coefficients of `simulator.config`
                               \\-> never seen by it   --> error

Which points are held out follows from their place alone (a training step of the run, a row of the
file), so that the same source always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.least_squares import fit_positive
from simulator.recorded import TrainingPoint
from simulator.recorded_work import EnginePoint
from simulator.roofline import smooth_max

HELD_OUT: Final = 0.25
"""Share of the places that is held out."""
KNEES: Final = (1.0, 2.0, 4.0, 8.0)
"""That are tried between reading weights and computing."""
LEAST_SHARE: Final = 1e-4
"""A coefficient that is less than that of every point's time is 0."""
_GOLDEN: Final = 0.6180339887498949
_VARIED: Final = 1.5
_LONGER: Final = 3.0
"""Largest over smallest prefill, and of pairs for each of its tokens, from which they tell."""
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


def fit_decode(points: Sequence[EnginePoint], what: str) -> PartFit:
    """Decode steps: a step, its sequences, their context, and the knee between the first two.

    Args:
        points: without any prefill in them.
        what: they are called in errors.

    Raises:
        ValueError: in one line, if they are too few.
    """
    _check_enough([point.place for point in points], what, least=4)
    fitted = [point for point in points if not is_held_out(point.place)]
    measured = np.array([point.seconds for point in fitted])
    batches = np.array([point.batch for point in fitted])
    contexts = np.array([max(point.context_tokens, 1.0) for point in fitted])
    per_step_s = np.array([point.seconds / point.steps for point in fitted])
    start = (
        0.6 * per_step_s.min(),
        0.2 * float((per_step_s / batches).mean()),
        0.2 * float((measured / contexts).mean()),
    )
    tries = [
        (fit_positive(partial(_decode_s, fitted, knee), start, measured), knee) for knee in KNEES
    ]
    found, knee = min(tries, key=lambda one: float((one[0].relative_error ** 2).sum()))
    step_s, sequence_s, token_s = _as_long_in_all(
        found.values, _decode_s(fitted, knee, found.values), measured
    )
    sequence_s, token_s = (
        value if value * float((size / measured).max()) > LEAST_SHARE else 0.0
        for value, size in (
            (sequence_s, np.array([p.sequences for p in fitted])),
            (token_s, contexts),
        )
    )
    chosen = (step_s, sequence_s, token_s)
    return PartFit(
        name="decode",
        settings={
            "rollout.decode_step_s": step_s,
            "rollout.decode_sequence_s": sequence_s,
            "rollout.decode_context_token_s": token_s,
            "rollout.decode_knee": knee if sequence_s else 1.0,
        },
        places=tuple(point.place for point in points),
        measured_s=np.array([point.seconds for point in points]),
        predicted_s=_decode_s(points, knee, chosen),
        note=_range_note(points),
        points=points,
    )


def fit_prefill(points: Sequence[EnginePoint], decode: PartFit) -> PartFit | None:
    """Prefills, in addition to the decode step that each of the engine's passes makes as well.

    None if too few were recorded to fit and to hold out.
    """
    held_out = sum(is_held_out(point.place) for point in points)
    if len(points) - held_out < 3 or not held_out:
        return None
    at = decode.settings
    known = (
        at["rollout.decode_step_s"],
        at["rollout.decode_sequence_s"],
        at["rollout.decode_context_token_s"],
    )
    before_s = _decode_s(points, at["rollout.decode_knee"], known)
    measured = np.array([point.seconds for point in points])
    sizes = np.array([(p.steps, p.prompt_tokens, p.prompt_pairs) for p in points])
    seen = np.array([not is_held_out(point.place) for point in points])
    told, note = _told_apart(sizes[seen])
    chosen = sizes[:, told]
    start = 0.2 * (measured[seen, None] / chosen[seen]).mean(axis=0)
    found = fit_positive(
        lambda values: before_s[seen] + chosen[seen] @ np.array(values),
        start.tolist(),
        measured[seen],
    ).values
    found = _as_long_in_all(found, chosen[seen] @ np.array(found), measured[seen] - before_s[seen])
    values = np.zeros(3)
    values[told] = [
        value if value * float((size / measured[seen]).max()) > LEAST_SHARE else 0.0
        for value, size in zip(found, chosen[seen].T, strict=True)
    ]
    names = ("rollout.prefill_pass_s", "rollout.prefill_token_s", "rollout.prefill_pair_s")
    return PartFit(
        name="prefill",
        settings=dict(zip(names, values.tolist(), strict=True)),
        places=tuple(point.place for point in points),
        measured_s=measured,
        predicted_s=before_s + sizes @ values,
        note=note,
        points=points,
    )


def fit_training(points: Sequence[TrainingPoint], prompt_tokens: float) -> PartFit:
    """Training steps: a constant, and their tokens of prompts and answers.

    Raises:
        ValueError: in one line, if they are too few.
    """
    _check_enough([point.step for point in points], "training steps", least=3)
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
        step_s, token_s = _as_long_in_all(
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


def _as_long_in_all(
    values: Sequence[float], predicted_s: Values, measured_s: Values
) -> tuple[float, ...]:
    """Coefficients times one factor, so that all points together take as long as they did.

    The least relative error is had a bit below the mean, the more so the more times scatter; what
    is simulated is a sum of many.
    """
    in_all_s = float(measured_s.sum())
    factor = in_all_s / float(predicted_s.sum()) if in_all_s > 0 else 1.0
    return tuple(factor * value for value in values)


def _decode_s(points: Sequence[EnginePoint], knee: float, values: Sequence[float]) -> Values:
    step_s, sequence_s, token_s = values
    return np.array(
        [
            point.steps * smooth_max(step_s, sequence_s * point.batch, knee)
            + token_s * point.context_tokens
            for point in points
        ]
    )


def _check_enough(places: Sequence[int], what: str, least: int) -> None:
    """Refuse what cannot be fitted with something held out."""
    held_out = sum(map(is_held_out, places))
    fitted = len(places) - held_out
    if fitted < least or held_out < 1:
        raise ValueError(
            f"{what}: {fitted} to fit to and {held_out} to hold out, but at least {least} and 1 "
            "are needed; record more of them"
        )


def _range_note(points: Sequence[EnginePoint]) -> str:
    batches = [point.batch for point in points]
    contexts = [point.context for point in points]
    note = (
        f"batches of {min(batches):.3g} to {max(batches):.3g}, "
        f"contexts of {min(contexts):,.0f} to {max(contexts):,.0f} tokens"
    )
    if max(batches) < 1.5 * min(batches):
        note += ": too much alike to tell what a sequence takes"
    return note


def _told_apart(sizes: Values) -> tuple[list[int], str]:
    """Which of pass, tokens and pairs the points can tell apart, and what there is to say of it.

    Prompts of one length say what they take, not whether a pass or its tokens take it; it is
    taken to be the tokens, as in all prefills but small ones. Pairs grow with the square of
    lengths: where lengths are alike, they are counted with the tokens.
    """
    tokens = sizes[:, 1] / sizes[:, 0]
    pairs = sizes[:, 2] / sizes[:, 1]
    told = [0, 1] if tokens.max() > _VARIED * tokens.min() else [1]
    note = f"passes of {tokens.min():,.0f} to {tokens.max():,.0f} new tokens"
    if told == [1]:
        note += ": too much alike to tell what a pass takes and what its tokens"
    if pairs.min() > 0 and pairs.max() > _LONGER * pairs.min():
        told.append(2)
    return told, note
