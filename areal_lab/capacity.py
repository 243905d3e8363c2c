"""Capacity arithmetic of eq. 3: how many groups may start, and the lag that follows from it.

Standard library only, so that the decisions (`control`) and the formulas (`functional`) share it.
The caller chooses the unit: prompt groups in `control`, samples or groups in a notebook.
"""

from __future__ import annotations

import math
from fractions import Fraction


def admissible(version: int, *, batch_size: int, eta: float) -> float:
    """Maximum number started while the engines hold `version`; may be infinite.

    The largest N with `floor((N - 1) / B) <= version + eta`, which for a fractional eta reads
    `N <= (version + 1 + eta) * B`: at most that fraction of a batch ahead.

    Args:
        version: version of the engines' weights.
        batch_size: B, the number that one training step consumes.
        eta: staleness bound in versions.

    Source: AReaL (arXiv:2505.24298), eq. 3.

    Raises:
        ValueError: eta is negative or NaN, or the batch is empty.
    """
    check_eta(eta)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be >= 1")
    if math.isinf(eta):
        return math.inf
    # In floats 0.29 * 100 is 28.999999999999996, and floor would lose one.
    return (version + 1) * batch_size + math.floor(Fraction(str(eta)) * batch_size)


def open_slots(*, started: int, in_flight: int, limit: float, max_in_flight: int) -> int:
    """How many may start now; never negative.

    Args:
        started: all started so far: running, waiting for training, or trained on.
        in_flight: those still running.
        limit: maximum of `started` (`admissible`).
        max_in_flight: maximum of `in_flight`.
    """
    return max(0, int(min(limit - started, max_in_flight - in_flight)))


def lag_bound(eta: float) -> float:
    """Largest lag, in versions, that training in the order of starts can see.

    Number n (counted from 1) of eq. 3 starts at a version i with `n <= (i + 1 + eta) B` and, in
    start order, is trained on at version `floor((n - 1) / B) <= i + ceil(eta)`. In any other order
    eq. 3 bounds how many are started, not the age of one.
    """
    check_eta(eta)
    return eta if math.isinf(eta) else math.ceil(eta)


def check_eta(eta: float) -> None:
    """Refuse an invalid staleness bound.

    Raises:
        ValueError: eta is negative or NaN.
    """
    if math.isnan(eta) or eta < 0:
        raise ValueError(
            f"eta is {eta}, but a staleness bound is a number >= 0 (versions); "
            "0 is synchronous, infinity has no bound"
        )
