"""Response lengths: log-normal with a spike at the cap, a trace, or a constant.

    LengthConfig --lengths_from--> Lengths --draw--> [groups, samples] tokens, 1 .. max_tokens

The mean in the settings is the mean after the cap. Real-valued lengths are rounded at random to one
of the two neighboring whole numbers, which keeps the mean. Responses of one group are correlated
through a shared factor; drift multiplies the lengths before the cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from simulator.config.schema import LengthConfig
from simulator.workload.histogram import Histogram, load_histogram
from simulator.workload.recorded_lengths import recorded_lengths

_NORMAL: Final = NormalDist()


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


def lengths_from(config: LengthConfig) -> Lengths:
    """The lengths that a configuration asks for.

    Raises:
        ValueError: one line: the impossible value, with its bound.
    """
    if config.kind == "lognormal":
        return LogNormalLengths(
            wanted_mean_tokens=config.mean_tokens,
            sigma=config.sigma,
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


class LogNormalLengths:
    r"""min(X, cap) with ln X normal: longer lengths form a spike at the cap.

    $$ E = \Phi(a) + e^{\mu + \sigma^2/2} [\Phi(b - \sigma) - \Phi(a - \sigma)] + c (1 - \Phi(b)),
    \quad a = -\mu / \sigma, \quad b = (\ln c - \mu) / \sigma $$

    is the mean of X between 1 and the cap c; mu is solved for it.
    """

    def __init__(
        self,
        *,
        wanted_mean_tokens: float,
        sigma: float,
        max_tokens: int,
        group_correlation: float = 0.0,
        drift_per_step: float = 0.0,
    ) -> None:
        _check_mean(wanted_mean_tokens, max_tokens)
        self.sigma = sigma
        self.max_tokens = max_tokens
        self.mu = _increasing_root(
            lambda mu: _clipped_mean(mu, sigma, max_tokens),
            wanted_mean_tokens,
            *_sensible_mu(sigma, max_tokens),
        )
        self._correlation = group_correlation
        self._drift = math.log1p(drift_per_step)

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens."""
        ln_tokens = _scores(generator, groups, samples, self._correlation)
        ln_tokens *= self.sigma
        ln_tokens += self._mu_at(step)
        np.clip(ln_tokens, 0.0, math.log(self.max_tokens), out=ln_tokens)
        tokens = np.exp(ln_tokens, out=ln_tokens)
        return _rounded(tokens, generator, self.max_tokens)

    def mean_tokens(self, step: float = 0.0) -> float:
        """Mean after the cap."""
        return _clipped_mean(self._mu_at(step), self.sigma, self.max_tokens)

    def capped_share(self, step: float = 0.0) -> float:
        """Share of the responses that the cap cuts off."""
        return _below((self._mu_at(step) - math.log(self.max_tokens)) / self.sigma)

    def _mu_at(self, step: float) -> float:
        low, high = _sensible_mu(self.sigma, self.max_tokens)
        return min(max(self.mu + step * self._drift, low), high)


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

    def _wanted(self, step: float) -> float:
        # In logarithms, because many steps would overflow.
        ln_tokens = math.log(self.tokens) + step * math.log1p(self.drift_per_step)
        return self.tokens if step == 0 else math.exp(min(ln_tokens, 700.0))


