"""Shared by the distributions of response lengths: correlated scores, rounding, a wanted mean.

Histograms of response lengths. Tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Self

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
    """Argument at which an increasing function has the value `wanted`, by bisection."""
    while True:
        middle = (low + high) / 2
        if not low < middle < high:  # neighboring numbers
            return middle
        if function(middle) < wanted:
            low = middle
        else:
            high = middle


def check_mean(mean_tokens: float, max_tokens: int) -> None:
    """Refuse a mean that no distribution with this cap has."""
    if not 1 < mean_tokens < max_tokens:
        raise refusal(
            "workload.answers.mean_tokens",
            f"workload.answers.mean_tokens is {mean_tokens}, but must be between 1 and "
            f"max_tokens ({max_tokens}), because it is the mean after the cap; change one of them",
        )


COLUMNS: Final = ("from_tokens", "to_tokens", "mean_tokens", "weight")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """Bins of lengths with weights, in ascending order; a bin may hold a single length.

    Lengths are spread evenly around the mean of their bin, as widely as its bounds allow, so that
    both the bounds and the mean of each bin are right.
    """

    from_tokens: NDArray[np.float64]
    to_tokens: NDArray[np.float64]
    """Inclusive."""
    mean_tokens: NDArray[np.float64]
    """Mean of the lengths in the bin."""
    weight: NDArray[np.float64]
    """Weights in any unit: numbers of requests, or shares."""
    source: str = ""
    """The comments of the file: where its lengths come from."""

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in COLUMNS]
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"columns of different lengths: {[len(one) for one in columns]}")
        if not len(self.weight):
            raise ValueError("there are no lengths")
        for name, column in zip(COLUMNS, columns, strict=True):
            if not np.isfinite(column).all():
                bad = column[~np.isfinite(column)][0]
                raise ValueError(f"{name} is {bad} somewhere, but must be finite")
        if (self.weight < 0).any() or self.weight.sum() <= 0:
            raise ValueError("weights must be >= 0, and not all 0")
        if self.from_tokens[0] < 1:
            raise ValueError(
                f"a length is {self.from_tokens.min():g}, but must be at least 1 token; "
                "leave such rows out"
            )
        middle = (self.from_tokens <= self.mean_tokens) & (self.mean_tokens <= self.to_tokens)
        if not middle.all() or (np.diff(self.from_tokens) < 0).any():
            raise ValueError("bins must ascend, each with from_tokens <= mean_tokens <= to_tokens")

    @classmethod
    def of_lengths(
        cls,
        tokens: Sequence[float] | NDArray[np.float64],
        weights: Sequence[float] | None = None,
        *,
        source: str = "",
    ) -> Self:
        """A bin for each distinct length.

        Args:
            tokens: in any order.
            weights: of the same; None counts each length once.
        """
        distinct, place = np.unique(np.asarray(tokens, np.float64), return_inverse=True)
        # numpy takes places as intp, which has 32 bits in a browser.
        place = place.astype(np.intp, copy=False)
        weight = np.bincount(place, weights=weights, minlength=len(distinct)).astype(np.float64)
        return cls(
            from_tokens=distinct,
            to_tokens=distinct,
            mean_tokens=distinct,
            weight=weight,
            source=source,
        )

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(self.mean_tokens @ self.weight / self.weight.sum())

    @property
    def longest(self) -> float:
        """The longest length."""
        return float(self.to_tokens[self.weight > 0].max())

    @property
    def half_width_tokens(self) -> NDArray[np.float64]:
        """Spread of lengths to either side of the mean of their bin."""
        return np.minimum(self.mean_tokens - self.from_tokens, self.to_tokens - self.mean_tokens)

    def share_at_least(self, tokens: float) -> float:
        """Share of the lengths whose bin begins at `tokens` or above."""
        return float(self.weight[self.from_tokens >= tokens].sum() / self.weight.sum())

    def to_csv(self) -> str:
        """A file that `read_table` reads back, with the source as comments."""
        single = bool((self.from_tokens == self.to_tokens).all())
        names = ("mean_tokens", "weight") if single else COLUMNS
        rows = zip(*(getattr(self, name).tolist() for name in names), strict=True)
        lines = [f"# {line}" for line in self.source.splitlines()]
        lines.append("tokens,weight" if single else ",".join(names))
        lines += [",".join(f"{cell:.17g}" for cell in row) for row in rows]
        return "\n".join(lines) + "\n"
