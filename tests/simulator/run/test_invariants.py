"""Properties of every simulation, for any system."""

from __future__ import annotations

import gc
import itertools
import json
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.events import (
    Drop,
    EtaRequested,
    PauseRequested,
    ResumeRequested,
    StartGroup,
    Train,
)
from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from areal_lab.control.schedule import (
    SCHEDULES,
    OnNewWeights,
    Schedule,
    asynchronous,
    lag_bound,
    one_step_overlap,
    partial_rollout,
    schedule_named,
    synchronous,
)
from areal_lab.runlog.activity import PAUSED_BY_HAND, idle_by_cause
from areal_lab.runlog.lags import ledger_of, total, trained_batches
from areal_lab.runlog.records import (
    TRAINER,
    ActionRecord,
    EventRecord,
    Log,
    encode,
    engine_process,
    read_log,
)
from areal_lab.runlog.replay import check_replay
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.config.schema import RolloutConfig
from simulator.costs import prefill as prefill_cost
from simulator.costs.weight_sync import WeightSync
from simulator.run.event_loop import EventLoop
from simulator.run.one_seed import run_system
from simulator.run.pools import GENERATE
from simulator.run.responses import Draws
from simulator.run.result import SimulationResult
from simulator.run.system import System
from simulator.workload.randomness import LENGTHS, NodeFailures, TurnCounts, stream
from tests.simulator.engine.toy_engine import toy_engines
from tests.simulator.run.test_event_loop import switching
from tests.simulator.run.toy_system import (
    Latencies,
    PerToken,
    Seconds,
    constant,
    lognormal,
    run_with_log,
    toy_system,
)

BY_NAME = [
    schedule_named(name, eta=eta, interruptible=pause)
    for name in SCHEDULES
    for eta in (0, 0.5, 1, 3, math.inf)
    for pause in (True, False)
]


def orders(schedule: Schedule) -> st.SearchStrategy[BatchOrder]:
    ahead = lag_bound(schedule)
    return st.sampled_from(
        [
            oldest_finished_first(),
            strict_start_order(),
            bounded_lag(ahead),
            bounded_lag(1, "drop"),
            bounded_lag(0, "recycle"),
            bounded_lag(1, "recycle"),
        ]
    )


@st.composite
def systems(draw: st.DrawFn) -> System:
    schedule = draw(st.sampled_from(list(dict.fromkeys(BY_NAME))))
    seconds = st.sampled_from([0.0, 0.5, 3.0, 40.0])
    slow = Latencies(lambda generator, size: generator.exponential(20.0, size))
    parts = 1 if schedule.carry_over else draw(st.sampled_from([1, 1, 2, 3]))
    engines = draw(st.integers(1, 4))
    hybrid = 0
    if parts == 1 and schedule.on_new_weights is OnNewWeights.INTERRUPT:
        hybrid = min(engines, draw(st.sampled_from([0, 0, 1, 4])))
    return toy_system(
        schedule,
        hybrid=hybrid,
        switch=switching(draw(seconds), draw(seconds)) if hybrid else None,
        batch=parts * draw(st.integers(1, 5 if parts == 1 else 2)),
        parts=parts,
        minibatches=parts,
        in_flight=draw(st.integers(1, 12)),
        steps=draw(st.integers(1, 9)),
        complete=draw(st.booleans()),
        order=draw(orders(schedule)),
        slots=draw(st.sampled_from([None, 1, 3])),
        engines=engines,
        samples=draw(st.integers(1, 4)),
        lengths=lognormal(60),
        training=PerToken(draw(st.sampled_from([0.0, 0.01, 0.3]))),
        weights=WeightSync(export_s=draw(seconds), delay_s=draw(seconds), load_s=draw(seconds)),
        push_holds_trainer=draw(st.booleans()),
        reward=draw(st.sampled_from([None, slow])),
        reward_workers=draw(st.integers(0, 3)),
        **draw(
            st.sampled_from(
                [
                    *({"turns": turns} for turns in (1, 2, 3)),
                    {"turns": 4, "turn_counts": TurnCounts(2.5, 4), "tool_tokens": 7},
                    {"turns": 2, "rollout": RolloutConfig(max_samples=1)},
                    {
                        "turns": 3,
                        "turn_counts": TurnCounts(1.5, 3),
                        "rollout": RolloutConfig(max_samples=3),
                    },
                ]
            )
        ),
        tool=draw(st.sampled_from([None, slow])),
        requests=draw(requests(schedule)),
    )


