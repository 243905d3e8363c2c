"""Random numbers besides the lengths: streams, latencies, failures and turns.

Random number streams: one generator for each seed, purpose and block.

Latencies outside the GPUs: scoring a sample, calling a tool. Seconds.

Faults: failures of nodes, and engines that are stragglers. Seconds.

Model calls per response of agents: a geometric distribution with a spike at its cap.

    k = min(geometric(p), most)        P(one more turn) = 1 - p, until the agent is stopped
    mean = (1 - (1 - p)^most) / p

Published means: 10.9 turns in SWE-Bench and 6.3 in BFCL (arXiv:2511.02230, 2026-05). Turns do not
depend on the tokens of a response, which are divided among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.config.schema import FaultsConfig, LatencyConfig

LENGTHS: Final = 1
REWARDS: Final = 2
TOOLS: Final = 3
ENGINE_FAILURES: Final = 4
TRAINER_FAILURES: Final = 5
STRAGGLERS: Final = 6
EQUAL_REWARDS: Final = 7
TURNS: Final = 8


def stream(seed: int, purpose: int, number: int) -> np.random.Generator:
    """The generator of block `number` of the stream that one purpose has under a seed."""
    return np.random.default_rng([seed, purpose, number])


@dataclass(frozen=True, slots=True)
class Latency:
    """Independent samples of one distribution."""

    config: LatencyConfig

    def draw(
        self, generator: np.random.Generator, size: int | tuple[int, ...], /
    ) -> NDArray[np.float64]:
        """Seconds, in an array of that shape."""
        mean_s, sigma = self.config.mean_s, self.config.sigma
        if mean_s == 0 or self.config.kind == "constant":
            return np.full(size, mean_s, dtype=np.float64)
        if self.config.kind == "exponential":
            return mean_s * generator.standard_exponential(size)
        # The mean of exp(sigma Z) is exp(sigma^2 / 2).
        scores: NDArray[np.float64] = np.asarray(generator.standard_normal(size))
        return mean_s * np.exp(sigma * scores - sigma**2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailures:
    """Nodes fail independently, at a constant rate while they work."""

    mtbf_s: float
    """Mean time between failures of one node; infinity never fails."""
    detection_s: float
    """Seconds from the failure until the run notices."""
    restart_s: float
    """Seconds from then until the node works again."""

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """Seconds that one node works until it fails; infinite if it never does."""
        drawn = float(generator.standard_exponential())
        return math.inf if math.isinf(self.mtbf_s) else self.mtbf_s * drawn


def failures_from(config: FaultsConfig) -> NodeFailures | None:
    """The failures that a configuration asks for; None if nodes never fail."""
    failures = NodeFailures(
        mtbf_s=3600 * config.node_mtbf_h or math.inf,
        detection_s=config.detection_s,
        restart_s=config.restart_s,
    )
    return None if math.isinf(failures.mtbf_s) else failures


def engine_slowdowns(
    config: FaultsConfig, engines: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Factor by which each engine's steps take longer; 1 for most.

    The share times the number of engines is rounded up or down at random, so that its mean is
    exact; which engines are stragglers is random.
    """
    slowdowns = np.ones(engines)
    order = generator.permutation(engines)
    stragglers = math.floor(config.straggler_share * engines + float(generator.random()))
    slowdowns[order[:stragglers]] = config.straggler_slowdown
    return slowdowns


_HALVINGS = 60
"""Halvings of the interval of `ending`."""


@dataclass(frozen=True)
class TurnCounts:
    """Numbers of turns with a given mean."""

    mean: float
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.most:
            raise ValueError(
                f"the mean number of turns is {self.mean}, but must be from 1 to the largest one "
                f"({self.most})"
            )

    @cached_property
    def ending(self) -> float:
        """Probability that a turn is the last one, before the cap."""
        if self.mean == 1:
            return 1.0
        if self.mean == self.most:
            return 0.0
        low, high = 0.0, 1.0  # the mean falls from `most` to 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(middle, self.most) > self.mean else (low, middle)
        return (low + high) / 2

    @property
    def capped(self) -> float:
        """Share of responses that the cap ends."""
        return (1 - self.ending) ** (self.most - 1)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Turns of `size` responses."""
        if self.ending == 0:
            return np.full(size, self.most, np.int64)
        return np.minimum(generator.geometric(self.ending, size), self.most).astype(np.int64)


def _mean(ending: float, most: int) -> float:
    return float(-np.expm1(most * np.log1p(-ending)) / ending) if ending < 1 else 1.0
