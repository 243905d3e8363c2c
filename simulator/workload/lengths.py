"""Distributions of response lengths: log-normal with a spike at the cap, a trace, or a constant.

    LengthConfig --lengths_from--> Lengths --draw--> [groups, samples] tokens, 1 .. max_tokens

The mean in the settings is the mean after the cap. Real-valued lengths are rounded at random to one
of the two neighboring whole numbers, which keeps the mean. Responses of one group are correlated
through a shared factor; drift multiplies the lengths before the cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from simulator.config.schema import LengthConfig
from simulator.workload.lognormal import LogNormalLengths
from simulator.workload.recorded_lengths import recorded_lengths
from simulator.workload.tails import sigma_from
from simulator.workload.trace_lengths import TraceLengths
from simulator.workload.traces import load_histogram


class Lengths(Protocol):
    """A distribution of response lengths."""

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens, each at least 1, at a training step."""
        ...

    def mean_tokens(self, step: float = 0.0) -> float:
        """Mean after the cap."""
        ...

    def capped_share(self, step: float = 0.0) -> float:
        """Share of the responses that the cap cuts off."""
        ...


class Distribution(Lengths, Protocol):
    """Lengths with a known distribution, without drift."""

    def share_up_to(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distribution function at whole lengths."""
        ...

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths up to which these shares of the responses are."""
        ...


def lengths_from(config: LengthConfig) -> Lengths:
    """The lengths that a configuration asks for.

    Raises:
        ValueError: one line: the impossible value, with its bound.
    """
    if config.kind == "lognormal":
        return LogNormalLengths(
            wanted_mean_tokens=config.mean_tokens,
            sigma=sigma_from(config),
            max_tokens=config.max_tokens,
            group_correlation=config.group_correlation,
            drift_per_step=config.drift_per_step,
        )
    if config.kind == "trace":
        return _trace_from(config)
    if config.kind == "constant":
        return ConstantLengths(
            tokens=config.mean_tokens,
            max_tokens=config.max_tokens,
            drift_per_step=config.drift_per_step,
        )
    return recorded_lengths(config.trace, max_tokens=config.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLengths:
    """All responses of one training step have the same length."""

    tokens: float
    max_tokens: int
    drift_per_step: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.max_tokens:
            raise refusal(
                "workload.answers.mean_tokens",
                f"workload.answers.mean_tokens is {self.tokens}, but must be from 1 to max_tokens "
                f"({self.max_tokens})",
            )

    def draw(
        self,
        generator: np.random.Generator,  # noqa: ARG002 - unused: nothing is random
        groups: int,
        samples: int,
        *,
        step: float = 0.0,
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens; `generator` is unused."""
        return np.full((groups, samples), int(self.mean_tokens(step)), dtype=np.int64)

    def mean_tokens(self, step: float = 0.0) -> float:
        """The length, a whole number."""
        return float(round(min(max(self._wanted(step), 1.0), self.max_tokens)))

    def capped_share(self, step: float = 0.0) -> float:
        """1 or 0: all responses or none."""
        return float(self._wanted(step) > self.max_tokens)

    def share_up_to(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """0 below the length, 1 from there on."""
        return (np.asarray(tokens) >= self.mean_tokens()).astype(np.float64)

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The length, for every share."""
        return np.full(np.shape(shares), self.mean_tokens())

    def _wanted(self, step: float) -> float:
        # In logarithms, because many steps would overflow.
        ln_tokens = math.log(self.tokens) + step * math.log1p(self.drift_per_step)
        return self.tokens if step == 0 else math.exp(min(ln_tokens, 700.0))


def _trace_from(config: LengthConfig) -> TraceLengths:
    return TraceLengths(
        load_histogram(config.trace),
        wanted_mean_tokens=config.mean_tokens,
        max_tokens=config.max_tokens,
        group_correlation=config.group_correlation,
        drift_per_step=config.drift_per_step,
    )
