"""Fit the costs of an engine: decode steps and prefills. Seconds.

    decode steps without prefills --fit_decode--> step, sequence, context, knee
    passes with prefills          --fit_prefill--> their time in addition to a decode step
    too few of the first          --fit_together--> both at once

With short responses, or frequent weight updates, few stretches of decode steps have no prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from simulator.calibrate.fit import (
    EnginePoint,
    PartFit,
    Values,
    check_enough,
    enough,
    is_held_out,
    with_equal_total,
)
from simulator.costs.coefficients import smooth_max
from simulator.stats.least_squares import fit_positive

KNEES: Final = (1.0, 2.0, 4.0, 8.0)
"""Knees to try between reading weights and computing."""
LEAST_SHARE: Final = 1e-4
"""A coefficient that accounts for less than this share of every point's time becomes 0."""
LEAST_DECODE: Final = 4
"""Fewest stretches without prefills to fit decode steps, one per coefficient."""
_LEAST_TOGETHER: Final = 8
_VARIED: Final = 1.5
_LONGER: Final = 3.0
"""Least ratio of the largest to the smallest prefill, and of pairs per token, to fit them."""
_DECODE: Final = (
    "rollout.decode_step_s",
    "rollout.decode_sequence_s",
    "rollout.decode_context_token_s",
)
_PREFILL: Final = ("rollout.prefill_pass_s", "rollout.prefill_token_s", "rollout.prefill_pair_s")


def fit_engine(points: Sequence[EnginePoint]) -> tuple[PartFit, PartFit | None]:
    """Decode steps, and prefills if there are enough, from spans with the engine's counts."""
    plain = [point for point in points if not point.prompt_tokens]
    if not enough([point.place for point in plain], LEAST_DECODE):
        return fit_together(points)
    decode = fit_decode(plain, "stretches of decode steps")
    return decode, fit_prefill([point for point in points if point.prompt_tokens], decode)


def fit_decode(points: Sequence[EnginePoint], what: str) -> PartFit:
    """Decode steps: a step, its sequences, their context, and the knee between the first two."""
    check_enough([point.place for point in points], what, least=LEAST_DECODE)
    fitted = [point for point in points if not is_held_out(point.place)]
    measured = np.array([point.seconds for point in fitted])
    start = _decode_start(fitted)
    tries = [
        (fit_positive(partial(_decode_s, fitted, knee), start, measured), knee) for knee in KNEES
    ]
    found, knee = min(tries, key=lambda one: float((one[0].relative_error ** 2).sum()))
    values = with_equal_total(found.values, _decode_s(fitted, knee, found.values), measured)
    at = _without_traces(values, [_decode_sizes(point) for point in fitted], measured)
    return PartFit(
        name="decode",
        settings=_decode_settings(at, knee),
        places=tuple(point.place for point in points),
        measured_s=np.array([point.seconds for point in points]),
        predicted_s=_decode_s(points, knee, at),
        note=_range_note(points),
        points=points,
    )


def fit_prefill(points: Sequence[EnginePoint], decode: PartFit) -> PartFit | None:
    """Prefills: their time in addition to the decode step of the same pass.

    None if there are too few points to fit and to hold out.
    """
    held_out = sum(is_held_out(point.place) for point in points)
    if len(points) - held_out < 3 or not held_out:
        return None
    at = decode.settings
    known = tuple(at[name] for name in _DECODE)
    before_s = _decode_s(points, at["rollout.decode_knee"], known)
    measured = np.array([point.seconds for point in points])
    sizes = np.array([_prefill_sizes(point) for point in points])
    seen = np.array([not is_held_out(point.place) for point in points])
    told, note = _told_apart(sizes[seen])
    chosen = sizes[:, told]
    start = 0.2 * (measured[seen, None] / chosen[seen]).mean(axis=0)
    found = fit_positive(
        lambda values: before_s[seen] + chosen[seen] @ np.array(values),
        start.tolist(),
        measured[seen],
    ).values
    found = with_equal_total(found, chosen[seen] @ np.array(found), measured[seen] - before_s[seen])
    values = np.zeros(3)
    values[told] = _without_traces(found, chosen[seen], measured[seen])
    return PartFit(
        name="prefill",
        settings=dict(zip(_PREFILL, values.tolist(), strict=True)),
        places=tuple(point.place for point in points),
        measured_s=measured,
        predicted_s=before_s + sizes @ values,
        note=note,
        points=points,
    )


