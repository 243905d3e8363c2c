"""The event loop: timers, weight updates, failures, colocated GPUs, turns, and the log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from areal_lab.control.events import (
    EngineJoined,
    EngineLost,
    GroupFinished,
    Interrupt,
    PushWeights,
    SamplesEnded,
    Train,
    TrainStepDone,
    WeightsPushed,
)
from areal_lab.control.schedule import Schedule, asynchronous, partial_rollout, synchronous
from areal_lab.runlog.activity import LOST, idle_by_cause
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.records import TRAINER, Log
from areal_lab.runlog.replay import check_replay
from simulator.config.schema import RolloutConfig
from simulator.costs.switch import SwitchCost
from simulator.costs.weight_sync import WeightSync
from simulator.run.conversations import Conversations
from simulator.run.one_seed import run_system
from simulator.run.system import System
from simulator.run.trainer import Trainer
from simulator.workload.randomness import ENGINE_FAILURES
from tests.simulator.engine.toy_engine import ToyEngine
from tests.simulator.run.toy_system import (
    Latencies,
    Seconds,
    constant,
    lognormal,
    run_with_log,
    toy_system,
)


def switching(to_training_s: float, to_generation_s: float) -> SwitchCost:
    """One term to training, and two to generation, one after the other."""
    return SwitchCost(
        to_training={"engine falls asleep": to_training_s},
        to_generation={
            "engine wakes up": to_generation_s / 4,
            "refit weights": to_generation_s * 3 / 4,
        },
    )


@dataclass(frozen=True)
class Fails:
    """Every node works for the given times, one after another, and then forever."""

    uptimes_s: Sequence[float]
    trainer: bool = False
    detection_s: float = 7.0
    restart_s: float = 13.0

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """The generator tells whom it is for: it has a seed sequence with the stream's number."""
        entropy: Any = generator.bit_generator.seed_seq.entropy  # type: ignore[attr-defined]
        if (entropy[1] == ENGINE_FAILURES) is self.trainer:
            return math.inf
        asked = _ASKED.setdefault(id(generator), iter(self.uptimes_s))
        return next(asked, math.inf)


_ASKED: dict[int, Iterator[float]] = {}


@pytest.fixture(autouse=True)
def _forget() -> None:
    _ASKED.clear()


def times(log: Log, kind: type) -> list[float]:
    return [r.t_s for r in log.events if isinstance(r.event, kind)] or [
        r.t_s for r in log.actions if isinstance(r.action, kind)
    ]


def test_generation_continues_while_new_weights_are_on_their_way() -> None:
    """100 tokens of 1 s; weights of 10 s of training, noticed 5 s later, loaded in 3 s."""
    system = toy_system(
        asynchronous(math.inf),
        batch=1,
        in_flight=1,
        engines=1,
        samples=1,
        steps=2,
        train_s=10.0,
        weights=WeightSync(export_s=2.0, delay_s=5.0, load_s=3.0),
    )
    _, log = run_with_log(system)
    assert times(log, Train) == [100, 203]
    assert times(log, TrainStepDone) == [112, 215]
    assert times(log, Interrupt) == times(log, PushWeights) == [112]
    assert times(log, WeightsPushed) == [120]
    # Group 1 began at 100 s, was stopped from 117 s to 120 s, and has 17 tokens of version 0.
    group = next(record for record in log.groups if record.group == 1)
    assert (group.t_s, group.end_s) == (100, 203)
    assert group.segments == (((0, 17), (1, 83)),)


def test_a_trainer_that_takes_part_in_the_transfer_continues_after_it() -> None:
    def second_step_s(*, holds: bool) -> float:
        system = toy_system(
            asynchronous(math.inf),
            batch=1,
            in_flight=6,
            train_s=150.0,
            weights=WeightSync(load_s=30.0),
            push_holds_trainer=holds,
        )
        return float(run_system(system, 1).columns["step_s"][2])

    assert second_step_s(holds=False) == pytest.approx(150)
    assert second_step_s(holds=True) == pytest.approx(180)


def test_weights_are_exported_after_the_engines_have_the_previous_ones() -> None:
    """Training takes 1 s, so that version 2 is ready while version 1 is still being loaded."""
    system = toy_system(
        asynchronous(math.inf),
        batch=1,
        in_flight=8,
        samples=1,
        steps=4,
        train_s=1.0,
        weights=WeightSync(export_s=2.0, delay_s=6.0, load_s=4.0),
    )
    result, log = run_with_log(system)
    assert times(log, WeightsPushed)[0] == 100 + 1 + 2 + 6 + 4
    assert times(log, TrainStepDone) == [103, 113 + 2, 125 + 2, 137 + 2]
    assert result.columns["update_s"].tolist() == [0, 10, 10, 10]
    assert result.columns["export_s"].tolist() == [2] * 4
    assert result.pools["training"].idle["waiting for weights"] == pytest.approx(3 * 9 / 139)


