"""Ranks without a controller: own groups, own engines, equal parts of a batch, one barrier."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.limits import Limits
from areal_lab.control.order import bounded_lag
from areal_lab.control.ranks import RankedCoordinator, coordinator_of
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import (
    Schedule,
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)

ORDER = (ev.Interrupt, ev.Save, ev.Train, ev.PushWeights, ev.Resume, ev.StartGroup, ev.Finish)


def limits(ranks: int, schedule: Schedule | None = None, **fields: object) -> Limits:
    values = {"batch_groups": 12, "max_in_flight": 24, "train_steps": 6} | fields
    return Limits(ranks=ranks, schedule=schedule or asynchronous(2), **values)  # type: ignore[arg-type]


def started(ranks: int, schedule: Schedule | None = None, **fields: object) -> RankedCoordinator:
    coordinator = coordinator_of(limits(ranks, schedule, **fields))
    assert isinstance(coordinator, RankedCoordinator)
    coordinator.handle(ev.RunStarted(tuple(range(12))))
    return coordinator


def test_one_rank_is_one_coordinator() -> None:
    assert type(coordinator_of(limits(1))) is Coordinator


@given(
    seed=st.integers(0, 10_000),
    ranks=st.sampled_from([2, 3, 4, 6, 12]),
    schedule=st.sampled_from([synchronous(), asynchronous(0.5), asynchronous(1), asynchronous(3)]),
    filtered=st.sampled_from([0.0, 0.3]),
)
def test_ranks_share_nothing_and_wait_for_each_other(  # noqa: PLR0912 - one case per action
    seed: int, ranks: int, schedule: Schedule, filtered: float
) -> None:
    """The world does whatever the seed says, one event at a time, until the run is complete."""
    random = Random(seed)
    coordinator = coordinator_of(
        limits(ranks, schedule, sampling=DynamicSampling(max_filtered=10**9))
    )
    running: dict[int, int] = {}
    kept: set[int] = set()
    trained: list[int] = []
    due: list[ev.Event] = [ev.RunStarted(tuple(range(12)))]
    pushed = version = 0
    ended = False
    while due or running:
        assert not ended
        place = random.randrange(len(due) + len(running))
        if place < len(due):
            event = due.pop(place)
        else:
            group = sorted(running)[place - len(due)]
            head = running.pop(group)
            if random.random() < filtered:
                event = ev.GroupFiltered(group, "equal")
            else:
                event = ev.GroupFinished(group, head, pushed)
                kept.add(group)
        if isinstance(event, ev.WeightsPushed):
            pushed = event.version
        actions = coordinator.handle(event)
        places = [ORDER.index(type(action)) for action in actions]
        assert places == sorted(places)
        for action in actions:
            match action:
                case ev.StartGroup(group, engine, begun):
                    assert group not in running
                    assert begun == pushed
                    assert engine * ranks // 12 == group % ranks
                    running[group] = begun
                case ev.Train(at, groups):
                    assert at == version
                    assert kept.issuperset(groups)
                    shares = Counter(group % ranks for group in groups)
                    assert shares == dict.fromkeys(range(ranks), 12 // ranks)
                    assert [group % ranks for group in groups] == sorted(g % ranks for g in groups)
                    trained += groups
                    kept -= set(groups)
                    version += 1
                    due.append(ev.TrainStepDone(version))
                case ev.PushWeights(of):
                    due.append(ev.WeightsPushed(of))
                case ev.Save(of):
                    due.append(ev.CheckpointDone(of))
                case ev.Finish(reason):
                    assert reason == "complete"
                    ended = True
                case _:
                    pass
    assert ended
    assert version == 6
    assert len(set(trained)) == len(trained) == 72
    assert coordinator.counts.trained == 72
    assert coordinator.counts.in_flight == coordinator.counts.finished == 0


def finish(coordinator: RankedCoordinator, *groups: int) -> list[ev.Action]:
    return [act for group in groups for act in coordinator.handle(ev.GroupFinished(group, 0, 0))]


def test_a_step_begins_when_the_last_rank_has_its_part() -> None:
    coordinator = started(3, synchronous())
    assert finish(coordinator, *(g for g in range(12) if g % 3 != 1)) == []
    assert coordinator.waiting == {0, 2}
    assert coordinator.waiting_for() == "1 of 3 ranks to have their batches"
    assert finish(coordinator, 1, 4, 7) == []
    (train,) = finish(coordinator, 10)
    assert train == ev.Train(0, (0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11))
    assert coordinator.waiting == frozenset()


def test_a_rank_that_waits_starts_what_eq_3_admits_for_it_and_no_more() -> None:
    coordinator = started(3, asynchronous(1), max_in_flight=12)
    found = finish(coordinator, 0, 3, 6, 9)
    assert [action.group for action in found if isinstance(action, ev.StartGroup)] == [
        12,
        15,
        18,
        21,
    ]
    for group in (12, 15, 18, 21):
        coordinator.handle(ev.GroupFinished(group, 0, 0))
    # Two batches of its own are all that it may start before there are new weights.
    assert coordinator.counts.started == 12 + 4
    assert coordinator.waiting == {0}


def test_a_stop_ends_the_step_that_some_ranks_have_begun() -> None:
    coordinator = started(2, synchronous())
    finish(coordinator, 0, 2, 4, 6, 8, 10)
    assert coordinator.handle(ev.StopRequested()) == ()
    train = finish(coordinator, 1, 3, 5, 7, 9, 11)
    assert [type(action) for action in train] == [ev.Train]
    assert [type(act) for act in coordinator.handle(ev.TrainStepDone(1))] == [ev.Save]
    assert coordinator.handle(ev.CheckpointDone(1)) == (ev.Finish("stopped"),)


def test_what_it_has_no_rule_for_is_refused() -> None:
    coordinator = started(2)
    for event in (ev.EngineLost(0), ev.PauseRequested(), ev.TrainStepDone(1)):
        with pytest.raises(ValueError, match=type(event).__name__):
            coordinator.handle(event)
    assert "stop only at a step" in (coordinator.refusal(ev.PauseRequested()) or "")
    assert coordinator.refusal(ev.EtaRequested(3)) is None
    coordinator.handle(ev.EtaRequested(3))
    assert coordinator.limits.schedule.eta == 3
    with pytest.raises(ValueError, match="multiple of 5"):
        coordinator_of(limits(5, batch_groups=10)).handle(ev.RunStarted(tuple(range(12))))
    with pytest.raises(ValueError, match="starts from its first step"):
        coordinator_of(limits(2)).handle(ev.RunStarted((0, 1), version=3))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ranks": 5}, r"ranks is 5, but must divide batch_groups \(12\)"),
        ({"ranks": 12, "max_in_flight": 6}, r"at most max_in_flight \(6\)"),
        ({"schedule": one_step_overlap()}, "one_step_overlap"),
        ({"schedule": partial_rollout(1), "order": bounded_lag(9)}, "partial_rollout"),
        ({"hybrid_engines": 1}, "hybrid_engines"),
        ({"batch_parts": 2}, "batch_parts"),
        ({"sampling": DynamicSampling(max_filtered=3, smallest_batch=4)}, "smallest_batch"),
        ({"ranks": 0}, "ranks is 0, but must be >= 1"),
    ],
)
def test_limits_that_ranks_cannot_keep_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        limits(**{"ranks": 2, **fields})  # type: ignore[arg-type]
