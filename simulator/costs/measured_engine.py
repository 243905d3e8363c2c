"""Engines with measured times: seconds of steps and prefills instead of coefficients.

    decode step   smooth_max(step, sequence B, knee) + context_token C
    prefill       pass + token n + pair (query, key) pairs

with B sequences, C tokens of context over all of them, and n new tokens. They are only valid for
the measured model, GPUs and engine. `areal-lab calibrate` fits them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from simulator.costs.roofline import smooth_max
from simulator.stats.format import short_time

if TYPE_CHECKING:
    from simulator.config.schema import SimulationConfig

GIVEN = "given by the user"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDecode:
    """Measured decode steps."""

    step_s: float
    """Per step, for any batch: reading weights, launching kernels, the engine's CPU."""
    sequence_s: float = 0.0
    """Per sequence of the step."""
    context_token_s: float = 0.0
    """Per token of context."""
    knee: float = 1.0
    """p of `smooth_max` between the first two; 1 gives their sum."""
    error: float = 0.0
    """Mean absolute relative error on steps that the fit has not seen; 0 if unknown."""
    source: str = GIVEN

    def __post_init__(self) -> None:
        _check(self, "measured decode")
        if self.step_s == 0:
            raise ValueError("step_s of a measured decode step is 0, but must be a number > 0")
        if self.knee < 1:
            raise ValueError(f"knee of a measured decode step is {self.knee}, but must be >= 1")

    def base_s(self, sequences: float) -> float:
        """Seconds of a step without reading context."""
        return smooth_max(self.step_s, self.sequence_s * sequences, self.knee)

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        if self.sequence_s == self.context_token_s == 0:
            return f"a measured step of {self.step_s:g} s, {self.source}"
        return (
            f"measured: {short_time(self.step_s)} per step, {short_time(self.sequence_s)} per "
            f"sequence, {short_time(self.context_token_s)} per token of context; "
            f"{self.source}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrefill:
    """Measured prefills: of prompts, and of contexts that an interruption discarded."""

    pass_s: float
    """Per prefill, for any number of tokens."""
    token_s: float = 0.0
    """Per new token."""
    pair_s: float = 0.0
    """Per (query, key) pair of attention."""
    slowdown: float = 1.0
    """Factor on all times of this engine, for stragglers."""
    error: float = 0.0
    """See `MeasuredDecode.error`."""
    source: str = GIVEN

    def __post_init__(self) -> None:
        _check(self, "measured prefill")

    def seconds(self, new_tokens: int, pairs: float) -> float:
        """Seconds of a prefill; 0 without tokens."""
        if new_tokens <= 0:
            return 0.0
        read_s = self.pass_s + self.token_s * new_tokens + self.pair_s * pairs
        return self.slowdown * read_s

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        return (
            f"measured: {short_time(self.pass_s)} per prefill, {short_time(self.token_s)} per "
            f"token, {short_time(self.pair_s)} per pair of attention; {self.source}"
        )


def measured_decode(config: SimulationConfig) -> MeasuredDecode | None:
    """The decode steps given in a config; None if the cost model computes them."""
    rollout, calibration = config.rollout, config.calibration
    if rollout.decode_step_s is None:
        return None
    return MeasuredDecode(
        step_s=rollout.decode_step_s,
        sequence_s=rollout.decode_sequence_s,
        context_token_s=rollout.decode_context_token_s,
        knee=rollout.decode_knee,
        error=calibration.decode_error,
        source=calibration.source or GIVEN,
    )


def measured_prefill(config: SimulationConfig, slowdown: float = 1.0) -> MeasuredPrefill | None:
    """The prefills given in a config; None if the cost model computes them."""
    rollout, calibration = config.rollout, config.calibration
    if rollout.prefill_pass_s is None:
        return None
    return MeasuredPrefill(
        pass_s=rollout.prefill_pass_s,
        token_s=rollout.prefill_token_s,
        pair_s=rollout.prefill_pair_s,
        slowdown=slowdown,
        error=calibration.prefill_error,
        source=calibration.source or GIVEN,
    )


def _check(record: MeasuredDecode | MeasuredPrefill, what: str) -> None:
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, int | float) and (
            value < 0 or math.isnan(value) or (math.isinf(value) and one.name != "knee")
        ):
            raise ValueError(f"{one.name} of a {what} is {value}, but must be a number >= 0")
