from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.control.events import (
    Drop,
    EngineJoined,
    EngineRetired,
    GroupFinished,
    StartGroup,
    Train,
)
from areal_lab.control.scaling import ScalingRule
from areal_lab.control.schedule import asynchronous
from areal_lab.runlog.replay import check_replay
from simulator.assembly.simulate import build, simulate
from simulator.config.load import load_simulation
from simulator.costs.weight_sync import WeightSync
from simulator.run.one_seed import run_system
from simulator.run.system import System
from tests.simulator.run.toy_system import lognormal, run_with_log, toy_system

RULE = ScalingRule(min_engines=1, max_engines=12, window_steps=2, startup_s=30.0)


def slow(engines: int, rule: ScalingRule | None = RULE, steps: int = 60) -> System:
    """Engines that take 100 s for two samples at once; a step of 8 samples trains for 50 s: eight
    engines are enough."""
    return toy_system(
        asynchronous(2),
        in_flight=12,
        slots=2,
        engines=engines,
        steps=steps,
        scaling=rule,
        weights=WeightSync(load_s=1.0),
    )


@pytest.mark.parametrize("engines", [2, 4, 8, 12])
def test_the_engines_come_to_what_the_trainer_needs(engines: int) -> None:
    result = run_system(slow(engines, steps=100), 1)
    assert result.engines is not None
    assert 8 <= result.engines.by_step[-1] <= 10
    assert result.columns["step_s"][-10:].mean() == pytest.approx(51)


def test_gpu_hours_count_an_engine_only_while_it_is_there() -> None:
    """By hand from the log: an engine is paid for from its start-up until its last group ends."""
    result, log = run_with_log(slow(2, replace(RULE, max_engines=4), steps=20))
    joined = [(r.t_s, r.event.engine) for r in log.events if isinstance(r.event, EngineJoined)]
    assert [engine for _, engine in joined] == [2, 3]
    assert not [r for r in log.events if isinstance(r.event, EngineRetired)]
    end_s = float(result.columns["end_s"][-1])
    paid_s = 2 * end_s + sum(end_s - (t_s - RULE.startup_s - 1.0) for t_s, _ in joined)
    # An engine that starts while others load waits until they have.
    hours = result.cost.gpu_hours * 20
    assert hours == pytest.approx((paid_s + end_s) / 3600, rel=0.01)
    assert result.gpus == pytest.approx(paid_s / end_s + 1, rel=0.01)


def test_with_equal_bounds_nothing_changes() -> None:
    rule = replace(RULE, min_engines=3, max_engines=3)
    fixed, scaled = run_system(slow(3, None), 1), run_system(slow(3, rule), 1)
    assert scaled.engines is not None
    assert scaled.engines.by_step == pytest.approx([3.0] * 60)
    for name, column in fixed.columns.items():
        assert scaled.columns[name] == pytest.approx(column, nan_ok=True), name
    assert scaled.cost.gpu_hours == pytest.approx(fixed.cost.gpu_hours)


@pytest.mark.parametrize("seed", range(4))
def test_every_group_is_trained_on_once_or_dropped_while_engines_come_and_go(seed: int) -> None:
    system = replace(slow(10, steps=80), lengths=lognormal(100, 0.5))
    result, log = run_with_log(system, seed)
    assert result.engines is not None
    assert result.engines.retired > 0
    actions = [record.action for record in log.actions]
    trained = Counter(g for one in actions if isinstance(one, Train) for g in one.groups)
    dropped = {one.group for one in actions if isinstance(one, Drop)}
    assert set(trained.values()) == {1}
    assert {one.group for one in actions if isinstance(one, StartGroup)} == {*trained} | dropped
    assert check_replay(log).agrees
    # A group is recorded once, also one whose engine retired: its tokens were kept.
    recorded = [record.group for record in log.groups]
    assert len(recorded) == len(set(recorded))
    finished = [r.event.group for r in log.events if isinstance(r.event, GroupFinished)]
    assert len(finished) == len(set(finished))


def test_a_config_scales_and_impossible_ones_are_refused() -> None:
    settings = ["workload.steps=30", "workload.answers.mean_tokens=400"]
    on = [*settings, "scaling.max_engines=8", "scaling.startup_s=5"]
    result = simulate(load_simulation("small", on))
    assert result.engines is not None
    assert result.engines.joined > 0
    assert result.to_json()["engines"]["joined"] == result.engines.joined
    assert "engines" not in simulate(load_simulation("small", settings)).to_json()
    for wrong, says in (
        ("schedule.eta=0", "eta >= 1"),
        ("faults.node_mtbf_h=9", "fixed number"),
        ("scaling.max_engines=1", "engines at first"),
    ):
        with pytest.raises(ConfigError, match=says):
            build(load_simulation("small", [*on, wrong]))
