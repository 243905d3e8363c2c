"""Histograms of response lengths. Tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

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
    """In any unit: numbers of requests, or shares."""
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
