"""What a run tells its caller after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_lab.control.events import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished training step. Times are seconds since training began."""

    step: int
    """Number of the step, from 1; also the version it produced."""
    total_steps: int
    version: Version
    time_s: float
    """When the step ended."""
    step_s: float
    """Seconds since the step before ended: what a step costs, waiting included."""
    tokens_per_s: float
    """Generated tokens of all samples that ended since the step before, per second."""
    reward_mean: float
    loss: float
    lag_token_mean: float
    lag_token_max: float
    """Versions between the weights trained and those that generated a token."""
    metrics: Mapping[str, float]
    """Everything the trainer measured, and the counts of the run."""
