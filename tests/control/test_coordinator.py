"""Small runs worked out by hand: two groups a batch, events on the left, actions below."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    RECYCLED,
    Action,
    BatchReturned,
    CheckpointCopied,
    CheckpointDone,
    Drop,
    EngineJoined,
    EngineLost,
    EtaRequested,
    Event,
    Finish,
    GroupFiltered,
    GroupFinished,
    Interrupt,
    PauseRequested,
    PushWeights,
    Request,
    Resume,
    ResumeRequested,
    RunStarted,
    Save,
    StartGroup,
    StopRequested,
    Train,
    TrainPartDone,
    TrainStepDone,
    WeightsOffered,
    WeightsPushed,
)
from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import (
    OnNewWeights,
    Schedule,
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)


def limits(
    schedule: Schedule,
    *,
    train_steps: int | None = None,
    max_in_flight: int = 99,
    save_every_steps: int = 0,
    order: BatchOrder | None = None,
    batch_parts: int = 1,
    hybrid_engines: int = 0,
) -> Limits:
    return Limits(
        batch_groups=2,
        batch_parts=batch_parts,
        hybrid_engines=hybrid_engines,
        max_in_flight=max_in_flight,
        train_steps=train_steps,
        save_every_steps=save_every_steps,
        schedule=schedule,
        order=order or oldest_finished_first(),
    )


def actions_after(coordinator: Coordinator, *events: Event) -> list[Action]:
    """The actions on the last of `events`."""
    actions: list[Action] = []
    for event in events:
        actions = list(coordinator.handle(event))
    return actions


def ended(group: int, version: int = 0) -> GroupFinished:
    return GroupFinished(group, version, version)


def test_a_synchronous_run_from_beginning_to_end() -> None:
    c = Coordinator(limits(synchronous(), train_steps=2))
    assert c.waiting_for() == "the run to start"
    assert actions_after(c, RunStarted((0, 1))) == [StartGroup(0, 0, 0), StartGroup(1, 1, 0)]
    assert c.waiting_for() == "0 of 2 groups for step 1"
    assert actions_after(c, ended(1)) == []
    assert c.waiting_for() == "1 of 2 groups for step 1"
    assert actions_after(c, ended(0)) == [Train(0, (0, 1))]
    assert c.waiting_for() == "the trainer (step 1)"
    assert actions_after(c, TrainStepDone(1)) == [PushWeights(1)]
    assert c.waiting_for() == "engines to load version 1"
    assert actions_after(c, WeightsPushed(1)) == [StartGroup(2, 0, 1), StartGroup(3, 1, 1)]
    assert actions_after(c, ended(2, 1), ended(3, 1)) == [Train(1, (2, 3))]
    assert actions_after(c, TrainStepDone(2)) == [Save(2), PushWeights(2)]
    assert c.waiting_for() == "the checkpoint of version 2"
    assert actions_after(c, WeightsPushed(2)) == []
    assert actions_after(c, CheckpointDone(2)) == [Finish("complete")]
    assert c.waiting_for() == "nothing (complete)"


def test_a_synchronous_batch_in_parts_is_trained_on_as_its_groups_finish() -> None:
    c = Coordinator(limits(synchronous(), batch_parts=2, train_steps=1))
    starts = [StartGroup(0, 0, 0), StartGroup(1, 0, 0)]
    assert actions_after(c, RunStarted((0,))) == starts
    assert c.waiting_for() == "0 of 1 groups for step 1"
    assert actions_after(c, ended(1)) == [Train(0, (1,), rest=1)]
    assert c.waiting_for() == "the trainer (step 1)"
    assert actions_after(c, TrainPartDone(1)) == []
    assert c.waiting_for() == "0 of 1 groups for step 1"
    with pytest.raises(ValueError, match="step 1 is running; its groups cannot be saved"):
        c.frontier()
    assert actions_after(c, ended(0)) == [Train(0, (0,))]
    assert (c.counts.trained, c.counts.finished) == (2, 0)
    assert actions_after(c, TrainStepDone(1)) == [Save(1), PushWeights(1)]


def test_a_stop_between_two_parts_ends_the_batch_with_no_more_groups_than_it_lacks() -> None:
    c = Coordinator(limits(asynchronous(1), batch_parts=2, max_in_flight=1))
    assert actions_after(c, RunStarted((0,))) == [StartGroup(0, 0, 0)]
    assert actions_after(c, ended(0)) == [Train(0, (0,), rest=1), StartGroup(1, 0, 0)]
    assert actions_after(c, TrainPartDone(1)) == []
    assert actions_after(c, StopRequested()) == []
    assert actions_after(c, GroupFiltered(1, "too easy")) == [StartGroup(2, 0, 0)]
    assert actions_after(c, ended(2)) == [Train(0, (2,))]
    assert actions_after(c, TrainStepDone(1)) == [Save(1)]
    assert actions_after(c, CheckpointDone(1)) == [Finish("stopped")]


def test_without_engines_between_two_parts_the_weights_are_of_no_version_and_not_saved() -> None:
    c = Coordinator(limits(synchronous(), batch_parts=2))
    actions_after(c, RunStarted((0,)), ended(0), TrainPartDone(1))
    reason = "no engine left"
    assert actions_after(c, EngineLost(0)) == [Drop(1, reason), Finish(reason)]


def test_hybrid_engines_get_no_group_from_a_batch_to_its_weights() -> None:
    c = Coordinator(limits(asynchronous(2), hybrid_engines=1, max_in_flight=3))
    actions_after(c, RunStarted((0, 1)))  # 0 and 2 on engine 0, 1 on engine 1
    assert c.engine_loads == {0: 2, 1: 1}
    assert actions_after(c, ended(1)) == [StartGroup(3, 1, 0)]
    assert actions_after(c, ended(0)) == [Train(0, (0, 1)), StartGroup(4, 1, 0)]
    assert c.engine_loads == {1: 2}
    assert actions_after(c, ended(3)) == [StartGroup(5, 1, 0)]
    assert actions_after(c, ended(4)) == []  # a batch, but the trainer works
    # The next step waits until the GPUs of engine 0 have loaded.
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    after = actions_after(c, WeightsPushed(1))
    assert after == [Train(1, (3, 4)), Resume(), StartGroup(6, 1, 1)]
    assert actions_after(c, TrainStepDone(2)) == [Interrupt(), PushWeights(2)]
    assert actions_after(c, WeightsPushed(2)) == [Resume()]
    assert c.engine_loads == {0: 1, 1: 2}  # group 2 is where it was


def test_hybrid_engines_may_be_all_of_them_and_may_be_lost_meanwhile() -> None:
    c = Coordinator(limits(asynchronous(1), hybrid_engines=2, max_in_flight=3))
    actions_after(c, RunStarted((0, 1)), ended(0))  # 2 and 3 run on engine 0
    assert actions_after(c, ended(1)) == [Train(0, (0, 1))]
    assert actions_after(c, EngineLost(0, tokens_kept=True)) == []
    with pytest.raises(ValueError, match=r"the engines are \[1\]"):
        c.handle(EngineJoined(1))
    assert actions_after(c, EngineJoined(0)) == []  # its devices train, too
    assert actions_after(c, TrainStepDone(1)) == [PushWeights(1)]
    starts = [StartGroup(2, 0, 0), StartGroup(3, 1, 0), StartGroup(4, 0, 1)]
    assert actions_after(c, WeightsPushed(1)) == starts


def test_new_weights_interrupt_what_runs() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    starts = [StartGroup(0, 0, 0), StartGroup(1, 0, 0), StartGroup(2, 0, 0)]
    assert actions_after(c, RunStarted((0,))) == starts
    assert actions_after(c, ended(0)) == [StartGroup(3, 0, 0)]  # eq. 3: (0 + 1 + 1) * 2 = 4 started
    assert actions_after(c, ended(2)) == [Train(0, (0, 2))]
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    assert actions_after(c, WeightsPushed(1)) == [Resume(), StartGroup(4, 0, 1)]
    # Group 1 began under version 0 and ended under version 1.
    assert actions_after(c, GroupFinished(1, 0, 1)) == [StartGroup(5, 0, 1)]


def test_the_trainer_does_not_wait_for_the_push_and_only_the_newest_version_follows() -> None:
    c = Coordinator(limits(asynchronous(2), max_in_flight=6))
    actions_after(c, RunStarted((0,)), *[ended(group) for group in range(5)])
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), Train(1, (2, 3)), PushWeights(1)]
    assert actions_after(c, TrainStepDone(2)) == []  # version 1 is still on its way
    assert actions_after(c, ended(5)) == [Train(2, (4, 5))]
    assert actions_after(c, TrainStepDone(3)) == []
    assert actions_after(c, WeightsPushed(1)) == [PushWeights(3)]  # still paused, 2 is skipped
    starts = [StartGroup(group, 0, 3) for group in range(6, 12)]
    assert actions_after(c, WeightsPushed(3)) == [Resume(), *starts]


def test_draining_starts_nothing_until_the_engines_are_empty() -> None:
    c = Coordinator(limits(asynchronous(1, interruptible=False), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    assert actions_after(c, TrainStepDone(1)) == []
    assert c.waiting_for() == "2 running groups to end before version 1 is loaded"
    assert actions_after(c, ended(2)) == []
    assert actions_after(c, ended(3)) == [Train(1, (2, 3)), PushWeights(1)]
    assert actions_after(c, WeightsPushed(1)) == [StartGroup(4, 0, 1), StartGroup(5, 0, 1)]


def test_one_step_overlap_generates_the_next_batch_while_training() -> None:
    c = Coordinator(limits(one_step_overlap(), max_in_flight=2))
    actions_after(c, RunStarted((0,)))
    assert actions_after(c, ended(0)) == [StartGroup(2, 0, 0)]
    assert actions_after(c, ended(1)) == [Train(0, (0, 1)), StartGroup(3, 0, 0)]
    assert actions_after(c, ended(2)) == []
    assert actions_after(c, TrainStepDone(1)) == []  # batch (2, 3) ends under one version
    assert actions_after(c, ended(3)) == [Train(1, (2, 3)), PushWeights(1)]
    assert actions_after(c, WeightsPushed(1)) == [StartGroup(4, 0, 1), StartGroup(5, 0, 1)]


def test_finishing_a_batch_starts_what_it_still_needs() -> None:
    c = Coordinator(limits(one_step_overlap(), max_in_flight=2))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), TrainStepDone(1))
    assert actions_after(c, GroupFiltered(2, "all wrong")) == [StartGroup(4, 0, 0)]
    assert actions_after(c, ended(3)) == []
    assert actions_after(c, ended(4)) == [Train(1, (3, 4)), PushWeights(1)]


def test_partial_rollout_pauses_for_training_and_carries_responses_over() -> None:
    c = Coordinator(limits(partial_rollout(), max_in_flight=3))
    assert len(actions_after(c, RunStarted((0,)))) == 3
    assert actions_after(c, ended(1)) == [StartGroup(3, 0, 0)]
    assert actions_after(c, ended(2)) == [Interrupt(), Train(0, (1, 2))]
    assert actions_after(c, TrainStepDone(1)) == [PushWeights(1)]
    assert actions_after(c, WeightsPushed(1)) == [Resume(), StartGroup(4, 0, 1)]
    assert actions_after(c, GroupFinished(0, 0, 1), GroupFinished(3, 0, 1)) == [
        Interrupt(),
        Train(1, (0, 3)),
    ]


def test_what_is_filtered_is_replaced_and_does_not_count() -> None:
    c = Coordinator(limits(synchronous()))
    actions_after(c, RunStarted((0,)))
    assert actions_after(c, GroupFiltered(0, "all right")) == [StartGroup(2, 0, 0)]
    assert (c.counts.started, c.counts.filtered) == (2, 1)


def test_a_recycled_group_starts_again_before_new_ones_and_what_it_reported_is_forgotten() -> None:
    order = bounded_lag(0, "recycle")
    c = Coordinator(limits(asynchronous(1), max_in_flight=4, order=order))
    c.handle(RunStarted((0,)))
    for group in (0, 1):
        c.handle(GroupFinished(group, 0, 0))
    c.handle(GroupFinished(2, 0, 0))
    actions = c.handle(TrainStepDone(1))
    assert actions[:2] == (Drop(2, RECYCLED), Drop(3, RECYCLED))
    assert not any(isinstance(action, StartGroup) for action in actions)
    assert [(one.group, one.version, one.attempts) for one in c.frontier().open] == [
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert c.counts.dropped == 2
    started = [one for one in c.handle(WeightsPushed(1)) if isinstance(one, StartGroup)]
    assert [(one.group, one.version) for one in started] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    assert [one.attempts for one in c.frontier().open] == [2, 2, 1, 1]
    with pytest.raises(ValueError, match="start <= head"):
        c.handle(GroupFinished(3, 0, 0))


def test_late_groups_are_dropped_running_or_finished_and_replaced() -> None:
    order = bounded_lag(0, "drop")
    c = Coordinator(limits(asynchronous(1), max_in_flight=4, order=order))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), ended(2))  # group 3 still runs
    assert actions_after(c, TrainStepDone(1)) == [
        Drop(2, "lag above 0"),
        Drop(3, "lag above 0"),
        PushWeights(1),
    ]
    starts = [StartGroup(group, 0, 1) for group in (4, 5, 6, 7)]
    assert actions_after(c, WeightsPushed(1)) == starts
    assert actions_after(c, ended(3)) == []  # its end crossed the abort on the way
    assert c.counts.dropped == 2
    with pytest.raises(ValueError, match="group 3 is not running"):
        c.handle(ended(3))


def test_bounded_lag_waits_for_a_straggler_only_when_it_must() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=4, order=bounded_lag(1)))
    actions_after(c, RunStarted((0,)), ended(1))
    # Group 0, still running, may be one version late: 1 and 2 go first.
    assert actions_after(c, ended(2)) == [Train(0, (1, 2))]
    actions_after(c, TrainStepDone(1), WeightsPushed(1), GroupFinished(3, 0, 1))
    assert actions_after(c, ended(4, 1)) == []
    assert c.waiting_for() == (
        "1 group started at version 0 or earlier to end, which would otherwise exceed a lag of 1"
    )
    assert actions_after(c, GroupFinished(0, 0, 1)) == [Train(1, (0, 3))]


def test_no_step_runs_while_a_checkpoint_is_written() -> None:
    c = Coordinator(limits(asynchronous(1), save_every_steps=1))
    actions_after(c, RunStarted((0,)), *[ended(group) for group in range(4)])
    assert actions_after(c, TrainStepDone(1)) == [Save(1), PushWeights(1)]
    assert actions_after(c, CheckpointDone(1)) == [Train(1, (2, 3))]


def test_steps_run_while_a_checkpoint_is_written_from_a_copy_and_the_next_one_waits() -> None:
    c = Coordinator(limits(asynchronous(4), save_every_steps=1, train_steps=3))
    actions_after(c, RunStarted((0,)), *[ended(group) for group in range(6)])
    assert actions_after(c, TrainStepDone(1)) == [Save(1), PushWeights(1)]
    actions_after(c, WeightsPushed(1))
    assert c.waiting_for() == "the checkpoint of version 1"
    assert actions_after(c, CheckpointCopied(1)) == [Train(1, (2, 3))]
    assert c.waiting_for() == "the trainer (step 2)"
    with pytest.raises(ValueError, match="no checkpoint was expected"):
        c.handle(CheckpointCopied(1))
    assert actions_after(c, TrainStepDone(2)) == [PushWeights(2)]
    actions_after(c, WeightsPushed(2))
    assert c.waiting_for() == "the checkpoint of version 1"
    with pytest.raises(ValueError, match="version 1 was expected"):
        c.handle(CheckpointDone(2))
    assert actions_after(c, CheckpointDone(1)) == [Save(2)]
    assert c.frontier().version == 2
    assert actions_after(c, CheckpointCopied(2)) == [Train(2, (4, 5))]


def test_the_end_of_a_run_waits_for_its_checkpoint() -> None:
    c = Coordinator(limits(synchronous(), train_steps=1))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), TrainStepDone(1), WeightsPushed(1))
    assert actions_after(c, CheckpointCopied(1)) == []
    assert c.waiting_for() == "the checkpoint of version 1"
    assert actions_after(c, CheckpointDone(1)) == [Finish("complete")]


def test_a_stop_waits_for_the_checkpoint_that_is_written_and_then_saves_the_newest_step() -> None:
    c = Coordinator(limits(asynchronous(4), save_every_steps=2))
    actions_after(c, RunStarted((0,)), *[ended(group) for group in range(6)])
    actions_after(c, TrainStepDone(1), WeightsPushed(1))
    assert Save(2) in actions_after(c, TrainStepDone(2))
    actions_after(c, WeightsPushed(2), CheckpointCopied(2), TrainStepDone(3))
    assert actions_after(c, StopRequested()) == []
    assert c.waiting_for() == "the checkpoint of version 2"
    assert actions_after(c, CheckpointDone(2)) == [Save(3)]
    assert actions_after(c, CheckpointCopied(3)) == []
    assert actions_after(c, WeightsPushed(3), CheckpointDone(3))[-1] == Finish("stopped")


def test_a_stop_finishes_the_step_saves_and_gives_up_the_rest() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(
        c, RunStarted((0,)), ended(0), ended(1), ended(2)
    )  # trains (0, 1), 3 runs, 2 waits
    assert actions_after(c, StopRequested()) == []
    assert c.waiting_for() == "the trainer (step 1)"
    assert actions_after(c, TrainStepDone(1)) == [Save(1)]
    assert actions_after(c, StopRequested()) == []
    assert actions_after(c, CheckpointDone(1)) == [
        Drop(2, "run ended"),
        Drop(3, "run ended"),
        Finish("stopped"),
    ]


def test_a_stop_before_anything_was_trained_ends_at_once() -> None:
    c = Coordinator(limits(synchronous()))
    actions_after(c, RunStarted((0,)))
    assert actions_after(c, StopRequested()) == [
        Drop(0, "run ended"),
        Drop(1, "run ended"),
        Finish("stopped"),
    ]


def test_a_stop_after_the_last_step_changes_nothing() -> None:
    c = Coordinator(limits(synchronous(), train_steps=1))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), TrainStepDone(1), StopRequested())
    assert actions_after(c, WeightsPushed(1), CheckpointDone(1)) == [Finish("complete")]


def test_the_groups_of_a_lost_engine_start_again_elsewhere() -> None:
    c = Coordinator(limits(synchronous()))
    actions_after(c, RunStarted((0, 1)))
    assert actions_after(c, EngineLost(1)) == [StartGroup(1, 0, 0)]
    assert actions_after(c, EngineJoined(7)) == []
    assert actions_after(c, GroupFiltered(0, "too easy")) == [StartGroup(2, 7, 0)]


def test_an_engine_lost_during_an_interruption_gives_its_groups_after_the_push() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0, 1)), ended(0), ended(1))  # 2 and 3 run on engine 0
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    assert actions_after(c, EngineLost(0)) == []
    starts = [StartGroup(2, 1, 1), StartGroup(3, 1, 1), StartGroup(4, 1, 1)]
    assert actions_after(c, WeightsPushed(1)) == [Resume(), *starts]


def test_without_engines_the_run_saves_and_ends() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    reason = "no engine left"
    assert actions_after(c, EngineLost(0)) == []
    assert actions_after(c, TrainStepDone(1)) == [Save(1)]
    # The checkpoint has them as open, so that a run that continues starts them again.
    assert [one.group for one in c.frontier().open] == [2, 3]
    drops = [Drop(2, reason), Drop(3, reason)]
    assert actions_after(c, CheckpointDone(1)) == [*drops, Finish(reason)]


def test_a_group_whose_tokens_are_kept_keeps_the_version_it_started_with() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0, 1)), ended(0), ended(1))  # 2 and 3 run on engine 0
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    assert actions_after(c, EngineLost(0, tokens_kept=True)) == []
    starts = [StartGroup(2, 1, 0), StartGroup(3, 1, 0), StartGroup(4, 1, 1)]
    assert actions_after(c, WeightsPushed(1)) == [Resume(), *starts]
    assert actions_after(c, GroupFinished(2, 0, 1), GroupFinished(3, 0, 0)) == [
        Train(1, (2, 3)),
    ]


def test_a_group_being_scored_when_its_engine_is_lost_is_not_moved() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0, 1)), ended(0), ended(1), TrainStepDone(1))
    actions_after(c, EngineLost(0, tokens_kept=True))  # 2 and 3 ran there, and wait for the push
    assert actions_after(c, ended(3)) == []
    assert c.counts.in_flight == 1
    starts = [StartGroup(2, 1, 0), StartGroup(4, 1, 1), StartGroup(5, 1, 1)]
    assert actions_after(c, WeightsPushed(1)) == [Resume(), *starts]


def test_a_run_without_engines_waits_for_one_that_returns() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    assert actions_after(c, EngineLost(0, tokens_kept=True, returns=True)) == []
    assert c.waiting_for() == "an engine to restart; none is left"
    assert actions_after(c, TrainStepDone(1)) == [PushWeights(1)]  # nobody is there to load it
    assert actions_after(c, WeightsPushed(1)) == []
    assert actions_after(c, EngineJoined(0)) == [
        StartGroup(2, 0, 0),
        StartGroup(3, 0, 0),
        StartGroup(4, 0, 1),
    ]


def test_a_run_whose_engines_are_given_up_ends() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0))
    assert actions_after(c, EngineLost(0, tokens_kept=True, returns=True)) == []
    reason = "no engine left"
    drops = [Drop(group, reason) for group in (0, 1, 2, 3)]
    assert actions_after(c, EngineLost(0)) == [*drops, Finish(reason)]


def test_after_a_recovery_the_count_begins_at_the_version() -> None:
    c = Coordinator(limits(asynchronous(1), train_steps=8))
    starts = [StartGroup(group, 0, 7) for group in (23, 24)]  # one step is left of 8
    assert actions_after(c, RunStarted((0,), version=7, next_group=23)) == starts
    assert c.counts.started == 16
    assert actions_after(c, ended(23, 7), ended(24, 7)) == [Train(7, (23, 24))]


def test_a_run_that_was_complete_when_recovered_ends_at_once() -> None:
    c = Coordinator(limits(asynchronous(1), train_steps=3))
    assert actions_after(c, RunStarted((0,), version=3, next_group=6)) == [Finish("complete")]


def test_a_pause_interrupts_and_what_ends_meanwhile_waits_for_the_resume() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0))  # 1, 2 and 3 run
    assert actions_after(c, PauseRequested()) == [Interrupt(by_hand=True)]
    assert c.waiting_for() == "a request to resume"
    assert actions_after(c, ended(1)) == []  # its score was on its way: a batch, and no step
    assert c.counts.finished == 2
    assert actions_after(c, ResumeRequested()) == [Train(0, (0, 1)), Resume()]


def test_a_pause_during_a_step_ends_the_step_and_pushes_its_weights() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3, save_every_steps=1))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), ended(2))  # trains (0, 1); 3 runs
    assert actions_after(c, PauseRequested()) == [Interrupt(by_hand=True)]
    assert c.waiting_for() == "the trainer (step 1), and is then paused"
    assert actions_after(c, TrainStepDone(1)) == [Save(1), PushWeights(1)]
    assert actions_after(c, CheckpointDone(1)) == []
    assert c.waiting_for() == "engines to load version 1, and is then paused"
    assert actions_after(c, WeightsPushed(1)) == []
    starts = [StartGroup(4, 0, 1), StartGroup(5, 0, 1)]
    assert actions_after(c, ResumeRequested()) == [Resume(), *starts]


def test_a_pause_during_a_push_keeps_the_engines_paused() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    assert actions_after(c, PauseRequested()) == []
    assert actions_after(c, WeightsPushed(1)) == []
    assert actions_after(c, ResumeRequested()) == [Resume(), StartGroup(4, 0, 1)]


def test_a_resume_during_a_push_waits_for_the_weights() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    actions_after(c, TrainStepDone(1), PauseRequested())
    assert actions_after(c, ResumeRequested()) == []
    assert actions_after(c, WeightsPushed(1)) == [Resume(), StartGroup(4, 0, 1)]


def test_draining_weights_wait_until_the_run_is_resumed() -> None:
    c = Coordinator(limits(asynchronous(1, interruptible=False), max_in_flight=3))
    actions_after(c, RunStarted((0,)), ended(0), ended(1), PauseRequested())  # 2 and 3 run
    assert actions_after(c, TrainStepDone(1)) == []
    assert actions_after(c, ResumeRequested()) == [Resume()]
    assert actions_after(c, ended(2), ended(3)) == [Train(1, (2, 3)), PushWeights(1)]


def test_an_engine_that_is_lost_during_a_pause_gives_its_groups_after_the_resume() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=3))
    actions_after(c, RunStarted((0, 1)), PauseRequested())  # 0 and 2 run on engine 0
    assert actions_after(c, EngineLost(0, tokens_kept=True)) == []
    assert actions_after(c, EngineJoined(2)) == []
    resumed = [Resume(), StartGroup(0, 2, 0), StartGroup(2, 1, 0)]
    assert actions_after(c, ResumeRequested()) == resumed


def test_a_stop_ends_a_pause_and_the_engines_are_left_running() -> None:
    c = Coordinator(limits(asynchronous(1), max_in_flight=2))
    actions_after(c, RunStarted((0,)), PauseRequested())
    drops = [Drop(0, "run ended"), Drop(1, "run ended")]
    assert actions_after(c, StopRequested()) == [*drops, Resume(), Finish("stopped")]


def test_a_run_that_is_paused_in_its_last_step_ends_when_it_is_resumed_or_stopped() -> None:
    for ends in (ResumeRequested(), StopRequested()):
        c = Coordinator(limits(synchronous(), train_steps=1))
        actions_after(c, RunStarted((0,)), ended(0), ended(1), PauseRequested())
        assert actions_after(c, TrainStepDone(1)) == [Save(1), PushWeights(1)]
        assert actions_after(c, WeightsPushed(1), CheckpointDone(1)) == []
        assert c.waiting_for() == "a request to resume"
        assert actions_after(c, ends) == [Finish("complete")]


def test_another_eta_counts_from_now_on() -> None:
    c = Coordinator(limits(asynchronous(0)))
    assert len(actions_after(c, RunStarted((0,)))) == 2
    assert actions_after(c, EtaRequested(1.5)) == [StartGroup(g, 0, 0) for g in (2, 3, 4)]
    assert actions_after(c, EtaRequested(0)) == []
    assert actions_after(c, ended(0), ended(1)) == [Train(0, (0, 1))]
    # Five groups are started, and eta 0 admits 2 * 2 under version 1.
    assert actions_after(c, TrainStepDone(1), WeightsPushed(1)) == [Resume()]
    assert actions_after(c, GroupFinished(2, 0, 1), GroupFinished(3, 0, 1)) == [Train(1, (2, 3))]
    assert actions_after(c, TrainStepDone(2), WeightsPushed(2)) == [Resume(), StartGroup(5, 0, 2)]
    assert c.limits.schedule.eta == 0


def test_engines_are_resumed_before_a_run_ends_that_lost_them_during_a_push() -> None:
    c = Coordinator(limits(asynchronous(1), train_steps=2))
    actions_after(c, RunStarted((0,)), ended(0), ended(1))
    assert actions_after(c, TrainStepDone(1)) == [Interrupt(), PushWeights(1)]
    actions_after(c, EngineLost(0, tokens_kept=True, returns=True), ended(2))
    assert actions_after(c, ended(3)) == [Train(1, (2, 3))]
    actions_after(c, WeightsPushed(1), TrainStepDone(2), CheckpointDone(2))
    assert actions_after(c, WeightsPushed(2)) == [Resume(), Finish("complete")]


RUNNING = (RunStarted((0, 1)),)
TRAINING = (*RUNNING, ended(0), ended(1))


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        ((), ended(0), "RunStarted was expected"),
        ((), RunStarted(()), "at least one engine"),
        ((), RunStarted((1, 1)), "named once"),
        ((), RunStarted((0,), version=-1), "version >= 0"),
        (RUNNING, RunStarted((0, 1)), "a run starts once"),
        (RUNNING, ended(9), "group 9 is not running"),
        (RUNNING, GroupFiltered(9, "?"), "group 9 is not running"),
        (RUNNING, GroupFinished(0, 1, 1), "start <= head <= tail <= 0"),
        (RUNNING, GroupFinished(0, -1, 0), "start <= head <= tail <= 0"),
        (RUNNING, TrainStepDone(1), "no step is running"),
        (TRAINING, TrainStepDone(2), "version 1 was expected"),
        (TRAINING, ended(0), "group 0 is not running"),
        (RUNNING, WeightsPushed(1), "no push was expected"),
        ((*TRAINING, TrainStepDone(1)), WeightsPushed(2), "version 1 was expected"),
        (RUNNING, CheckpointDone(0), "no checkpoint was expected"),
        (RUNNING, EngineLost(5, returns=True), r"the engines are \[0, 1\]"),
        (RUNNING, EngineLost(5), r"the engines are \[0, 1\]"),
        (RUNNING, EngineJoined(1), r"the engines are \[0, 1\]"),
        ((*RUNNING, StopRequested()), ended(0), "after Finish"),
    ],
)
def test_impossible_events_are_refused(
    before: tuple[Event, ...], event: Event, message: str
) -> None:
    c = Coordinator(limits(synchronous()))
    actions_after(c, *before)
    counts, waiting = c.counts, c.waiting_for()
    with pytest.raises(ValueError, match=message):
        c.handle(event)
    assert (c.counts, c.waiting_for()) == (counts, waiting)


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        ((), TrainPartDone(1), "no step is running"),
        ((ended(0),), TrainPartDone(2), "version 1 was expected"),
        ((ended(0),), TrainStepDone(1), "1 groups of the batch are not trained on yet"),
        ((ended(0), ended(1), TrainPartDone(1)), TrainPartDone(1), "TrainStepDone was expected"),
    ],
)
def test_impossible_events_of_a_batch_in_parts_are_refused(
    before: tuple[Event, ...], event: Event, message: str
) -> None:
    c = Coordinator(limits(synchronous(), batch_parts=2))
    actions_after(c, *RUNNING, *before)
    counts, waiting = c.counts, c.waiting_for()
    with pytest.raises(ValueError, match=message):
        c.handle(event)
    assert (c.counts, c.waiting_for()) == (counts, waiting)


STOPPING = (*TRAINING, StopRequested())


@pytest.mark.parametrize(
    ("schedule", "order", "before", "request_", "reason"),
    [
        (synchronous(), None, RUNNING, EtaRequested(1), "synchronous is eta 0; start a run with"),
        (one_step_overlap(), None, (), EtaRequested(1), "one_step_overlap is eta 1; start a run"),
        (asynchronous(1), None, RUNNING, EtaRequested(-1), "eta is -1, but a staleness bound is"),
        (asynchronous(1), None, RUNNING, EtaRequested(float("nan")), "eta is nan"),
        (asynchronous(1), bounded_lag(2), RUNNING, EtaRequested(2.5), "eta can be at most 2"),
        (asynchronous(1), None, STOPPING, PauseRequested(), r"the run is ending \(stopped\)"),
        (asynchronous(1), None, STOPPING, ResumeRequested(), r"the run is ending \(stopped\)"),
        (asynchronous(1), None, STOPPING, EtaRequested(1), r"the run is ending \(stopped\)"),
        (synchronous(), None, (*RUNNING, StopRequested()), PauseRequested(), "the run is over"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_with_the_reason(
    schedule: Schedule,
    order: BatchOrder | None,
    before: tuple[Event, ...],
    request_: Request,
    reason: str,
) -> None:
    c = Coordinator(limits(schedule, order=order))
    actions_after(c, *before)
    refused = c.refusal(request_)
    assert refused is not None
    assert re.search(reason, refused)
    counts, waiting, rules = c.counts, c.waiting_for(), c.limits
    because = "cannot be done|after Finish" if before else "RunStarted was expected"
    with pytest.raises(ValueError, match=because):
        c.handle(request_)
    assert (c.counts, c.waiting_for(), c.limits) == (counts, waiting, rules)


def test_what_will_be_possible_is_not_refused_before_the_run_starts() -> None:
    c = Coordinator(limits(partial_rollout(), order=bounded_lag(1, "drop")))
    for request in (PauseRequested(), ResumeRequested(), StopRequested(), EtaRequested(99)):
        assert c.refusal(request) is None


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_groups is 0"):
        Limits(batch_groups=0, max_in_flight=1)
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        Limits(batch_groups=1, max_in_flight=0)
    with pytest.raises(ValueError, match="train_steps is 0"):
        Limits(batch_groups=1, max_in_flight=1, train_steps=0)
    with pytest.raises(ValueError, match="weights_offered is true"):
        Limits(batch_groups=2, max_in_flight=2, ranks=2, weights_offered=True)
    with pytest.raises(ValueError, match="batch_parts is 3, but must divide batch_groups"):
        limits(synchronous(), batch_parts=3)
    with pytest.raises(ValueError, match="pauses generation while it trains"):
        limits(partial_rollout(), batch_parts=2)
    with pytest.raises(ValueError, match="smallest_batch needs all groups of a batch"):
        replace(
            limits(synchronous(), batch_parts=2),
            sampling=DynamicSampling(max_filtered=3, smallest_batch=1),
        )
    with pytest.raises(ValueError, match="hybrid_engines is -1"):
        limits(synchronous(), hybrid_engines=-1)
    with pytest.raises(ValueError, match="those of hybrid engines are paused"):
        limits(one_step_overlap(), hybrid_engines=1)
    with pytest.raises(ValueError, match="hybrid_engines is 1, but batch_parts is 2"):
        limits(synchronous(), hybrid_engines=1, batch_parts=2)
    with pytest.raises(ValueError, match="save_every_steps is -1"):
        limits(synchronous(), save_every_steps=-1)
    for eta, lag in ((4, 3), (0.5, 0), (float("inf"), 9)):
        with pytest.raises(ValueError, match=r"raise max_lag .* or set on_late"):
            limits(asynchronous(eta), order=bounded_lag(lag))
        limits(asynchronous(eta), order=bounded_lag(lag, "drop"))
    waits = Schedule(name="both", eta=1, on_new_weights=OnNewWeights.DRAIN, carry_over=True)
    with pytest.raises(ValueError, match=r"OnNewWeights\.INTERRUPT with carry_over"):
        limits(waits)


def offered(schedule: Schedule, *, max_in_flight: int = 99) -> Coordinator:
    return Coordinator(replace(limits(schedule, max_in_flight=max_in_flight), weights_offered=True))


def test_a_program_that_trains_offers_weights_when_it_likes() -> None:
    c = offered(asynchronous(2), max_in_flight=3)
    actions_after(c, RunStarted((0,)), ended(0), ended(1), ended(2), ended(3))
    assert actions_after(c, TrainStepDone(1)) == [Train(1, (2, 3))]
    assert c.counts.pushed_version == 0
    # Eq. 3 counts from the weights that the engines have, so 6 groups may have started.
    assert actions_after(c, ended(4)) == []
    assert actions_after(c, WeightsOffered(1)) == [Interrupt(), PushWeights(1)]
    assert actions_after(c, WeightsPushed(1)) == [
        Resume(),
        StartGroup(6, 0, 1),
        StartGroup(7, 0, 1),
    ]
    with pytest.raises(ValueError, match="above 1 and up to 2"):
        c.handle(WeightsOffered(3))
    assert actions_after(c, WeightsOffered(2)) == []  # of the step that still runs
    assert actions_after(c, TrainStepDone(2)) == [Interrupt(), PushWeights(2)]
    with pytest.raises(ValueError, match="expected, of a run with"):
        actions_after(Coordinator(limits(synchronous())), RunStarted((0,)), WeightsOffered(1))


def test_a_batch_that_comes_back_is_trained_on_later_without_what_is_lost() -> None:
    c = offered(synchronous())
    actions_after(c, RunStarted((0,)), ended(0))
    assert actions_after(c, ended(1)) == [Train(0, (0, 1))]
    with pytest.raises(ValueError, match="no batch"):
        c.handle(BatchReturned((0, 1, 2)))
    with pytest.raises(ValueError, match="lost ones among them"):
        c.handle(BatchReturned((0, 1), lost=(7,)))
    assert actions_after(c, BatchReturned((0, 1), lost=(1,))) == [StartGroup(1, 0, 0)]
    assert (c.counts.started, c.counts.trained, c.counts.finished) == (2, 0, 1)
    assert c.frontier().open[1].attempts == 2
    assert actions_after(c, ended(1)) == [Train(0, (0, 1))]
    assert actions_after(c, BatchReturned((0, 1))) == [Train(0, (0, 1))]
    c.handle(WeightsOffered(1))
    with pytest.raises(ValueError, match="version 1 were offered, with it"):
        c.handle(BatchReturned((0, 1)))


@pytest.mark.parametrize("order", [oldest_finished_first(), strict_start_order()])
def test_an_earlier_batch_that_comes_back_does_not_end_the_step_that_runs(
    order: BatchOrder,
) -> None:
    asked = replace(limits(asynchronous(1), order=order), weights_offered=True)
    c = Coordinator(asked)
    actions_after(c, RunStarted((0,)), ended(0), ended(1), ended(2), ended(3))
    assert actions_after(c, TrainStepDone(1)) == [Train(1, (2, 3))]
    assert actions_after(c, BatchReturned((0, 1), lost=(0,))) == [StartGroup(0, 0, 0)]
    assert actions_after(c, ended(0)) == []
    assert actions_after(c, TrainStepDone(1)) == [Train(1, (0, 1))]
