"""Latencies outside the GPUs: scoring a sample, calling a tool. Seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.config.schema import LatencyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Independent draws of one distribution."""

    kind: str
    mean_s: float
    sigma: float = 1.0
    """Spread of ln(seconds), for `lognormal`."""

    def draw(
        self, generator: np.random.Generator, size: int | tuple[int, ...], /
    ) -> NDArray[np.float64]:
        """Seconds, in an array of that shape."""
        if self.mean_s == 0 or self.kind == "constant":
            return np.full(size, self.mean_s, dtype=np.float64)
        if self.kind == "exponential":
            return self.mean_s * generator.standard_exponential(size)
        # The mean of exp(sigma Z) is exp(sigma^2 / 2).
        scores: NDArray[np.float64] = np.asarray(generator.standard_normal(size))
        return self.mean_s * np.exp(self.sigma * scores - self.sigma**2 / 2)


def latency_from(config: LatencyConfig) -> Latency:
    """The latency that a configuration asks for."""
    return Latency(kind=config.kind, mean_s=config.mean_s, sigma=config.sigma)
