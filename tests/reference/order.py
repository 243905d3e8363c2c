"""Which groups form the next batch, as plain rules over everything started and not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from areal_lab.control.events import GroupId, Version
from areal_lab.control.order import BatchOrder


def batch(
    order: BatchOrder,
    finished: Mapping[GroupId, Version],
    running: Mapping[GroupId, Version],
    *,
    trained: Version,
    batch_groups: int,
    part: int = 0,
    rest: int = 0,
) -> tuple[GroupId, ...] | None:
    """The batch at trainer version `trained`, or None to wait; values are start versions.

    Args:
        part: groups of a batch in parts; 0 is all of it.
        rest: groups of the same batch that are taken after them.
    """
    part = part or batch_groups
    if order.name == "strict_start_order":
        oldest = sorted({**finished, **running})[:part]
    else:
        oldest = sorted(finished, key=lambda group: (finished[group], group))[:part]
    if len(oldest) < part or any(group in running for group in oldest):
        return None
    if order.name == "bounded_lag" and not order.drops_late and math.isfinite(order.max_lag):
        untrained = {**finished, **running}
        last_deadline = int(max(untrained.values()) + order.max_lag)
        for further in range(last_deadline - trained + 1):
            due = {
                g for g, start in untrained.items() if start + order.max_lag <= trained + further
            }
            if len(due & set(oldest)) < len(due) - rest - further * batch_groups:
                return None
    return tuple(oldest)
