"""Engines whose GPUs join the training of each step, in an otherwise disaggregated run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_lab.control.events import PushWeights, StartGroup, Train, TrainStepDone, WeightsPushed
from areal_lab.control.schedule import (
    Schedule,
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)
from areal_lab.plots.timeline import _turns, draw_timeline
from areal_lab.runlog.activity import (
    PAUSED,
    TRAINERS_TURN,
    WAIT_BATCH,
    WAIT_WEIGHTS,
    idle_by_cause,
)
from areal_lab.runlog.records import TRAINER, Log, engine_process
from areal_lab.runlog.replay import check_replay
from simulator.assembly.simulate import build, simulate
from simulator.config.load import load_simulation
from simulator.costs.weight_sync import WeightSync
from simulator.plan.bound import least_step_s
from simulator.report.to_json import cost_parts
from simulator.run.one_seed import run_system
from simulator.run.pools import WAIT_HYBRID
from simulator.run.system import System
from tests.simulator.run.test_event_loop import Fails, switching
from tests.simulator.run.toy_system import (
    Drawn,
    Latencies,
    constant,
    lognormal,
    run_with_log,
    toy_system,
)

EXACT = 1e-9
SWITCH = switching(10.0, 6.0)
UPDATE = WeightSync(load_s=4.0)


def hybrid(schedule: Schedule, joining: int = 1, **fields: Any) -> System:
    """The first `joining` engines, of two by default, are hybrid."""
    defaults: dict[str, Any] = {"switch": SWITCH, "weights": UPDATE}
    return toy_system(schedule, hybrid=joining, **{**defaults, **fields})


def two_lengths(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Groups of 100 and 150 tokens in turn."""
    del generator
    return np.repeat(np.resize([100, 150], shape[0])[:, None], shape[1], axis=1)


def times(log: Log, kind: type) -> list[float]:
    return [r.t_s for r in log.events if isinstance(r.event, kind)] or [
        r.t_s for r in log.actions if isinstance(r.action, kind)
    ]


def worked_out(engines: int = 1) -> System:
    """Two groups a batch, two in flight: the even ones start on engine 0, which is hybrid."""
    return hybrid(
        asynchronous(1),
        engines,
        batch=2,
        in_flight=2,
        samples=1,
        steps=2,
        train_s=30.0,
        lengths=Drawn(two_lengths),
    )


def test_a_hybrid_engine_pauses_with_its_responses_and_the_others_generate() -> None:
    """Training from 150 s: 10 s to switch, 30 s of work. Then engine 1 loads in 4 s and engine 0 is
    ready in 6 s."""
    _, log = run_with_log(worked_out())
    assert times(log, Train) == [150, 306]
    assert times(log, TrainStepDone) == [190, 346]
    assert times(log, PushWeights)[0] == 190
    assert times(log, WeightsPushed)[0] == 196
    groups = {record.group: record for record in log.groups}
    # 50 s before training, and 50 s from 196 s on.
    assert (groups[2].engine, groups[2].t_s, groups[2].end_s) == (0, 100, 246)
    assert groups[2].segments == (((0, 50), (1, 50)),)
    # 40 s while the GPUs of engine 0 train; stopped from 190 s to 196 s.
    assert (groups[3].engine, groups[3].t_s, groups[3].end_s) == (1, 150, 306)
    assert groups[3].segments == (((0, 40), (1, 110)),)
    assert check_replay(log).agrees


def test_the_time_of_hybrid_gpus_is_generation_training_and_the_switch() -> None:
    result, log = run_with_log(worked_out())
    run_s = 346
    busy = {name: share * run_s for name, share in result.pools["hybrid"].busy.items()}
    assert busy == pytest.approx(
        {
            **{"decode": 150 + 110, "train": 60},
            **{"engine falls asleep": 20, "engine wakes up": 1.5, "refit weights": 4.5},
        }
    )
    assert result.pools["hybrid"].idle_share == pytest.approx(0, abs=1e-9)
    idle = {name: share * run_s for name, share in result.pools["training"].idle.items()}
    assert idle == pytest.approx({WAIT_BATCH: 150 + 110, WAIT_HYBRID: 20, WAIT_WEIGHTS: 6})
    assert result.pools["training"].busy == pytest.approx({"train": 60 / run_s})
    rollout = result.pools["rollout"]
    assert rollout.busy == pytest.approx({"decode": 340 / run_s, "load weights": 4 / run_s})
    assert rollout.idle == pytest.approx({PAUSED: 2 / run_s})
    turns = idle_by_cause(log)[engine_process(0)].idle_s[TRAINERS_TURN]
    assert turns == pytest.approx(40 + 40)


