"""Runs whose responses pass through a controller, or whose ranks do without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from areal_lab.control.events import GroupFinished, GroupId, Train
from areal_lab.control.schedule import Schedule, asynchronous, synchronous
from areal_lab.runlog.activity import WAIT_BATCH, WAIT_CONTROLLER, WAIT_RANKS, idle_by_cause
from areal_lab.runlog.records import TRAINER, Log, engine_process
from areal_lab.runlog.replay import check_replay
from simulator.assembly.simulate import build, simulate, simulated_log
from simulator.config.load import load_simulation
from simulator.costs.controller import ControllerCost, ControllerInputs
from simulator.costs.training_timing import FETCH
from simulator.report.notes import CONTROLLER_BOUND, OTHER_RANKS, bottleneck
from simulator.run.flights import BATCHES, NOTHING_TO_HANDLE, REPLIES
from simulator.run.one_seed import run_system
from simulator.run.pools import CONTROLLER
from simulator.run.responses import Draws, GroupDraws
from simulator.run.result import SimulationResult
from simulator.run.system import System
from tests.simulator.engine.toy_engine import toy_engines
from tests.simulator.run.test_event_loop import switching
from tests.simulator.run.toy_system import lognormal, run_with_log, toy_system

EXACT = 1e-9
FREE = ControllerInputs(
    read_token_s=0, message_s=0, request_s=0, metadata_bytes=0, packed_token_bytes=0
)


def way(kind: str, inputs: ControllerInputs | None = None, **fields: Any) -> ControllerCost:
    return ControllerCost(kind=kind, inputs=inputs or ControllerInputs(), **fields)  # type: ignore[arg-type]


def same(one: SimulationResult, other: SimulationResult) -> bool:
    """Equal to the bit, but for what only a run with a controller has."""
    mine, theirs = one.to_json(), other.to_json()
    for told in (mine, theirs):
        told.pop("controller", None)
        for part in ("utilisation", "busy", "idle"):
            told[part].pop(CONTROLLER, None)
    columns = one.columns.keys() & other.columns.keys()
    return mine == theirs and all(
        np.array_equal(one.columns[name], other.columns[name], equal_nan=True) for name in columns
    )


def records(log: Log) -> list[object]:
    return [*log.events, *log.actions, *log.groups, *log.spans]


@pytest.mark.parametrize("kind", ["single", "metadata"])
@pytest.mark.parametrize("schedule", [synchronous(), asynchronous(2)], ids=lambda s: s.name)
def test_a_controller_that_takes_no_time_changes_nothing(kind: str, schedule: Schedule) -> None:
    plain = toy_system(schedule, lengths=lognormal(80), in_flight=6, engines=3, slots=2)
    cost = way(kind, FREE, readers=3 if kind == "metadata" else 0)
    one, log = run_with_log(replace(plain, controller=cost))
    other, expected = run_with_log(plain)
    assert same(one, other)
    assert records(log) == records(expected)
    assert one.columns["controller_s"].tolist() == [0.0] * plain.workload.steps
    assert one.columns["reply_s"].tolist() == [0.0] * plain.workload.steps


def test_one_rank_is_a_run_with_a_controller_that_takes_no_time() -> None:
    config = load_simulation("small", ["seeds=1", "controller.ranks=1"])
    alone = config.with_settings({"controller.kind": "spmd"})
    system = build(alone)
    assert system.controller is not None
    assert same(
        run_system(replace(system, controller=way("spmd", FREE, readers=1)), 1, name="small"),
        simulate(config, seed=1),
    )


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_replies_that_arrive_together_are_handled_one_after_the_other(engines: int) -> None:
    """4 groups of 2 x 100 tokens end at 100 s; each takes 3 s, the batch 1 s and 4 s to send."""
    inputs = ControllerInputs(
        read_token_s=0.01, message_s=0.5, packed_token_bytes=10, stream_bytes_per_s=2000
    )
    system = toy_system(synchronous(), engines=engines, controller=way("single", inputs))
    system = replace(system, controller=way("single", inputs, receivers=2))
    result, log = run_with_log(system)
    step_s = 100 + 4 * 3 + (2 * 0.5 + 8 * 100 * 10 / 2000) + 50
    assert result.columns["step_s"] == pytest.approx(step_s, rel=EXACT)
    ends_s = [record.t_s for record in log.events if isinstance(record.event, GroupFinished)]
    assert ends_s[:4] == pytest.approx([103, 106, 109, 112], rel=EXACT)
    pool = result.pools[CONTROLLER]
    assert pool.busy == pytest.approx({REPLIES: 12 / step_s, BATCHES: 5 / step_s}, rel=EXACT)
    assert pool.idle == pytest.approx({NOTHING_TO_HANDLE: 1 - 17 / step_s}, rel=EXACT)
    assert pool.utilization == pytest.approx(17 / step_s)
    assert result.columns["controller_s"] == pytest.approx(17)
    assert result.columns["reply_s"] == pytest.approx((3 + 6 + 9 + 12) / 4)
    training = result.pools["training"]
    assert training.idle[WAIT_CONTROLLER] == pytest.approx(5 / step_s)
    assert training.idle[WAIT_BATCH] == pytest.approx(112 / step_s)


def test_readers_beside_the_engines_read_at_the_same_time() -> None:
    """Each of 2 agents reads 2 groups, 2 s each; messages of 0.5 s for each of 2 responses."""
    inputs = ControllerInputs(
        read_token_s=0.01,
        message_s=0.5,
        metadata_bytes=0,
        packed_token_bytes=10,
        stream_bytes_per_s=2000,
        request_s=0.25,
    )
    fields = {"readers": 2, "receivers": 4, "network_bytes_per_s": 1e9}
    system = toy_system(synchronous(), controller=way("metadata", inputs, **fields))
    result, _ = run_with_log(system)
    # Two are read at 102 s and handled until 103 and 104 s, two at 104 s until 105 and 106 s.
    fetch_s = 8000 / (4 * 2000) + 2 * 0.25
    step_s = 106 + 4 * 0.5 + fetch_s + 50
    assert result.columns["step_s"] == pytest.approx(step_s, rel=EXACT)
    assert result.columns["outside_s"] == pytest.approx(fetch_s)
    assert result.pools["training"].busy[FETCH] == pytest.approx(fetch_s / step_s)
    # One process that does all of it takes longer.
    single = replace(system, controller=way("single", inputs, receivers=4))
    assert run_system(single, 1).step_s > result.step_s


@pytest.mark.parametrize("reply_s", [5.0, 24.0, 26.0, 60.0])
def test_an_asynchronous_run_has_the_rate_of_the_controller_if_that_is_slowest(
    reply_s: float,
) -> None:
    # 4 groups at a time of 100 s each: one in 25 s, trained on in 20 s.
    system = toy_system(
        asynchronous(math.inf),
        batch=1,
        in_flight=40,
        slots=4,
        engines=2,
        train_s=20.0,
        steps=120,
        warmup_steps=60,
        controller=way("single", FREE.with_settings({"message_s": reply_s / 2})),
    )
    result = run_system(system, 1)
    handled_s = reply_s + reply_s / 2  # two responses, and the message to the one rank
    assert result.step_s == pytest.approx(max(25.0, handled_s), rel=0.01)
    busy = result.pools[CONTROLLER].utilization
    assert busy == pytest.approx(handled_s / result.step_s, rel=0.02)
    if handled_s > 25:
        shares = {name: {**pool.busy, **pool.idle} for name, pool in result.pools.items()}
        assert bottleneck(shares) == CONTROLLER_BOUND


@pytest.mark.parametrize("kind", ["single", "metadata", "spmd"])
def test_every_byte_is_counted_once(kind: str) -> None:
    ranks = 2 if kind == "spmd" else 1
    inputs = ControllerInputs()
    system = toy_system(
        synchronous(),
        lengths=lognormal(300),
        controller=way(kind, inputs, readers=2),
    )
    system = replace(system, limits=replace(system.limits, ranks=ranks))
    result = run_system(system, 3)
    columns, tokens = result.columns, result.columns["tokens"]
    told = inputs.metadata_bytes * columns["sequences"]
    packed = inputs.packed_token_bytes * tokens
    received = {"single": inputs.reply_token_bytes * tokens, "metadata": told}.get(kind, 0 * tokens)
    sent = {"single": packed, "metadata": told}.get(kind, 0 * tokens)
    assert columns["controller_received_bytes"] == pytest.approx(received, rel=EXACT)
    assert columns["controller_sent_bytes"] == pytest.approx(sent, rel=EXACT)
    fetched = packed if kind == "metadata" else 0 * tokens
    assert columns["fetched_bytes"] == pytest.approx(fetched, rel=EXACT)
    assert (CONTROLLER in result.pools) == (kind != "spmd")


@pytest.mark.parametrize("kind", ["single", "metadata", "spmd"])
def test_shares_of_every_pool_add_up_and_the_log_tells_the_same(kind: str) -> None:
    slow = ControllerInputs(read_token_s=0.02, message_s=0.4, request_s=1.0)
    system = toy_system(
        asynchronous(1),
        lengths=lognormal(100, 1.0),
        batch=4,
        in_flight=8,
        engines=4,
        slots=2,
        steps=20,
        train_s=30.0,
        controller=way(kind, slow, readers=2 if kind != "single" else 0),
    )
    system = replace(system, limits=replace(system.limits, ranks=2 if kind == "spmd" else 1))
    result, log = run_with_log(system)
    for pool in result.pools.values():
        total = sum(pool.busy.values()) + sum(pool.idle.values())
        assert total == pytest.approx(1)
        assert min(*pool.busy.values(), *pool.idle.values(), 1.0) >= 0
    assert check_replay(log).agrees
    idle = {name: use.idle_s for name, use in idle_by_cause(log).items()}
    end_s = result.makespan_s
    for cause in (WAIT_CONTROLLER, WAIT_RANKS):
        seconds = [idle[engine_process(number)].get(cause, 0.0) for number in range(4)]
        share = result.pools["rollout"].idle.get(cause, 0.0)
        assert sum(seconds) / 4 / end_s == pytest.approx(share, abs=0.02)
    waits = idle[TRAINER].get(WAIT_CONTROLLER, 0.0) / end_s
    assert waits == pytest.approx(result.pools["training"].idle.get(WAIT_CONTROLLER, 0.0), abs=1e-6)
    if kind == "spmd":
        assert result.pools["rollout"].idle[WAIT_RANKS] > 0.01
    else:
        assert waits > 0.001


def test_colocated_gpus_wait_for_the_controller_before_they_train() -> None:
    inputs = FREE.with_settings({"message_s": 1.0})
    system = toy_system(
        synchronous(),
        switch=switching(11.0, 17.0),
        controller=way("single", inputs, receivers=3),
    )
    result = run_system(system, 1)
    step_s = 100 + 8 + 3 + 11 + 50 + 17
    assert result.columns["step_s"][1:] == pytest.approx(step_s)
    pool = result.pools["all"]
    # Engines wait for their replies, and then all of them for the batch.
    assert sum(pool.idle.values()) * result.makespan_s == pytest.approx(11 * system.workload.steps)
    assert pool.idle[WAIT_CONTROLLER] * result.makespan_s >= 3 * system.workload.steps


# --- ranks without a controller ------------------------------------------------------------------


class OfRank(Draws):
    """The lengths that the groups of one rank have in the whole run."""

    def __init__(self, whole: System, seed: int, rank: int) -> None:
        super().__init__(whole, seed)
        self._rank, self._ranks = rank, whole.limits.ranks

    def of(self, group: GroupId) -> GroupDraws:
        """The draws of its group number `group`."""
        return super().of(group * self._ranks + self._rank)


@dataclass
class ByRank:
    """Training that takes a second per token of the rank that has the most."""

    ranks: int

    def step(self, lengths: Any, *, minibatches: int) -> Any:
        assert minibatches == 1
        own = np.asarray(lengths).reshape(self.ranks, -1).sum(axis=1)
        return toy_seconds(float(own.max()))


def toy_seconds(seconds: float) -> Any:
    from tests.simulator.run.toy_system import Seconds

    return Seconds(seconds=seconds)


def ranked(ranks: int, **fields: Any) -> System:
    defaults: dict[str, Any] = {
        "batch": 12,
        "engines": 6,
        "steps": 8,
        "lengths": lognormal(200, 1.0),
        "make_engine": toy_engines(1.0, 3),
        "controller": way("spmd", FREE, readers=ranks),
    }
    system = toy_system(synchronous(), **{**defaults, **fields})
    return replace(system, limits=replace(system.limits, ranks=ranks))


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_synchronous_step_is_that_of_the_slowest_of_runs_on_their_own(ranks: int) -> None:
    whole = ranked(ranks, training=ByRank(ranks), train_s=0.0)
    result = run_system(whole, 5)
    alone = toy_system(
        synchronous(),
        batch=12 // ranks,
        engines=6 // ranks,
        steps=8,
        make_engine=toy_engines(1.0, 3),
        train_s=0.0,
    )
    generated_s = []
    trained = []
    for rank in range(ranks):
        own = run_system(alone, 5, responses=OfRank(whole, 5, rank))
        generated_s.append(own.columns["step_s"])
        prompts = 10 * own.columns["sequences"]
        trained.append(own.columns["tokens"] + prompts)
    slowest_s = np.max(generated_s, axis=0) + np.max(trained, axis=0)
    assert result.columns["step_s"] == pytest.approx(slowest_s, rel=EXACT)
    # The trainer's wait for other ranks is the ranks' own, on average.
    waits_s = (np.max(generated_s, axis=0) - np.mean(generated_s, axis=0)).sum()
    share = result.pools["training"].idle[WAIT_RANKS]
    assert share * result.makespan_s == pytest.approx(waits_s, rel=1e-6)


@pytest.mark.parametrize("schedule", [synchronous(), asynchronous(1), asynchronous(4)])
def test_equal_lengths_wait_for_no_rank(schedule: Schedule) -> None:
    def system(ranks: int) -> System:
        made = ranked(ranks, lengths=toy_system(synchronous()).lengths, in_flight=12)
        return replace(made, limits=replace(made.limits, schedule=schedule))

    one, several = run_system(system(1), 1), run_system(system(3), 1)
    assert several.columns["end_s"] == pytest.approx(one.columns["end_s"], rel=EXACT)
    assert WAIT_RANKS not in several.pools["training"].idle


def test_more_ranks_wait_longer() -> None:
    # Groups that all start at once are assigned before anything is known of their lengths.
    lengths = lognormal(200, 0.7)
    fields = {"steps": 40, "in_flight": 6, "make_engine": toy_engines(1.0, 2), "lengths": lengths}
    seconds = [run_system(ranked(ranks, **fields), 2).step_s for ranks in (1, 2, 6)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.05 * seconds[0]


def test_the_slowest_rank_is_the_bottleneck_of_an_asynchronous_run() -> None:
    system = ranked(6, batch=6, train_s=1.0, steps=40, warmup_steps=4)
    system = replace(system, limits=replace(system.limits, schedule=asynchronous(1)))
    result = run_system(system, 1)
    shares = {name: {**pool.busy, **pool.idle} for name, pool in result.pools.items()}
    assert bottleneck(shares) == OTHER_RANKS


def test_ranks_of_a_preset_have_the_lengths_of_the_run_with_a_controller() -> None:
    brief = ["seeds=1", "workload.steps=2", "workload.warmup_steps=0", "schedule.eta=0"]
    brief += ["workload.prompts_per_batch=64", "schedule.max_concurrent_prompts=64"]

    def lengths(kind: str) -> list[Sequence[int]]:
        config = load_simulation("table_1_1.5b_asynchronous", [*brief, f"controller.kind={kind}"])
        log = simulated_log(config, seed=3)
        assert check_replay(log).agrees
        groups = {record.group: record for record in log.groups}
        batch = next(r.action for r in log.actions if isinstance(r.action, Train))
        return sorted(
            [sum(n for _, n in sample) for sample in groups[g].segments] for g in batch.groups
        )

    assert lengths("spmd") == lengths("none") == lengths("single")


def test_what_a_system_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limits.ranks is 4, but must divide engines \(6\)"):
        ranked(4)