def test_colocated_gpus_switch_to_training_and_back() -> None:
    system = toy_system(
        synchronous(), switch=switching(11.0, 17.0), rollout=RolloutConfig(tensor_parallel=3)
    )
    result, log = run_with_log(system)
    assert result.columns["step_s"][1:] == pytest.approx(100 + 11 + 50 + 17)
    assert result.gpus == 6
    assert list(result.pools) == ["all"]
    pool = result.pools["all"]
    run_s = result.makespan_s
    assert pool.busy["train"] == pytest.approx(12 * 50 / run_s)
    assert pool.busy["decode"] == pytest.approx(12 * 100 / run_s)
    assert pool.busy["engine falls asleep"] == pytest.approx(12 * 11 / run_s)
    assert pool.busy["engine wakes up"] == pytest.approx(11 * 17 / 4 / run_s)
    assert pool.busy["refit weights"] == pytest.approx(11 * 17 * 3 / 4 / run_s)
    spans = {span.name for span in log.spans}
    assert {"engine falls asleep", "engine wakes up", "refit weights"} <= spans
    assert pool.idle_share == pytest.approx(0, abs=1e-12)
    assert pool.utilization == pytest.approx(12 * 150 / run_s)
    assert check_replay(log).agrees


def test_colocated_gpus_idle_until_the_longest_responses_end() -> None:
    system = toy_system(synchronous(), switch=switching(0.0, 0.0), lengths=lognormal(100))
    pool = run_system(system, 1).pools["all"]
    assert set(pool.idle) == {"nothing admitted (staleness bound)"}
    assert pool.idle_share + pool.utilization == pytest.approx(1)


def test_partial_rollout_can_be_colocated_and_asynchronous_cannot() -> None:
    toy_system(partial_rollout(), switch=switching(1.0, 1.0))
    with pytest.raises(ValueError, match="generates while it trains"):
        toy_system(asynchronous(1), switch=switching(1.0, 1.0))


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_node_loses_its_groups_and_comes_back() -> None:
    """Two nodes of one engine each; the second fails at 130 s, for 20 s."""
    system = toy_system(
        asynchronous(1),
        engines=2,
        engines_per_node=1,
        failures=Fails([130.0, 10**9]),
        lengths=constant(100),
        steps=6,
    )
    result, log = run_with_log(system)
    # Both nodes fail at 130 s: all groups wait until one is back.
    assert times(log, EngineLost) == [137, 137]
    assert times(log, EngineJoined) == [150, 150]
    assert result.counts.engine_losses == 2
    assert check_replay(log).agrees
    restarted = [record for record in log.groups if record.t_s == 150]
    assert restarted
    assert all(sum(t for _, t in s) == 100 for r in log.groups for s in r.segments)
    assert LOST in result.pools["rollout"].idle


def test_the_groups_of_the_last_engine_start_over_when_it_is_back() -> None:
    system = toy_system(
        synchronous(), engines=1, failures=Fails([30.0]), steps=2, batch=3, train_s=10.0
    )
    result, log = run_with_log(system)
    assert times(log, EngineLost) == [37]
    assert times(log, EngineJoined) == [50]
    assert times(log, GroupFinished)[:3] == [150.0, 150.0, 150.0]
    assert result.columns["step_s"].tolist() == [160.0, 110.0]
    assert result.counts.engine_losses == 1


def test_an_engine_that_comes_back_while_all_are_paused_waits_with_them() -> None:
    """Paused for training from 100 s to 150 s; the engine fails at 110 s and is back at 130 s."""

    class LongerThanTheFirst:
        def draw(
            self, _: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
        ) -> np.ndarray:
            return np.full((groups, samples), 300 if step else 100)

    system = toy_system(
        partial_rollout(),
        batch=1,
        in_flight=2,
        engines=1,
        samples=1,
        steps=2,
        lengths=LongerThanTheFirst(),
        failures=Fails([110.0]),
    )
    _, log = run_with_log(system)
    assert times(log, Train) == [100, 450]
    assert next(g for g in log.groups if g.group == 1).end_s == 450


