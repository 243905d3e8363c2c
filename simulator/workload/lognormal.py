"""Log-normal response lengths, with a spike at the cap. Tokens."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.workload.sampling import (
    check_mean,
    correlated_scores,
    increasing_root,
    normal_quantiles,
    rounded,
)


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
    """Normal distribution function, exact far into its lower tail."""
    return math.erfc(-score / math.sqrt(2)) / 2
