"""The planner: the front, the space of candidates, and recommendations small enough to check.

The system is the preset `small`: a token takes 10 ms, new weights 0.5 s; a training step takes 2 s
on two GPUs, less on more.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_lab.config.problem import Kind, Problem
from simulator.assembly.build import problems
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.plan.bound import least_step_s
from simulator.plan.report import plan_report, show_plan
from simulator.plan.result import (
    Comparison,
    Memory,
    Outcome,
    Plan,
    Point,
    dominates,
    engine_share,
    front,
    hourly_cost,
    known_errors,
    limit_of,
    memory_of,
    most_promising_first,
    other_prices,
    trainer_share,
)
from simulator.plan.schema import PlanConfig, PriceEntry, load_plan
from simulator.plan.search import find_plan
from simulator.plan.sensitivity import at_end
from simulator.plan.space import expand, nearest_split
from simulator.plan.summary import (
    against,
    nothing_possible,
    partial_nodes,
    question_lines,
    recommendation_lines,
    verdict,
    workload_line,
)
from simulator.plan.trial import Job, Trial, run_job, shortened, workers
from simulator.report.measured_errors import MeasuredErrors
from simulator.stats.format import span
from tests.simulator.report.known_errors import DENSE, EXACT, errors_of, row

EXAMPLE = Path(__file__).parents[3] / "configs/plan_example.yaml"

POINTS = st.lists(
    st.builds(
        Point,
        st.integers(1, 4).map(float),
        st.integers(1, 4).map(float),
        st.integers(1, 4),
        st.sampled_from(["dollars", "GPU-hours of H800"]),
    ),
    max_size=12,
)


def small_plan(*overrides: str) -> PlanConfig:
    return copy.deepcopy(_loaded(overrides))


@cache
def _loaded(overrides: tuple[str, ...]) -> PlanConfig:
    return load_plan(
        None,
        [
            *("simulation=small", "objective=hours", "steps=100", "search.sensitivity=0"),
            *("candidates.gpus=[4, 8]", "candidates.eta=[0, 1, 4]", "search.seeds=2"),
            *("base.trainer.step_s=null", "base.trainer.mfu=0.0016"),
            *("candidates.rollout_share=[0.25, 0.5]", *overrides),
        ],
    )


def solved(*overrides: str, errors: MeasuredErrors = EXACT) -> Plan:
    with workers(1) as run:
        return find_plan(small_plan(*overrides), run, errors=errors)


# --- the front ----------------------------------------------------------------------------------


@given(POINTS)
def test_points_on_the_front_are_not_dominated_and_all_others_are(points: list[Point]) -> None:
    on_front = front(list(enumerate(points)))
    for number, point in enumerate(points):
        beaten = any(dominates(other, point) for other in points)
        assert (number in on_front) is not beaten


@given(POINTS)
def test_dominance_is_a_strict_order(points: list[Point]) -> None:
    for one in points:
        assert not dominates(one, one)
        for two in points:
            assert not (dominates(one, two) and dominates(two, one))
            for three in points:
                if dominates(one, two) and dominates(two, three):
                    assert dominates(one, three)


@given(POINTS, st.floats(0.01, 1))
def test_the_front_with_slack_contains_the_front(points: list[Point], slack: float) -> None:
    named = list(enumerate(points))
    assert set(front(named)) <= set(front(named, slack=slack))


@given(POINTS)
def test_the_front_is_simulated_first(points: list[Point]) -> None:
    named = list(enumerate(points))
    ordered = most_promising_first(named)
    assert sorted(ordered) == list(range(len(points)))
    on_front = front(named)
    assert set(ordered[: len(on_front)]) == set(on_front)


# --- the space ----------------------------------------------------------------------------------


def test_every_combination_is_counted_once() -> None:
    plan = small_plan(
        *("candidates.gpus=[2, 4]", "candidates.eta=[0, 1, 8]", "limits.eta=4"),
        *("candidates.placement=[disaggregated, colocated]", "candidates.rollout_share=[0.3, 0.5]"),
    )
    space = expand(plan)
    assert space.combinations == 2 * 2 * 3 * 2
    # 2 GPUs have one split; shares are ignored when colocated.
    assert space.merged == 3 + 6 + 0 + (0 if nearest_split(4, 0.3, 1, 1) != 2 else 3)
    assert {one.kind for one in space.over_limits} == {"limits.eta"}
    assert {one.kind for one in space.impossible} == {"placement and schedule"}


def test_too_few_sequences_for_the_data_parallel_ranks_are_an_impossible_candidate() -> None:
    found = solved(
        *("candidates.gpus=[4, 8]", "candidates.rollout_share=[0.5]", "candidates.eta=[1]"),
        *("base.workload.prompts_per_batch=3", "base.workload.samples_per_prompt=2"),
        "base.workload.minibatches=2",
    )
    assert [one.config.cluster.gpus for one in found.space.possible] == [4]
    (refused,) = found.space.impossible
    assert refused.why.startswith(
        "trainer: a minibatch has 3 sequences, but must have >= 4, one per data-parallel rank"
    )
    assert found.best is not None


def test_an_impossible_space_lists_its_reasons() -> None:
    found = solved(
        *("candidates.rollout_tensor_parallel=[3, 16]", "candidates.gpus=[4]"),
        "candidates.rollout_share=[0.5]",
    )
    assert found.best is None
    assert not found.front
    assert found.simulations == 0
    assert {one.kind for one in found.space.impossible} == {"divisibility"}
    assert list(recommendation_lines(found)) == ["no candidate is possible, for the reasons above"]
    assert any("engines of 16" in one.why for one in found.space.impossible)
    assert any("divisibility" in line for line in question_lines(found))
    assert nothing_possible(found).startswith("no candidate is possible: 6 by divisibility (e.g. ")


def test_a_reason_common_to_all_candidates_is_named_once() -> None:
    told = nothing_possible(solved("base.trainer.micro_batch_tokens=10"))
    assert told.startswith("no candidate is possible, because: trainer.micro_batch_tokens")
    assert told.endswith("change it in base, or use other candidates")


def test_impossible_settings_of_base_are_to_be_corrected_there() -> None:
    told = nothing_possible(
        solved(
            "base.trainer.micro_batch_tokens=10", "candidates.placement=[disaggregated, colocated]"
        )
    )
    assert "by settings (e.g. trainer.micro_batch_tokens" in told
    assert told.endswith("; correct these settings in base, or change candidates")


def test_bounds_that_leave_no_candidate_are_named_with_their_values() -> None:
    found = solved(
        "limits.gpus=3", "limits.eta=4", "candidates.gpus=[4, 2, 1]", "candidates.eta=[8]"
    )
    told = nothing_possible(found)
    assert "2 by limits.gpus = 3 (e.g. 4 GPUs)" in told
    assert "1 by limits.eta = 4 (e.g. eta 8)" in told
    assert "(e.g. 1 GPU cannot be split into engines of 1" in told


def test_no_decision_depends_on_the_words_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(
        *("candidates.gpu=[A100-40, H100]", "base.model=R1-Distill-Qwen-32B"),
        *("candidates.placement=[disaggregated, colocated]", "candidates.gpus=[4, 64]"),
        *("candidates.trainer_tensor_parallel=[1, 3, 8]", "base.workload.answers.max_tokens=4000"),
    )
    as_they_are = expand(plan)
    assert {one.kind for one in as_they_are.impossible} == set(Kind) - {Kind.MACHINE, Kind.SETTINGS}

    def reworded(config: SimulationConfig) -> list[Problem]:
        return [dataclasses.replace(one, message="no") for one in problems(config)]

    monkeypatch.setattr("simulator.plan.space.problems", reworded)
    others = expand(plan)
    assert len(others.possible) == len(as_they_are.possible)
    assert [one.kind for one in others.impossible] == [one.kind for one in as_they_are.impossible]


def test_a_model_that_does_not_fit_is_counted_as_memory() -> None:
    plan = small_plan("base.model=R1-Distill-Qwen-32B", "candidates.gpu=[A100-40]")
    space = expand(plan)
    assert not space.possible
    assert {one.kind for one in space.impossible} == {"memory"}
    assert "tensor_parallel" in space.impossible[0].why


@given(st.integers(2, 64), st.floats(0.05, 0.95), st.integers(1, 8), st.integers(1, 8))
def test_a_split_divides_both_sides(gpus: int, share: float, engine: int, trainer: int) -> None:
    split = nearest_split(gpus, share, engine, trainer)
    fitting = [k for k in range(1, gpus) if k % engine == 0 and (gpus - k) % trainer == 0]
    assert (split is None) == (not fitting)
    if split is not None:
        assert split in fitting
        assert abs(split - share * gpus) == min(abs(k - share * gpus) for k in fitting)


def own_gpu(folder: Path) -> str:
    file = folder / "mygpu.yaml"
    file.write_text("like: H100\nmemory_bytes_per_s: 1.0e12\n")
    return str(file)


def test_a_custom_gpu_can_be_a_candidate(tmp_path: Path) -> None:
    file = own_gpu(tmp_path)
    for override in (f"candidates.gpu=[{file}]", f"base.cluster.gpu={file}"):
        found = solved(override, "candidates.gpus=[4]", "candidates.eta=[1]", "search.seeds=1")
        assert found.best is not None
        assert found.best.candidate.config.cluster.gpu == file
        assert found.best.candidate.hardware == "4 mygpu"
        assert "4 mygpu" in "\n".join(recommendation_lines(found))


def test_a_custom_gpu_can_generate_next_to_one_of_the_catalogue(tmp_path: Path) -> None:
    space = expand(
        small_plan(
            *(f"candidates.rollout_gpu=[{own_gpu(tmp_path)}]", "candidates.gpu=[h100]"),
            *("candidates.gpus=[4]", "candidates.eta=[1]", "candidates.rollout_share=[0.25]"),
        )
    )
    assert [one.hardware for one in space.possible] == ["1 mygpu + 3 H100"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["base.trainer.step_s=150"],
            "base.trainer.step_s is 150, measured on some GPUs, but candidates "
            "differ in number of GPUs that train (2, 3, 4, 6); let the cost model compute it "
            "(base.trainer.step_s=null)",
        ),
        (
            ["base.trainer.step_s=150", "candidates.gpu=[H100, L40S]", "base.trainer.token_s=1"],
            "candidates differ in type of GPU that trains (H100, L40S); number of GPUs that train "
            "(2, 3, 4, 6); let the cost model compute it "
            "(base.trainer.step_s=null base.trainer.token_s=0)",
        ),
        (
            ["candidates.gpu=[H100, L40S]"],
            "base.rollout.decode_step_s is 0.01, measured on some GPUs, but "
            "candidates differ in type of GPU that generates (H100, L40S)",
        ),
        (
            ["base.rollout.prefill_pass_s=0.1", "candidates.rollout_tensor_parallel=[1, 2]"],
            "base.rollout.prefill_pass_s is 0.1, measured on some GPUs, but "
            "candidates differ in rollout.tensor_parallel (1, 2)",
        ),
    ],
)
def test_times_measured_on_some_gpus_are_refused_for_others(
    overrides: Sequence[str], says: str
) -> None:
    with pytest.raises(ValueError, match=r"measured on some GPUs") as error:
        solved(*overrides)
    assert says in str(error.value)


def test_measured_times_are_accepted_for_the_same_gpus() -> None:
    found = solved(
        *("base.trainer.step_s=2", "candidates.gpus=[4]", "candidates.rollout_share=[0.5]"),
        *("base.rollout.prefill_pass_s=0.01", "candidates.schedule=[synchronous, asynchronous]"),
    )
    assert found.best is not None
    more = solved("candidates.eta=[1]", "candidates.rollout_share=[0.5]")
    hours = {one.candidate.gpus: one.hours.mean for one in more.screened}
    assert hours[8] < hours[4]


# --- the recommendation -------------------------------------------------------------------------


def test_the_recommendation_is_the_best_of_all_candidates_simulated_one_by_one() -> None:
    plan = small_plan()
    search = plan.search
    seconds = {}
    for one in expand(plan).possible:
        config = shortened(one.config, search.steps, search.warmup_steps)
        trials = [run_job(Job(config=config, seed=seed)) for seed in (1, 2)]
        seconds[one.number] = sum(trial.step_s for trial in trials) / 2
    found = solved()
    assert found.best is not None
    assert found.best.hours.mean == pytest.approx(min(seconds.values()) * 100 / 3600)


def test_the_closed_form_is_never_slower_than_the_simulation() -> None:
    plan = small_plan(
        "candidates.placement=[disaggregated, colocated]",
        "candidates.schedule=[asynchronous, one_step_overlap, partial_rollout]",
    )
    for one in expand(plan).possible:
        config = shortened(one.config, 24, 8)
        assert 0.9 * least_step_s(config) <= run_job(Job(config=config, seed=1)).step_s


@pytest.mark.parametrize("require_batches", [1, 2])
def test_the_closed_form_of_streamed_minibatches_is_never_slower(require_batches: int) -> None:
    plan = small_plan(
        f"base.schedule.require_batches={require_batches}",
        *("base.workload.minibatches=4", "base.workload.prompts_per_batch=16"),
        *("candidates.schedule=[asynchronous, one_step_overlap]", "candidates.eta=[0, 0.5, 2]"),
    )
    bounds = {}
    for one in expand(plan).possible:
        assert one.config.batch_parts == 4 // require_batches
        config = shortened(one.config, 24, 8)
        bounds[one.number] = least_step_s(config)
        whole_s = least_step_s(config.with_settings({"schedule.require_batches": 0}))
        assert bounds[one.number] <= whole_s
        if one.config.schedule.versions_ahead == 0:  # at most half of the training is hidden
            assert bounds[one.number] < whole_s
        assert 0.9 * bounds[one.number] <= run_job(Job(config=config, seed=1)).step_s
    assert any(one.eta == 0 for one in expand(plan).possible)


@pytest.mark.parametrize("hybrid", [1, 2])
def test_the_closed_form_with_hybrid_gpus_is_never_slower(hybrid: int) -> None:
    plan = small_plan(
        *(f"base.cluster.hybrid_gpus={hybrid}", "candidates.eta=[0, 0.5, 2]"),
        *("candidates.schedule=[asynchronous, partial_rollout]", "base.weights.update_s=null"),
    )
    possible = expand(plan).possible
    assert {one.eta for one in possible} >= {0, 0.5, 2}
    for one in possible:
        assert one.config.cluster.hybrid_gpus == hybrid
        assert f", {hybrid} hybrid" in one.split
        config = shortened(one.config, 24, 8)
        trial = run_job(Job(config=config, seed=1))
        assert 0.9 * least_step_s(config) <= trial.step_s
        assert 0 < engine_share([trial]) <= 1
        assert 0 < trainer_share([trial]) <= 1
        cost = hourly_cost(one, ())
        assert cost.gpu_hours == pytest.approx(one.gpus)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan_report(solved("seed=3")) == plan_report(solved("seed=3"))
    assert plan_report(solved("seed=3")) != plan_report(solved("seed=4"))


def test_two_workers_find_the_same_plan_as_one() -> None:
    with workers(2) as run:
        two = find_plan(small_plan(), run, errors=EXACT)
    assert plan_report(two) == plan_report(solved())


@pytest.mark.parametrize("objective", ["gpus", "dollars", "hours"])
def test_more_of_a_limit_is_never_worse(objective: str) -> None:
    before = float("inf")
    for deadline_h in (0.05, 0.08, 0.2, 1.0):
        plan = small_plan(f"objective={objective}")
        plan.limits.deadline_h = deadline_h
        with workers(1) as run:
            best = find_plan(plan, run).best
        value = float("inf") if best is None else best.value(objective)
        assert value <= before
        before = value
    assert before < float("inf")


def test_a_train_bound_run_gains_nothing_from_asynchrony() -> None:
    found = solved(
        *("base.trainer.step_s=1000", "candidates.gpus=[4]", "candidates.eta=[0, 4]"),
        "candidates.rollout_share=[0.5]",
    )
    (comparison,) = found.comparisons
    assert not comparison.pays
    assert comparison.ratio.mean == pytest.approx(1, abs=0.02)
    assert comparison.asynchronous.limit == "train-bound"


def test_asynchrony_pays_if_generation_and_training_take_equally_long() -> None:
    found = solved("candidates.gpus=[4]", "candidates.eta=[0, 4]", "search.seeds=5")
    (comparison,) = found.comparisons
    assert comparison.pays
    assert comparison.ratio.mean > 1.5
    assert "asynchrony pays" in verdict(comparison)


@cache
def _one() -> Outcome:
    return next(iter(solved("candidates.gpus=[4]").comparisons)).asynchronous


def compared(*ratios: float, errors: MeasuredErrors = EXACT) -> Comparison:
    """Two outcomes on the same GPUs, seed by seed."""
    one = dataclasses.replace(_one(), known=known_errors(_one().candidate, errors))
    trial = one.trials[0]
    slow = tuple(dataclasses.replace(trial, step_s=trial.step_s * ratio) for ratio in ratios)
    return Comparison(
        synchronous=dataclasses.replace(one, trials=slow),
        asynchronous=dataclasses.replace(one, trials=(trial,) * len(ratios)),
    )


@pytest.mark.parametrize(
    ("ratios", "pays", "says"),
    [
        ((0.9, 2.27, 3.6), None, "whether asynchrony pays on 4 H100 is undecided"),
        ((2.2, 2.27, 2.3), True, "asynchrony pays on 4 H100"),
        ((0.98, 0.986, 0.99), False, "asynchrony does not help on 4 H100"),
        ((0.998, 1.0, 1.002), None, "whether asynchrony pays on 4 H100 is undecided"),
        ((2.27,), True, "asynchrony pays on 4 H100"),
    ],
)
def test_a_comparison_is_undecided_if_its_interval_contains_1(
    ratios: tuple[float, ...], *, pays: bool | None, says: str
) -> None:
    comparison = compared(*ratios)
    assert comparison.pays is pays
    assert verdict(comparison).startswith(says)
    # Where the seeds' interval has a gain of 2 % and a loss, more of them help.
    assert ("search.seeds=12" in verdict(comparison)) is (ratios == (0.9, 2.27, 3.6))


@given(st.floats(0.2, 5), st.floats(0, 1))
def test_a_gain_is_undecided_exactly_if_its_interval_contains_1(gain: float, size: float) -> None:
    comparison = compared(gain, gain * 1.01, errors=_errors_of(round(size, 2)))
    ratio = comparison.predicted_ratio
    assert (comparison.pays is None) is (ratio.low <= 1 <= ratio.high)
    assert ("undecided" in verdict(comparison)) is (comparison.pays is None)
    assert 0 < ratio.low <= ratio.value <= ratio.high
    assert comparison.ratio.low > 0


@cache
def _errors_of(size: float) -> MeasuredErrors:
    return errors_of(size)


def test_limits_that_no_candidate_meets_name_the_fastest() -> None:
    found = solved("deadline_h=0.001")
    assert found.best is None
    assert found.front
    assert "no candidate is within the limits; the fastest is" in "\n".join(
        recommendation_lines(found)
    )


# --- money --------------------------------------------------------------------------------------


def test_an_objective_of_money_without_a_price_is_refused_with_a_fix() -> None:
    with pytest.raises(ValueError, match=r"set prices .*: \[\{gpu: H800, typical: 2.0\}\]"):
        solved("objective=dollars", "candidates.gpu=[H800]")


def test_time_without_a_price_leaves_money_unknown() -> None:
    found = solved("candidates.gpu=[H800]")
    told = plan_report(found)
    assert told["best"]["dollars"] is None
    assert any("no published price" in line for line in told["warnings"])
    assert "money unknown" in told["answer"]


def test_a_price_in_the_plan_file_counts() -> None:
    plan = small_plan("candidates.gpu=[H800]", "objective=dollars")
    plan.prices = [PriceEntry(gpu="H800", typical=2.0, low=1.0, high=4.0)]
    with workers(1) as run:
        best = find_plan(plan, run).best
    assert best is not None
    assert best.dollars is not None
    assert best.dollars.mean == pytest.approx(2.0 * best.gpu_hours.mean)
    assert best.hourly.high == pytest.approx(4.0 * best.candidate.gpus)


def test_reserved_and_spot_prices_are_ratios_of_the_price_without_interruptions() -> None:
    prices = "[{gpu: H100, typical: 2.0, reserved: 1.5, spot: 0.8}]"
    best = solved("candidates.gpus=[4]", f"prices={prices}").best
    assert best is not None
    assert best.dollars is not None
    entries = small_plan(f"prices={prices}").prices
    for found, share in zip(other_prices(best, entries), (0.75, 0.4), strict=True):
        assert found.dollars == pytest.approx(share * best.dollars.mean)
        assert (found.factor, found.interruptions_per_h) == (1, 0)
    assert not other_prices(best, [PriceEntry(gpu="H800", typical=1, spot=1)])


def test_interrupted_spot_nodes_cost_the_lost_work_and_the_restart() -> None:
    entry = "gpu: H100, typical: 2.0, spot: 0.8, interruptions_per_day: 0.01, restart_s: 36"
    found = solved(
        *("candidates.gpus=[12]", f"prices=[{{{entry}}}]", "base.outside.checkpoint_steps=20"),
    )
    best = found.best
    assert best is not None
    (spot,) = other_prices(best, found.config.prices)
    per_h = 2 * 0.01 / 24  # 12 GPUs are on two nodes of 8
    lost_h = 20 * best.hours.mean / 100 / 2 + 0.01
    assert spot.interruptions_per_h == pytest.approx(per_h)
    assert spot.factor - 1 == pytest.approx(per_h * lost_h, rel=1e-3)
    assert spot.dollars == pytest.approx(12 * 0.8 * best.hours.mean * spot.factor)
    text = " ".join(recommendation_lines(found))
    assert "at spot prices: $" in text
    assert "each loses half of 20 steps and a restart" in text
    (told,) = json.loads(json.dumps(plan_report(found), allow_nan=False))["best"]["other_prices"]
    assert told["name"] == "spot"


def test_interruptions_without_what_they_cost_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set spot, .* and restart_s, .* and base.outside"):
        small_plan("prices=[{gpu: H100, typical: 2.0, interruptions_per_day: 1}]")


@pytest.mark.parametrize(
    ("trains", "decodes", "limit"),
    [(0.95, 0.91, "both sides full"), (0.95, 0.89, "train-bound"), (0.5, 0.91, "generation-bound")],
)
def test_a_full_trainer_beside_full_engines_is_not_called_train_bound(
    trains: float, decodes: float, limit: str
) -> None:
    trial = Trial(
        step_s=1.0,
        tokens_per_s=1.0,
        kwh=1.0,
        busy={"training": {"train": trains}, "rollout": {"decode": decodes}},
        idle={"training": {"waiting for a batch": 1 - trains}, "rollout": {}},
    )
    assert limit_of([trial]) == limit


# --- memory and nodes ---------------------------------------------------------------------------


def memory(*overrides: str) -> list[Memory]:
    (one,) = expand(load_plan(None, ["candidates.gpu=[H100]", *overrides])).possible
    return memory_of(one)


def test_the_parts_of_memory_are_those_of_the_cost_model() -> None:
    training, generation = memory("base.model=Qwen2.5-7B", "base.trainer.tensor_parallel=4")
    assert training.side == "training"
    assert training.available == generation.available == find_gpu("H100").memory_bytes
    # Two, four and twelve bytes per parameter; the first is on a fourth of the GPUs.
    parameters = find_model("Qwen2.5-7B").parameters
    assert training.parts["parameters"] == pytest.approx(2 * parameters / 4, rel=0.01)
    assert training.parts["gradients"] == pytest.approx(2 * training.parts["parameters"])
    assert training.free == training.available - sum(training.parts.values()) > 0
    assert generation.parts["weights"] == pytest.approx(2 * parameters, rel=0.02)
    used = sum(generation.parts.values())
    assert used == pytest.approx(0.85 * generation.available)
    halved = memory("base.model=Qwen2.5-7B", "base.rollout.tensor_parallel=2")[1]
    assert halved.parts["weights"] == pytest.approx(generation.parts["weights"] / 2)


def test_a_layout_is_refused_where_its_memory_is_used_up() -> None:
    """The most tokens of a micro-batch that fit leave nearly nothing free."""
    fits, fails = 27_904, 10_000_000
    settings = ("base.model=Qwen2.5-7B", "base.trainer.tensor_parallel=4")
    while fails - fits > 16:
        tokens = (fits + fails) // 2
        plan = load_plan(
            None,
            ["candidates.gpu=[H100]", *settings, f"base.trainer.micro_batch_tokens={tokens}"],
        )
        fits, fails = (tokens, fails) if expand(plan).possible else (fits, tokens)
    full = memory(*settings, f"base.trainer.micro_batch_tokens={fits}")[0]
    assert 0 <= full.free < 1e-4 * full.available


def test_measured_training_steps_say_nothing_of_memory() -> None:
    assert [one.side for one in memory("base.trainer.step_s=10")] == ["generation"]


def test_gpus_that_are_not_whole_nodes_are_named() -> None:
    whole, part = (
        expand(small_plan(f"candidates.gpus=[{gpus}]", "candidates.rollout_share=[0.5]"))
        for gpus in (16, 12)
    )
    assert partial_nodes(whole.possible[0]) == ""
    assert partial_nodes(part.possible[0]) == "1.5 nodes of 8 H100"
    found = solved("candidates.gpus=[4, 8]", "objective=gpus")
    text = "\n".join(recommendation_lines(found))
    assert "4 H100: 0.5 nodes of 8 H100; the cost is that of these GPUs alone" in text
    assert "memory of a GPU in training: " in text
    told = json.loads(json.dumps(plan_report(found), allow_nan=False))
    assert {one["side"] for one in told["memory"]} >= {"generation"}


# --- bottleneck and sensitivity -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "engines", "limit"),
    [
        ({"train": 0.95, "waiting for a batch": 0.05}, {"decode": 0.5}, "train-bound"),
        ({"train": 0.5, "waiting for a batch": 0.5}, {"decode": 0.98}, "generation-bound"),
        (
            {"train": 0.5, "waiting for a batch": 0.5},
            {"decode": 0.5, "nothing admitted (staleness bound)": 0.5},
            "staleness-bound",
        ),
        ({"train": 0.5, "waiting for weights": 0.5}, {"decode": 0.5}, "weight updates"),
        ({"train": 0.25, "lost": 0.75}, {"decode": 0.2, "lost": 0.05}, "failures"),
        ({"train": 0.67, "lost": 0.3, "waiting for a batch": 0.03}, {"decode": 0.9}, "failures"),
        (
            {"train": 0.5, "waiting for a batch": 0.5},
            {"decode": 0.5, "waiting for rewards": 0.5},
            "rewards and tools",
        ),
    ],
)
def test_the_bottleneck_is_what_the_pools_wait_for(
    training: dict[str, float], engines: dict[str, float], limit: str
) -> None:
    trial = Trial(
        step_s=1.0,
        tokens_per_s=1.0,
        kwh=1.0,
        busy={"training": {}, "rollout": {}},
        idle={"training": training, "rollout": engines},
    )
    assert limit_of([trial]) == limit


def test_the_price_changes_money_in_proportion_and_nothing_else() -> None:
    found = solved("objective=dollars", "search.sensitivity=2", "candidates.gpus=[4]")
    assert found.sensitivity is not None
    price = next(one for one in found.sensitivity.inputs if one.name == "price of a GPU-hour")
    own = found.sensitivity.base
    for end, of in ((price.low, own.hourly.low), (price.high, own.hourly.high)):
        there = at_end(end, own)
        assert there is not None
        assert of is not None
        assert own.hourly.dollars is not None
        assert there.value("dollars") / own.value("dollars") == pytest.approx(
            of / own.hourly.dollars
        )
        assert there.hours == own.hours


def test_longer_responses_take_longer_in_a_generation_bound_run() -> None:
    found = solved(
        *("search.sensitivity=2", "base.trainer.step_s=0.01", "candidates.gpus=[4]"),
        "candidates.rollout_share=[0.5]",
    )
    assert found.sensitivity is not None
    length = next(one for one in found.sensitivity.inputs if one.name == "mean length")
    ends = [at_end(end, found.sensitivity.base) for end in (length.low, length.high)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].hours.mean < found.sensitivity.base.hours.mean < ends[1].hours.mean
    assert length is found.sensitivity.inputs[0]


def test_slower_memory_and_training_are_slower() -> None:
    # In the preset, the engine's CPU time hides the time of reading memory.
    overrides = ["simulation=table_7", "base.workload.steps=3", "base.rollout.engine_overhead_s=0"]
    config = load_plan(None, [*overrides, "base.workload.warmup_steps=1"]).base
    config.workload.prompts_per_batch = 16
    base, memory, training = (
        run_job(Job(config=config, seed=1, memory_slowdown=one, training_slowdown=two)).step_s
        for one, two in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))
    )
    assert training > base
    synchronous = config.with_settings({"schedule.name": "synchronous"})
    one, two = (
        run_job(Job(config=synchronous, seed=1, memory_slowdown=by)).step_s for by in (1.0, 2.0)
    )
    assert two > one
    assert memory >= base * 0.99


@pytest.mark.parametrize(
    ("gpu", "ends", "source"),
    [
        ("H100", ("-29.6%", "+29.6%"), "two known trainers differ by a factor of 1.42: ±30%"),
        (
            "L40S",
            ("-42.1%", "+42.1%"),
            "two known trainers differ by a factor of 1.42; fitted on other GPUs, ±30%: ±42%",
        ),
    ],
)
def test_the_range_of_training_speed_is_the_difference_between_trainers(
    gpu: str, ends: tuple[str, str], source: str
) -> None:
    found = solved(
        *("search.sensitivity=1", f"candidates.gpu=[{gpu}]", "candidates.gpus=[4]"),
        *("candidates.eta=[1]", "base.trainer.mfu=null", "candidates.rollout_share=[0.5]"),
        "search.seeds=1",
    )
    assert found.sensitivity is not None
    speed = next(one for one in found.sensitivity.inputs if one.name == "MFU of training")
    assert (speed.low.value, speed.high.value) == ends
    assert speed.source == source
    text = StringIO()
    show_plan(Console(file=text, width=200), found)
    assert source in text.getvalue()


# --- the model's error --------------------------------------------------------------------------


COLOCATED = DENSE._replace(colocated=True)


def rough(
    groups: str = "abc", *, disaggregated: float = 1.5, colocated: float = 0.0
) -> MeasuredErrors:
    """Errors of disaggregated runs, and of colocated ones."""
    return MeasuredErrors(
        [
            row(size, group=group, gain=-size, kind=kind)
            for group in groups
            for kind, size in ((DENSE, disaggregated), (COLOCATED, colocated))
        ]
    )


PLACEMENTS = (
    *("candidates.placement=[disaggregated, colocated]", "candidates.gpus=[4]"),
    *("candidates.schedule=[asynchronous, synchronous]", "base.weights.switch_s=1"),
)


def test_the_pessimistic_end_ranks_what_was_predicted_well_before_what_is_faster_on_average() -> (
    None
):
    mean, careful = (
        solved(*PLACEMENTS, f"rank_by={by}", errors=rough()) for by in ("mean", "pessimistic")
    )
    assert mean.best is not None
    assert careful.best is not None
    assert not mean.best.candidate.config.cluster.colocated
    assert careful.best.candidate.config.cluster.colocated
    assert careful.best.hours.mean > mean.best.hours.mean
    assert careful.best.predicted_hours.high < mean.best.predicted_hours.high
    evaluated = [one.predicted_hours.high for one in careful.outcomes]
    assert careful.best.predicted_hours.high == min(evaluated)


@pytest.mark.parametrize("disaggregated", [0.0, 0.4])
def test_candidates_excluded_by_their_lower_bound_are_not_the_best_by_the_pessimistic_end(
    monkeypatch: pytest.MonkeyPatch, disaggregated: float
) -> None:
    monkeypatch.setattr("simulator.plan.search._ROUND", 1)  # skip as soon as possible
    plan = small_plan(
        *PLACEMENTS,
        "candidates.gpus=[2, 3, 4, 5, 6, 8]",
        "candidates.rollout_share=[0.2, 0.5, 0.8]",
    ).with_settings({"rank_by": "pessimistic"})
    with workers(1) as run:
        bounded = find_plan(plan, run, errors=rough(disaggregated=disaggregated))
        everything = find_plan(
            plan, run, bound=lambda _: 1e-9, errors=rough(disaggregated=disaggregated)
        )
    assert everything.bounded == 0 < bounded.bounded
    assert bounded.best is not None
    assert everything.best is not None
    assert bounded.best.candidate.number == everything.best.candidate.number
    assert [one.candidate.number for one in bounded.front] == [
        one.candidate.number for one in everything.front
    ]


def test_limits_hold_at_the_pessimistic_end_only_if_it_ranks() -> None:
    fast = solved("candidates.gpus=[4]", errors=errors_of(0.5)).best
    assert fast is not None
    between_h = (fast.hours.mean + fast.predicted_hours.high) / 2
    late = solved("candidates.gpus=[4]", f"deadline_h={between_h}", errors=errors_of(0.5))
    assert late.best is not None
    told = "\n".join(recommendation_lines(late))
    assert "its 90 % interval exceeds the deadline" in told
    assert "rank_by=pessimistic" in told
    none = solved(
        *("candidates.gpus=[4]", f"deadline_h={between_h}", "rank_by=pessimistic"),
        errors=errors_of(0.5),
    )
    assert none.best is None


def test_a_plan_shows_the_intervals_and_how_far_predictions_were_off() -> None:
    found = solved("candidates.gpus=[4]", "rank_by=pessimistic", errors=errors_of(0.5))
    text = StringIO()
    show_plan(Console(file=text, width=110), found)
    flat = " ".join(text.getvalue().split())
    assert flat.count("ranked by the pessimistic end of the 90 % interval") == 2
    assert (
        "The 90 % interval has the model's error on 12 measured runs (6 systems and models)" in flat
    )
    assert "gains of asynchrony were predicted wrong by a factor of 1.65 in the median" in flat
    assert "Never compared with a measured run" not in flat
    best = found.best
    assert best is not None
    ends = {"low": best.predicted_hours.low, "high": best.predicted_hours.high}
    assert span(ends) in flat
    assert max(map(len, text.getvalue().splitlines())) <= 110


def test_a_plan_answers_for_every_cluster_and_staleness_bound_that_was_asked_about() -> None:
    found = solved("candidates.gpus=[4, 8]", "candidates.eta=[0, 1, 4]", "objective=dollars")
    best = found.best
    assert best is not None
    assert [one.name for one in found.clusters] == list(
        dict.fromkeys(one.hardware for one in found.space.possible)
    )
    assert [one.name for one in found.etas] == ["eta 0", "eta 1", "eta 4"]
    for one in (*found.clusters, *found.etas):
        if one.outcome is None:
            assert one.least_hours * found.config.steps > 0
            assert "not simulated: over" in against(found, one)
        elif one.outcome is best:
            assert against(found, one) == "the recommendation"
        else:
            like = found.comparable_best(one.outcome)
            assert like.candidate is best.candidate
            assert len(like.trials) == len(one.outcome.trials)
            change = one.outcome.value("hours") / like.value("hours") - 1
            way = "slower" if change > 0 else "faster"
            assert against(found, one).startswith(f"{abs(change):.0%} {way}, ")
            assert one.outcome.limit in against(found, one)
    # None of the same cluster is better than the one that stands for it.
    for one in found.clusters:
        here = [of for of in found.outcomes if of.candidate.hardware == one.name]
        if one.outcome is not None and here:
            assert one.outcome.rank("dollars") == min(of.rank("dollars") for of in here)
    text = StringIO()
    show_plan(Console(file=text, width=200), found)
    shown = text.getvalue()
    assert "every staleness bound on the recommended cluster, at its best" in shown
    # Hours and dollars have one interval, printed once a row.
    for one in found.front:
        (row,) = (
            line
            for line in shown.split("every cluster")[0].splitlines()
            if all(
                cell in line for cell in (one.candidate.hardware, one.candidate.split, one.limit)
            )
        )
        assert row.count("x/÷") == 1
        assert f"x/÷ {one.predicted_hours.factor:.2f}" in row
    told = json.loads(json.dumps(plan_report(found), allow_nan=False))
    assert [one["name"] for one in told["etas"]] == ["eta 0", "eta 1", "eta 4"]


def test_two_noisy_seeds_leave_bounds_that_are_factors_of_the_answer() -> None:
    one = dataclasses.replace(_one(), known=known_errors(_one().candidate, errors_of(0.2)))
    first = one.trials[0]

    def of(*steps_s: float) -> Outcome:
        trials = tuple(dataclasses.replace(first, step_s=one) for one in steps_s)
        return dataclasses.replace(one, trials=trials)

    noisy, doubled = of(1.5, 2.4), of(3.0, 4.8)
    dollars = noisy.predicted_dollars
    assert dollars is not None
    assert 0 < dollars.low < dollars.value < dollars.high
    assert dollars.factor == pytest.approx(noisy.predicted_hours.factor)
    assert doubled.predicted_hours.low == pytest.approx(2 * noisy.predicted_hours.low)
    assert doubled.predicted_hours.high == pytest.approx(2 * noisy.predicted_hours.high)
    assert of(1.5, 1.5).predicted_hours.factor < noisy.predicted_hours.factor
    assert compared(0.9, 2.4).predicted_ratio.low > 0


def test_gpus_that_were_never_compared_with_a_run_widen_the_interval() -> None:
    space = expand(small_plan("candidates.gpu=[H100, A100-80]", "candidates.gpus=[4]"))
    spreads = {
        one.config.cluster.gpu: known_errors(one, errors_of(0.1)).step.error.spread
        for one in space.possible
    }
    assert spreads["A100-80"] > spreads["H100"] > 0


def test_a_plan_says_its_workload_and_where_each_number_is_from() -> None:
    line = workload_line(load_plan(None, ["base.workload.prompts_per_batch=64"]))
    assert line == (
        "a step: 64 prompts; 16 responses each (default); prompts of 256 tokens (default); "
        "responses of 9,277 tokens on average (default); at most 27,648 (default); change them as "
        "base.workload.*"
    )
    preset = workload_line(load_plan(None, ["simulation=table_7", "base.workload.turns=3"]))
    assert "at most 7,168 (table_7)" in preset
    assert preset.endswith("3 turns; change them as base.workload.*")


def test_the_report_of_a_plan_has_both_intervals() -> None:
    found = solved("candidates.gpus=[4]", "search.seeds=4", errors=errors_of(0.5))
    told = json.loads(json.dumps(plan_report(found), allow_nan=False))
    assert told["rank_by"] == "mean"
    hours = told["best"]["hours"]
    assert hours["low"] < hours["seeds_low"] <= hours["mean"] <= hours["seeds_high"] < hours["high"]
    assert told["best"]["model_error"]["rows"] == 12
    (ratio,) = told["asynchrony"]
    low, high = ratio["ratio"]["low"], ratio["ratio"]["high"]
    assert ratio["undecided"] is (low <= 1 <= high)
    assert ratio["model_error"]["of"] == "gain"
    assert told["model_error"]["says"][0].startswith(
        "The 90 % interval has the model's error on 12"
    )


# --- the file -----------------------------------------------------------------------------------


def test_the_shipped_example_is_a_plan_of_hundreds_of_candidates() -> None:
    plan = load_plan(EXAMPLE)
    assert plan.base.model == "R1-Distill-Qwen-7B"
    space = expand(plan)
    assert 400 <= len(space.possible) <= 600
    assert space.impossible


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["objective=money"], "objective is 'money'"),
        (["steps=0"], "steps is 0"),
        (["candidates.rollout_share=[1.5]"], "must be a list of numbers > 0 and < 1"),
        (["candidates.schedule=[overlapped]"], "candidates.schedule is ['overlapped'], but must"),
        (["candidates.placement=[shared]"], "candidates.placement is ['shared'], but must be"),
        (["candidates.gpu=[H1000]"], "H100"),
        (["candidates.node_range=[4, 2]"], "first <= last"),
        (["search.steps=2", "search.warmup_steps=2"], "leaves none to average"),
        (["limits.deadline_h=-1"], "limits.deadline_h is -1"),
        (["base.workload.answers.drift_per_step=0.01"], "drift"),
        (["candidates.etas=[1]"], "did you mean 'candidates.eta'"),
        (["candidates.rollout_gpu=[H1000]"], "candidates.rollout_gpu: unknown GPU 'H1000'"),
        (["base.model=Qwen2.5-72"], "base.model: unknown model 'Qwen2.5-72'"),
        (["base.trainer.step_s=nan"], "base.trainer.step_s is 'nan', but must be a number > 0"),
        (["base.seeds=0"], "base.seeds is 0, but must be an integer from 1 to 10,000"),
        (["base.cluster.gpus=0", "candidates.gpus=[4]"], "base.cluster.gpus is 0, but must be"),
        (
            ["base.cluster.gpu=H1000", "candidates.gpu=[H100]"],
            "base.cluster.gpu: unknown GPU 'H1000'",
        ),
        (["base.workload.minibatches=99999"], "base.workload.minibatches is 99999, but a batch"),
        (["search.near=inf"], "search.near is 'inf', but must be a finite number >= 0"),
        (["simulation=nosuch"], "unknown preset 'nosuch'; known are small, "),
        (
            ["prices=[{gpu: H100}]"],
            "prices[0].typical is missing, but must be a finite",
        ),
        (
            ["prices=[{gpu: H100, cost: 2}]"],
            "prices[0].cost is not a setting; known are gpu, typical, low, high",
        ),
        (["prices=[{gpu: H100, typcal: 2}]"], "did you mean 'typical'?"),
        (["prices=[H100]"], "prices[0] is 'H100', but must be {gpu, typical, low, high, "),
        (
            ["prices=[{gpu: H100, typical: $2}]"],
            "prices[0].typical is '$2', but must be a finite",
        ),
        (["prices=2"], "prices is 2, but must be a list of {gpu, typical, low, high, "),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(overrides: Sequence[str], says: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_plan(None, overrides)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_report_is_plain_json() -> None:
    told = json.loads(json.dumps(plan_report(solved("search.sensitivity=2")), allow_nan=False))
    assert told["best"]["hours"]["low"] <= told["best"]["hours"]["mean"]
    assert told["candidates"]["combinations"] == 12
    assert told["sensitivity"]["of"] == "hours"
    assert {row["input"] for row in told["sensitivity"]["inputs"]} >= {"mean length"}
    for one in (*told["front"], *(option["outcome"] for option in told["etas"])):
        lag = one["staleness"]
        parts = lag["before_queue_mean"] + lag["in_queue_mean"]
        assert lag["head_mean"] == pytest.approx(parts)
        assert lag["head_p95"] >= max(lag["before_queue_p95"], lag["in_queue_p95"])
        for name, known in one["lag"].items():
            assert known["low"] <= known["mean"] == lag[f"head_{name}"] <= known["high"]


def test_the_lag_of_the_recommendation_is_in_words() -> None:
    """Late groups are thrown away where the bound says so."""
    late = ("base.schedule.batch_order=bounded_lag", "base.schedule.max_lag=1")
    for policy in ("wait", "drop"):
        found = solved("candidates.eta=[1]", *late, f"base.schedule.on_late={policy}")
        best = found.best
        assert best is not None
        lines = " ".join(recommendation_lines(found))
        assert f"lag of first tokens: {best.staleness['head_mean']:.2f} versions" in lines
        assert best.staleness["head_p95"] <= 1
        thrown = best.staleness["thrown_away"] > 0
        assert thrown is (policy == "drop")
        assert ("are thrown away" in lines) is thrown
        assert ("90 % interval" in lines and ", of the percentile" in lines) is not thrown
    (synchronous,) = solved("candidates.eta=[0]", "candidates.gpus=[4]").front[:1]
    assert synchronous.staleness["head_mean"] == synchronous.staleness["head_p95"] == 0


# --- computed by hand ---------------------------------------------------------------------------


def test_more_hours_are_on_the_front_with_fewer_gpus_but_not_with_more() -> None:
    small, large = Point(2.0, 2.0, 4), Point(1.0, 2.0, 8)
    assert front([("small", small), ("large", large), ("both", Point(2.0, 2.0, 8))]) == [
        "small",
        "large",
    ]
    assert dominates(small, Point(2.0, 3.0, 8))
    assert not dominates(Point(1.0, 1.0, 8), small)


def test_candidates_excluded_by_their_lower_bound_are_not_the_best() -> None:
    plan = small_plan(
        *("candidates.gpus=[2, 3, 4, 5, 6, 8]", "candidates.rollout_share=[0.2, 0.5, 0.8]"),
        "candidates.eta=[0, 1, 2]",
    )
    plan.objective = "dollars"
    with workers(1) as run:
        bounded = find_plan(plan, run)
        everything = find_plan(plan, run, bound=lambda _: 1e-9)
    assert everything.bounded == 0 < bounded.bounded
    assert {one.candidate.number for one in bounded.front} == {
        one.candidate.number for one in everything.front
    }


@pytest.mark.parametrize(("gain", "pays"), [(0.9, False), (1.01, False), (1.05, True)])
def test_asynchrony_pays_from_two_percent(gain: float, *, pays: bool) -> None:
    assert compared(gain, gain).pays is pays


# --- shared and separate GPUs, each with a layout of its own ------------------------------------


def test_each_way_to_share_gpus_has_its_own_combinations() -> None:
    """What only separate trainers have is merged for shared GPUs, not multiplied."""
    space = expand(
        small_plan(
            "candidates.gpus=[4]",
            "candidates.rollout_share=[0.5]",
            "candidates.eta=[0, 1]",
            "candidates.placement=[disaggregated, colocated]",
            "candidates.hybrid=[false, true]",
            "candidates.require_batches=[0, 1]",
            "base.workload.minibatches=2",
        )
    )
    kinds = Counter(one.kind for one in space.possible)
    assert kinds["shared"] == 1  # synchronous
    assert kinds["separate"] == kinds["separate, streamed"] == 2
    for one in space.possible:
        cluster, schedule = one.config.cluster, one.config.schedule
        assert (one.kind == "shared") is cluster.colocated
        if one.kind == "hybrid":
            assert (cluster.rollout_gpus, cluster.hybrid_gpus) == (4, 2)
        assert (schedule.require_batches > 0) is (one.kind == "separate, streamed")
        assert ("in 2 parts" in one.schedule) is (one.kind == "separate, streamed")
    assert kinds["hybrid"] > 0


def test_a_split_can_be_divided_by_all_the_parallelism_of_its_trainer() -> None:
    found = expand(
        small_plan(
            "base.model=Qwen3-30B-A3B",
            "candidates.gpus=[64]",
            "candidates.rollout_share=[0.4]",
            "candidates.eta=[1]",
            "candidates.trainer_pipeline_parallel=[1, 2]",
            "candidates.trainer_expert_parallel=[8, 16]",
            "candidates.trainer_sequence_parallel=[1, 4]",
            "candidates.trainer_context_parallel=[1, 2]",
        )
    ).possible
    layouts = {one.split for one in found}
    assert {"TP 1 PP 2 EP 16 CP 2 SP 4" in layout for layout in layouts} == {True, False}
    for one in found:
        trainer, gpus = one.config.trainer, one.config.cluster.training_gpus
        rank = trainer.pipeline_parallel * trainer.context_parallel * trainer.sequence_parallel
        assert gpus % rank == 0
        assert gpus % (trainer.pipeline_parallel * trainer.expert_parallel) == 0
    assert len(layouts) == len(found)


def test_every_kind_is_shown_with_its_best_layout() -> None:
    found = solved(
        "candidates.gpus=[4]",
        "candidates.rollout_share=[0.5]",
        "candidates.eta=[0, 1]",
        "candidates.placement=[disaggregated, colocated]",
        "candidates.require_batches=[0, 1]",
        "base.workload.minibatches=2",
        "search.sensitivity=0",
    )
    assert found.best is not None
    assert [one.name for one in found.kinds] == ["separate", "separate, streamed", "shared"]
    for one in found.kinds:
        if one.outcome is not None:
            assert one.outcome.candidate.kind == one.name
    shown = {one.name for one in found.kinds if one.outcome is found.best}
    assert shown == {found.best.candidate.kind}
    assert [one["name"] for one in plan_report(found)["kinds"]] == [one.name for one in found.kinds]
