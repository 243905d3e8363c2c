"""Intervals of lags: what moves them, against simulations with faster and slower engines."""

from __future__ import annotations

import math
from functools import cache

import pytest

from areal_lab.runlog.activity import NOTHING_ADMITTED, WAIT_BATCH
from simulator.assembly.simulate import simulate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.report.lags import Lag, balance, lag_span, lags_of
from simulator.run.result import SimulationResult
from simulator.stats.statistics import ModelError, prediction

ERROR = ModelError(spread=0.17, groups=6)
OF_BOTH = ModelError(spread=math.sqrt(2) * ERROR.spread, groups=ERROR.groups)
FACTOR = prediction([1.0], OF_BOTH).factor
"""Of the balance of generation and training."""
ONE_BATCH = "schedule.max_concurrent_prompts=4"
"""A batch of the preset `small` in flight."""


@cache
def small(*overrides: str) -> tuple[SimulationConfig, SimulationResult]:
    sizes = ("workload.steps=30", "workload.warmup_steps=12", "schedule.name=asynchronous")
    config = load_simulation("small", [*sizes, *overrides])
    return config, simulate(config)


def ranges(*overrides: str) -> dict[str, Lag] | None:
    config, result = small(*overrides)
    idle = {name: pool.idle for name, pool in result.pools.items()}
    return lags_of(config, [idle], [result.staleness()], ERROR)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.eta=4",),
        ("schedule.eta=4", ONE_BATCH),
        ("schedule.eta=4", "trainer.step_s=0.6", ONE_BATCH),
        ("schedule.eta=1",),
    ],
)
def test_lags_with_faster_and_slower_engines_are_within_the_interval(
    overrides: tuple[str, ...],
) -> None:
    found = ranges(*overrides)
    assert found is not None
    for factor in (FACTOR, 1 / FACTOR):
        _, other = small(*overrides, f"rollout.time_factor={factor}")
        lags = other.staleness()
        for name, tolerance in (("mean", 0.3), ("p95", 0.0)):
            low, high = found[name].range.low, found[name].range.high
            assert low - tolerance <= lags[f"head_{name}"] <= high + tolerance, (name, factor)


def test_the_mean_moves_as_the_closed_form_does() -> None:
    """A trainer that waits half of the time: a batch in flight and rho of it in the queue."""
    config = load_simulation("small", ["schedule.name=asynchronous", "schedule.eta=4", ONE_BATCH])
    idle = {"training": {WAIT_BATCH: 0.5}, "rollout": {}}
    assert balance(idle) == 0.5
    assert 1 < FACTOR < 2
    lags = lags_of(config, [idle, idle], [{"head_mean": 1.5, "head_p95": 2}] * 2, ERROR)
    assert lags is not None
    mean, p95 = lags["mean"].range, lags["p95"].range
    assert mean.value - mean.low == pytest.approx(0.5 - 0.5 / FACTOR)
    assert mean.high - mean.value == pytest.approx(0.5 * FACTOR - 0.5)
    assert p95.high - p95.value == pytest.approx(math.hypot(0.5 * FACTOR - 0.5, 1))


def test_a_trainer_that_nearly_stops_waiting_may_have_a_lag_of_eta() -> None:
    config = load_simulation("small", ["schedule.name=asynchronous", "schedule.eta=4", ONE_BATCH])
    idle = {"training": {WAIT_BATCH: 0.1}, "rollout": {}}
    lags = lags_of(config, [idle], [{"head_mean": 1.9, "head_p95": 2}], ERROR)
    assert lags is not None
    assert lags["mean"].range.high == pytest.approx(4)
    slow = {"training": {}, "rollout": {NOTHING_ADMITTED: 1 - 1 / (2 * FACTOR)}}
    lags = lags_of(config, [slow], [{"head_mean": 4, "head_p95": 4}], ERROR)
    assert lags is not None
    assert lags["mean"].range.low == lags["mean"].range.high == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.eta=0",),
        ("schedule.name=synchronous",),
        ("schedule.name=one_step_overlap",),
        ("schedule.name=partial_rollout", "schedule.eta=2", "cluster.placement=colocated"),
    ],
)
def test_a_schedule_that_sets_the_lag_leaves_it_the_interval_of_the_seeds(
    overrides: tuple[str, ...],
) -> None:
    found = ranges(*overrides)
    assert found is not None
    for one in found.values():
        assert one.range.low == one.range.value == one.range.high == one.seeds.mean


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.interruptible=false",),
        ("schedule.eta=1.5",),
        ("schedule.eta=inf",),
        ("schedule.batch_order=bounded_lag", "schedule.max_lag=4", "schedule.on_late=drop"),
        ("schedule.require_batches=1", "workload.minibatches=2"),
        ("workload.equal_rewards_share=0.2",),
        ("cluster.hybrid_gpus=1",),
    ],
)
def test_there_is_no_interval_where_there_is_no_closed_form(overrides: tuple[str, ...]) -> None:
    _, result = small(*overrides)
    assert result.closed_form is None
    assert ranges(*overrides) is None


def test_an_interval_in_words() -> None:
    assert lag_span(1.346, 4.0) == "1.35 to 4"
