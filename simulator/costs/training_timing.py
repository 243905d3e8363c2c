"""Duration of a training step, by part, and a step with a measured duration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.transformer import ModelShape
from simulator.costs.training_speed import forward_flops

FORWARD_BACKWARD = "forward/backward"
PADDING = "padding"
BUBBLE = "pipeline bubble"
SLOWEST_RANK = "waiting for the slowest rank"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
PROXIMAL = "proximal log-probs"
REFERENCE = "reference log-probs"
CRITIC = "critic"
MEASURED = "train"
FIXED = "fixed time"

Sizes: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Tokens of prompt and response of each sequence, in batch order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTiming:
    """One training step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by part; their sum is `seconds`."""
    micro_batches: int
    """Of all ranks and minibatches."""
    tokens: int
    flops: float
    """FLOPs of the model: forward and backward passes, and the forward passes of log-probs, without
    recomputation and padding."""

    def __post_init__(self) -> None:
        if self.seconds != sum(self.parts.values()):
            raise ValueError(f"parts {dict(self.parts)} do not sum to {self.seconds} seconds")


class Training(Protocol):
    """Anything that gives the duration of a training step."""

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One training step on sequences of these lengths (prompt and response), in batch order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """A step of measured duration: constant, or growing with the tokens of the batch."""

    seconds: float
    token_s: float = 0.0
    """Per token of prompt and response."""
    model: ModelShape

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ValueError(f"trainer.step_s is {self.seconds}, but must be > 0 and finite")
        if not math.isfinite(self.token_s) or self.token_s < 0:
            raise ValueError(f"trainer.token_s is {self.token_s}, but must be >= 0 and finite")

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """The measured time, with the FLOPs of these sequences."""
        sizes = np.asarray(lengths, np.float64)
        pairs = float((sizes * (sizes + 1) / 2).sum())
        seconds = self.seconds + self.token_s * float(sizes.sum())
        return TrainTiming(
            seconds=seconds,
            parts={MEASURED: seconds},
            micro_batches=minibatches,
            tokens=int(sizes.sum()),
            flops=3 * float(forward_flops(float(sizes.sum()), pairs, self.model)),
        )
