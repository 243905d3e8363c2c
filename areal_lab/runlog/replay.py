"""Verify a log by replay: a coordinator with its limits must return its actions for its events.

limits --limits_to_fields--> header of the log --limits_from_fields--> the same limits
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from areal_lab.control.coordinator import Limits
from areal_lab.control.drift import DriftBound
from areal_lab.control.events import Action, EtaRequested, RunStarted
from areal_lab.control.order import OnLateName, order_named
from areal_lab.control.ranks import coordinator_of
from areal_lab.control.routing import least_loaded, routing_named
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import OnNewWeights, Schedule
from areal_lab.runlog.records import MOST, ActionRecord, EventRecord, Log, Scalar

_MOST_GROUPS: Final = 2**20
"""Maximum groups in flight, or in a batch: a replay starts them all."""
_MOST_RANKS: Final = 2**12
_MOST_CHANGES: Final = 4
"""Most changes of eta that are listed one by one."""
_BOUNDS: Final = tuple(one.name for one in dataclasses.fields(DriftBound))


def limits_to_fields(limits: Limits) -> dict[str, Scalar]:
    """Constants of a run as flat fields for the header of its log."""
    sampling = limits.sampling
    # Most runs, and all older logs, have none of these.
    slots = {"group_slots": limits.group_slots} if limits.group_slots > 1 else {}
    parts = {"batch_parts": limits.batch_parts} if limits.batch_parts > 1 else {}
    hybrid = {"hybrid_engines": limits.hybrid_engines} if limits.hybrid_engines else {}
    ranks = {"ranks": limits.ranks} if limits.ranks > 1 else {}
    offered = {"weights_offered": True} if limits.weights_offered else {}
    bound = limits.schedule.bound
    bounds = {} if bound is None else {name: float(getattr(bound, name)) for name in _BOUNDS}
    return {
        "batch_groups": limits.batch_groups,
        "max_in_flight": limits.max_in_flight,
        **slots,
        **parts,
        **hybrid,
        **ranks,
        **offered,
        "train_steps": limits.train_steps,
        "save_every_steps": limits.save_every_steps,
        "schedule": limits.schedule.name,
        "eta": float(limits.schedule.eta),
        "on_new_weights": limits.schedule.on_new_weights.value,
        "carry_over": limits.schedule.carry_over,
        **bounds,
        "order": limits.order.name,
        "max_lag": float(limits.order.max_lag),
        "on_late": limits.order.on_late,
        "routing": limits.routing.name,
        "max_filtered": None if sampling is None else sampling.max_filtered,
        "smallest_batch": None if sampling is None else sampling.smallest_batch,
        "equal_rewards": None if sampling is None else float(sampling.tolerance),
    }


def limits_from_fields(fields: Mapping[str, Scalar]) -> Limits:
    """Inverse of `limits_to_fields`; further fields are ignored."""
    try:
        schedule = Schedule(
            name=str(fields["schedule"]),
            eta=_float(fields["eta"]),
            on_new_weights=OnNewWeights(str(fields["on_new_weights"])),
            carry_over=bool(fields["carry_over"]),
            bound=(
                DriftBound(**{name: _float(fields[name]) for name in _BOUNDS})
                if "max_drift" in fields
                else None
            ),
        )
        return Limits(
            batch_groups=_int(fields["batch_groups"]),
            max_in_flight=_int(fields["max_in_flight"]),
            group_slots=_int(fields.get("group_slots", 1)),
            batch_parts=_int(fields.get("batch_parts", 1)),
            hybrid_engines=_int(fields.get("hybrid_engines", 0)),
            ranks=_int(fields.get("ranks", 1), most=_MOST_RANKS),
            weights_offered=bool(fields.get("weights_offered", False)),
            train_steps=(
                None if fields["train_steps"] is None else _int(fields["train_steps"], most=MOST)
            ),
            save_every_steps=_int(fields["save_every_steps"], most=MOST),
            schedule=schedule,
            order=order_named(
                str(fields["order"]),
                schedule,
                max_lag=_float(fields["max_lag"]),
                on_late=on_late_of(fields),
            ),
            # Older logs do not have these.
            routing=routing_named(str(fields.get("routing", least_loaded().name))),
            sampling=_sampling(fields),
        )
    except KeyError as error:
        raise ValueError(
            f"the log's header has no {error.args[0]}, so the log cannot be replayed"
        ) from error


def on_late_of(fields: Mapping[str, Scalar]) -> OnLateName:
    """What happens to late groups, of the header of a log; older logs have `drop_late`."""
    if "on_late" in fields:
        return cast(OnLateName, str(fields["on_late"]))  # `bounded_lag` checks it
    return "drop" if fields["drop_late"] else "wait"


def eta_changes(log: Log) -> list[tuple[float, float]]:
    """Changes of eta, by request or by a bound on drift: seconds since the start of the log, and
    the new value.

    Those by a bound follow from a replay, up to an event that does not belong to the log.
    """
    events = list(log.events)
    if "max_drift" not in log.header.limits:
        return [(one.t_s, one.event.eta) for one in events if isinstance(one.event, EtaRequested)]
    coordinator = coordinator_of(limits_from_fields(log.header.limits))
    changes: list[tuple[float, float]] = []
    for number, record in enumerate(events):
        if number and isinstance(record.event, RunStarted):
            coordinator = coordinator_of(coordinator.limits)
        before = coordinator.limits.schedule.eta
        try:
            coordinator.handle(record.event)
        except ValueError:
            break
        if (eta := coordinator.limits.schedule.eta) != before:
            changes.append((record.t_s, eta))
    return changes


def etas_in_words(eta: Scalar, changes: Sequence[tuple[float, float]]) -> str:
    """The staleness bound at the start of a run, and its changes (`eta_changes`)."""
    later = [float(value) for _, value in changes]
    first = f"{float(str(eta)):g}"
    if len(later) > _MOST_CHANGES:
        return (
            f"{first}, then {min(later):g} to {max(later):g} in {len(later)} changes, "
            f"{later[-1]:g} at the end"
        )
    return ", then ".join([first, *(f"{value:g}" for value in later)])


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of replaying a log, up to the first difference."""

    events: int
    actions: int
    difference: str = ""
    """The first action that differs from the replay; empty if none does."""

    @property
    def agrees(self) -> bool:
        """True if every action follows from the events before it."""
        return not self.difference


def check_replay(log: Log) -> Replay:
    """Compare the actions after each event with those of a new coordinator.

    Only the last event of the run, or before a recovery, may lack some of its actions, because the
    run was killed between them. From a recovery on, the run has a new coordinator, with the limits
    that were in force.
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
        max_filtered=_int(fields["max_filtered"], most=MOST),
        smallest_batch=None if smallest is None else _int(smallest),
        tolerance=_float(fields["equal_rewards"]),
    )


def _int(value: Scalar, *, most: int = _MOST_GROUPS) -> int:
    if type(value) is not int or abs(value) > most:
        raise ValueError(
            f"the log's header has {value!r}, but needs a whole number of at most {most:,}"
        )
    return value


def _float(value: Scalar) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"the log's header has {value!r}, but needs a number")
    return float(value)