def fit_together(points: Sequence[EnginePoint]) -> tuple[PartFit, PartFit]:
    """Decode steps and prefills at once, if few stretches have no prefills."""
    check_enough([point.place for point in points], "stretches of engine steps", _LEAST_TOGETHER)
    seen = [point for point in points if not is_held_out(point.place)]
    measured = np.array([point.seconds for point in seen])
    sizes = np.array([_prefill_sizes(point) for point in seen])
    told, note = _told_apart(sizes[sizes[:, 1] > 0])
    chosen = sizes[:, told]
    shares = 0.2 * measured.sum() / np.maximum(chosen.sum(axis=0), 1.0)
    start = [*_decode_start(seen), *shares.tolist()]

    def seconds(knee: float, values: Sequence[float]) -> Values:
        return np.asarray(_decode_s(seen, knee, values[:3]) + chosen @ np.array(values[3:]))

    tries = [(fit_positive(partial(seconds, knee), start, measured), knee) for knee in KNEES]
    found, knee = min(tries, key=lambda one: float((one[0].relative_error ** 2).sum()))
    values = with_equal_total(found.values, seconds(knee, found.values), measured)
    at = _without_traces(values[:3], [_decode_sizes(point) for point in seen], measured)
    of_prefill = np.zeros(3)
    of_prefill[told] = _without_traces(values[3:], chosen, measured)

    def fitted(name: str, of: Sequence[EnginePoint], note: str) -> PartFit:
        return PartFit(
            name=name,
            settings=_decode_settings(at, knee)
            if name == "decode"
            else dict(zip(_PREFILL, of_prefill.tolist(), strict=True)),
            places=tuple(point.place for point in of),
            measured_s=np.array([point.seconds for point in of]),
            predicted_s=_decode_s(of, knee, at)
            + np.array([_prefill_sizes(point) for point in of]) @ of_prefill,
            note=note,
            points=of,
        )

    reading = [point for point in points if point.prompt_tokens]
    if not enough([point.place for point in reading], 1):
        reading = list(points)
    together = "fitted together with prefills, because few stretches have none"
    return (
        fitted("decode", points, f"{_range_note(points)}; {together}"),
        fitted("prefill", reading, note),
    )


def _decode_start(points: Sequence[EnginePoint]) -> tuple[float, float, float]:
    measured = np.array([point.seconds for point in points])
    batches = np.array([point.batch for point in points])
    contexts = np.array([max(point.context_tokens, 1.0) for point in points])
    per_step_s = np.array([point.seconds / point.steps for point in points])
    return (
        0.6 * float(per_step_s.min()),
        0.2 * float((per_step_s / batches).mean()),
        0.2 * float((measured / contexts).mean()),
    )


def _decode_sizes(point: EnginePoint) -> tuple[float, float, float]:
    return point.steps, point.sequences, max(point.context_tokens, 1.0)


def _prefill_sizes(point: EnginePoint) -> tuple[float, float, float]:
    return point.steps if point.prompt_tokens else 0.0, point.prompt_tokens, point.prompt_pairs


def _decode_settings(values: Sequence[float], knee: float) -> dict[str, float]:
    settings = dict(zip(_DECODE, values, strict=True))
    return {**settings, "rollout.decode_knee": knee if values[1] else 1.0}


def _without_traces(
    values: Sequence[float], sizes: Sequence[Sequence[float]] | Values, measured: Values
) -> list[float]:
    return [
        value if value * float((size / measured).max()) > LEAST_SHARE else 0.0
        for value, size in zip(values, np.asarray(sizes).T, strict=True)
    ]


def _decode_s(points: Sequence[EnginePoint], knee: float, values: Sequence[float]) -> Values:
    step_s, sequence_s, token_s = values
    return np.array(
        [
            point.steps * smooth_max(step_s, sequence_s * point.batch, knee)
            + token_s * point.context_tokens
            for point in points
        ]
    )


def _range_note(points: Sequence[EnginePoint]) -> str:
    batches = [point.batch for point in points]
    contexts = [point.context for point in points]
    note = (
        f"batches of {min(batches):.3g} to {max(batches):.3g}, "
        f"contexts of {min(contexts):,.0f} to {max(contexts):,.0f} tokens"
    )
    if max(batches) < 1.5 * min(batches):
        note += ": too similar to separate the time per sequence"
    return note


def _told_apart(sizes: Values) -> tuple[list[int], str]:
    """Which of pass, tokens and pairs the points can separate, with a note.

    Prompts of one length cannot separate the time per pass from the time per token; all of it is
    attributed to tokens, which dominate in all but small prefills. Pairs grow with the square of
    the length: if lengths are similar, pairs are included in the tokens.
    """
    tokens = sizes[:, 1] / sizes[:, 0]
    pairs = sizes[:, 2] / sizes[:, 1]
    told = [0, 1] if tokens.max() > _VARIED * tokens.min() else [1]
    note = f"passes of {tokens.min():,.0f} to {tokens.max():,.0f} new tokens"
    if told == [1]:
        note += ": too similar to separate the time per pass from the time per token"
    if pairs.min() > 0 and pairs.max() > _LONGER * pairs.min():
        told.append(2)
    return told, note