def requests(schedule: Schedule) -> st.SearchStrategy[Any]:
    """A pause or two, and other staleness bounds where there can be others."""
    moments = st.lists(st.floats(0, 900), min_size=4, max_size=4).map(sorted)
    asked = [PauseRequested(), ResumeRequested(), PauseRequested(), ResumeRequested()]
    if not schedule.eta_is_fixed and schedule.bound is None:
        asked[1:3] = [EtaRequested(schedule.eta / 2), EtaRequested(0)]
    return st.one_of(st.just(()), moments.map(lambda s: tuple(zip(s, asked, strict=True))))


@settings(max_examples=60)
@given(systems(), st.integers(0, 3))
def test_a_simulation_accounts_for_everything(system: System, seed: int) -> None:
    result, log = run_with_log(system, seed)
    check_clock(log)
    check_every_group_ends_once(system, result, log)
    check_order_of_a_groups_life(log)
    check_tokens(system, seed, log)
    check_lags(result, log)
    check_ledger(result, log)
    check_time(system, result)
    assert check_replay(log).agrees, check_replay(log).difference


def check_clock(log: Log) -> None:
    times = [r.t_s for r in log.records if isinstance(r, EventRecord | ActionRecord)]
    assert times == sorted(times)
    assert times[0] == 0
    spans = list(log.spans)
    assert all(0 <= span.t_s <= span.end_s <= log.end_s for span in spans)
    last_s: dict[tuple[str, bool], float] = {}
    for span in spans:
        key = (span.process, bool(span.cause))
        assert span.t_s >= last_s.get(key, 0.0) - 1e-9, f"{span} begins before the one before ended"
        last_s[key] = span.end_s


def check_every_group_ends_once(system: System, result: SimulationResult, log: Log) -> None:
    started = [r.action.group for r in log.actions if isinstance(r.action, StartGroup)]
    trained = [g for r in log.actions if isinstance(r.action, Train) for g in r.action.groups]
    dropped = [r.action.group for r in log.actions if isinstance(r.action, Drop)]
    groups = set(started)
    assert groups == set(range(len(groups)))
    # Each attempt of a recycled group is dropped or trained on, and one is at most trained on.
    assert len(groups) == len(started) or system.limits.order.on_late == "recycle"
    assert len(set(trained)) == len(trained)
    assert sorted(trained + dropped) == sorted(started)
    assert result.counts.started == len(started)
    assert (
        result.counts.trained == len(trained) == system.workload.steps * system.limits.batch_groups
    )
    assert result.counts.dropped + result.counts.unfinished == len(dropped)
    if system.limits.train_steps is not None:
        assert result.counts.unfinished == 0
    sequences = system.limits.batch_groups * system.workload.samples_per_prompt
    assert (result.columns["sequences"] == sequences).all()


def check_order_of_a_groups_life(log: Log) -> None:
    started: dict[int, float] = {}
    scored: dict[int, float] = {}
    for group in log.groups:
        assert group.t_s <= group.generated_s <= group.end_s
        scored[group.group] = group.end_s
    for record in log.actions:
        match record.action:
            case StartGroup(group):
                started[group] = record.t_s
            case Train(_, groups):
                assert all(started[group] <= scored[group] <= record.t_s for group in groups)


