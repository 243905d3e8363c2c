"""Dynamic sampling: which groups are replaced, how many, and how a run ends that finds none."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import TOO_FEW_GROUPS, Coordinator, replay
from areal_lab.control.frontier import recovered_start
from areal_lab.control.limits import Limits
from areal_lab.control.sampling import ALL_CUT_OFF, EQUAL_REWARDS, DynamicSampling
from areal_lab.control.schedule import asynchronous, synchronous
from areal_lab.runlog.replay import limits_from_fields, limits_to_fields
from tests.control.shell import Shell
from tests.control.test_coordinator_properties import SEEDS, limits
from tests.control.test_frontier import killed_and_continued


@st.composite
def sampling_limits(draw: st.DrawFn) -> Limits:
    """Any limits, with any bound on what is filtered."""
    any_limits = draw(limits())
    parts = any_limits.batch_parts
    sampling = DynamicSampling(
        max_filtered=draw(st.integers(1, 12)),
        smallest_batch=draw(
            st.none() if parts > 1 else st.none() | st.integers(1, any_limits.batch_groups)
        ),
    )
    return replace(any_limits, sampling=sampling)


@given(sampling_limits(), SEEDS, st.integers(0, 100), st.sampled_from([0.0, 0.1]))
@settings(max_examples=300)
def test_batches_are_full_or_smaller_as_allowed_and_a_run_ends(
    limits: Limits, seed: int, unfit_percent: int, disturb: float
) -> None:
    shell = Shell(limits, unfit=lambda group: Random(seed ^ group).random() * 100 < unfit_percent)
    shell.run(Random(seed), events=8000, disturb=disturb, ask=disturb)
    assert shell.over in ("complete", TOO_FEW_GROUPS)
    assert limits.sampling is not None
    smallest = limits.sampling.smallest_batch or limits.batch_groups
    for groups in shell.whole_batches:
        assert smallest <= len(groups) <= limits.batch_groups
        assert disturb or not any(map(shell.unfit, groups))
    if shell.over == "complete":
        assert len(shell.batches) == limits.train_steps
        assert shell.coordinator.failure == ""
    else:
        saved = [0, *(a.version for a in shell.actions if isinstance(a, ev.Save))]
        assert shell.trained in saved or shell.between
        assert shell.coordinator.failure.startswith(f"step {shell.trained + 1} needs ")
    assert replay(limits, shell.events) == shell.actions
    assert limits_from_fields(limits_to_fields(limits)) == limits


@given(sampling_limits(), SEEDS)
@settings(max_examples=150)
def test_between_two_batches_no_more_is_filtered_than_the_bound_and_what_ran(
    limits: Limits, seed: int
) -> None:
    assume(not limits.order.drops_late)  # a late group that is dropped hides the bound until then
    assert limits.sampling is not None
    shell = Shell(limits, unfit=lambda group: Random(seed ^ group).random() < 0.8)
    random, ran = Random(seed), 0
    while shell.over is None:
        shell.tell(random.choice(shell.possible()))
        # With slots by sample, groups of which some samples ended run in addition.
        ran = limits.max_in_flight if limits.group_slots == 1 else max(ran, len(shell.running) + 1)
        most = limits.sampling.max_filtered + ran
        # What finished for later batches hides the bound until the batch before is taken.
        assert shell.filtered_since < most or len(shell.finished) >= shell.rest


@given(sampling_limits(), SEEDS, st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=150)
def test_a_run_that_continues_counts_its_smaller_batches(
    limits: Limits, seed: int, kills: int, keep: float
) -> None:
    limits = replace(limits, save_every_steps=max(1, limits.save_every_steps))
    trained, last = killed_and_continued(limits, Random(seed), kills=kills, disturb=0.0, keep=keep)
    assert len(trained) == len(set(trained))
    assert not any(map(last.unfit, trained))
    assert len(trained) == last.trained * limits.batch_groups - last.unfilled
    begun = limits.batch_groups - last.rest if last.between else 0
    assert last.coordinator.counts.trained == len(trained) + begun


@given(limits(), SEEDS, st.integers(1, 3))
@settings(max_examples=100)
def test_refilled_batches_are_those_of_a_run_that_was_never_killed(
    limits: Limits, seed: int, kills: int
) -> None:
    assume(not limits.order.drops_late)
    limits = replace(
        limits,
        save_every_steps=max(1, limits.save_every_steps),
        sampling=DynamicSampling(max_filtered=1000),
    )
    trained, last = killed_and_continued(limits, Random(seed), kills=kills, disturb=0.0, keep=0.5)
    assert last.over == "complete"
    uninterrupted = Shell(limits, unfit=last.unfit)
    uninterrupted.run(Random(seed + 1), events=8000)
    assert sorted(trained) == sorted(g for batch in uninterrupted.batches for g in batch)


def test_a_synchronous_run_trains_on_a_smaller_batch_of_its_own_version() -> None:
    shell = Shell(
        Limits(
            batch_groups=3,
            max_in_flight=3,
            train_steps=4,
            schedule=synchronous(),
            sampling=DynamicSampling(max_filtered=4, smallest_batch=1),
        ),
        unfit=lambda group: group % 4 != 0,
    )
    shell.run(Random(0), events=1000)
    assert shell.over == "complete"
    assert set(shell.lags) == {0}
    assert any(len(batch) < 3 for batch in shell.batches)


def refilled(smallest_batch: int | None) -> Coordinator:
    """One of two groups of the first batch finished; the other places had equal rewards."""
    sampling = DynamicSampling(max_filtered=2, smallest_batch=smallest_batch)
    run = Coordinator(
        Limits(
            batch_groups=2,
            max_in_flight=2,
            train_steps=3,
            schedule=asynchronous(0),
            sampling=sampling,
        )
    )
    run.handle(ev.RunStarted((0,)))
    assert run.handle(ev.GroupFinished(0, 0, 0)) == ()
    assert run.handle(ev.GroupFiltered(1, EQUAL_REWARDS)) == (ev.StartGroup(2, 0, 0),)
    return run


def test_an_exhausted_batch_is_smaller_if_that_is_allowed() -> None:
    run = refilled(1)
    assert run.handle(ev.GroupFiltered(2, EQUAL_REWARDS)) == (ev.Train(0, (0,)),)
    assert (run.counts.trained, run.counts.unfilled, run.counts.started) == (1, 1, 2)
    run.handle(ev.TrainStepDone(1))
    # Eq. 3 counts the place that no group took: two groups start, not three.
    assert run.handle(ev.WeightsPushed(1)) == (ev.StartGroup(3, 0, 1), ev.StartGroup(4, 0, 1))
    frontier = run.frontier()
    assert frontier.unfilled == 1
    again = Coordinator(run.limits)
    again.handle(recovered_start(frontier, (0,)))
    assert again.counts == replace(run.counts, filtered=2)


def test_an_exhausted_run_ends_and_says_why_and_what_to_do() -> None:
    run = refilled(None)
    assert run.handle(ev.GroupFiltered(2, "reward timeout")) == (
        ev.Drop(0, "run ended"),
        ev.Finish(TOO_FEW_GROUPS),
    )
    assert run.failure == (
        "step 1 needs 2 groups with different rewards, but found 1: 2 groups were filtered since "
        "the last batch (1 all rewards equal, 1 reward timeout), and the limit is 2; train on "
        "problems that the model sometimes solves, raise gconfig.n_samples, raise "
        "rollout.dynamic_sampling.max_batches, or set "
        "rollout.dynamic_sampling.on_exhausted=smaller_batch"
    )


def test_an_exhausted_run_saves_what_it_trained() -> None:
    run = Coordinator(
        Limits(
            batch_groups=1,
            max_in_flight=1,
            schedule=asynchronous(0),
            sampling=DynamicSampling(max_filtered=1),
        )
    )
    run.handle(ev.RunStarted((0,)))
    run.handle(ev.GroupFinished(0, 0, 0))
    run.handle(ev.TrainStepDone(1))
    run.handle(ev.WeightsPushed(1))
    assert run.handle(ev.GroupFiltered(1, EQUAL_REWARDS)) == (ev.Save(1),)
    assert run.handle(ev.CheckpointDone(1)) == (ev.Finish(TOO_FEW_GROUPS),)


def test_running_groups_may_still_fill_the_batch() -> None:
    sampling = DynamicSampling(max_filtered=1, smallest_batch=1)
    run = Coordinator(Limits(batch_groups=2, max_in_flight=3, sampling=sampling))
    run.handle(ev.RunStarted((0,)))
    run.handle(ev.GroupFinished(0, 0, 0))
    assert run.handle(ev.GroupFiltered(1, EQUAL_REWARDS)) == ()
    assert run.waiting_for() == "2 running groups to end: 1 were filtered for this batch"
    assert run.handle(ev.GroupFinished(2, 0, 0))[0] == ev.Train(0, (0, 2))


@pytest.mark.parametrize(
    ("rewards", "masked", "tolerance", "reason"),
    [
        ((0.0, 1.0), (), 0.0, None),
        ((1.0, 1.0), (), 0.0, EQUAL_REWARDS),
        ((0.0, 0.0), (0,), 0.0, EQUAL_REWARDS),
        ((0.1, 0.2), (), 0.1, EQUAL_REWARDS),
        ((0.1, 0.2), (), 0.05, None),
        ((0.0, 1.0), (0,), 0.0, None),
        ((0.0, 1.0), (0, 1), 0.0, ALL_CUT_OFF),
    ],
)
def test_groups_without_a_gradient_are_rejected(
    rewards: tuple[float, ...], masked: tuple[int, ...], tolerance: float, reason: str | None
) -> None:
    sampling = DynamicSampling(max_filtered=1, tolerance=tolerance)
    assert sampling.rejects(rewards, masked) == reason


@pytest.mark.parametrize(
    "wrong",
    [{"max_filtered": 0}, {"smallest_batch": 0}, {"tolerance": -1}, {"tolerance": math.nan}],
)
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} is .* but must be >= "):
        DynamicSampling(**{"max_filtered": 1, **wrong})


def test_a_batch_cannot_need_more_groups_than_it_has() -> None:
    sampling = DynamicSampling(max_filtered=1, smallest_batch=3)
    with pytest.raises(ValueError, match="smallest_batch is 3, but must be <= 2"):
        Limits(batch_groups=2, max_in_flight=1, sampling=sampling)
