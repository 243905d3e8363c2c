"""Pure decisions: what to start, train on, push, save and drop.

events       Event, Action and their members; Version, GroupId, EngineId
schedule     when generation runs ahead, and how new weights reach running responses
admission    how many groups may start (eq. 3)
order        which finished groups form a batch; backlog: its data structures
routing      which engine takes a group
limits       the constants of a run
coordinator  all of these: events in, actions out
microbatch   how a batch is cut into micro-batches that fit into memory

May import the standard library and `areal_lab.capacity` only; imported by every room that runs or
replays decisions, and by `simulator`.
"""

from areal_lab.capacity import open_slots
from areal_lab.control.admission import lag_bound, start_limit
from areal_lab.control.coordinator import Coordinator, Counts
from areal_lab.control.limits import Limits
from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from areal_lab.control.routing import Router, Routing, least_loaded, round_robin, sticky
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
    "Routing",
    "least_loaded",
    "round_robin",
    "sticky",
    # the whole
    "Coordinator",
    "Counts",
    "Limits",
]