def check_tokens(system: System, seed: int, log: Log) -> None:
    draws = Draws(system, seed)
    for group in log.groups:
        told = [sum(tokens for _, tokens in sample) for sample in group.segments]
        assert told == draws.of(group.group).lengths
        for sample in group.segments:
            versions = [version for version, _ in sample]
            assert versions == sorted(set(versions))


def check_lags(result: SimulationResult, log: Log) -> None:
    batches = list(trained_batches(log))
    assert result.columns["end_s"].tolist() == [batch.done_s for batch in batches]
    assert result.columns["tokens"].tolist() == [batch.tokens for batch in batches]
    counted = batches[result.warmup_steps :]
    assert Counter(result.token_lags) == total(batch.token_lags for batch in counted)
    assert Counter(result.head_lags) == total(batch.head_lags for batch in counted)
    assert Counter(result.tail_lags) == total(batch.tail_lags for batch in counted)


def check_ledger(result: SimulationResult, log: Log) -> None:
    """Tokens and parts of the lag sum exactly, and equal those that the log has."""
    assert result.ledger.unexplained == result.ledger.waiting == 0
    assert result.ledger == ledger_of(log).tokens()
    assert result.ledger.trained == result.columns["tokens"].sum()
    batches = list(trained_batches(log))
    for batch in batches:
        before, waited = batch.parts.before_queue, batch.parts.in_queue
        assert before.total() == waited.total() == batch.samples
        assert _sum(before) + _sum(waited) == _sum(batch.head_lags)
        assert min([*before, *waited]) >= 0
    for part in ("before_queue", "in_queue", "offered"):
        logged = total(getattr(batch.parts, part) for batch in batches[result.warmup_steps :])
        assert Counter(result.lags(part)) == logged
        means = [batch.parts.means[part] for batch in batches]
        assert result.columns[f"lag_{part}"].tolist() == means


def _sum(lags: Counter[int]) -> int:
    return sum(lag * samples for lag, samples in lags.items())


@settings(max_examples=60)
@given(systems(), st.integers(0, 3), st.booleans())
def test_the_ledger_has_every_token_that_engines_generated(
    system: System, seed: int, fails: bool
) -> None:
    if fails and not system.limits.hybrid_engines:
        failures = NodeFailures(mtbf_s=400, detection_s=3, restart_s=20)
        system = replace(system, failures=failures, nodes_per_engine=1)
    loop = EventLoop(system, seed)
    loop.run()
    engines = [slot.engine.generated_tokens for slot in loop.slots]
    assert loop.ledger.tokens().generated == sum(engines)
    assert loop.ledger.tokens().unexplained == 0


def check_time(system: System, result: SimulationResult) -> None:
    """Busy and idle shares sum to 1, and the parts of a step to the step."""
    for pool in result.pools.values():
        if pool.seconds:
            assert sum(pool.busy.values()) + pool.idle_share == pytest.approx(1)
        assert min([*pool.busy.values(), *pool.idle.values()], default=0) >= 0
    columns = result.columns
    steps_s = columns["train_s"] + columns["export_s"] + columns["wait_s"]
    assert steps_s == pytest.approx(columns["step_s"])
    assert columns["step_s"].sum() == pytest.approx(result.makespan_s)
    assert system.gpus == sum(pool.gpus for pool in result.pools.values())