def test_with_hybrid_engines_only_nothing_generates_while_they_train() -> None:
    result, log = run_with_log(worked_out(engines=2))
    assert set(result.pools) == {"hybrid", "training"}
    assert times(log, Train)[0] == 150
    starts = [r.t_s for r in log.actions if isinstance(r.action, StartGroup)]
    assert not [t_s for t_s in starts if 150 <= t_s < 196]
    assert check_replay(log).agrees


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("schedule", [synchronous(), asynchronous(0), partial_rollout(0)])
def test_a_synchronous_step_is_generation_switch_training_and_the_slower_update(
    schedule: Schedule, engines: int
) -> None:
    def step_s(load_s: float) -> float:
        weights = WeightSync(export_s=3.0, delay_s=2.0, load_s=load_s)
        return float(run_system(hybrid(schedule, engines, weights=weights), 1).columns["step_s"][1])

    assert step_s(1.0) == pytest.approx(100 + 10 + 50 + 3 + 6, rel=EXACT)
    slower = 2 + 20 if engines == 1 else 6  # without other engines nothing is broadcast
    assert step_s(20.0) == pytest.approx(100 + 10 + 50 + 3 + slower, rel=EXACT)


def test_hybrid_engines_without_a_switch_are_a_disaggregated_synchronous_run() -> None:
    fields: dict[str, Any] = {"lengths": lognormal(100), "weights": UPDATE}
    free = run_system(hybrid(synchronous(), switch=switching(0.0, 0.0), **fields), 1)
    apart = run_system(toy_system(synchronous(), **fields), 1)
    assert free.columns["end_s"] == pytest.approx(apart.columns["end_s"], rel=EXACT)


def test_all_hybrid_engines_take_as_long_as_colocated_ones() -> None:
    fields: dict[str, Any] = {"lengths": lognormal(100), "weights": WeightSync()}
    both = run_system(hybrid(synchronous(), 2, **fields), 1)
    colocated = run_system(toy_system(synchronous(), switch=SWITCH, **fields), 1)
    assert both.columns["end_s"] == pytest.approx(colocated.columns["end_s"], rel=EXACT)
    assert both.gpus == colocated.gpus + 1


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [synchronous(), asynchronous(0.5), asynchronous(3), partial_rollout()],
    ids=lambda schedule: f"{schedule.name}-{schedule.eta}",
)
def test_idle_causes_equal_those_read_from_the_log(
    schedule: Schedule, engines: int, *, complete: bool
) -> None:
    """All but what is nobody's fault at the end, as for other systems."""
    system = hybrid(
        schedule,
        engines,
        engines=3,
        in_flight=6,
        slots=3,
        steps=20,
        complete=complete,
        lengths=lognormal(80),
        reward=Latencies(lambda generator, size: generator.exponential(9.0, size)),
        weights=WeightSync(export_s=2, delay_s=3, load_s=5),
    )
    result, log = run_with_log(system)
    assert check_replay(log).agrees
    use = idle_by_cause(log)
    for number in range(engines):
        one = use[engine_process(number)]
        own = Counter({**one.busy_s, **one.idle_s})
        # From the batch until the trainer is done with it.
        assert own[TRAINERS_TURN] == pytest.approx(turns_s(log))
    trainer = use[TRAINER]
    assert trainer.busy_s["engine falls asleep"] == pytest.approx(20 * 10)
    pools = result.pools
    assert sum(pool.gpus for pool in pools.values()) == system.gpus
    for pool in pools.values():
        assert sum(pool.busy.values()) + pool.idle_share == pytest.approx(1)
    columns = result.columns
    parts_s = columns["train_s"] + columns["export_s"] + columns["wait_s"]
    assert parts_s == pytest.approx(columns["step_s"])
    if not complete:
        for name, numbers in (("rollout", range(engines, 3)), ("hybrid", range(engines))):
            if name in pools:
                states: Counter[str] = Counter()
                for number in numbers:
                    one = use[engine_process(number)]
                    states.update(one.idle_s)
                scale = len(numbers) * result.makespan_s
                logged = {cause: s / scale for cause, s in states.items()}
                logged.pop(TRAINERS_TURN, None)
                assert waits(logged) == pytest.approx(waits(pools[name].idle), abs=1e-9)


def waits(shares: Mapping[str, float]) -> dict[str, float]:
    """Idle shares; the log of a run that was stopped shows that nothing came after it."""
    merged = Counter[str]()
    for name, share in shares.items():
        end = name.startswith(("nothing", "waiting for weights"))
        if share > 1e-12:
            merged["waited" if end else name] += share  # type: ignore[assignment]
    return dict(merged)


def turns_s(log: Log) -> float:
    begun = times(log, Train)
    return sum(done - began for began, done in zip(begun, times(log, TrainStepDone), strict=True))


