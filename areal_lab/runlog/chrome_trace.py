"""A run's log as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

    process row   threads                      slices               instants       counters
    run           activity                     -                    push, resume   groups, versions,
                                                                    drop, finish   lag of a batch,
                                                                    by hand        eta, speed and
                                                                                   GPU memory
    trainer       activity, measured           activity, idle       -              -
    engine i      activity, slot 0, slot 1 ..  groups, scoring      interrupt      -
    samples       slot 0, slot 1 ..            samples, turns       -              -
    rewards, ...  activity                     activity, idle       -              -

Groups of one engine overlap, but slices of one thread must not, so each group takes the lowest free
slot. With workflows of several turns, a sample takes a slot instead: its turns may run on different
engines, and between them are its tools; turns at the same time take further slots. Timestamps are
microseconds since the run's start. Format: "Trace Event Format" of the Catapult project (phases X
complete, i instant, C counter, M metadata).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, TypeAlias

from areal_lab.control import events as ev
from areal_lab.control.ledger import mean_lag
from areal_lab.runlog.activity import activity, label
from areal_lab.runlog.incidents import in_words, requests
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    MetricRecord,
    SpanRecord,
    TurnTimes,
    engine_process,
)
from areal_lab.runlog.replay import eta_changes
from areal_lab.runlog.summary import TRAINER_SPEED

TraceEvent: TypeAlias = dict[str, Any]

_RUN_PID = 1
_ACTIVITY_TID = 1
_FIRST_SLOT_TID = 100
"""Smaller numbers are threads of a process that are not slots."""
_SPANS_TID = 2


def chrome_trace(log: Log) -> dict[str, Any]:
    """Convert a log to the JSON object format of the Trace Event Format; write it with
    `json.dump`.
    """
    activities = activity(log)
    groups = list(log.groups)
    names = list(activities)
    for group in groups:
        if engine_process(group.engine) not in names:
            names.append(engine_process(group.engine))
    pids = {name: number for number, name in enumerate(names, start=_RUN_PID + 1)}
    events: list[TraceEvent] = [*_process_names(_RUN_PID, "run", 0)]
    for name, pid in pids.items():
        events.extend(_process_names(pid, name, pid))
        events.append(_thread_name(pid, _ACTIVITY_TID, "activity"))
    for name, stretches in activities.items():
        for stretch in stretches:
            events.append(
                _slice(
                    label(stretch.name) if stretch.busy else f"idle: {label(stretch.name)}",
                    "busy" if stretch.busy else "idle",
                    (stretch.start_s, stretch.end_s),
                    (pids[name], _ACTIVITY_TID),
                    {},
                )
            )
    events.extend(_details(log.spans, pids))
    events.extend(_group_slices([group for group in groups if not group.turns], pids))
    if of_turns := [group for group in groups if group.turns]:
        pid = max(pids.values(), default=_RUN_PID) + 1
        events.extend(_process_names(pid, "samples", pid))
        events.extend(_sample_slices(of_turns, pid))
    events.extend(_instants(log, pids))
    events.extend((*_group_counters(log), *_version_counters(log), *_lag_counters(log)))
    events.extend(_speed_counters(log))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "mode": log.header.mode,
            "started_at": str(log.header.started_at),
            **{name: str(value) for name, value in log.header.limits.items()},
        },
    }


def _details(spans: Iterable[SpanRecord], pids: dict[str, int]) -> Iterator[TraceEvent]:
    """Spans with numbers, on a separate thread, because the activity thread merges spans."""
    detailed = sorted((s for s in spans if s.args), key=lambda span: (span.t_s, -span.end_s))
    for process in dict.fromkeys(span.process for span in detailed):
        yield _thread_name(pids[process], _SPANS_TID, "measured")
    for span in detailed:
        where = (pids[span.process], _SPANS_TID)
        args = {name: _number(value) for name, value in span.args.items()}
        yield _slice(span.name, "span", (span.t_s, span.end_s), where, args)


@dataclass(slots=True)
class _Slots:
    """The slots of one process."""

    free: list[int] = field(default_factory=list)
    busy: list[tuple[float, int]] = field(default_factory=list)
    """Busy slots, with the time of their end."""
    count: int = 0

    def take(self, start_s: float, end_s: float) -> tuple[int, bool]:
        """Lowest free slot, and whether it is new; starts must not decrease."""
        while self.busy and self.busy[0][0] <= start_s:
            heappush(self.free, heappop(self.busy)[1])
        new = not self.free
        slot = self.count if new else heappop(self.free)
        self.count += new
        heappush(self.busy, (end_s, slot))
        return slot, new


def _sample_slices(groups: Iterable[GroupRecord], pid: int) -> Iterator[TraceEvent]:
    """Slices of samples of several turns, and within them the turns."""
    samples: list[tuple[float, float, GroupRecord, int, list[TurnTimes]]] = []
    for group in groups:
        by_sample: dict[int, list[TurnTimes]] = {}
        for turn in sorted(group.turns, key=lambda turn: turn.start_s):
            by_sample.setdefault(turn.sample, []).append(turn)
        for sample, own in sorted(by_sample.items()):
            end_s = max(turn.end_s for turn in own)
            samples.append((own[0].start_s, end_s, group, sample, own))
    slots = _Slots()
    beside: list[tuple[str, TurnTimes]] = []
    for start_s, end_s, group, sample, turns in sorted(samples, key=lambda one: one[0]):
        slot, new = slots.take(start_s, end_s)
        where = (pid, _FIRST_SLOT_TID + slot)
        if new:
            yield _thread_name(*where, f"slot {slot}")
        args = {
            "group": group.group,
            "sample": sample,
            "turns": len(turns),
            "tokens": sum(turn.tokens for turn in turns),
            "reward": _number(group.rewards[sample]),
            "end": group.finish_reasons[sample],
        }
        name = f"group {group.group}, sample {sample}"
        yield _slice(name, "sample", (start_s, end_s), where, args)
        free_s = start_s
        for number, turn in enumerate(turns):
            turned = f"turn {number} on {engine_process(turn.engine)}"
            if turn.start_s < free_s:
                beside.append((f"{name}, {turned}", turn))
                continue
            free_s = turn.end_s
            times_s = (turn.start_s, turn.end_s)
            yield _slice(turned, "turn", times_s, where, {"tokens": turn.tokens})
    first, slots = _FIRST_SLOT_TID + slots.count, _Slots()
    for name, turn in sorted(beside, key=lambda one: one[1].start_s):
        slot, new = slots.take(turn.start_s, turn.end_s)
        if new:
            yield _thread_name(pid, first + slot, f"beside {slot}")
        times_s = (turn.start_s, turn.end_s)
        yield _slice(name, "turn", times_s, (pid, first + slot), {"tokens": turn.tokens})


def _group_slices(groups: Iterable[GroupRecord], pids: dict[str, int]) -> Iterator[TraceEvent]:
    slots: dict[int, _Slots] = {}
    for group in sorted(groups, key=lambda group: (group.t_s, group.group)):
        pid = pids[engine_process(group.engine)]
        slot, new = slots.setdefault(pid, _Slots()).take(group.t_s, group.end_s)
        if new:
            yield _thread_name(pid, _FIRST_SLOT_TID + slot, f"slot {slot}")
        where = (pid, _FIRST_SLOT_TID + slot)
        versions = [version for sample in group.segments for version, _ in sample]
        args = {
            "group": group.group,
            "tokens": sum(tokens for sample in group.segments for _, tokens in sample),
            "head_version": min(versions, default=None),
            "tail_version": max(versions, default=None),
            "rewards": [_number(reward) for reward in group.rewards],
            "finish_reasons": list(group.finish_reasons),
        }
        yield _slice(f"group {group.group}", "group", (group.t_s, group.end_s), where, args)
        if group.end_s > group.generated_s:
            yield _slice("score", "reward", (group.generated_s, group.end_s), where, {})


def _instants(log: Log, pids: dict[str, int]) -> Iterator[TraceEvent]:
    engines = [pid for name, pid in pids.items() if name.startswith(engine_process(0)[:-1])]
    for t_s, request in requests(log):
        yield _instant(f"by hand: {in_words(request)}", "g", t_s, _RUN_PID)
    for record in log.actions:
        match record.action:
            case ev.Interrupt():
                for pid in engines:
                    yield _instant("interrupt", "p", record.t_s, pid)
            case ev.Resume():
                yield _instant("resume", "g", record.t_s, _RUN_PID)
            case ev.PushWeights(version=version):
                yield _instant(f"push version {version}", "g", record.t_s, _RUN_PID)
            case ev.Drop(group=group, reason=reason):
                yield _instant(f"drop group {group}: {reason}", "p", record.t_s, _RUN_PID)
            case ev.Finish(reason=reason):
                yield _instant(f"finish: {reason}", "g", record.t_s, _RUN_PID)
            case _:
                pass


def _group_counters(log: Log) -> Iterator[TraceEvent]:
    running: set[ev.GroupId] = set()
    finished: set[ev.GroupId] = set()
    for record in log.records:
        if not isinstance(record, EventRecord | ActionRecord):
            continue
        match record.event if isinstance(record, EventRecord) else record.action:
            case ev.RunStarted():
                running, finished = set(), set()
            case ev.StartGroup(group=group):
                running.add(group)
            case ev.GroupFinished(group=group) if group in running:
                running.remove(group)
                finished.add(group)
            case ev.GroupFiltered(group=group) | ev.Drop(group=group):
                running.discard(group)
                finished.discard(group)
            case ev.Train(groups=groups):
                finished.difference_update(groups)
            case _:
                continue
        yield _counter("groups in flight", record.t_s, len(running))
        yield _counter("groups waiting to be trained on", record.t_s, len(finished))


def _version_counters(log: Log) -> Iterator[TraceEvent]:
    for record in log.events:
        match record.event:
            case ev.RunStarted(version=version):
                yield _counter("version of the trainer", record.t_s, version)
                yield _counter("version on the engines", record.t_s, version)
            case ev.TrainStepDone(version=version):
                yield _counter("version of the trainer", record.t_s, version)
            case ev.WeightsPushed(version=version):
                yield _counter("version on the engines", record.t_s, version)
            case _:
                pass


def _lag_counters(log: Log) -> Iterator[TraceEvent]:
    changes = eta_changes(log)
    eta = log.header.limits.get("eta")
    for t_s, bound in [(0.0, eta), *changes] if changes else []:
        if isinstance(bound, int | float) and math.isfinite(bound):
            yield _counter("eta", t_s, bound)
    for batch in trained_batches(log):
        if batch.tokens:
            yield _counter("token lag, mean", batch.done_s, mean_lag(batch.token_lags))
            yield _counter("token lag, largest", batch.done_s, max(batch.token_lags))
            means = batch.parts.means
            yield _counter("lag before the queue, mean", batch.done_s, means["before_queue"])
            yield _counter("lag in the queue, mean", batch.done_s, means["in_queue"])


def _speed_counters(log: Log) -> Iterator[TraceEvent]:
    for record in log.records:
        if isinstance(record, MetricRecord) and record.name in TRAINER_SPEED:
            yield _counter(record.name, record.t_s, record.value)


# --- the events of the format --------------------------------------------------------------------


def _microseconds(t_s: float) -> float:
    return round(t_s * 1e6, 3)


def _process_names(pid: int, name: str, position: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    sort = {"sort_index": position}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": sort}


def _thread_name(pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    name: str,
    category: str,
    times_s: tuple[float, float],
    where: tuple[int, int],
    args: dict[str, Any],
) -> TraceEvent:
    start = _microseconds(times_s[0])
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        # From rounded ends, so adjacent slices do not overlap by a rounding error.
        "dur": round(_microseconds(times_s[1]) - start, 3),
        "pid": where[0],
        "tid": where[1],
        "args": args,
    }


def _instant(name: str, scope: str, t_s: float, pid: int) -> TraceEvent:
    return {
        "ph": "i",
        "name": name,
        "cat": "action",
        "s": scope,
        "ts": _microseconds(t_s),
        "pid": pid,
        "tid": _ACTIVITY_TID,
    }


def _counter(name: str, t_s: float, value: float) -> TraceEvent:
    return {
        "ph": "C",
        "name": name,
        "ts": _microseconds(t_s),
        "pid": _RUN_PID,
        "tid": 0,
        "args": {"value": value},
    }


def _number(value: float) -> float | str:
    """A number, or text for infinity and NaN, which JSON lacks."""
    return value if math.isfinite(value) else str(value)
