"""The benchmark of the simulator: what it counts is what was simulated, and its quick parts run."""

from __future__ import annotations

import math

import pytest

from benchmarks import one_simulation, simulator
from benchmarks.demo import ROOT
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.plan.schema import load_plan
from simulator.plan.space import expand


def test_a_whole_run_counts_the_sequences_that_were_trained_on() -> None:
    config = load_simulation("small")
    seconds, sequences = simulator.whole_run(config)
    assert seconds > 0
    workload = config.workload
    assert sequences == (workload.steps * workload.prompts_per_batch * workload.samples_per_prompt)


def test_engines_alone_finish_all_sequences() -> None:
    config = load_simulation("small")
    seconds, sequences = simulator.engines_alone(config, 40)
    assert seconds > 0
    assert sequences == 40 * config.workload.samples_per_prompt


def test_memory_is_measured_in_every_step() -> None:
    config = load_simulation("small")
    watched = simulator.WatchedTraining(build(config).training)
    watched.step([10, 20], minibatches=1)
    assert len(watched.rss_mib) == 1
    assert math.isfinite(simulator.rss_growth(build(config), 0, settled=4))


def test_the_plan_has_500_configurations_and_a_quick_one_runs() -> None:
    assert len(expand(load_plan(simulator.PLAN, simulator.QUESTION)).possible) >= 500
    quick = [
        *(*simulator.QUICK_QUESTION, "candidates.rollout_share=[0.5]", "simulation=small"),
        *("base.rollout.decode_step_s=null", "base.trainer.step_s=null"),
        "base.workload.prompts_per_batch=32",
    ]
    figures = simulator.plan_seconds(quick, 1)
    assert figures["plan_s"] > 0
    assert 0 < figures["screened"] <= figures["possible"]
    assert figures["screened"] < figures["simulations"]


def test_two_trees_simulate_in_turns_and_tell_equal_results_from_others() -> None:
    found = simulator.one_of(ROOT, "run", "small")
    assert found["cpu_s"] > 0
    assert found["answer"] == one_simulation.simulate("small", [])
    assert found["answer"] != one_simulation.simulate("small", ["seed=2"])
    with pytest.raises(RuntimeError, match="no_such_preset"):
        simulator.one_of(ROOT, "run", "no_such_preset")


def test_the_answer_of_a_plan_has_its_trials() -> None:
    quick = [
        *(*simulator.QUICK_QUESTION, "candidates.rollout_share=[0.5]", "simulation=small"),
        *("base.rollout.decode_step_s=null", "base.trainer.step_s=null"),
        "base.workload.prompts_per_batch=32",
    ]
    first, again, other = (
        one_simulation.plan(str(simulator.PLAN), [*quick, f"base.seed={seed}"])
        for seed in (1, 1, 2)
    )
    assert first == again != other
