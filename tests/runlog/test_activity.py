"""Where the time of each process went: by hand, and properties of any log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.runlog.activity import (
    AFTER,
    BEFORE,
    LOST,
    NOT_JOINED,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    NOTHING_TO_SCORE,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_BY_HAND,
    PAUSED_FOR_TRAINING,
    TRAIN_ON_ITS_WAY,
    WAIT_BATCH,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
    Stretch,
    activity,
    idle_by_cause,
    training_window,
)
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    RunHeader,
    SpanRecord,
)

PROCESSES = ("trainer", "engine 0", "rewards")


def log_of(*records: Record | tuple[float, ev.Event | ev.Action], processes=PROCESSES) -> Log:
    header = RunHeader(mode="train", started_at=0.0, limits={}, processes=processes)
    return Log(header, tuple(as_record(record) for record in records))


def as_record(record: Record | tuple[float, ev.Event | ev.Action]) -> Record:
    match record:
        case (float(t_s), what) if isinstance(what, ev.Event):
            return EventRecord(t_s, what)
        case (float(t_s), what):
            return ActionRecord(t_s, what)
        case _:
            return record


def group(
    number: int, t_s: float, generated_s: float, end_s: float, engine: int = 0
) -> GroupRecord:
    return GroupRecord(
        group=number,
        engine=engine,
        t_s=t_s,
        generated_s=generated_s,
        end_s=end_s,
        rewards=(1.0,),
        segments=(((0, 5),),),
        finish_reasons=("stop",),
    )


def span(process: str, name: str, t_s: float, end_s: float, cause: str = "") -> SpanRecord:
    return SpanRecord(process=process, name=name, t_s=t_s, end_s=end_s, cause=cause)


def story(stretches: list[Stretch]) -> list[tuple[str, float, float]]:
    return [(stretch.name, stretch.start_s, stretch.end_s) for stretch in stretches]


SYNCHRONOUS = (
    (1.0, ev.RunStarted((0,))),
    (1.0, ev.StartGroup(0, 0, 0)),
    group(0, 1.0, 4.0, 5.0),
    (5.0, ev.GroupFinished(0, 0, 0)),
    (5.0, ev.Train(0, (0,))),
    (8.0, ev.TrainStepDone(1)),
    (8.0, ev.PushWeights(1)),
    (9.0, ev.WeightsPushed(1)),
    (9.0, ev.StartGroup(1, 0, 1)),
    group(1, 9.0, 10.0, 10.0),
    (10.0, ev.GroupFinished(1, 1, 1)),
    (10.0, ev.Train(1, (1,))),
    (12.0, ev.TrainStepDone(2)),
    (12.0, ev.Save(2)),
    (12.0, ev.PushWeights(2)),
    (13.0, ev.WeightsPushed(2)),
    (15.0, ev.CheckpointDone(2)),
    (15.0, ev.Finish("complete")),
)


def test_without_spans_everything_follows_from_events_and_actions():
    by_process = activity(log_of(*SYNCHRONOUS))
    assert story(by_process["trainer"]) == [
        (BEFORE, 0.0, 1.0),
        (WAIT_BATCH, 1.0, 5.0),
        ("train", 5.0, 8.0),
        (WAIT_WEIGHTS, 8.0, 9.0),
        (WAIT_BATCH, 9.0, 10.0),
        ("train", 10.0, 12.0),
        ("save", 12.0, 15.0),
    ]
    assert story(by_process["engine 0"]) == [
        (BEFORE, 0.0, 1.0),
        ("generate", 1.0, 4.0),
        (WAIT_REWARDS, 4.0, 5.0),
        (NOTHING_ADMITTED, 5.0, 8.0),
        (WAIT_WEIGHTS, 8.0, 9.0),
        ("generate", 9.0, 10.0),
        (NOTHING_LEFT, 10.0, 15.0),
    ]
    assert story(by_process["rewards"]) == [
        (BEFORE, 0.0, 1.0),
        (NOTHING_TO_SCORE, 1.0, 4.0),
        ("judge", 4.0, 5.0),
        (NOTHING_TO_SCORE, 5.0, 15.0),
    ]


def test_spans_are_busy_time_and_the_rest_has_a_cause():
    log = log_of(
        *SYNCHRONOUS,
        span("trainer", "forward/backward", 5.5, 7.0),
        span("trainer", "optimizer", 7.0, 8.0),
        span("engine 0", "decode", 1.5, 4.0),
        span("engine 0", "load weights", 8.25, 9.0),
    )
    by_process = activity(log)
    assert story(by_process["trainer"])[1:6] == [
        (WAIT_BATCH, 1.0, 5.0),
        (TRAIN_ON_ITS_WAY, 5.0, 5.5),
        ("forward/backward", 5.5, 7.0),
        ("optimizer", 7.0, 8.0),
        (WAIT_WEIGHTS, 8.0, 9.0),
    ]
    assert story(by_process["engine 0"])[1:7] == [
        (ON_ITS_WAY, 1.0, 1.5),
        ("decode", 1.5, 4.0),
        (WAIT_REWARDS, 4.0, 5.0),
        (NOTHING_ADMITTED, 5.0, 8.0),
        (WAIT_WEIGHTS, 8.0, 8.25),
        ("load weights", 8.25, 9.0),
    ]


def test_the_innermost_span_counts_and_busy_beats_waiting():
    log = log_of(
        (0.0, ev.RunStarted((0,))),
        span("trainer", "step", 0.0, 10.0),
        span("trainer", "forward/backward", 2.0, 6.0),
        span("trainer", "checkpointed part", 3.0, 4.0),
        span("engine 0", "wait", 0.0, 10.0, cause="a reason"),
        span("engine 0", "load weights", 4.0, 6.0),
    )
    by_process = activity(log)
    assert story(by_process["trainer"]) == [
        ("step", 0.0, 2.0),
        ("forward/backward", 2.0, 3.0),
        ("checkpointed part", 3.0, 4.0),
        ("forward/backward", 4.0, 6.0),
        ("step", 6.0, 10.0),
    ]
    assert story(by_process["engine 0"]) == [
        ("a reason", 0.0, 4.0),
        ("load weights", 4.0, 6.0),
        ("a reason", 6.0, 10.0),
    ]
    assert [stretch.busy for stretch in by_process["engine 0"]] == [False, True, False]


def test_a_pause_is_for_training_until_there_are_new_weights():
    log = log_of(
        (0.0, ev.RunStarted((0,))),
        (0.0, ev.StartGroup(0, 0, 0)),
        (0.0, ev.StartGroup(1, 0, 0)),
        (2.0, ev.GroupFinished(1, 0, 0)),
        (2.0, ev.Interrupt()),
        (2.0, ev.Train(0, (1,))),
        (5.0, ev.TrainStepDone(1)),
        (5.0, ev.PushWeights(1)),
        (6.0, ev.WeightsPushed(1)),
        (6.0, ev.Resume()),
        group(0, 0.0, 9.0, 9.0),
        (9.0, ev.GroupFinished(0, 0, 1)),
    )
    assert story(activity(log)["engine 0"]) == [
        ("generate", 0.0, 2.0),
        (PAUSED_FOR_TRAINING, 2.0, 5.0),
        (PAUSED, 5.0, 6.0),
        ("generate", 6.0, 9.0),
    ]


def test_a_pause_by_hand_is_a_cause_of_its_own():
    log = log_of(
        (0.0, ev.RunStarted((0, 1))),
        (0.0, ev.StartGroup(0, 0, 0)),
        (0.0, ev.StartGroup(1, 0, 0)),
        (2.0, ev.GroupFinished(1, 0, 0)),
        (2.0, ev.Train(0, (1,))),
        (3.0, ev.PauseRequested()),
        (3.0, ev.Interrupt(by_hand=True)),
        (5.0, ev.TrainStepDone(1)),
        (5.0, ev.PushWeights(1)),
        (6.0, ev.WeightsPushed(1)),
        (8.0, ev.PauseRequested()),
        (9.0, ev.ResumeRequested()),
        (9.0, ev.Resume()),
        group(0, 0.0, 12.0, 12.0),
        (12.0, ev.GroupFinished(0, 0, 1)),
        (13.0, ev.PauseRequested()),
        (14.0, ev.StopRequested()),
        (15.0, ev.Finish("stopped")),
        processes=("trainer", "engine 0", "engine 1"),
    )
    by_process = activity(log)
    assert pauses(log) == [(3.0, 9.0), (13.0, 14.0)]
    assert story(by_process["engine 0"]) == [
        ("generate", 0.0, 3.0),
        (PAUSED_BY_HAND, 3.0, 9.0),
        ("generate", 9.0, 12.0),
        (NOTHING_LEFT, 12.0, 13.0),
        (PAUSED_BY_HAND, 13.0, 14.0),
        (NOTHING_LEFT, 14.0, 15.0),
    ]
    assert story(by_process["engine 1"])[1] == (PAUSED_BY_HAND, 3.0, 9.0)
    assert story(by_process["trainer"]) == [
        (WAIT_BATCH, 0.0, 2.0),
        ("train", 2.0, 5.0),
        (PAUSED_BY_HAND, 5.0, 9.0),
        (NOTHING_LEFT, 9.0, 13.0),
        (PAUSED_BY_HAND, 13.0, 14.0),
        (NOTHING_LEFT, 14.0, 15.0),
    ]


def test_an_engine_that_says_it_is_paused_is_so_by_hand_where_that_was_asked():
    log = log_of(
        (0.0, ev.RunStarted((0,))),
        (0.0, ev.StartGroup(0, 0, 0)),
        (2.0, ev.PauseRequested()),
        (4.0, ev.ResumeRequested()),
        (6.0, ev.PauseRequested()),
        span("engine 0", "decode", 0.0, 1.0),
        span("engine 0", "paused", 1.0, 3.0, cause=PAUSED),
        span("engine 0", "load weights", 3.0, 3.5),
        span("engine 0", "paused", 3.5, 7.0, cause=PAUSED),
    )
    assert pauses(log) == [(2.0, 4.0), (6.0, 7.0)]
    assert story(activity(log)["engine 0"]) == [
        ("decode", 0.0, 1.0),
        (PAUSED, 1.0, 2.0),
        (PAUSED_BY_HAND, 2.0, 3.0),
        ("load weights", 3.0, 3.5),
        (PAUSED_BY_HAND, 3.5, 4.0),
        (PAUSED, 4.0, 6.0),
        (PAUSED_BY_HAND, 6.0, 7.0),
    ]


def test_a_lost_engine_is_lost_until_it_joins_and_its_groups_run_elsewhere():
    log = log_of(
        (0.0, ev.RunStarted((0, 1))),
        (0.0, ev.StartGroup(0, 0, 0)),
        (2.0, ev.EngineLost(0)),
        (2.0, ev.StartGroup(0, 1, 0)),
        (4.0, ev.EngineJoined(0)),
        (4.0, ev.EngineJoined(2)),
        (4.0, ev.StartGroup(1, 2, 0)),
        (6.0, ev.Drop(0, "late")),
        (7.0, ev.GroupFinished(1, 0, 0)),
        processes=("engine 0", "engine 1"),
    )
    by_process = activity(log)
    assert story(by_process["engine 0"]) == [
        ("generate", 0.0, 2.0),
        (LOST, 2.0, 4.0),
        (NOTHING_ADMITTED, 4.0, 7.0),
    ]
    assert story(by_process["engine 1"]) == [
        (NOTHING_ADMITTED, 0.0, 2.0),
        ("generate", 2.0, 6.0),
        (NOTHING_ADMITTED, 6.0, 7.0),
    ]
    assert story(by_process["engine 2"]) == [(NOT_JOINED, 0.0, 4.0), ("generate", 4.0, 7.0)]


def test_use_is_counted_between_start_and_finish_only():
    log = log_of(
        *SYNCHRONOUS, span("engine 0", "decode", 0.0, 4.0), span("engine 0", "decode", 15.0, 20.0)
    )
    assert training_window(log) == (1.0, 15.0)
    use = idle_by_cause(log)["engine 0"]
    assert use.total_s == 14.0
    assert use.busy_s == {"decode": 3.0}
    assert story(activity(log)["trainer"])[-1] == (AFTER, 15.0, 20.0)


def test_a_log_without_events_has_no_use_and_no_error():
    uses = idle_by_cause(log_of())
    assert all(use.total_s == 0 and use.shares() == {} for use in uses.values())
    assert all(use.busy_share == use.idle_share == 0 for use in uses.values())


SPANS = st.builds(
    lambda process, name, start_s, length_s, cause: span(
        process, name, start_s, start_s + length_s, cause
    ),
    st.sampled_from(["trainer", "engine 0", "reader"]),
    st.sampled_from(["a", "b"]),
    st.floats(0, 20),
    st.floats(0, 10),
    st.sampled_from(["", "", "cause"]),
)


@given(st.lists(SPANS, max_size=12))
def test_activity_has_no_gap_and_no_overlap_and_shares_sum_to_one(spans):
    log = log_of(*SYNCHRONOUS, *spans)
    for stretches in activity(log).values():
        assert stretches[0].start_s == 0.0
        assert stretches[-1].end_s == log.end_s
        for before, after in pairwise(stretches):
            assert before.end_s == after.start_s
            assert (before.name, before.busy) != (after.name, after.busy)
        assert all(stretch.start_s < stretch.end_s for stretch in stretches)
    for use in idle_by_cause(log).values():
        assert sum(use.shares().values()) == pytest.approx(1)
        assert use.busy_share + use.idle_share == pytest.approx(1)


@given(st.lists(SPANS, max_size=12))
def test_busy_time_is_the_time_that_some_span_covers(spans):
    log = log_of((0.0, ev.RunStarted((0,))), *spans, (40.0, ev.Finish("complete")))
    uses = idle_by_cause(log)
    for process in {s.process for s in spans if s.end_s > s.t_s}:
        busy = [(s.t_s, s.end_s) for s in spans if s.process == process and not s.cause]
        covered, reached = 0.0, 0.0
        for start_s, end_s in sorted(busy):
            covered += max(0.0, end_s - max(start_s, reached))
            reached = max(reached, end_s)
        assert sum(uses[process].busy_s.values()) == pytest.approx(covered)
