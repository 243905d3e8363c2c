"""Batch orders: which finished groups form the next batch, and what training waits for otherwise.

Eq. 3 bounds the number of started groups, not the age of each: with "oldest finished first" a
straggler may be trained on at any lag. Lag is the trainer's version minus the version that the
engines held when the group (last) started; the oldest group is the one with the oldest version,
then with the lowest id.

    order                        lag                  a straggler
    oldest_finished_first        no bound             is overtaken
    strict_start_order           <= ceil(eta)         stops training until it ends
    bounded_lag(L)               <= L >= ceil(eta)    is overtaken while the bound permits
    bounded_lag(L, drop=True)    <= L                 is dropped, counted and replaced

An order is data. The groups between start and training, from which it chooses, are its `Backlog`.
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
    """A policy for forming batches. Create one with the functions below."""

    name: str
    make_backlog: Callable[[int], Backlog] = field(compare=False, repr=False)
    """Creates the backlog for batches of `batch_groups`."""
    max_lag: float = math.inf
    """Guaranteed bound of the lag in whole versions, in addition to eq. 3."""
    drop_late: bool = False
    """Whether late groups are dropped to keep the bound; otherwise training waits."""


def oldest_finished_first() -> BatchOrder:
    """The B oldest finished groups, whatever is still running, as in the released AReaL."""
    return BatchOrder(name="oldest_finished_first", make_backlog=OldestFirst)


def strict_start_order() -> BatchOrder:
    """The B oldest of all groups; waits until they are finished. No lag exceeds ceil(eta)."""
    return BatchOrder(name="strict_start_order", make_backlog=StartOrder)


def bounded_lag(max_lag: float, *, drop: bool = False) -> BatchOrder:
    """The B oldest finished groups, if every group can still be trained on within `max_lag`.

    Waiting looks ahead (earliest deadline first): a batch is taken only if, for every j >= 0, the
    groups due within the next j batches that are not in this one fit into j batches.

    Args:
        max_lag: versions, rounded down. Waiting needs `max_lag >= ceil(eta)`, which `Limits`
            checks.
        drop: drop groups that can no longer be trained on in time, running or finished, instead of
            waiting. Dropped groups do not count as started, so others replace them.
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
        schedule: gives the bound of `bounded_lag` if `max_lag` is None.
        max_lag: bound of `bounded_lag`, in versions; None uses `lag_bound(schedule)`.
        drop_late: whether `bounded_lag` drops groups beyond the bound, instead of waiting.

    Raises:
        ValueError: if the name is unknown, listing the known ones, or there is no bound.
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