def test_a_cluster_that_is_paused_trains_the_same_groups_later() -> None:
    system = build(load_simulation("small"))
    alone, _ = run_with_log(system, 1)
    asked = ((1.5, PauseRequested()), (41.5, ResumeRequested()))
    result, log = run_with_log(replace(system, requests=asked), 1)
    assert check_replay(log).agrees
    assert result.counts.trained == alone.counts.trained
    assert result.makespan_s - alone.makespan_s == pytest.approx(40, rel=0.1)
    for process in (TRAINER, engine_process(0)):
        assert idle_by_cause(log)[process].idle_s[PAUSED_BY_HAND] == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        (((2.0, PauseRequested()), (1.0, ResumeRequested())), "must be in order"),
        (((-1.0, EtaRequested(1)),), "from 0 s on"),
        (((1.0, PauseRequested()),), "has no end; add a ResumeRequested"),
        (((1.0, EtaRequested(-1)),), "eta is -1"),
    ],
)
def test_requests_that_cannot_be_are_refused(requests: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        toy_system(asynchronous(1), requests=requests)


@settings(max_examples=20)
@given(systems(), st.integers(0, 3))
def test_the_same_seed_gives_the_same_bytes(system: System, seed: int) -> None:
    (one, log), (two, again) = run_with_log(system, seed), run_with_log(system, seed)
    assert json.dumps(one.to_json()) == json.dumps(two.to_json())
    assert [encode(r) for r in log.records] == [encode(r) for r in again.records]


@settings(max_examples=20)
@given(systems())
def test_writing_a_log_changes_nothing(system: System) -> None:
    with_log, log = run_with_log(system, 1)
    without = run_system(system, 1)
    assert json.dumps(with_log.to_json()) == json.dumps(without.to_json())
    assert read_log(map(encode, [log.header, *log.records])) == log


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        synchronous(),
        one_step_overlap(),
        asynchronous(3),
        asynchronous(3, interruptible=False),
        partial_rollout(),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.on_new_weights}",
)
def test_idle_causes_equal_those_read_from_the_log(
    schedule: Schedule, *, complete: bool, asked: bool, parts: int
) -> None:
    """Counted without a log, and computed from it by the code that reads a real run's log."""
    system = toy_system(
        schedule,
        parts=1 if schedule.carry_over else parts,
        minibatches=parts,
        in_flight=6,
        slots=3,
        complete=complete,
        lengths=lognormal(80),
        reward=Latencies(lambda generator, size: generator.exponential(9.0, size)),
        # Without an update after the last step, the run ends with that step, as the averages do.
        weights=WeightSync() if complete else WeightSync(export_s=2, delay_s=3, load_s=5),
        requests=((60.5, PauseRequested()), (210.25, ResumeRequested())) if asked else (),
    )
    result, log = run_with_log(system)
    assert (PAUSED_BY_HAND in result.pools["rollout"].idle) is asked
    use = idle_by_cause(log)
    engines = Counter[str]()
    for number in range(system.engines):
        one = use[engine_process(number)]
        assert one.total_s == pytest.approx(result.makespan_s)
        engines.update({**one.busy_s, **one.idle_s})
    ours = dict(result.pools["rollout"].busy) | dict(result.pools["rollout"].idle)
    log_shares = {name: s / system.engines / result.makespan_s for name, s in engines.items()}
    log_trainer = use[TRAINER].busy_s | use[TRAINER].idle_s
    ours_trainer = dict(result.pools["training"].busy) | dict(result.pools["training"].idle)
    if not complete:
        # The log shows that nothing came after the last start; the simulation stops in the middle.
        for shares in (ours, log_shares, ours_trainer, log_trainer):
            waited = [n for n in shares if n.startswith(("nothing", "waiting for weights"))]
            shares["waited"] = sum(shares.pop(name) for name in waited)
    assert log_shares == pytest.approx(ours, abs=1e-9)
    shares = {name: seconds / result.makespan_s for name, seconds in log_trainer.items()}
    assert {n: s for n, s in shares.items() if s > 1e-12} == pytest.approx(
        {n: s for n, s in ours_trainer.items() if s > 1e-12}, abs=1e-9
    )


# --- monotonicity --------------------------------------------------------------------------------


def throughput(schedule: Schedule, **fields: Any) -> float:
    defaults: dict[str, Any] = {
        "batch": 8,
        "in_flight": 12,
        "steps": 60,
        "warmup_steps": 10,
        "slots": 4,
        "lengths": lognormal(100),
        "training": Seconds(seconds=350.0),
        "weights": WeightSync(export_s=2, delay_s=2, load_s=5),
    }
    return run_system(toy_system(schedule, **{**defaults, **fields}), 1).tokens_per_s


