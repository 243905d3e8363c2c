"""Curves of response lengths for pictures, and what the longest response of a batch costs.

    quantile_curves   tokens against the share of responses, for a probability plot
    batch_curve       responses that still run against the tokens that each has generated
    batch_tail        the same as numbers, averaged over random batches

A batch is one synchronous step: all responses start together and get a token per decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from simulator.calibrate.length_fit import Family, LengthFit
from simulator.stats.statistics import Estimate, estimate
from simulator.workload.lengths import Lengths
from simulator.workload.sampling import normal_quantiles

_LEAST_SHARE: Final = 1e-4
"""Most extreme share of a curve."""


class QuantilePoint(TypedDict):
    """A point of a probability plot."""

    family: Family
    share: float
    """Share of the responses up to this length."""
    score: float
    """That share as a quantile of the normal distribution: a log-normal is a straight line."""
    tokens: float


class BatchPoint(TypedDict):
    """A moment of a batch."""

    tokens: float
    """Decode steps since its start."""
    running: float
    """Share of its responses that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTail:
    """What the length of the longest response does to a batch; means over random batches."""

    mean_tokens: Estimate
    """Mean length of a response of the batch."""
    longest_tokens: Estimate
    """Decode steps until the last response ends."""
    done_at_half: Estimate
    """Share of the responses that have ended when half of these steps are done."""
    waiting: Estimate
    """Share of the places of ended responses in the decode steps: 1 - mean / longest."""


def quantile_curves(
    fit: LengthFit, families: Sequence[Family] | None = None, *, points: int = 121
) -> list[QuantilePoint]:
    """Quantiles of the observed lengths (`trace`) and of what is fitted to them.

    The shares are evenly spaced in normal scores, from one response of all to all but one.
    """
    least = min(0.25, max(_LEAST_SHARE, 0.5 / fit.answers))
    edge = float(normal_quantiles(np.array([1 - least]))[0])
    scores = np.linspace(-edge, edge, points)
    shares = np.array([math.erfc(-score / math.sqrt(2)) / 2 for score in scores.tolist()])
    return [
        {"family": family, "share": share, "score": score, "tokens": tokens}
        for family in families or fit.families
        for share, score, tokens in zip(
            shares.tolist(), scores.tolist(), fit.quantiles(shares, family).tolist(), strict=True
        )
    ]


def batch_curve(
    lengths: Lengths, groups: int, samples: int, *, seed: int = 1, points: int = 200
) -> list[BatchPoint]:
    """Responses of one random batch that still run, over its decode steps."""
    tokens = np.sort(_batch(lengths, groups, samples, np.random.default_rng(seed)).ravel())
    places = np.linspace(0, tokens[-1], points)
    running = 1 - np.searchsorted(tokens, places, side="right") / len(tokens)
    return [
        {"tokens": place, "running": share}
        for place, share in zip(places.tolist(), running.tolist(), strict=True)
    ]


def batch_tail(
    lengths: Lengths, groups: int, samples: int, *, batches: int = 40, seed: int = 1
) -> BatchTail:
    """Averages over random batches, with 95 % intervals.

    Args:
        groups: prompts of a batch.
        samples: responses per prompt.
        batches: how many are drawn.
    """
    generator = np.random.default_rng(seed)
    drawn = [_batch(lengths, groups, samples, generator) for _ in range(batches)]
    means = [float(one.mean()) for one in drawn]
    longest = [float(one.max()) for one in drawn]
    return BatchTail(
        mean_tokens=estimate(means),
        longest_tokens=estimate(longest),
        done_at_half=estimate([float((one <= one.max() / 2).mean()) for one in drawn]),
        waiting=estimate([1 - mean / most for mean, most in zip(means, longest, strict=True)]),
    )


def _batch(
    lengths: Lengths, groups: int, samples: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    if groups < 1 or samples < 1:
        raise ValueError(
            f"a batch of {groups} prompts x {samples} responses is empty; both must be at least 1"
        )
    return lengths.draw(generator, groups, samples)