@pytest.mark.parametrize("engines", [2, 3])
def test_hybrid_gpus_may_be_the_only_ones_that_train(engines: int) -> None:
    """Trainers that generate while they wait, by the clock of the run with another trainer."""
    fields: dict[str, Any] = {"engines": engines, "lengths": lognormal(100)}
    with_others = run_system(hybrid(asynchronous(1), **fields), 1)
    alone = run_system(hybrid(asynchronous(1), training_gpus=0, **fields), 1)
    assert alone.columns["end_s"].tolist() == with_others.columns["end_s"].tolist()
    assert set(alone.pools) == {"rollout", "hybrid"}
    assert alone.pools["hybrid"] == with_others.pools["hybrid"]
    assert alone.gpus == engines == sum(pool.gpus for pool in alone.pools.values())
    assert alone.cost.gpu_hours < with_others.cost.gpu_hours


def test_a_step_begins_only_when_hybrid_engines_have_loaded() -> None:
    """Although two batches are finished long before."""
    system = hybrid(asynchronous(4), batch=1, in_flight=8, steps=6, train_s=200.0)
    _, log = run_with_log(system)
    pushed, begun = times(log, WeightsPushed), times(log, Train)
    assert all(train >= push for train, push in zip(begun[1:], pushed, strict=False))


def test_without_other_engines_no_weights_are_written_or_sent() -> None:
    config = load_simulation(
        "small", ["weights.backend=disk", "weights.update_s=null", "schedule.name=synchronous"]
    )
    some, all_of_them = (config.with_settings({"cluster.hybrid_gpus": gpus}) for gpus in (1, 2))
    slow = {"weights.export_s": 100.0, "weights.load_s": 100.0}
    assert build(all_of_them).weights == WeightSync()
    for seconds in (least_step_s, lambda one: simulate(one).step_s):
        assert seconds(all_of_them.with_settings(slow)) == seconds(all_of_them)
        assert seconds(some.with_settings(slow)) > seconds(some) + 100
    parts = [[part.name for part in cost_parts(one)] for one in (some, all_of_them)]
    assert ["weight update" in names for names in parts] == [True, False]
    assert all("switching" in names for names in parts)


def test_training_has_the_hybrid_gpus_too() -> None:
    """32 of 96 join 32 others, so that training takes half the time, and colocation's terms."""
    changes = ["trainer.mfu=0.3", "workload.steps=4", "workload.warmup_steps=1", "eta=0"]
    apart, joined = (
        load_simulation("table_1_1.5b_asynchronous", [*changes, f"cluster.hybrid_gpus={gpus}"])
        for gpus in (0, 32)
    )
    assert (joined.cluster.training_gpus, joined.cluster.only_training_gpus) == (64, 32)
    system = build(joined)
    assert (system.limits.hybrid_engines, system.training_gpus, system.gpus) == (32, 32, 128)
    results = [simulate(config) for config in (apart, joined)]
    ratio = results[0].mean("train_s") / results[1].mean("train_s")
    assert 1.7 < ratio < 2.1
    assert {name: pool.gpus for name, pool in results[1].pools.items()} == {
        **{"rollout": 64, "hybrid": 32, "training": 32},
    }
    assert "refit weights" in results[1].pools["hybrid"].busy
    # The switch is that of 64 colocated GPUs, among which the state is divided.
    alike = ["cluster.placement=colocated", "schedule.name=synchronous", "cluster.gpus=64"]
    colocated = build(load_simulation("table_1_1.5b_asynchronous", [*changes[:3], *alike]))
    assert system.switch == colocated.switch
    assert math.isclose(results[0].gpus, results[1].gpus)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hybrid(one_step_overlap()), "waits for responses to end before an update"),
        (
            lambda: hybrid(asynchronous(1, interruptible=False)),
            "waits for responses to end before an update",
        ),
        (lambda: hybrid(synchronous(), -1), "hybrid_engines is -1, but must be >= 0"),
        (lambda: hybrid(synchronous(), 3), "hybrid_engines is 3, but must be <= 2"),
        (lambda: hybrid(synchronous(), switch=None), "switch is None"),
        (lambda: hybrid(synchronous(), training_gpus=-1), "training_gpus is -1"),
        (
            lambda: toy_system(synchronous(), training_gpus=0),
            "training_gpus is 0, but must be >= 1",
        ),
        (lambda: hybrid(synchronous(), parts=2, minibatches=2), "batch_parts is 2"),
        (lambda: replace(hybrid(synchronous()), failures=Fails([1.0])), "are not simulated"),
    ],
)
def test_systems_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_hybrid_run_with_constant_lengths_repeats_itself() -> None:
    steps_s = run_system(hybrid(asynchronous(0), steps=9, lengths=constant(100)), 1).columns[
        "step_s"
    ]
    assert steps_s[1:] == pytest.approx(steps_s[1])


def test_the_timeline_is_pale_where_responses_of_hybrid_engines_stand_still() -> None:
    _, log = run_with_log(worked_out())
    turns = _turns(log, [(190, 196)], [0, 1])
    # The second one is ended by the end of the run; engine 1 has none.
    assert turns == [(150, 190, 0), (306, 346, 0)]
    assert _turns(log, [(149, 196)], [0, 1]) == [(306, 346, 0)]
    assert draw_timeline(log, zoom_s=200.0).axes
