"""Trials that are simulated once, and those that are shipped."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from simulator.config.schema import SimulationConfig
from simulator.plan.report import plan_report
from simulator.plan.schema import PlanConfig, PriceEntry, load_plan
from simulator.plan.search import PlanSearch, evaluation_jobs, find_plan, screening_job
from simulator.plan.space import expand
from simulator.plan.trial import Job, Trial, TrialCache, key, run_job, shipped_trials
from simulator.report.measured_errors import measured_errors
from tools.trials import FILE, PLAN, questions


def question(*overrides: str) -> PlanConfig:
    return load_plan(
        None,
        [
            *("simulation=small", "objective=dollars", "steps=100", "search.sensitivity=1"),
            *("candidates.gpus=[2, 4]", "candidates.eta=[0, 1]", "search.seeds=2"),
            *("base.trainer.step_s=null", "base.trainer.mfu=0.0016", *overrides),
        ],
    )


class Counted:
    """Simulates, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Trial]:
        for job in jobs:
            self.jobs.append(job)
            yield run_job(job)


def test_a_plan_with_other_prices_and_limits_simulates_nothing_and_finds_the_same() -> None:
    counted = Counted()
    cache = TrialCache(counted)
    find_plan(question(), cache)
    done = len(counted.jobs)
    assert done == cache.simulated == len(cache) > 0
    for changed in (
        question("prices=[{gpu: H100, typical: 9.0}]"),
        question("deadline_h=1", "name=another"),
        question("base.cluster.price_per_gpu_h=3", "base.cluster.overhead=0.5"),
    ):
        assert plan_report(find_plan(changed, cache)) == plan_report(find_plan(changed))
    assert len(counted.jobs) == done


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (["deadline_h=0.05"], True),
        (["prices=[{gpu: H100, typical: 9.0}]", "objective=hours"], True),
        (["rank_by=pessimistic", "search.seeds=3", "limits.budget_dollars=1"], True),
        (["limits.eta=0"], False),
        (["limits.gpus=2"], False),
        (["steps=200"], False),
        (["candidates.gpus=[2, 4, 8]"], False),
        (["base.cluster.overhead=0.5"], False),
        (["base.workload.answers.mean_tokens=150"], False),
    ],
)
def test_a_search_with_the_candidates_of_another_finds_the_same(
    changed: list[str], same: bool
) -> None:
    cache = TrialCache()
    first = PlanSearch(question(), cache)
    first.advance()
    again = PlanSearch(question(*changed), cache, reuse=first)
    assert (again.plan.space is first.plan.space) == same
    assert again.advance()
    assert plan_report(again.plan) == plan_report(find_plan(question(*changed), cache))


def test_other_bounds_or_errors_are_not_taken_from_another_search() -> None:
    first = PlanSearch(question())
    for given in ({"bound": lambda _: 0.0}, {"errors": measured_errors.__wrapped__()}):
        again = PlanSearch(question(), reuse=first, **given)
        assert again.plan.space is not first.plan.space


def test_a_job_that_comes_twice_at_once_is_simulated_once() -> None:
    counted = Counted()
    job = screening_job(question(), expand(question()).possible[0])
    first, second = TrialCache(counted)([job, job])
    assert first == second == run_job(job)
    assert len(counted.jobs) == 1


def test_two_searches_that_take_turns_share_their_trials() -> None:
    """Also those that one of them simulates after the other has asked for them."""
    questions = [question("search.seeds=3"), question("search.seeds=3", "deadline_h=0.05")]
    counted = Counted()
    cache = TrialCache(counted)
    searches = [PlanSearch(one, cache) for one in questions]
    turns = itertools.cycle([0, 1, 1, 1, 0, 0, 0, 1])  # each is ahead of the other now and then
    ended = [False, False]
    while not all(ended):
        turn = next(turns)
        ended[turn] = searches[turn].advance(0)
    for one, search in zip(questions, searches, strict=True):
        assert plan_report(search.plan) == plan_report(find_plan(one))
    names = [key(job) for job in counted.jobs]
    assert len(set(names)) == len(names)


def test_a_paused_cache_gives_what_it_knows_and_simulates_nothing() -> None:
    known = question("search.sensitivity=0", "candidates.eta=[1]")
    cache = TrialCache()
    find_plan(known, cache)
    done = cache.simulated
    cache.paused = True
    assert PlanSearch(known, cache).advance()
    search = PlanSearch(question("search.sensitivity=0"), cache)
    assert not search.advance()
    assert search.step is not None
    assert search.step.waits
    assert search.plan.stopped_in == "screening"
    assert not search.advance()
    assert cache.simulated == done
    cache.paused = False
    assert search.advance()
    assert plan_report(search.plan) == plan_report(find_plan(search.plan.config))


