"""Verify a log by replay: a coordinator with its limits must return its actions for its events.

limits --limits_to_fields--> header of the log --limits_from_fields--> the same limits
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from areal_lab.control.coordinator import Limits
from areal_lab.control.events import Action, RunStarted
from areal_lab.control.order import order_named
from areal_lab.control.ranks import coordinator_of
from areal_lab.control.routing import least_loaded, routing_named
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import OnNewWeights, Schedule
from areal_lab.runlog.records import ActionRecord, EventRecord, Log, Scalar


def limits_to_fields(limits: Limits) -> dict[str, Scalar]:
    """The constants of a run as flat fields for the header of its log."""
    sampling = limits.sampling
    # Most runs, and all older logs, have none of these.
    parts = {"batch_parts": limits.batch_parts} if limits.batch_parts > 1 else {}
    hybrid = {"hybrid_engines": limits.hybrid_engines} if limits.hybrid_engines else {}
    ranks = {"ranks": limits.ranks} if limits.ranks > 1 else {}
    return {
        "batch_groups": limits.batch_groups,
        "max_in_flight": limits.max_in_flight,
        **parts,
        **hybrid,
        **ranks,
        "train_steps": limits.train_steps,
        "save_every_steps": limits.save_every_steps,
        "schedule": limits.schedule.name,
        "eta": float(limits.schedule.eta),
        "on_new_weights": limits.schedule.on_new_weights.value,
        "carry_over": limits.schedule.carry_over,
        "order": limits.order.name,
        "max_lag": float(limits.order.max_lag),
        "drop_late": limits.order.drop_late,
        "routing": limits.routing.name,
        "max_filtered": None if sampling is None else sampling.max_filtered,
        "smallest_batch": None if sampling is None else sampling.smallest_batch,
        "equal_rewards": None if sampling is None else float(sampling.tolerance),
    }


def limits_from_fields(fields: Mapping[str, Scalar]) -> Limits:
    """The constants that `limits_to_fields` wrote; further fields are ignored.

    Raises:
        ValueError: if a field is missing or has an impossible value.
    """
    try:
        schedule = Schedule(
            name=str(fields["schedule"]),
            eta=_float(fields["eta"]),
            on_new_weights=OnNewWeights(str(fields["on_new_weights"])),
            carry_over=bool(fields["carry_over"]),
        )
        return Limits(
            batch_groups=_int(fields["batch_groups"]),
            max_in_flight=_int(fields["max_in_flight"]),
            batch_parts=_int(fields.get("batch_parts", 1)),
            hybrid_engines=_int(fields.get("hybrid_engines", 0)),
            ranks=_int(fields.get("ranks", 1)),
            train_steps=None if fields["train_steps"] is None else _int(fields["train_steps"]),
            save_every_steps=_int(fields["save_every_steps"]),
            schedule=schedule,
            order=order_named(
                str(fields["order"]),
                schedule,
                max_lag=_float(fields["max_lag"]),
                drop_late=bool(fields["drop_late"]),
            ),
            # Logs from before there was a choice do not name these.
            routing=routing_named(str(fields.get("routing", least_loaded().name))),
            sampling=_sampling(fields),
        )
    except KeyError as error:
        raise ValueError(
            f"the log's header has no {error.args[0]}, so the log cannot be replayed"
        ) from error


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a log, up to the first difference."""

    events: int
    actions: int
    difference: str = ""
    """The first action that differs from the replay; empty if none does."""

    @property
    def agrees(self) -> bool:
        """Whether every action follows from the events before it."""
        return not self.difference


def check_replay(log: Log) -> Replay:
    """Compare the actions after each event with those of a fresh coordinator.

    Only the last event of the run, or before a recovery, may lack some of its actions, because the
    run was killed between them. A recovered run has another coordinator from there on, with the
    limits that were in force.
    """
    coordinator = coordinator_of(limits_from_fields(log.header.limits))
    due: deque[Action] = deque()
    events = actions = 0
    for record in log.records:
        match record:
            case EventRecord(event=event):
                if events and isinstance(event, RunStarted):
                    due.clear()
                    coordinator = coordinator_of(coordinator.limits)
                if due:
                    return Replay(events, actions, f"{due[0]} is missing before {event}")
                events += 1
                try:
                    due.extend(coordinator.handle(event))
                except ValueError as error:
                    return Replay(events, actions, f"an event is impossible: {error}")
            case ActionRecord(action=action):
                actions += 1
                if not due:
                    return Replay(events, actions, f"{action} does not follow from any event")
                if (expected := due.popleft()) != action:
                    return Replay(events, actions, f"{action} instead of {expected}")
            case _:
                pass
    return Replay(events, actions)


def _sampling(fields: Mapping[str, Scalar]) -> DynamicSampling | None:
    if fields.get("max_filtered") is None:
        return None
    smallest = fields["smallest_batch"]
    return DynamicSampling(
        max_filtered=_int(fields["max_filtered"]),
        smallest_batch=None if smallest is None else _int(smallest),
        tolerance=_float(fields["equal_rewards"]),
    )


def _int(value: Scalar) -> int:
    if type(value) is not int:
        raise ValueError(f"the log's header has {value!r}, but needs a whole number")
    return value


def _float(value: Scalar) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"the log's header has {value!r}, but needs a number")
    return float(value)
