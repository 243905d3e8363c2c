"""Capacity arithmetic of eq. 3: how many groups may start, and the lag that follows from it.

The mean lag in closed form, in two parts: before the queue, while a group is generated, and in the
queue, while it waits for training.

    queue                       before the queue          in the queue: rho < 1, else
    drops its oldest if full    C M / (B max(1, rho))     rho, (2 q + rho - 1) / (2 rho)
    eq. 3 bounds its entrance   the same, at most eta     rho, the rest of eta

Standard library only, so that the decisions (`control`) and the formulas (`functional`) share it.
The caller chooses the unit: prompt groups in `control`, samples or groups in a notebook.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple


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


class MeanStaleness(NamedTuple):
    """Mean lag of the first tokens of trained samples, in versions."""

    before_queue: float
    """Versions that pass while the group of a sample is generated."""
    in_queue: float
    """Versions that pass while the group waits for training."""

    @property
    def lag(self) -> float:
        """The sum."""
        return self.before_queue + self.in_queue


def mean_staleness_dropping(
    *,
    in_flight: float,
    batch_size: int,
    queue_batches: float,
    rate_ratio: float,
    longest_over_mean: float = 1.0,
) -> MeanStaleness:
    r"""Mean lag where a full queue drops its oldest entries and admission has no other bound.

    $$ \frac{C M}{B \max(1, \rho)} \quad \text{and} \quad
    \rho \text{ if } \rho < 1, \text{ else } \frac{2 q + \rho - 1}{2 \rho} $$

    Args:
        in_flight: C, samples that engines generate at once.
        batch_size: B, samples of a training step.
        queue_batches: q, capacity of the queue in batches.
        rate_ratio: rho, samples generated per second over samples that the trainer could take.
        longest_over_mean: M, mean length of the longest response of a group over the mean length.
            1 if the slot of a response stays taken until its group is complete.

    In the queue: below rho 1 it holds at most one batch, and the samples that end while the trainer
    works, a share rho, wait for one version. From 1 on it is full; the trainer takes its oldest
    batch, of mean age (2 q - 1) / (2 rho) steps, plus half a version, for versions are whole.

    Range: steady state; weights reach the engines in a small part of a step; q >= 1; lengths and
    rates do not drift. Compared with three published rows, the lag is within 0.3 versions.

    Source: a note by Applied Compute of 2026-07-03, as retold; its simulator is not public. The
    derivation above is ours.

    Raises:
        ValueError: a number is out of its range.
    """
    before = _before_queue(in_flight, batch_size, rate_ratio, longest_over_mean)
    if not queue_batches >= 1:
        raise ValueError(f"queue_batches is {queue_batches}, but must be >= 1 (batches)")
    if rate_ratio < 1:
        return MeanStaleness(before, rate_ratio)
    return MeanStaleness(before, (2 * queue_batches + rate_ratio - 1) / (2 * rate_ratio))


def mean_staleness_bounded(
    *,
    in_flight: float,
    batch_size: int,
    eta: float,
    rate_ratio: float,
    longest_over_mean: float = 1.0,
) -> MeanStaleness:
    r"""Mean lag where eq. 3 bounds what may start, and every group that started is trained on.

    While eq. 3 does not bind, which is the case if rho < 1 and the sum is at most eta, the parts
    are those of `mean_staleness_dropping`. Where it binds, number n starts at the version i with
    `n = (i + 1 + eta) B` and one of the same step is trained on at `i + eta`: the mean is eta, in
    any order, and the queue has what generation leaves of it. Groups then start when weights
    arrive, many at once, and fewer new versions come while they are generated than `in_flight`
    tells: the part before the queue is up to one version smaller, the other one that much larger.

    Args:
        in_flight: C, samples that engines generate at once if nothing else bounds them.
        batch_size: B, samples of a training step.
        eta: staleness bound in versions; infinity never binds, so that the queue of a trainer that
            is too slow grows without end.
        rate_ratio: rho, samples generated per second with C in flight over samples that the trainer
            could take.
        longest_over_mean: as in `mean_staleness_dropping`.

    Range: whole eta; weights reach the engines in a small part of a step; the seconds of a response
    do not depend on how many are in flight; steady state, which from rho 1 on takes
    `eta / (1 - 1 / rho)` steps, because the lag grows by `1 - 1 / rho` in each.

    Source: ours, after `admissible` (AReaL, arXiv:2505.24298, eq. 3).

    Raises:
        ValueError: a number is out of its range.
    """
    check_eta(eta)
    before = _before_queue(in_flight, batch_size, rate_ratio, longest_over_mean)
    if rate_ratio < 1:
        waits = min(rate_ratio, eta)
        return MeanStaleness(min(before, eta - waits), waits)
    before = min(before, eta)
    return MeanStaleness(before, eta - before)


def _before_queue(
    in_flight: float, batch_size: int, rate_ratio: float, longest_over_mean: float
) -> float:
    if not in_flight > 0 or batch_size < 1:
        raise ValueError(
            f"in_flight is {in_flight} and batch_size {batch_size}, but must be > 0 and >= 1"
        )
    if not rate_ratio > 0:
        raise ValueError(f"rate_ratio is {rate_ratio}, but must be > 0")
    if not longest_over_mean >= 1:
        raise ValueError(
            f"longest_over_mean is {longest_over_mean}, but must be >= 1: the longest response of "
            "a group is no shorter than the mean"
        )
    return in_flight * longest_over_mean / (batch_size * max(1.0, rate_ratio))


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