CHANGES = {
    "model": "Qwen2.5-1.5B",
    "workload.steps": 3,
    "workload.answers.sigma": 0.5,
    "workload.reward.mean_s": 1.0,
    "cluster.gpu": "H200",
    "cluster.gpus": 8,
    "cluster.rollout_gpu": "H20",
    "rollout.engine_overhead_s": 0.1,
    "trainer.mfu": 0.5,
    "weights.poll_s": 1.0,
    "schedule.eta": float("inf"),
    "faults.straggler_share": 0.5,
}


def test_whatever_decides_a_trial_is_in_its_key() -> None:
    base = SimulationConfig()
    jobs = [Job(config=base, seed=1), Job(config=base, seed=2)]
    jobs += [
        Job(config=base, seed=1, training_slowdown=2),
        Job(config=base, seed=1, memory_slowdown=2),
    ]
    jobs += [
        Job(config=base.with_settings({name: value}), seed=1) for name, value in CHANGES.items()
    ]
    keys = [key(job) for job in jobs]
    assert None not in keys
    assert len(set(keys)) == len(jobs)


def test_names_prices_and_other_seeds_do_not_decide_a_trial() -> None:
    base = SimulationConfig()
    other = base.with_settings(
        {"name": "x", "seeds": 9, "seed": 4, "cluster.price_per_gpu_h": 1, "cluster.overhead": 1}
    )
    assert key(Job(config=base, seed=1)) == key(Job(config=other, seed=1))


def test_the_last_digits_of_another_processor_do_not_decide_a_trial() -> None:
    job = screening_job(question(), expand(question()).possible[0])
    one, other, third = (
        key(dataclasses.replace(job, training_slowdown=by)) for by in (0.7, 0.1 * 7, 0.7001)
    )
    assert 0.7 != 0.1 * 7
    assert one == other != third


def test_a_custom_gpu_counts_by_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    keys = set()
    for bandwidth in ("1.0e12", "2.0e12"):
        file.write_text(f"like: H100\nmemory_bytes_per_s: {bandwidth}\n")
        config = SimulationConfig().with_settings({"cluster.gpu": str(file)})
        keys.add(key(Job(config=config, seed=1)))
    assert len(keys) == 2


def test_trials_that_depend_on_a_file_of_lengths_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n100\n200\n300\n")
    plan = question("base.workload.answers.kind=trace", f"base.workload.answers.trace={file}")
    job = screening_job(plan, expand(plan).possible[0])
    counted = Counted()
    cache = TrialCache(counted)
    assert key(job) is None
    assert list(cache([job])) == list(cache([job]))
    assert len(counted.jobs) == 2
    assert not len(cache)


def test_a_written_cache_is_read_back(tmp_path: Path) -> None:
    cache = TrialCache()
    whole = plan_report(find_plan(question(), cache))
    cache.save(tmp_path / "new" / "trials.json", made_by="a test")
    loaded = TrialCache.load(tmp_path / "new" / "trials.json")
    assert plan_report(find_plan(question(), loaded)) == whole
    assert loaded.simulated == 0
    assert loaded.made_by.endswith(", a test")


@pytest.mark.parametrize(
    ("text", "says"), [(None, "does not exist"), ("[1]", "no trials"), ("{", "no")]
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "trials.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        TrialCache.load(file)
    assert "\n" not in str(error.value)


# --- shipped ------------------------------------------------------------------------------------


def test_the_shipped_trials_answer_the_shipped_plan_without_a_simulation() -> None:
    cache = shipped_trials(PLAN)
    for one in questions():
        assert PlanSearch(one, cache).advance()
    price = PriceEntry(gpu="H100", typical=6)
    changes: list[dict[str, object]] = [
        *({"limits.deadline_h": hours} for hours in (6, 12, 30, 200)),
        *({"objective": name} for name in ("gpus", "hours")),
        {"prices": [price]},
        {"limits.budget_dollars": 1000},
    ]
    for changed in changes:
        one = load_plan(PLAN).with_settings({"search.sensitivity": 0, **changed})
        assert PlanSearch(one, cache).advance()
    assert cache.simulated == 0


def test_the_shipped_trials_are_those_of_this_version() -> None:
    """If not, run `python -m tools.trials`."""
    plan = load_plan(PLAN)
    possible = expand(plan).possible
    shipped = TrialCache.load(FILE)
    for candidate in (possible[0], possible[len(possible) // 2], possible[-1]):
        jobs = [screening_job(plan, candidate), evaluation_jobs(plan, candidate)[-1]]
        for job, trial in zip(jobs, shipped(jobs), strict=True):
            assert trial.step_s == pytest.approx(run_job(job).step_s, rel=1e-9)
    assert shipped.simulated == 0
