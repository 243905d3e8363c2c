"""Pure decisions: what to start, train on, push, save and drop. Standard library only.

    events      Event, Action and their members, Version, GroupId, EngineId
    schedule    Schedule, synchronous, one_step_overlap, asynchronous, partial_rollout
    admission   start_limit, open_slots, lag_bound
    order       BatchOrder, oldest_finished_first, strict_start_order, bounded_lag
    routing     Router
    coordinator Coordinator, Limits, Counts, replay
"""

from areal_lab.control.admission import lag_bound, open_slots, start_limit
from areal_lab.control.coordinator import Coordinator, Counts, Limits, replay
from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from areal_lab.control.routing import Router
from areal_lab.control.schedule import (
    OnNewWeights,
    Schedule,
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)

__all__ = [
    # schedules
    "OnNewWeights",
    "Schedule",
    "asynchronous",
    "one_step_overlap",
    "partial_rollout",
    "synchronous",
    # admission
    "lag_bound",
    "open_slots",
    "start_limit",
    # batch orders
    "BatchOrder",
    "bounded_lag",
    "oldest_finished_first",
    "strict_start_order",
    # routing
    "Router",
    # the whole
    "Coordinator",
    "Counts",
    "Limits",
    "replay",
]