def test_groups_that_were_being_scored_when_their_engines_were_lost_are_scored_again() -> None:
    """Generated at 100 s, scored for 60 s; the engines fail at 120 s and are back at 140 s."""
    system = toy_system(
        synchronous(),
        batch=2,
        engines=2,
        engines_per_node=1,
        failures=Fails([120.0, 10**9]),
        reward=Latencies(lambda _, size: np.full(size, 60.0)),
        steps=1,
    )
    _, log = run_with_log(system)
    assert times(log, EngineLost) == [127, 127]
    groups = {record.group: (record.t_s, record.generated_s, record.end_s) for record in log.groups}
    assert groups == {0: (140, 240, 300), 1: (140, 240, 300)}
    assert times(log, GroupFinished) == [300, 300]


def test_a_failing_trainer_repeats_its_step() -> None:
    """It trains from 100 s to 150 s; the node fails at 120 s, is back at 140 s, done at 190 s."""
    system = toy_system(synchronous(), failures=Fails([120.0, 10**9], trainer=True), steps=3)
    result, log = run_with_log(system)
    assert result.columns["end_s"].tolist() == [190.0, 340.0, 490.0]
    assert result.counts.trainer_restarts == 1
    assert idle_by_cause(log)[TRAINER].idle_s[LOST] == pytest.approx(40)
    assert result.pools["training"].idle[LOST] == pytest.approx(40 / 490)


def test_a_trainer_failure_while_it_has_nothing_to_do_costs_nothing() -> None:
    system = toy_system(synchronous(), failures=Fails([20.0], trainer=True), steps=2)
    assert run_system(system, 1).columns["end_s"].tolist() == [150.0, 300.0]


def test_random_failures_lose_no_group() -> None:
    class Often:
        detection_s, restart_s = 5.0, 60.0

        def uptime_s(self, generator: np.random.Generator, /) -> float:
            return float(generator.exponential(700.0))

    for schedule in (synchronous(), asynchronous(2), partial_rollout()):
        for seed in range(4):
            system = toy_system(
                schedule,
                in_flight=8,
                engines=5,
                engines_per_node=2,
                failures=Often(),
                lengths=lognormal(100),
                steps=25,
                weights=WeightSync(export_s=2, delay_s=3, load_s=4),
            )
            result, log = run_with_log(system, seed)
            assert result.counts.engine_losses > 0
            assert check_replay(log).agrees
            trained = [
                g for r in log.actions if isinstance(r.action, Train) for g in r.action.groups
            ]
            assert len(set(trained)) == len(trained) == 25 * 4


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("schedule", [asynchronous(2), partial_rollout()], ids=lambda one: one.name)
def test_no_more_samples_run_than_there_are_slots_when_engines_fail(
    schedule: Schedule, engines: int
) -> None:
    samples, in_flight = 3, 6
    made: list[ToyEngine] = []
    losses = most = 0

    class Counted(ToyEngine):
        def submit(self, *args: Any) -> None:
            nonlocal most
            super().submit(*args)
            most = max(most, sum(len(one.running) + len(one.waiting) for one in made))

    def make_engine(_number: int, _seed: int, _record: object) -> ToyEngine:
        made.append(Counted(1.0))
        return made[-1]

    class Often:
        detection_s, restart_s = 3.0, 5.0

        def uptime_s(self, generator: np.random.Generator, /) -> float:
            return float(generator.exponential(200.0 * engines))

    for seed in range(8):
        made.clear()
        system = toy_system(
            schedule,
            engines=engines,
            in_flight=in_flight,
            samples=samples,
            group_slots=samples,
            failures=Often(),
            lengths=lognormal(100),
            make_engine=make_engine,
        )
        result, log = run_with_log(system, seed)
        losses += result.counts.engine_losses
        assert check_replay(log).agrees
    assert losses > 8
    assert most == in_flight * samples


def test_an_engine_of_several_nodes_fails_when_the_first_of_them_does() -> None:
    """The minimum of three exponential times has a third of their mean."""

    class Often:
        detection_s, restart_s = 1.0, 1.0

        def uptime_s(self, generator: np.random.Generator, /) -> float:
            return float(generator.exponential(3000.0))

    losses = []
    for nodes in (1, 3):
        found = 0
        for seed in range(8):
            system = toy_system(
                asynchronous(2),
                in_flight=8,
                engines=3,
                engines_per_node=1,
                nodes_per_engine=nodes,
                failures=Often(),
                lengths=lognormal(100),
                steps=25,
            )
            found += run_with_log(system, seed)[0].counts.engine_losses
        losses.append(found)
    assert 1.8 < losses[1] / losses[0] < 5


# --- turns ---------------------------------------------------------------------------------------


