"""Spreads of ln(length) of published responses, by name, and from two numbers of a training log.

truncated_share --> sigma_of_truncated      else tail --> TAILS      else sigma
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, NamedTuple

from areal_lab.config.problem import refusal
from simulator.config.schema import LengthConfig, TailName
from simulator.workload.lognormal import clipped_mean
from simulator.workload.sampling import check_mean, increasing_root

MOST_SIGMA: Final = 10.0
"""As of `workload.answers.sigma`."""
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
"""By `workload.answers.tail`. A log-normal of such a spread does not reproduce the trace itself,
which `kind: trace` does."""


def sigma_from(config: LengthConfig) -> float:
    """The spread that a configuration asks for.

    Raises:
        ValueError: no spread has this truncated share; one line with the bound.
    """
    if config.truncated_share is not None:
        return sigma_of_truncated(config.mean_tokens, config.max_tokens, config.truncated_share)
    return TAILS[config.tail].sigma if config.tail else config.sigma


@lru_cache(maxsize=256)
def sigma_of_truncated(mean_tokens: float, max_tokens: int, truncated_share: float) -> float:
    r"""The spread with which a mean after the cut and a truncated share occur together.

    $$ \mu = \ln c - \sigma z, \quad \Phi(z) = 1 - p $$

    for the share p above the cap c; the mean decreases from c to about p c as sigma grows.

    Raises:
        ConfigError: one line with the bound.
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