def test_throughput_does_not_fall_when_eta_grows() -> None:
    rates = [throughput(asynchronous(eta)) for eta in (0, 1, 2, 4, 8, math.inf)]
    for less, more in itertools.pairwise(rates):
        assert more >= 0.995 * less
    assert rates[1] > 1.2 * rates[0]


def test_eta_0_is_the_synchronous_schedule_and_infinity_has_no_bound() -> None:
    zero, whole = (
        run_system(toy_system(schedule, lengths=lognormal(100)), 1)
        for schedule in (asynchronous(0), synchronous())
    )
    assert zero.columns["end_s"].tolist() == whole.columns["end_s"].tolist()
    assert throughput(asynchronous(math.inf)) == throughput(asynchronous(10**6))


def test_more_hardware_is_never_slower() -> None:
    for fields in (
        [{"slots": slots} for slots in (1, 2, 4, 8, None)],
        [{"engines": engines} for engines in (1, 2, 3, 6)],
        [{"training": Seconds(seconds=seconds)} for seconds in (900.0, 400.0, 100.0, 0.0)],
        [{"weights": WeightSync(load_s=seconds)} for seconds in (50.0, 10.0, 0.0)],
        [{"token_s": seconds} for seconds in (2.0, 1.0, 0.5)],
    ):
        for schedule in (synchronous(), asynchronous(2)):
            rates = [throughput(schedule, **field) for field in fields]
            for less, more in itertools.pairwise(rates):
                # List scheduling has anomalies (Graham 1969), well below a percent here.
                assert more >= 0.99 * less, (schedule.name, fields)


def test_a_system_with_all_times_halved_is_twice_as_fast() -> None:
    def ends(scale: float) -> list[float]:
        system = toy_system(
            asynchronous(2),
            in_flight=6,
            token_s=scale,
            lengths=lognormal(100),
            training=Seconds(seconds=130 * scale),
            weights=WeightSync(export_s=2 * scale, delay_s=4 * scale, load_s=8 * scale),
            reward=Latencies(lambda g, size: scale * g.exponential(8.0, size)),
        )
        return run_system(system, 1).columns["end_s"].tolist()

    assert ends(0.5) == [end_s / 2 for end_s in ends(1.0)]


def test_asynchrony_gains_no_more_than_generation_where_training_is_the_bottleneck() -> None:
    """Only the generation time can be hidden, and it is short."""
    sync = throughput(synchronous(), training=Seconds(seconds=50_000.0))
    overlapped = throughput(asynchronous(8), training=Seconds(seconds=50_000.0))
    assert 1 <= overlapped / sync < 1.02


def test_a_synchronous_step_is_never_faster_than_an_asynchronous_one() -> None:
    for training_s in (10.0, 100.0, 400.0, 1600.0):
        training = Seconds(seconds=training_s)
        rates = [throughput(s, training=training) for s in (synchronous(), asynchronous(4))]
        assert rates[0] <= rates[1] * 1.005


def test_draws_do_not_depend_on_schedule_and_cluster() -> None:
    """Common random numbers: group n has the same lengths everywhere."""
    systems_ = [
        toy_system(synchronous(), lengths=lognormal(100)),
        toy_system(asynchronous(4), engines=7, slots=2, in_flight=9, lengths=lognormal(100)),
    ]
    one, other = (
        {
            g.group: [sum(t for _, t in s) for s in g.segments]
            for g in run_with_log(system)[1].groups
        }
        for system in systems_
    )
    both = one.keys() & other.keys()
    assert len(both) >= 40
    assert all(one[group] == other[group] for group in both)


