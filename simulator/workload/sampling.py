"""Shared by the distributions of response lengths: correlated scores, rounding, a wanted mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal

_NORMAL: Final = NormalDist()


def correlated_scores(
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


def rounded(
    tokens: NDArray[np.float64], generator: np.random.Generator, max_tokens: int
) -> NDArray[np.int64]:
    """Round to a neighboring whole number at random, which keeps the mean."""
    tokens += generator.random(tokens.shape)
    whole = tokens.astype(np.int64)
    # exp(ln(cap)) may lie a bit above the cap.
    return np.minimum(whole, max_tokens, out=whole)


def normal_quantiles(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores below which these shares of a standard normal distribution are."""
    values = [_normal_quantile(share) for share in np.asarray(shares, np.float64).ravel().tolist()]
    return np.array(values).reshape(np.shape(shares))


def _normal_quantile(share: float) -> float:
    if 0 < share < 1:
        return _NORMAL.inv_cdf(share)
    return -math.inf if share <= 0 else math.inf


def increasing_root(
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


def check_mean(mean_tokens: float, max_tokens: int) -> None:
    """Refuse a mean that no distribution with this cap has.

    Raises:
        ConfigError: one line, with both.
    """
    if not 1 < mean_tokens < max_tokens:
        raise refusal(
            "workload.answers.mean_tokens",
            f"workload.answers.mean_tokens is {mean_tokens}, but must be between 1 and "
            f"max_tokens ({max_tokens}), because it is the mean after the cap; change one of them",
        )
