"""A search that is stopped after any simulation, and continued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from simulator.plan.report import plan_report
from simulator.plan.result import Plan
from simulator.plan.schema import PlanConfig, load_plan
from simulator.plan.search import PlanSearch, Step, find_plan
from simulator.plan.sensitivity import at_end
from simulator.plan.summary import question_lines, recommendation_lines
from simulator.plan.trial import Job, Trial, run_job

STAGES = ("bounds", "screening", "evaluation", "comparison", "sensitivity")


@cache
def question() -> PlanConfig:
    return load_plan(
        None,
        [
            *("simulation=small", "objective=dollars", "steps=100", "search.sensitivity=2"),
            *("candidates.gpus=[2, 3, 4, 5, 6, 8]", "candidates.eta=[0, 1, 2]", "search.seeds=2"),
            *("base.trainer.step_s=null", "base.trainer.mfu=0.0016"),
            "candidates.rollout_share=[0.2, 0.5, 0.8]",
        ],
    )


@cache
def simulated(job: str) -> Trial:
    return run_job(_jobs[job])


_jobs: dict[str, Job] = {}


def run(jobs: Sequence[Job]) -> Iterator[Trial]:
    """Simulate each job once in all tests."""
    for job in jobs:
        _jobs[repr(job)] = job
        yield simulated(repr(job))


@cache
def snapshots() -> list[tuple[Step, Plan]]:
    """The plan after every step."""
    search = PlanSearch(question(), run)
    return [(step, search.plan) for step in search]


def test_the_stages_follow_one_another_and_each_counts_to_its_end() -> None:
    steps = [step for step, _ in snapshots()]
    order = [STAGES.index(step.stage) for step in steps if step.stage not in ("evaluation",)]
    assert order == sorted(order)
    assert {step.stage for step in steps} == set(STAGES)
    for before, after in pairwise(steps):
        assert after.done == 0 or (after.stage == before.stage and after.done > before.done)
        if after.done == 0:
            assert before.done == before.total


def test_a_stopped_search_continues_to_the_same_plan() -> None:
    whole = plan_report(find_plan(question(), run))
    search = PlanSearch(question(), run)
    for step in search:
        if step.stage == "screening" and step.done == 5:
            break
    assert search.plan.stopped_in == "screening"
    for step in search:
        if step.stage == "sensitivity" and step.done == 3:
            break
    assert not search.plan.waiting
    for _ in search:
        pass
    assert plan_report(search.plan) == whole
    assert search.plan.stopped_in == ""


def test_a_search_advances_by_one_step_at_least_and_to_its_end_without_a_limit() -> None:
    search = PlanSearch(question(), run)
    assert not search.advance(0)
    assert search.plan.stopped_in == "bounds"
    assert search.advance()
    assert search.advance()
    assert plan_report(search.plan) == plan_report(find_plan(question(), run))


@given(st.integers(0, 10**6))
def test_the_plan_is_consistent_wherever_the_search_is_stopped(place: int) -> None:
    some = snapshots()
    step, plan = some[place % len(some)]
    possible = len(plan.space.possible)
    assert plan.stopped_in == step.stage
    assert plan.bounded >= 0
    assert plan.bounded + len(plan.waiting) + len(plan.screened) == possible
    assert (not plan.waiting) or step.stage in ("bounds", "screening")
    known = {one.candidate.number: one for one in plan.screened}
    for one in plan.front:
        assert one.candidate.number in known
        better = [
            other
            for other in plan.front
            if other.hours.mean < one.hours.mean
            and other.value("dollars") < one.value("dollars")
            and other.candidate.gpus <= one.candidate.gpus
        ]
        assert not better
    if plan.screened:
        assert plan.best in plan.front
        so_far = next(iter(recommendation_lines(plan))).startswith("so far, lowest cost: ")
        assert so_far is not plan.settled
        assert plan.settled is (step.stage in ("comparison", "sensitivity") or plan is some[-1][1])
    told = "\n".join(question_lines(plan))
    assert f"stopped during {step.stage}" in told
    if plan.waiting:
        assert f"{len(plan.waiting)} candidate" in told


def test_each_simulation_is_counted_and_never_lost() -> None:
    before = 0
    numbers: set[int] = set()
    for step, plan in snapshots():
        simulated = step.stage != "bounds" and plan.simulations > before
        assert plan.simulations - before in ((0, 1) if simulated else (0,))
        before = plan.simulations
        found = {one.candidate.number for one in plan.screened}
        assert numbers <= found
        numbers = found


def test_the_recommendation_only_gets_better_while_candidates_are_screened() -> None:
    values = [
        plan.best.value("dollars")
        for step, plan in snapshots()
        if step.stage == "screening" and plan.best is not None
    ]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1


def test_a_sensitivity_that_was_stopped_has_the_inputs_that_are_complete() -> None:
    plans = [plan for step, plan in snapshots() if step.stage == "sensitivity" and step.done]
    last = plans[-1].sensitivity
    assert last is not None
    whole = {one.name: one for one in last.inputs}
    counts = []
    for plan in plans:
        assert plan.sensitivity is not None
        counts.append(len(plan.sensitivity.inputs))
        for one in plan.sensitivity.inputs:
            for end, final in ((one.low, whole[one.name].low), (one.high, whole[one.name].high)):
                there, then = at_end(end, last.base), at_end(final, last.base)
                assert there is not None
                assert then is not None
                assert there.trials == then.trials
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len(whole)


def test_the_sensitivity_varies_what_was_simulated_with_the_first_seed() -> None:
    last = snapshots()[-1][1]
    assert last.sensitivity is not None
    own = last.sensitivity.base
    config = own.candidate.config.with_settings(
        {
            "workload.steps": last.config.search.steps,
            "workload.warmup_steps": last.config.search.warmup_steps,
        }
    )
    assert own.trials == (run_job(Job(config=config, seed=last.config.base.seed)),)


def test_every_excluded_candidate_has_a_bound_that_a_simulated_one_beats() -> None:
    plan = snapshots()[-1][1]
    assert plan.bounded > 0
    known = {one.candidate.number for one in plan.screened}
    for candidate in plan.space.possible:
        least_h = plan.least_hours[candidate.number]
        if candidate.number not in known:
            assert any(
                one.hours.mean <= least_h and one.candidate.gpus <= candidate.gpus
                for one in plan.screened
            )
    for one in plan.screened:
        assert plan.least_hours[one.candidate.number] <= one.hours.mean * 1.1