def test_a_block_of_draws_is_a_batch_and_a_group_its_row() -> None:
    steps: list[float] = []

    class Watched:
        def draw(
            self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
        ) -> np.ndarray:
            steps.append(step)
            return generator.integers(1, 10**6, (groups, samples))

    draws = Draws(toy_system(synchronous(), batch=4, samples=3, lengths=Watched()), 9)
    block = stream(9, LENGTHS, 2).integers(1, 10**6, (4, 3))
    assert [draws.of(group).lengths for group in range(8, 12)] == block.tolist()
    assert draws.of(1).lengths == stream(9, LENGTHS, 0).integers(1, 10**6, (4, 3))[1].tolist()
    assert steps == [2.0, 0.0]


def test_engines_are_idle_only_while_nothing_may_start() -> None:
    """Work conserving: an engine is never idle while a group may start."""
    system = toy_system(
        asynchronous(math.inf),
        batch=1,
        in_flight=2,
        engines=2,
        samples=1,
        steps=50,
        train_s=0.0,
        lengths=lognormal(100),
    )
    pool = run_system(system, 1).pools["rollout"]
    assert pool.idle_share == pytest.approx(0, abs=1e-12)
    assert pool.utilization == pytest.approx(1)


def test_two_samples_of_a_group_take_as_long_as_two_groups_of_one_sample() -> None:
    """With one slot."""
    pairs = toy_system(synchronous(), batch=4, samples=2, engines=1, slots=1, lengths=constant(50))
    single = toy_system(synchronous(), batch=8, samples=1, engines=1, slots=1, lengths=constant(50))
    assert run_system(pairs, 1).step_s == run_system(single, 1).step_s == 8 * 50 + 50


def test_busy_time_is_split_by_the_activities_that_engines_report() -> None:
    system = toy_system(asynchronous(1), lengths=lognormal(100))
    shares = run_system(system, 1).pools["rollout"].busy
    assert GENERATE not in shares
    assert shares["decode"] > 0


def forget_free_lists() -> None:
    """Python keeps freed tuples and floats for later; a collection releases them.

    Frozen objects are not collected, so that cycles that a run leaves behind stay visible.
    """
    gc.freeze()
    gc.collect()
    gc.unfreeze()


def test_a_step_keeps_little_more_memory_than_its_row() -> None:
    """A row has 20 columns of 8 bytes. The table of prefill times ends at the longest chunk, and
    what is under way, some 25 kB, differs between two moments. Threads that other tests left
    behind do not count."""

    class Watched(Seconds):
        def step(self, lengths: Any, *, minibatches: int) -> Seconds:
            steps.append(len(lengths))
            if len(steps) in (40, 440):
                forget_free_lists()
                held.append(tracemalloc.take_snapshot().filter_traces(others))
            return super().step(lengths, minibatches=minibatches)

    steps: list[int] = []
    held: list[tracemalloc.Snapshot] = []
    of_runs = [
        tracemalloc.Filter(True, f"*/{room}/*") for room in ("simulator", "areal_lab", "simpy")
    ]
    others = [tracemalloc.Filter(False, prefill_cost.__file__), *of_runs]
    config = load_simulation("small", ["workload.steps=440", "schedule.eta=2"])
    system = replace(build(config), training=Watched(seconds=0.9))
    tracemalloc.start()
    try:
        run_system(system, 1)
    finally:
        tracemalloc.stop()
    changes = held[1].compare_to(held[0], "filename")
    assert sum(change.size_diff for change in changes) <= 400 * 2 * 20 * 8


def test_nothing_is_left_over_at_the_end() -> None:
    system = toy_system(asynchronous(2), steps=200, lengths=lognormal(100))
    loop = EventLoop(replace(system, make_engine=toy_engines(1.0, 3)), 1)
    loop.run()
    assert len(loop.flights) + len(loop.kept) == 0
    assert all(not slot.flights for slot in loop.slots)
    assert len(loop.env._queue) < 50
