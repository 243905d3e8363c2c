"""How many groups may start now: eq. 3, the engines' limit, and the end of the run.

All counts are prompt groups. *Started* is the count of eq. 3: groups that run, wait for training,
or were trained on. Groups that a filter rejects or an order drops are subtracted and replaced;
after a recovery at `version` the count starts at `version * batch_groups`. The arithmetic is in
`areal_lab.capacity`.
"""

from __future__ import annotations

import math

from areal_lab.capacity import lag_bound as lag_bound_of
from areal_lab.control.events import Version
from areal_lab.control.schedule import Schedule


def start_limit(
    schedule: Schedule, *, version: Version, batch_groups: int, train_steps: int | None
) -> float:
    """Groups that may have been started while the engines hold `version`; may be infinite.

    Eq. 3 (`Schedule.admissible_groups`), but at most the groups that the run trains on: a run of
    `train_steps` batches has no group left over at its end.
    """
    run_groups = math.inf if train_steps is None else train_steps * batch_groups
    return min(schedule.admissible_groups(version, batch_groups), run_groups)


def whole_batches(started: int, batch_groups: int) -> int:
    """`started` rounded up to whole batches: the limit when only the current batch is completed."""
    return -(-started // batch_groups) * batch_groups


def lag_bound(schedule: Schedule) -> float:
    """Largest lag of `strict_start_order`, in versions, which `bounded_lag` must allow."""
    return lag_bound_of(schedule.eta)
