"""Response lengths: log-normal with a spike at the cap, a trace, recorded, or constant. Tokens.

    LengthConfig --lengths_from--> Lengths --draw--> [groups, samples] tokens, 1 .. max_tokens

The mean in the settings is the mean after the cap. Real-valued lengths are rounded at random to one
of the two neighboring whole numbers, which keeps the mean. Responses of one group are correlated
through a shared factor; drift multiplies the lengths before the cap.

Log-normal response lengths, with a spike at the cap. Tokens.

Spreads of ln(length) of published responses, by name, and from two numbers of a training log.

truncated_share --> sigma_of_truncated      else tail --> TAILS      else sigma
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from simulator.config.schema import LengthConfig, TailName
from simulator.workload.histogram import (
    check_mean,
    correlated_scores,
    increasing_root,
    normal_quantiles,
    rounded,
)
from simulator.workload.recorded_run import recorded_lengths
from simulator.workload.trace_lengths import TraceLengths, load_histogram


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
        check_mean(wanted_mean_tokens, max_tokens)
        self.sigma = sigma
        self.max_tokens = max_tokens
        self.mu = _mu_of_mean(wanted_mean_tokens, sigma, max_tokens)
        self._correlation = group_correlation
        self._drift = math.log1p(drift_per_step)

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens."""
        ln_tokens = correlated_scores(generator, groups, samples, self._correlation)
        ln_tokens *= self.sigma
        ln_tokens += self._mu_at(step)
        np.clip(ln_tokens, 0.0, math.log(self.max_tokens), out=ln_tokens)
        tokens = np.exp(ln_tokens, out=ln_tokens)
        return rounded(tokens, generator, self.max_tokens)

    def mean_tokens(self, step: float = 0.0) -> float:
        """Mean after the cap."""
        return clipped_mean(self._mu_at(step), self.sigma, self.max_tokens)

    def capped_share(self, step: float = 0.0) -> float:
        """Share of the responses that the cap cuts off."""
        return _below((self._mu_at(step) - math.log(self.max_tokens)) / self.sigma)

    def mean_with_cap(self, max_tokens: int) -> float:
        """Mean of the same lengths, cut at another cap."""
        return clipped_mean(self.mu, self.sigma, max_tokens)

    def share_up_to(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distribution function at whole lengths, which stand for what is rounded to them."""
        scores = (np.log(np.asarray(tokens, np.float64) + 0.5) - self.mu) / self.sigma
        below = np.array([_below(score) for score in scores.ravel().tolist()]).reshape(scores.shape)
        return np.where(np.asarray(tokens) >= self.max_tokens, 1.0, below)

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths up to which these shares of the responses are, cut at the cap."""
        ln_tokens = self.mu + self.sigma * normal_quantiles(shares)
        capped = ln_tokens >= math.log(self.max_tokens)  # whose exp may be a bit less than the cap
        return np.where(capped, self.max_tokens, np.exp(np.where(capped, 0.0, ln_tokens.clip(0.0))))

    def _mu_at(self, step: float) -> float:
        low, high = _sensible_mu(self.sigma, self.max_tokens)
        return min(max(self.mu + step * self._drift, low), high)


@lru_cache(maxsize=256)
def _mu_of_mean(mean_tokens: float, sigma: float, max_tokens: int) -> float:
    """The mu of a mean; a plan asks hundreds of times for the same one."""
    return increasing_root(
        lambda mu: clipped_mean(mu, sigma, max_tokens),
        mean_tokens,
        *_sensible_mu(sigma, max_tokens),
    )


def clipped_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of a log-normal clipped to 1 and to the cap."""
    low, high = -mu / sigma, (math.log(cap) - mu) / sigma
    inside = math.exp(mu + sigma**2 / 2) * (_below(high - sigma) - _below(low - sigma))
    return _below(low) + inside + cap * _below(-high)


def _sensible_mu(sigma: float, cap: float) -> tuple[float, float]:
    """Bounds beyond which all lengths (but one in 1e30) are 1, or the cap."""
    return -12 * sigma, math.log(cap) + 12 * sigma


def _below(score: float) -> float:
    return math.erfc(-score / math.sqrt(2)) / 2


MOST_SIGMA: Final = 10.0
"""Largest `workload.answers.sigma`."""
_LEAST_SIGMA: Final = 1e-6


class Tail(NamedTuple):
    """A named spread."""

    sigma: float
    source: str


TAILS: Final[Mapping[TailName, Tail]] = MappingProxyType(
    {
        "math": Tail(
            0.684, "ServeGen (2025), DeepSeek-R1, client 66: 41,230 responses to short prompts"
        ),
        "deepscaler": Tail(
            0.570,
            "DeepScaleR (2025-02-10), training on mathematics: 3,500 tokens on average, 4.2 % cut "
            "off at 8,192",
        ),
        "reasoning": Tail(0.825, "ServeGen (2025), DeepSeek-R1, client 35: 395,593 responses"),
        "service": Tail(0.970, "ServeGen (2025), DeepSeek-R1, all clients: 1,383,686 responses"),
        "conversation": Tail(1.358, "Mooncake (2025), conversations with Kimi: 12,031 responses"),
    }
)
"""Tails by `workload.answers.tail`. A log-normal of such a spread does not reproduce the trace
itself, which `kind: trace` does."""


def sigma_from(config: LengthConfig) -> float:
    """The spread that a configuration asks for."""
    if config.truncated_share is not None:
        return sigma_of_truncated(config.mean_tokens, config.max_tokens, config.truncated_share)
    return TAILS[config.tail].sigma if config.tail else config.sigma


@lru_cache(maxsize=256)
def sigma_of_truncated(mean_tokens: float, max_tokens: int, truncated_share: float) -> float:
    r"""The spread with which a mean after the cut and a truncated share occur together.

    $$ \mu = \ln c - \sigma z, \quad \Phi(z) = 1 - p $$

    for the share p above the cap c; the mean decreases from c to about p c as sigma grows.
    """
    check_mean(mean_tokens, max_tokens)
    z = NormalDist().inv_cdf(1 - truncated_share)
    ln_cap = math.log(max_tokens)

    def mean_of(sigma: float) -> float:
        return clipped_mean(ln_cap - sigma * z, sigma, max_tokens)

    least = mean_of(MOST_SIGMA)
    if mean_tokens < least:
        raise refusal(
            "workload.answers.truncated_share",
            f"workload.answers.truncated_share is {truncated_share:g}, but with a mean of "
            f"{mean_tokens:g} tokens after the cut at {max_tokens} it must be below "
            f"{_most_share(mean_tokens, max_tokens):.3g}, or responses of the maximum length alone "
            "make the mean larger; lower it, or raise mean_tokens",
        )
    return increasing_root(lambda sigma: -mean_of(sigma), -mean_tokens, _LEAST_SIGMA, MOST_SIGMA)


def _most_share(mean_tokens: float, max_tokens: int) -> float:
    """Share of the cap with which all other responses of a mean have one token."""
    return (mean_tokens - 1) / (max_tokens - 1)


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
    """The lengths that a configuration asks for."""
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
