"""Published seconds of switching colocated GPUs, by term; `data/colocation.csv` has the sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulator.costs.coefficients import DATA, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSwitch:
    """One published time, or range of times."""

    term: str
    subject: str
    gpu: str
    """Empty if it is not stated."""
    bytes: float
    """Copied by one GPU; of refits, all weights; of batches, the number of samples."""
    copying: int
    """GPUs of one host that copy at the same time."""
    tensors: int
    """Matrices of routed experts."""
    low_s: float
    high_s: float
    source: str
    date: str
    why_not: str
    """Why fits exclude it; empty if they do not."""

    @property
    def seconds(self) -> float:
        """Middle of the range."""
        return (self.low_s + self.high_s) / 2


@cache
def published() -> tuple[PublishedSwitch, ...]:
    """All rows of `data/colocation.csv`."""
    return tuple(
        PublishedSwitch(
            term=row["term"],
            subject=row["subject"],
            gpu=row["gpu"],
            bytes=float(row["gb"]) * (1 if row["term"] == "batch" else 1e9),
            copying=int(row["copying"]),
            tensors=int(row["tensors"]),
            low_s=float(row["low_s"]),
            high_s=float(row["high_s"]),
            source=row["source"],
            date=row["date"],
            why_not=row["why_not"],
        )
        for row in read_table(DATA / "colocation.csv")
    )


def rows_of(term: str) -> tuple[PublishedSwitch, ...]:
    """The rows of a term that are fitted.

    Raises:
        ValueError: there is none.
    """
    rows = tuple(row for row in published() if row.term == term and not row.why_not)
    if not rows:
        raise ValueError(f"no published seconds of {term!r}")
    return rows


def relative_fit(
    columns: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], float]:
    """Least squares of the relative error.

    Args:
        columns: [terms, rows].
        seconds: [rows].

    Returns:
        One coefficient per term; and the mean absolute relative error of the rows.
    """
    measured = np.array(seconds)
    scaled = np.array(columns).T / measured[:, None]
    coefficients = np.linalg.lstsq(scaled, np.ones_like(measured), rcond=None)[0]
    return coefficients, float(np.abs(scaled @ coefficients - 1).mean())
