"""Excerpts of a log with fewer engines, for readable timelines of large clusters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from areal_lab.control.events import (
    EngineId,
    EngineJoined,
    EngineLost,
    EngineRetired,
    RunStarted,
    StartGroup,
)
from areal_lab.runlog.records import (
    REWARDS,
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    SpanRecord,
    engine_process,
)
from simulator.stats.format import shown_name


def engines_of(log: Log) -> tuple[EngineId, ...]:
    """Engines at the start of the run."""
    for record in log.events:
        if isinstance(record.event, RunStarted):
            return tuple(record.event.engines)
    return ()


def only_engines(log: Log, engines: Iterable[EngineId], *, rewards: bool = True) -> Log:
    """The log without the other engines. It cannot be replayed, because groups are missing.

    Args:
        rewards: keep the process that scores, whose row is empty if scoring takes no time.
    """
    kept = frozenset(engines)
    others = {engine_process(engine) for engine in engines_of(log) if engine not in kept}
    if not rewards:
        others.add(REWARDS)
    processes = tuple(name for name in log.header.processes if name not in others)
    return dataclasses.replace(
        log,
        header=dataclasses.replace(log.header, processes=processes),
        records=tuple(_excerpt(log.records, kept, others)),
    )


def _excerpt(
    records: Iterable[Record], kept: frozenset[EngineId], others: set[str]
) -> Iterator[Record]:
    for record in records:
        match record:
            case SpanRecord():
                if record.process not in others:
                    yield dataclasses.replace(record, name=shown_name(record.name))
            case GroupRecord():
                if record.engine in kept:
                    yield record
            case EventRecord(event=RunStarted() as event):
                engines = tuple(one for one in event.engines if one in kept)
                yield dataclasses.replace(record, event=dataclasses.replace(event, engines=engines))
            case EventRecord(event=EngineLost() | EngineRetired() | EngineJoined() as event):
                if event.engine in kept:
                    yield record
            case ActionRecord(action=StartGroup() as action):
                if action.engine in kept:
                    yield record
            case _:
                yield record
