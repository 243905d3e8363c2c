"""Which finished groups form the next batch, and what is waited for if none can be formed yet.

Eq. 3 bounds how many groups are started, not the age of one: with "oldest among the finished" a
straggler may be trained on at any lag. Lag is the trainer's version minus the version that the
engines held when the group (last) started; the oldest group is the one with the oldest version,
then with the lowest id.

    order                        lag                  a straggler
    oldest_finished_first        no bound             is overtaken
    strict_start_order           <= ceil(eta)         stops training until it ends
    bounded_lag(L)               <= L >= ceil(eta)    is overtaken while the bound permits
    bounded_lag(L, drop=True)    <= L                 is dropped, counted and replaced

An order is data. What it decides from, the groups between start and training, is its `Backlog`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from areal_lab.control.admission import lag_bound
from areal_lab.control.backlog import Backlog, EarliestDeadlineFirst, OldestFirst, StartOrder
from areal_lab.control.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """A policy for forming batches. Make one with the functions below."""

    name: str
    make_backlog: Callable[[int], Backlog] = field(compare=False, repr=False)
    """From `batch_groups`."""
    max_lag: float = math.inf
    """Lag, in whole versions, that is promised never to be exceeded, beside what eq. 3 gives."""
    drop_late: bool = False
    """Whether the promise is kept by dropping; otherwise by waiting."""


def oldest_finished_first() -> BatchOrder:
    """The B oldest among the finished, whatever still runs: what the released AReaL does."""
    return BatchOrder(name="oldest_finished_first", make_backlog=OldestFirst)


def strict_start_order() -> BatchOrder:
    """The B oldest of all; waits until they finished. No lag exceeds ceil(eta)."""
    return BatchOrder(name="strict_start_order", make_backlog=StartOrder)


def bounded_lag(max_lag: float, *, drop: bool = False) -> BatchOrder:
    """The B oldest among the finished, unless a group would be trained on later than `max_lag`.

    Waiting looks ahead (earliest deadline first): a batch is taken only if, for every j >= 0, what
    must be trained on within j further batches and is not in this one fits into j batches.

    Args:
        max_lag: versions; a fraction has no meaning beyond its whole part. Waiting needs
            `max_lag >= ceil(eta)`, which `Limits` checks.
        drop: give up what can no longer be trained on in time, running or finished, instead of
            waiting for it. Dropped groups do not count as started, so that others replace them.
    """
    if math.isnan(max_lag) or max_lag < 0:
        raise ValueError(f"max_lag is {max_lag}, but a lag is a number >= 0 (versions)")
    whole = max_lag if math.isinf(max_lag) else math.floor(max_lag)
    kind = OldestFirst if drop else EarliestDeadlineFirst
    return BatchOrder(
        name="bounded_lag",
        make_backlog=lambda batch_groups: kind(batch_groups, whole),
        max_lag=whole,
        drop_late=drop,
    )


OrderName = Literal["oldest_finished_first", "strict_start_order", "bounded_lag"]
ORDERS: Final[tuple[OrderName, ...]] = get_args(OrderName)
"""Names of the orders above."""


def order_named(
    name: str, schedule: Schedule, *, max_lag: float | None = None, drop_late: bool = False
) -> BatchOrder:
    """The batch order of this name, for runs of a schedule.

    Args:
        name: one of `ORDERS`.
        schedule: gives `bounded_lag` its bound where `max_lag` does not.
        max_lag: bound of `bounded_lag`, in versions; None takes `lag_bound(schedule)`.
        drop_late: whether `bounded_lag` drops what would exceed the bound instead of waiting.

    Raises:
        ValueError: if there is no such order, with the names there are, or no bound.
    """
    match name:
        case "oldest_finished_first":
            return oldest_finished_first()
        case "strict_start_order":
            return strict_start_order()
        case "bounded_lag":
            if max_lag is None:
                max_lag = lag_bound(schedule)
                if math.isinf(max_lag):
                    raise ValueError(
                        f"batch_order is {name}, but eta is infinite, which gives no bound; "
                        "set max_lag"
                    )
            return bounded_lag(max_lag, drop=drop_late)
    raise ValueError(f"batch_order is {name!r}, but must be one of {', '.join(ORDERS)}")