class TraceLengths:
    """Observed lengths, all multiplied by one factor to reach the wanted mean.

    Lengths inside a group are correlated by rank (a Gaussian copula), which leaves the distribution
    of the trace unchanged.
    """

    def __init__(
        self,
        histogram: Histogram,
        *,
        wanted_mean_tokens: float,
        max_tokens: int,
        group_correlation: float = 0.0,
        drift_per_step: float = 0.0,
    ) -> None:
        """See `LengthConfig`; `wanted_mean_tokens` of 0 leaves the lengths unchanged."""
        self.max_tokens = max_tokens
        self._weights = histogram.weight / histogram.weight.sum()
        self._means = histogram.mean_tokens
        self._half_widths = histogram.half_width_tokens
        self._correlation = group_correlation
        self._drift = math.log1p(drift_per_step)
        # Scores at the edges between bins: drawing scores then needs no distribution function.
        shares = np.cumsum(self._weights)[:-1]
        self._edges = np.array([_normal_quantile(share) for share in shares])
        # Beyond these, every length is 1, or the cap.
        self._lowest_scale = 0.5 / histogram.to_tokens[-1]
        self._highest_scale = 2 * max_tokens / histogram.from_tokens[0]
        self.scale = 1.0
        """Factor on the lengths of the trace."""
        if wanted_mean_tokens != 0:
            _check_mean(wanted_mean_tokens, max_tokens)
            self.scale = _increasing_root(
                self._scaled_mean, wanted_mean_tokens, self._lowest_scale, self._highest_scale
            )

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens."""
        bins = np.searchsorted(self._edges, _scores(generator, groups, samples, self._correlation))
        tokens = generator.random((groups, samples))
        tokens -= 0.5
        tokens *= (2 * self._half_widths)[bins]
        tokens += self._means[bins]
        tokens *= self._scale_at(step)
        np.clip(tokens, 1.0, self.max_tokens, out=tokens)
        return _rounded(tokens, generator, self.max_tokens)

    def mean_tokens(self, step: float = 0.0) -> float:
        """Mean after the cap."""
        return self._scaled_mean(self._scale_at(step))

    def capped_share(self, step: float = 0.0) -> float:
        """Share of the responses that the cap cuts off."""
        scale = self._scale_at(step)
        low, high = self._bounds(scale)
        above = np.where(
            high > low, (high - self.max_tokens) / _width(low, high), low > self.max_tokens
        )
        return float(np.clip(above, 0.0, 1.0) @ self._weights)

    def _scale_at(self, step: float) -> float:
        scale = self.scale * math.exp(min(step * self._drift, 600.0))
        return float(min(max(scale, self._lowest_scale), self._highest_scale))

    def _bounds(self, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        spread = self._half_widths
        return scale * (self._means - spread), scale * (self._means + spread)

    def _scaled_mean(self, scale: float) -> float:
        """Mean of the bins, each uniform, clipped to 1 and to the cap."""
        low, high = self._bounds(scale)
        middle, width, cap = (low + high) / 2, _width(low, high), float(self.max_tokens)
        over = np.where(low >= cap, middle - cap, np.maximum(high - cap, 0.0) ** 2 / (2 * width))
        under = np.where(high <= 1, 1 - middle, np.maximum(1 - low, 0.0) ** 2 / (2 * width))
        return float((middle - over + under) @ self._weights)


def _width(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """Width of a bin; 1 for a bin of one length, which only avoids a division by 0."""
    return np.where(high > low, high - low, 1.0)


def _trace_from(config: LengthConfig) -> TraceLengths:
    return TraceLengths(
        load_histogram(config.trace),
        wanted_mean_tokens=config.mean_tokens,
        max_tokens=config.max_tokens,
        group_correlation=config.group_correlation,
        drift_per_step=config.drift_per_step,
    )


def _scores(
    generator: np.random.Generator, groups: int, samples: int, correlation: float
) -> NDArray[np.float64]:
    """Standard normal numbers, correlated within one group (row)."""
    scores = generator.standard_normal((groups, samples))
    # Always drawn, so that later numbers stay the same.
    common = generator.standard_normal((groups, 1))
    scores *= math.sqrt(1 - correlation)
    common *= math.sqrt(correlation)
    scores += common
    return scores


def _rounded(
    tokens: NDArray[np.float64], generator: np.random.Generator, max_tokens: int
) -> NDArray[np.int64]:
    """Round to a neighboring whole number at random, which keeps the mean."""
    tokens += generator.random(tokens.shape)
    whole = tokens.astype(np.int64)
    # exp(ln(cap)) may lie a bit above the cap.
    return np.minimum(whole, max_tokens, out=whole)


def _clipped_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of a log-normal clipped to 1 and to the cap."""
    low, high = -mu / sigma, (math.log(cap) - mu) / sigma
    inside = math.exp(mu + sigma**2 / 2) * (_below(high - sigma) - _below(low - sigma))
    return _below(low) + inside + cap * _below(-high)


def _sensible_mu(sigma: float, cap: float) -> tuple[float, float]:
    """Bounds beyond which all lengths (but one in 1e30) are 1, or the cap."""
    return -12 * sigma, math.log(cap) + 12 * sigma


def _below(score: float) -> float:
    """Normal distribution function, exact far into its lower tail."""
    return math.erfc(-score / math.sqrt(2)) / 2


def _normal_quantile(share: float) -> float:
    if 0 < share < 1:
        return _NORMAL.inv_cdf(share)
    return -math.inf if share <= 0 else math.inf


def _increasing_root(
    function: Callable[[float], float], wanted: float, low: float, high: float
) -> float:
    """Where an increasing function has the value `wanted`, by bisection."""
    while True:
        middle = (low + high) / 2
        if not low < middle < high:  # neighboring numbers
            return middle
        if function(middle) < wanted:
            low = middle
        else:
            high = middle


def _check_mean(mean_tokens: float, max_tokens: int) -> None:
    if not 1 < mean_tokens < max_tokens:
        raise refusal(
            "workload.answers.mean_tokens",
            f"workload.answers.mean_tokens is {mean_tokens}, but must be between 1 and "
            f"max_tokens ({max_tokens}), because it is the mean after the cap; change one of them",
        )
