"""Time of a training step besides generation, training and weights: data, logs, validation.

    rewards --> data, advantages, logs --> training step --> validation, checkpoint every n steps

Only colocated GPUs get a time that was not given: there it was published, and nothing hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from simulator.config.schema import OutsideConfig
from simulator.costs.colocation.published import relative_fit, rows_of

BATCH: Final = "data, advantages, logs"
VALIDATION: Final = "validation"
CHECKPOINT: Final = "checkpoint"
FETCH: Final = "fetching responses"
OUTSIDE: Final = frozenset({BATCH, FETCH, VALIDATION, CHECKPOINT})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCost:
    """Seconds of a step outside generation, training and weights."""

    batch_s: float = 0.0
    sample_s: float = 0.0
    """Per response of the batch."""
    validation_s: float = 0.0
    validation_steps: int = 0
    """0 never validates."""
    checkpoint_s: float = 0.0
    checkpoint_steps: int = 0
    error: float | None = 0.0
    """Of the batch's seconds; 0 if given, None if unknown."""
    provenance: str = ""

    def before_training(self, samples: int, /) -> Mapping[str, float]:
        """Seconds between the last reward and the training step."""
        return {BATCH: self.batch_s + self.sample_s * samples}

    def after_training(self, step: int, /) -> Mapping[str, float]:
        """Seconds after training step number `step`, the first of which is 1."""
        return {
            name: seconds
            for name, seconds, every in (
                (VALIDATION, self.validation_s, self.validation_steps),
                (CHECKPOINT, self.checkpoint_s, self.checkpoint_steps),
            )
            if every and step % every == 0
        }


def outside_from(config: OutsideConfig, *, colocated: bool) -> OutsideCost | None:
    """The cost of a config; None if it takes no time."""
    batch_s, sample_s, error, source = 0.0, 0.0, 0.0, "outside.*, given"
    if config.batch_s is not None:
        batch_s = config.batch_s
    elif colocated:
        batch_s, sample_s = batch_seconds()
        error = math.nan
        source = (
            f"{1e3 * batch_s:.0f} ms and {1e3 * sample_s:.2f} ms per response, as one system "
            "takes (vime issue 442, 2026-09); outside.batch_s replaces it"
        )
    cost = OutsideCost(
        batch_s=batch_s,
        sample_s=sample_s,
        validation_s=config.validation_s,
        validation_steps=config.validation_steps,
        checkpoint_s=config.checkpoint_s,
        checkpoint_steps=config.checkpoint_steps,
        error=None if math.isnan(error) else error,
        provenance=source,
    )
    takes = batch_s + sample_s
    takes += config.validation_s * config.validation_steps
    takes += config.checkpoint_s * config.checkpoint_steps
    return cost if takes > 0 else None


@cache
def batch_seconds() -> tuple[float, float]:
    """Seconds per step and per response, from two published batches."""
    rows = rows_of("batch")
    (step_s, sample_s), _ = relative_fit(
        [[1.0] * len(rows), [row.bytes for row in rows]], [row.seconds for row in rows]
    )
    return float(step_s), float(sample_s)
