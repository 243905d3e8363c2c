"""Lags, replay and the Chrome trace of a log."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    Event,
    GroupFinished,
    RunStarted,
    Save,
    StopRequested,
    TrainStepDone,
    WeightsPushed,
)
from areal_lab.control.ledger import mean_lag
from areal_lab.control.order import bounded_lag, strict_start_order
from areal_lab.control.schedule import (
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.lags import total, trained_batches
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    RunHeader,
    SpanRecord,
    end_of,
)
from areal_lab.runlog.replay import check_replay, limits_from_fields, limits_to_fields

LIMITS = Limits(batch_groups=1, max_in_flight=2, train_steps=2, schedule=asynchronous(1))


def group(number: int, t_s: float, end_s: float, *segments: tuple[int, int]) -> GroupRecord:
    return GroupRecord(
        group=number,
        engine=0,
        t_s=t_s,
        generated_s=end_s - 0.5,
        end_s=end_s,
        rewards=(1.0,),
        segments=(segments,),
        finish_reasons=("stop",),
    )


def logged(limits: Limits, *happened: tuple[float, Event], more: tuple[Record, ...] = ()) -> Log:
    """The log of a coordinator for these events."""
    coordinator = Coordinator(limits)
    records: list[Record] = []
    for t_s, event in happened:
        records.append(EventRecord(t_s, event))
        records.extend(ActionRecord(t_s, action) for action in coordinator.handle(event))
    header = RunHeader(
        mode="train",
        started_at=5.0,
        limits=limits_to_fields(limits),
        processes=("trainer", "engine 0"),
    )
    return Log(header, (*records, *more))


# Group 1 is interrupted after 2 tokens and continues with version 1.
INTERRUPTED = logged(
    LIMITS,
    (0.0, RunStarted((0,))),
    (2.0, GroupFinished(0, 0, 0)),
    (4.0, TrainStepDone(1)),
    (5.0, WeightsPushed(1)),
    (7.0, GroupFinished(1, 0, 1)),
    (9.0, TrainStepDone(2)),
    more=(group(0, 0.0, 2.0, (0, 3)), group(1, 0.0, 7.0, (0, 2), (1, 4))),
)


# --- lags ----------------------------------------------------------------------------------------


def test_lag_is_the_version_before_the_step_minus_the_version_of_the_token():
    first, second = trained_batches(INTERRUPTED)
    assert (first.version, first.groups, first.begun_s, first.done_s) == (1, (0,), 2.0, 4.0)
    assert first.token_lags == {0: 3}
    assert second.head_lags == {1: 1}
    assert second.tail_lags == {0: 1}
    assert second.token_lags == {1: 2, 0: 4}
    assert (second.samples, second.tokens, second.multi_version_samples) == (1, 6, 1)


def test_a_step_that_did_not_end_is_not_counted():
    cut = dataclasses.replace(
        INTERRUPTED,
        records=tuple(
            r
            for r in INTERRUPTED.records
            if not (isinstance(r, EventRecord) and r.event == TrainStepDone(2))
        ),
    )
    assert [batch.version for batch in trained_batches(cut)] == [1]


def test_counters_add_and_average():
    assert total([Counter({0: 1}), Counter({0: 2, 3: 1})]) == {0: 3, 3: 1}
    assert mean_lag(Counter({0: 3, 4: 1})) == 1.0
    assert mean_lag(Counter()) == 0.0


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        Limits(batch_groups=3, max_in_flight=5, schedule=synchronous(), save_every_steps=2),
        Limits(batch_groups=3, max_in_flight=5, schedule=partial_rollout()),
        Limits(batch_groups=1, max_in_flight=1, schedule=one_step_overlap()),
        Limits(batch_groups=2, max_in_flight=9, schedule=asynchronous(0.5, interruptible=False)),
        Limits(batch_groups=2, max_in_flight=2, order=strict_start_order()),
        Limits(batch_groups=2, max_in_flight=2, order=bounded_lag(2, "drop")),
        Limits(batch_groups=2, max_in_flight=2, order=bounded_lag(math.inf)),
    ],
)
def test_limits_survive_the_header(limits):
    assert limits_from_fields(limits_to_fields(limits)) == limits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"order": "by_color"}, "by_color"),
        ({"batch_groups": 2.5}, "needs a whole number"),
        ({"max_lag": "many"}, "needs a number"),
        ({"on_new_weights": "panic"}, "panic"),
    ],
)
def test_limits_that_cannot_be_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        limits_from_fields({**limits_to_fields(LIMITS), **change})


def test_limits_without_a_field_say_which():
    fields = limits_to_fields(LIMITS)
    del fields["eta"]
    with pytest.raises(ValueError, match="has no eta"):
        limits_from_fields(fields)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0, 2.0])
def test_a_log_as_it_was_has_what_had_ended_by_then_and_replays(share):
    log = INTERRUPTED
    t_s = share * log.end_s
    then = log.until(t_s)
    assert all(end_of(record) <= t_s for record in then.records)
    assert len(then.records) == sum(end_of(record) <= t_s for record in log.records)
    assert then.end_s == min(t_s, log.end_s)
    assert check_replay(then).agrees
    later = then.lasting(log.end_s + 5)
    assert (later.end_s, later.records) == (log.end_s + 5, then.records)
    assert later.lasting(1.0).end_s == later.end_s


def test_a_true_log_replays():
    replay = check_replay(INTERRUPTED)
    assert replay.agrees
    assert replay.events == 6
    assert replay.actions == sum(1 for _ in INTERRUPTED.actions)


def test_a_run_killed_between_an_event_and_its_actions_replays():
    *kept, last = [r for r in INTERRUPTED.records if not isinstance(r, GroupRecord)]
    assert isinstance(last, ActionRecord)
    assert check_replay(dataclasses.replace(INTERRUPTED, records=tuple(kept))).agrees


def test_an_action_left_out_in_the_middle_is_found():
    records = list(INTERRUPTED.records)
    first_action = next(i for i, r in enumerate(records) if isinstance(r, ActionRecord))
    del records[first_action]
    assert not check_replay(dataclasses.replace(INTERRUPTED, records=tuple(records))).agrees


def test_an_action_left_out_before_an_event_that_asks_for_nothing_is_found():
    *kept, last = [r for r in INTERRUPTED.records if not isinstance(r, GroupRecord)]
    assert isinstance(last, ActionRecord)
    records = (*kept, EventRecord(9.5, StopRequested()))
    replay = check_replay(dataclasses.replace(INTERRUPTED, records=records))
    assert f"{last.action} is missing before StopRequested()" in replay.difference


def test_an_action_that_does_not_follow_is_found():
    invented = (*INTERRUPTED.records, ActionRecord(9.5, Save(7)))
    replay = check_replay(dataclasses.replace(INTERRUPTED, records=invented))
    assert "Save(version=7)" in replay.difference


def test_an_impossible_event_is_found():
    impossible = (*INTERRUPTED.records, EventRecord(9.5, GroupFinished(44, 0, 0)))
    replay = check_replay(dataclasses.replace(INTERRUPTED, records=impossible))
    assert "is impossible" in replay.difference


def test_other_limits_than_those_of_the_run_are_found():
    other = dataclasses.replace(
        INTERRUPTED.header, limits={**INTERRUPTED.header.limits, "max_in_flight": 1}
    )
    assert not check_replay(dataclasses.replace(INTERRUPTED, header=other)).agrees


def test_a_log_of_nothing_replays():
    assert check_replay(Log(INTERRUPTED.header, ())).agrees


# --- chrome trace --------------------------------------------------------------------------------

TRACED = dataclasses.replace(
    INTERRUPTED,
    records=(
        *INTERRUPTED.records,
        SpanRecord(
            process="trainer", name="optimizer", t_s=2.0, end_s=3.0, args={"norm": math.inf}
        ),
        EventRecord(9.75, StopRequested()),
    ),
)


def trace_events(log: Log = TRACED) -> list[dict]:
    return chrome_trace(log)["traceEvents"]


def test_every_event_has_what_its_phase_needs():
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "i": {"name", "ts", "s", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
    }
    events = trace_events()
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert event.get("dur", 0) >= 0
        assert event.get("s", "g") in {"g", "p", "t"}
    json.dumps(events, allow_nan=False)


def test_processes_have_names_and_a_sort_order():
    names = {e["pid"]: e["args"]["name"] for e in trace_events() if e["name"] == "process_name"}
    order = {
        e["pid"]: e["args"]["sort_index"]
        for e in trace_events()
        if e["name"] == "process_sort_index"
    }
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)] == [
        "run",
        "trainer",
        "engine 0",
    ]
    assert {event["pid"] for event in trace_events()} <= set(names)


def test_times_are_microseconds():
    [group_1] = [e for e in trace_events() if e["name"] == "group 1"]
    assert (group_1["ts"], group_1["dur"]) == (0, 7e6)
    assert group_1["args"]["head_version"] == 0
    assert group_1["args"]["tail_version"] == 1


def test_slices_of_one_thread_nest_and_never_cross():
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace_events():
        if event["ph"] == "X":
            interval = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(interval)
    for intervals in threads.values():
        for a_start, a_end in intervals:
            for b_start, b_end in intervals:
                assert not a_start < b_start < a_end < b_end


def test_overlapping_groups_have_separate_slots_and_reuse_free_ones():
    groups = (group(2, 7.0, 8.0, (1, 1)), group(3, 7.5, 9.0, (1, 1)))
    log = dataclasses.replace(TRACED, records=(*TRACED.records, *groups))
    slots = {e["name"]: e["tid"] for e in trace_events(log) if e.get("cat") == "group"}
    assert slots["group 0"] != slots["group 1"]
    assert slots["group 2"] == min(slots["group 0"], slots["group 1"])
    assert slots["group 3"] == max(slots["group 0"], slots["group 1"])


def test_pushes_interrupts_and_counters_are_there():
    names = [event["name"] for event in trace_events()]
    assert {"push version 1", "interrupt", "resume"} <= set(names)
    counters: dict[str, list[float]] = {}
    for event in trace_events():
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"]["value"])
    assert counters["version of the trainer"] == [0, 1, 2]
    assert counters["version on the engines"] == [0, 1]
    assert max(counters["groups in flight"]) == 2
    assert counters["groups in flight"][-1] == 0
    assert counters["token lag, largest"] == [0, 1]
    assert counters["token lag, mean"] == [0, pytest.approx(2 / 6)]
