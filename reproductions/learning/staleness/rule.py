"""A rule of thumb: above a threshold of a predictor, a setting loses more than a limit.

                 loses more than the limit    loses less
above            hit                          false alarm
below            miss                         silent, rightly
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reproductions.learning.staleness.cells import Cell, Predictor
from simulator.stats.statistics import Estimate

ROUND: Final = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Thresholds of drift that people can remember."""
_RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """How often a rule was right."""

    hits: int = 0
    misses: int = 0
    false_alarms: int = 0
    silent: int = 0
    """Below the threshold, and lost less."""

    @property
    def cells(self) -> int:
        """All that were looked at."""
        return self.hits + self.misses + self.false_alarms + self.silent

    @property
    def losing(self) -> int:
        """Cells that lose more than the limit."""
        return self.hits + self.misses

    @property
    def balanced_accuracy(self) -> float:
        """Mean of the shares that are right among losing and other cells; nan without either.

        A rule that always says the same has 0.5, however many cells lose.
        """
        others = self.false_alarms + self.silent
        if not self.losing or not others:
            return math.nan
        return (self.hits / self.losing + self.silent / others) / 2

    def __add__(self, other: Verdicts) -> Verdicts:
        """Both counted together."""
        return Verdicts(
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            false_alarms=self.false_alarms + other.false_alarms,
            silent=self.silent + other.silent,
        )


def verdicts(
    cells: Iterable[Cell], threshold: float, limit: float, predictor: Predictor
) -> Verdicts:
    """Count what a threshold says of cells.

    Args:
        limit: of the loss, in reward.
    """
    counts = {(above, loses): 0 for above in (True, False) for loses in (True, False)}
    for cell in cells:
        counts[predictor(cell) > threshold, cell.loss > limit] += 1
    return Verdicts(
        hits=counts[True, True],
        misses=counts[False, True],
        false_alarms=counts[True, False],
        silent=counts[False, False],
    )


def best_threshold(
    cells: Sequence[Cell],
    limit: float,
    predictor: Predictor,
    candidates: Sequence[float] | None = None,
) -> float | None:
    """The threshold with the best balanced accuracy; of equally good ones the smallest.

    Args:
        candidates: to choose from, in order; None takes the middles between neighboring values.

    Returns:
        None if all cells lose more than the limit, or none does: then nothing tells where.
    """
    if candidates is None:
        values = sorted({predictor(cell) for cell in cells})
        candidates = [(low + high) / 2 for low, high in pairwise(values)]

    def accuracy(threshold: float) -> float:
        return verdicts(cells, threshold, limit, predictor).balanced_accuracy

    losing = sum(cell.loss > limit for cell in cells)
    if not candidates or losing in (0, len(cells)):
        return None
    return max(candidates, key=accuracy)


def rank_correlation(one: ArrayLike, other: ArrayLike) -> NDArray[np.float64]:
    """Spearman's, over the last axis: the correlation of ranks; equal values share theirs.

    nan where either side has fewer than two different values.
    """
    ranks = _ranks(one), _ranks(other)
    with np.errstate(invalid="ignore"):
        first, second = (
            (own - own.mean(-1, keepdims=True)) / own.std(-1, keepdims=True) for own in ranks
        )
        return np.asarray((first * second).mean(-1))


def correlation_with_loss(cells: Sequence[Cell], predictor: Predictor) -> Estimate:
    """Rank correlation of a predictor with the loss; nan with fewer than two cells.

    Its interval holds 95 % of the correlations over cells that are drawn again with replacement,
    the same ones for every predictor.
    """
    if len(cells) < 2:
        return Estimate(math.nan, -math.inf, math.inf)
    values = np.array([predictor(cell) for cell in cells])
    losses = np.array([cell.loss for cell in cells])
    drawn = np.random.default_rng(0).integers(0, len(cells), (_RESAMPLES, len(cells)))
    again = rank_correlation(values[drawn], losses[drawn])
    known = again[~np.isnan(again)]
    low, high = np.quantile(known, (0.025, 0.975)) if known.size else (-math.inf, math.inf)
    return Estimate(float(rank_correlation(values, losses)), float(low), float(high))


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Counted from 1, of some tens of values: how many are smaller, and half of those as large."""
    array = np.asarray(values)
    own, others = array[..., :, None], array[..., None, :]
    ranks: NDArray[np.float64] = ((others < own).sum(-1) + (others <= own).sum(-1) + 1) / 2
    return ranks
