"""A log with fewer processes, for pictures: a row for each of a hundred is nothing to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from areal_lab.control.events import (
    EngineId,
    EngineJoined,
    EngineLost,
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
    """Engines that were there when the run began."""
    for record in log.events:
        if isinstance(record.event, RunStarted):
            return tuple(record.event.engines)
    return ()


def only_engines(log: Log, engines: Iterable[EngineId], *, rewards: bool = True) -> Log:
    """The log without what other engines did. It no longer replays: groups are missing.

    Args:
        log: what to pick from.
        engines: those to keep.
        rewards: keep the process that judges; where judging takes no time it is an empty row.
    """
    kept = frozenset(engines)
    others = {engine_process(engine) for engine in engines_of(log) if engine not in kept}
    if not rewards:
        others.add(REWARDS)
    processes = tuple(name for name in log.header.processes if name not in others)
    return dataclasses.replace(
        log,
        header=dataclasses.replace(log.header, processes=processes),
        records=tuple(_picked(log.records, kept, others)),
    )


def _picked(
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
            case EventRecord(event=EngineLost() | EngineJoined() as event):
                if event.engine in kept:
                    yield record
            case ActionRecord(action=StartGroup() as action):
                if action.engine in kept:
                    yield record
            case _:
                yield record
