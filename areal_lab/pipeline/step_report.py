"""The report of one training step, as the caller of a run receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_lab.control.events import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished training step. Times are seconds since training began."""

    step: int
    """Number of the step, counted from 1; also the version it produced."""
    total_steps: int
    version: Version
    time_s: float
    """When the step ended."""
    step_s: float
    """Seconds since the previous step ended, waiting included."""
    tokens_per_s: float
    """Generated tokens per second, of all samples that ended since the previous step."""
    reward_mean: float
    loss: float
    lag_token_mean: float
    lag_token_max: float
    """Largest number of versions between the weights trained and those that generated a token."""
    metrics: Mapping[str, float]
    """All measurements of the trainer, and the counts of the run."""
