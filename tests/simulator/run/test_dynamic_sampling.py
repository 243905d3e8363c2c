"""Dynamic sampling in simulated seconds: what is generated and thrown away takes its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.control.events import GroupFiltered
from areal_lab.control.sampling import EQUAL_REWARDS, DynamicSampling
from areal_lab.control.schedule import Schedule, asynchronous, synchronous
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.replay import check_replay
from areal_lab.runlog.summary import build_summary
from simulator.assembly.simulate import build, simulate, simulated_log
from simulator.config.load import load_simulation
from simulator.run.system import System
from simulator.workload.recorded_run import recorded_settings
from tests.simulator.run.toy_system import run_with_log, toy_system


def with_sampling(system: System, sampling: DynamicSampling, *, share: float) -> System:
    limits = replace(system.limits, sampling=sampling)
    workload = system.workload.with_settings({"equal_rewards_share": share})
    return replace(system, limits=limits, workload=workload)


@pytest.mark.parametrize("schedule", [synchronous(), asynchronous(2)])
def test_batches_stay_full_and_the_share_is_filtered(schedule: Schedule) -> None:
    plain = toy_system(schedule, steps=60, batch=8, complete=True)
    system = with_sampling(plain, DynamicSampling(max_filtered=10**9), share=0.5)
    result, log = run_with_log(system)
    assert result.counts.trained == 60 * 8
    filtered = [r.event for r in log.events if isinstance(r.event, GroupFiltered)]
    assert {event.reason for event in filtered} == {EQUAL_REWARDS}
    assert len(filtered) == result.counts.filtered
    assert result.counts.started == result.counts.trained + result.counts.filtered
    assert result.counts.filtered_tokens == 2 * 100 * result.counts.filtered
    # Binomial: 480 successes at 1/2 take 480 failures, with a deviation of sqrt(960).
    assert result.counts.filtered == pytest.approx(480, abs=4 * 960**0.5)
    assert check_replay(log).agrees
    told = build_summary(
        log, reward_before=None, reward_after=None, wall_s=0.0, backend="simulated"
    )
    assert told["filtered"] == result.counts.filtered
    assert told["smaller_batches"] == 0


def test_generation_that_is_thrown_away_takes_its_time() -> None:
    """Engines that are never idle and a trainer that takes no time: seconds go with tokens."""
    plain = toy_system(asynchronous(4), steps=80, batch=8, slots=4, train_s=0.001)
    half = with_sampling(plain, DynamicSampling(max_filtered=10**9), share=0.5)
    all_trained, some_filtered = run_with_log(plain)[0], run_with_log(half)[0]
    ratio = some_filtered.columns["end_s"][-1] / all_trained.columns["end_s"][-1]
    started = 1 + some_filtered.counts.filtered / some_filtered.counts.trained
    assert ratio == pytest.approx(started, rel=0.05)
    assert ratio > 1.7


def test_smaller_batches_are_counted() -> None:
    sampling = DynamicSampling(max_filtered=4, smallest_batch=1)
    system = with_sampling(
        toy_system(synchronous(), steps=20, batch=16, complete=True), sampling, share=0.5
    )
    result, log = run_with_log(system)
    told = build_summary(
        log, reward_before=None, reward_after=None, wall_s=0.0, backend="simulated"
    )
    assert told["steps"] == 20
    assert told["smaller_batches"] > 0
    assert result.counts.trained == told["trained_samples"] / 2 < 20 * 16


def test_a_run_that_finds_nothing_says_so() -> None:
    system = toy_system(synchronous(), steps=3, complete=True)
    with pytest.raises(ConfigError, match="step 1 needs 4 groups with different rewards"):
        run_with_log(with_sampling(system, DynamicSampling(max_filtered=9), share=0.99))


def test_the_setting_of_the_simulator_switches_it_on() -> None:
    config = load_simulation("small", ["workload.equal_rewards_share=0.4"])
    assert build(config).limits.sampling is not None
    assert build(load_simulation("small", [])).limits.sampling is None
    counts = simulate(config).counts
    assert counts.filtered / (counts.filtered + counts.trained) == pytest.approx(0.4, abs=0.1)
    log = simulated_log(config)
    share = recorded_settings(RecordedRun(Path("run"), log))["workload.equal_rewards_share"]
    assert share == pytest.approx(0.4, abs=0.1)


def test_a_synchronous_step_waits_for_the_last_replacement() -> None:
    """Each of n groups takes a geometric number of rounds; a step, the largest of them."""
    batch, share = 8, 0.5
    plain = toy_system(synchronous(), steps=300, batch=batch, slots=64, train_s=1.0)
    result = run_with_log(with_sampling(plain, DynamicSampling(max_filtered=10**9), share=share))[0]
    rounds = sum(1 - (1 - share**more) ** batch for more in range(60))
    assert result.columns["generate_s"].mean() <= 100 * rounds * 1.1
    assert result.step_s == pytest.approx(100 * rounds + 1, rel=0.06)
