r"""Variance between and within groups, by analysis of variance (Fisher 1925).

value = group's mean + spread within the group        variance: between + within

correlation of two values of a group = between / (between + within)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_RESAMPLED: Final = 1000
_AT_ONCE: Final = 1_000_000
"""Numbers of one block of resampling, which bounds its memory."""

Floats = NDArray[np.float64]


class Components(NamedTuple):
    """Components of variance; arrays if they are of many resamples."""

    between: Floats | float
    within: Floats | float

    @property
    def correlation(self) -> Floats | float:
        """Of two values of one group, 0 to 1; nan if nothing varies."""
        with np.errstate(invalid="ignore"):
            return np.divide(self.between, np.add(self.between, self.within))


def components(counts: Floats, means: Floats, spreads: Floats) -> Components:
    r"""Components from the values' count, mean and standard deviation (ddof 1) in each group.

    $$ W = \frac{\sum (n_i - 1) s_i^2}{N - g}, \quad
    B = \frac{\sum n_i (m_i - m)^2}{g - 1}, \quad
    \sigma_{between}^2 = \frac{B - W}{n_0}, \quad
    n_0 = \frac{N - \sum n_i^2 / N}{g - 1} $$

    Args:
        counts: [..., groups] values in each group; those with one value have no spread.
        means: [..., groups].
        spreads: [..., groups]; ignored where the count is 1.
    """
    total, groups = counts.sum(axis=-1), counts.shape[-1]
    inside = np.where(counts > 1, (counts - 1) * spreads**2, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):  # nan if all groups have one value
        within = inside.sum(axis=-1) / (total - groups)
    middle = (counts * means).sum(axis=-1) / total
    squares = (counts * (means - middle[..., None]) ** 2).sum(axis=-1) / (groups - 1)
    size = (total - (counts**2).sum(axis=-1) / total) / (groups - 1)
    return Components(np.maximum(0.0, (squares - within) / size), within)


def summaries(groups: Sequence[Sequence[float]]) -> tuple[Floats, Floats, Floats]:
    """Count, mean and standard deviation of each group."""
    arrays = [np.asarray(group, np.float64) for group in groups]
    counts = np.array([len(one) for one in arrays], np.float64)
    means = np.array([one.mean() for one in arrays])
    spreads = np.array([one.std(ddof=1) if len(one) > 1 else 0.0 for one in arrays])
    return counts, means, spreads


def correlation_interval(counts: Floats, means: Floats, spreads: Floats) -> tuple[float, float]:
    """95 % interval of the correlation, from groups that are drawn again (bootstrap, seed 1)."""
    generator, groups, found = np.random.default_rng(1), len(counts), []
    block = max(1, min(_RESAMPLED, _AT_ONCE // groups))
    for first in range(0, _RESAMPLED, block):
        chosen = generator.integers(0, groups, (min(block, _RESAMPLED - first), groups))
        found.append(components(counts[chosen], means[chosen], spreads[chosen]).correlation)
    low, high = np.nanquantile(np.concatenate(found), [0.025, 0.975]).tolist()
    return low, high
