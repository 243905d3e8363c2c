"""Published seconds of switching colocated GPUs, by term; `data/colocation.csv` has the sources.

Seconds to copy state between a GPU and its host.

pageable memory    1.8 to 2.8 GB/s to the host, 5.5 GB/s back, whatever the link: staged in
                   small pinned buffers, tensor by tensor
pinned memory      a share of the PCIe rate: 0.84 alone, 0.33 with the other GPUs of the host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.costs.coefficients import DATA, PublishedTime, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSwitch(PublishedTime):
    """Time of a term."""

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
    """The rows of a term that are fitted."""
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


Direction = Literal["to host", "to gpu"]

_PINNED_LINK_BYTES_PER_S = {"H100": 64e9, "L20": 32e9}
"""PCIe of the GPUs of the pinned rows, one direction: PCIe 5 and 4 with 16 lanes."""
_A100_LINK_BYTES_PER_S = 32e9
"""PCIe 4 with 16 lanes."""


class CopyRate(NamedTuple):
    """A rate with its error."""

    bytes_per_s: float
    error: float
    """Mean absolute relative error of the seconds on the published rows."""


@cache
def pageable_rate(direction: Direction) -> CopyRate:
    """Rate of copies with pageable memory, as trainers make them."""
    rows = rows_of(direction)
    per_byte, error = relative_fit([[row.bytes for row in rows]], [row.seconds for row in rows])
    return CopyRate(float(1 / per_byte[0]), error)


@cache
def pinned_alone_share() -> float:
    """Share of the PCIe rate that one GPU reaches if no other GPU of its host copies."""
    rows = rows_of("pinned to host")
    shares = [row.bytes / row.seconds / _PINNED_LINK_BYTES_PER_S[row.gpu] for row in rows]
    return sum(shares) / len(shares)


@cache
def pinned_shared_share() -> float:
    """Share of the rate while other GPUs of the host copy: four A100s whose engine falls asleep and
    wakes.

    Hosts with eight GPUs that copy at once were not published; they are assumed to be alike.
    """
    rows = [row for row in (*rows_of("engine sleep"), *rows_of("engine wake")) if row.copying > 1]
    rates = [row.bytes / row.seconds for row in rows]
    return sum(rates) / len(rates) / _A100_LINK_BYTES_PER_S


PINNED_ERROR = 0.5
"""Error for a host whose GPUs copy at the same time: one type of host was measured, and its GPUs
are 2.1 times as fast alone."""


def copy_rate(direction: Direction, gpu: GPU, *, pinned: bool, gpus: int) -> CopyRate:
    """Rate per GPU while all of the cluster copy."""
    link = gpu.pcie_bytes_per_s
    share = pinned_alone_share() if gpus == 1 else pinned_shared_share()
    pinned_rate = CopyRate(share * link, PINNED_ERROR)
    if pinned:
        return pinned_rate
    rate = pageable_rate(direction)
    return rate if rate.bytes_per_s < pinned_rate.bytes_per_s else pinned_rate