def test_turns_divide_the_tokens_and_prefill_the_turns_before() -> None:
    seen: list[tuple[float, int, list[int]]] = []

    class Watched(ToyEngine):
        def submit(self, now_s, group, prompt, lengths, version, /):  # type: ignore[no-untyped-def]
            seen.append((now_s, prompt, list(lengths)))
            super().submit(now_s, group, prompt, lengths, version)

    engine = Conversations(Watched(1.0), 3, lambda _group: [[5.0, 6.0], [1.0, 1.0]])
    engine.submit(0.0, 4, 10, [10, 2], 0)
    done = [(s, d) for s in (0.5, 1.0, 4.0, 9.0, 30.0) for d in engine.advance(s)]
    assert seen == [
        *[(0.0, 10, [4]), (0.0, 10, [1])],
        *[(2.0, 11, [1]), (9.0, 14, [3])],
        (18.0, 17, [3]),
    ]
    assert [(d.group, d.segments) for _, d in done] == [(4, (((0, 10),), ((0, 2),)))]
    assert engine.next_s() == math.inf


def test_a_dropped_conversation_does_not_continue() -> None:
    engine = Conversations(ToyEngine(1.0), 2, lambda _group: [[5.0]])
    engine.submit(0.0, 1, 10, [4], 0)
    assert engine.advance(3.0) == []  # at its tool
    engine.drop(3.0, 1)
    assert engine.advance(100.0) == []
    engine.submit(100.0, 1, 10, [4], 0)
    engine.advance(101.0)
    assert engine.fail(101.0) == [1]
    assert engine.next_s() == math.inf


# --- the log -------------------------------------------------------------------------------------


def full_system() -> System:
    return toy_system(
        asynchronous(2),
        in_flight=6,
        slots=3,
        lengths=lognormal(80),
        weights=WeightSync(export_s=2, delay_s=3, load_s=5),
    )


def test_a_simulated_log_converts_to_a_chrome_trace() -> None:
    _, log = run_with_log(full_system())
    assert log.header.mode == "simulate"
    trace = chrome_trace(log)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"decode", "train", "load weights", "export weights"} <= names


def test_a_simulated_log_can_be_drawn() -> None:
    from areal_lab.plots.timeline import draw_timeline

    _, log = run_with_log(full_system())
    assert draw_timeline(log, zoom_s=200.0).axes


def test_a_step_of_several_parts_has_a_span_for_each() -> None:
    @dataclass(frozen=True)
    class Parts:
        seconds: float = 60.0
        micro_batches: int = 12
        flops: float = 3e15

        @property
        def parts(self) -> dict[str, float]:
            return {"forward/backward": 40.0, "proximal log-probs": 15.0, "optimizer": 5.0}

        def step(self, lengths: Sequence[int], *, minibatches: int) -> Parts:
            assert len(lengths) == 8
            assert minibatches == 1
            return self

    result, log = run_with_log(toy_system(synchronous(), training=Parts()))
    spans = [(s.name, s.t_s, s.end_s) for s in log.spans if s.process == TRAINER][:3]
    assert spans == [
        ("forward/backward", 100.0, 140.0),
        ("proximal log-probs", 140.0, 155.0),
        ("optimizer", 155.0, 160.0),
    ]
    assert (result.columns["micro_batches"] == 12).all()
    assert result.mean("train_flops") == 3e15
    plain = run_system(toy_system(synchronous(), training=Seconds(seconds=60.0)), 1)
    assert math.isnan(plain.mean("train_flops"))


def test_the_trainer_gets_prompt_and_response_tokens_in_batch_order() -> None:
    lengths: list[list[int]] = []

    class Watching(Seconds):
        def step(self, sequences: Sequence[int], *, minibatches: int) -> Seconds:
            lengths.append(list(sequences))
            return super().step(sequences, minibatches=minibatches)

    system = toy_system(
        asynchronous(1), training=Watching(seconds=5.0), lengths=lognormal(100), prompt_tokens=1000
    )
    _, log = run_with_log(system)
    of_group = {g.group: [1000 + sum(t for _, t in s) for s in g.segments] for g in log.groups}
    batches = [r.action.groups for r in log.actions if isinstance(r.action, Train)]
    assert lengths == [[t for g in groups for t in of_group[g]] for groups in batches]
    assert Trainer.__doc__


def test_samples_that_end_together_are_reported_together() -> None:
    """Their number frees their slots; the end of the group would hide a smaller one."""
    samples = 3
    system = toy_system(asynchronous(1), steps=4, samples=samples, group_slots=samples)
    _, log = run_with_log(system)
    ended: Counter[int] = Counter()
    for record in log.events:
        if isinstance(record.event, SamplesEnded):
            ended[record.event.group] += record.event.samples
    finished = {one.event.group for one in log.events if isinstance(one.event, GroupFinished)}
    assert finished
    assert {ended[group] for group in finished} == {samples}
