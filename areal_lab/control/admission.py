"""How many groups may start now: eq. 3, the engines' limit, and the end of the run.

All counts are prompt groups. *Started* is the count of eq. 3: groups that run, wait to be trained
on, or were trained on. What a filter rejects or an order drops leaves the count and is replaced;
after a recovery at `version` the count begins at `version * batch_groups`.
"""

from __future__ import annotations

import math

from areal_lab.control.events import Version
from areal_lab.control.schedule import Schedule


def start_limit(
    schedule: Schedule, *, version: Version, batch_groups: int, train_steps: int | None
) -> float:
    """Groups that may have been started while the engines hold `version`; may be infinite.

    Eq. 3 (`Schedule.admissible_groups`), and never more than the run can train on: a run of
    `train_steps` batches that ends has nothing left over.
    """
    run_groups = math.inf if train_steps is None else train_steps * batch_groups
    return min(schedule.admissible_groups(version, batch_groups), run_groups)


def open_slots(*, started: int, in_flight: int, limit: float, max_in_flight: int) -> int:
    """Groups that may start now, given `limit` from `start_limit`; never negative."""
    return max(0, int(min(limit - started, max_in_flight - in_flight)))


def whole_batches(started: int, batch_groups: int) -> int:
    """`started` rounded up to whole batches: where generation stops that completes its batch."""
    return -(-started // batch_groups) * batch_groups


def lag_bound(schedule: Schedule) -> float:
    """Largest lag, in versions, that `strict_start_order` can see; what `bounded_lag` must allow.

    Group n (counted from 1) of eq. 3 starts at a version i with `n <= (i + 1 + eta) B` and, in
    start order, is trained on at version `floor((n - 1) / B) <= i + ceil(eta)`.
    """
    return schedule.eta if math.isinf(schedule.eta) else math.ceil(schedule.eta)
