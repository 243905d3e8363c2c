"""Settings of schedules, filters and engines in training loops on controllers."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.control import events as ev
from areal_lab.controllers.host_pool import host_pool
from areal_lab.engines.keys import write_key_file
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import launch_engine
from areal_lab.runlog.records import Log
from tests.asynchronous import in_loop
from tests.cluster.host_lab import DEADLINE_S, until
from tests.controllers.loop import controllers, one_step, replayed
from tests.pipeline.rewards import even_digits_of_some, nothing
from tests.pipeline.tiny_run import tiny_config

pytestmark = pytest.mark.slow


def config_of(folder: Path, *overrides: str, steps: int = 3, nodes: int = 2) -> TrainConfig:
    return tiny_config(
        folder,
        "evaluation.max_problems=0",
        f"cluster.n_nodes={nodes}",
        f"total_train_steps={steps}",
        *overrides,
    )


async def logged(folder: Path, *overrides: str, steps: int = 3) -> Log:
    """The log of a whole loop."""
    config = config_of(folder, *overrides, steps=steps)
    async with controllers(folder / "run", config) as (_, rollouts, trainer):
        for _ in range(steps):
            await one_step(rollouts, trainer)
        assert trainer.version == rollouts.version == steps
        await until(
            lambda: ev.Finish("complete") in actions(replayed(rollouts)), "the end is logged"
        )
        with pytest.raises(RuntimeError, match=f"total_train_steps is {steps}"):
            await rollouts.prepare_batch()
    log = replayed(rollouts)
    assert actions(log)[-1] == ev.Finish("complete")
    assert [a.version for a in actions(log) if isinstance(a, ev.PushWeights)] == [
        *range(1, steps + 1)
    ]
    return log


def actions(log: Log) -> list[ev.Action]:
    return [record.action for record in log.actions]


@in_loop
async def test_one_step_overlap_generates_each_batch_with_one_version(tmp_path: Path) -> None:
    log = await logged(tmp_path, "rollout.schedule=one_step_overlap")
    assert not any(isinstance(action, ev.Interrupt) for action in actions(log))
    finished = [r.event for r in log.events if isinstance(r.event, ev.GroupFinished)]
    assert len(finished) == 9
    assert all(event.head_version == event.tail_version for event in finished)
    starts = {a.group: a.version for a in actions(log) if isinstance(a, ev.StartGroup)}
    for train in [a for a in actions(log) if isinstance(a, ev.Train)]:
        assert len({starts[group] for group in train.groups}) == 1


@in_loop
async def test_partial_rollout_pauses_generation_while_the_program_trains(tmp_path: Path) -> None:
    log = await logged(
        tmp_path,
        "rollout.schedule=partial_rollout",
        "rollout.max_concurrent_rollouts=6",
        "gconfig.max_new_tokens=200",
    )
    done = actions(log)
    first = next(n for n, action in enumerate(done) if isinstance(action, ev.Train))
    assert isinstance(done[first - 1], ev.Interrupt)
    assert isinstance(done[first + 1], ev.PushWeights), "nothing starts while the program trains"


@in_loop
async def test_without_interruption_weights_wait_for_running_groups(tmp_path: Path) -> None:
    log = await logged(tmp_path, "rollout.interruptible=false", "eta=1")
    assert not any(isinstance(action, ev.Interrupt) for action in actions(log))
    finished = [r.event for r in log.events if isinstance(r.event, ev.GroupFinished)]
    assert all(event.head_version == event.tail_version for event in finished)


@in_loop
async def test_slots_by_sample_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.slots=samples")
    with pytest.raises(ConfigError, match=r"use rollout\.slots=groups"):
        async with host_pool(config, folder=tmp_path / "run"):
            pass


@in_loop
async def test_late_groups_start_again(tmp_path: Path) -> None:
    log = await logged(
        tmp_path,
        *("rollout.on_late=recycle", "rollout.batch_order=bounded_lag", "rollout.max_lag=1"),
        *("eta=3", "rollout.max_concurrent_rollouts=12"),
        steps=4,
    )
    drops = [a.group for a in actions(log) if isinstance(a, ev.Drop) and a.reason == ev.RECYCLED]
    assert drops
    trained = [g for action in actions(log) if isinstance(action, ev.Train) for g in action.groups]
    assert len(trained) == len(set(trained)) == 12


@in_loop
async def test_late_groups_are_dropped_and_replaced(tmp_path: Path) -> None:
    log = await logged(
        tmp_path,
        *("rollout.on_late=drop", "rollout.batch_order=bounded_lag", "rollout.max_lag=1"),
        *("eta=3", "rollout.max_concurrent_rollouts=12"),
        steps=4,
    )
    drops = [action.group for action in actions(log) if isinstance(action, ev.Drop)]
    assert drops
    trained = [g for action in actions(log) if isinstance(action, ev.Train) for g in action.groups]
    assert len(trained) == len(set(trained)) == 12
    assert not set(trained) & set(drops)


@in_loop
async def test_groups_of_equal_rewards_are_replaced(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.dynamic_sampling.enabled=true", steps=2)
    async with controllers(tmp_path / "run", config, even_digits_of_some) as (_, rollouts, trainer):
        for _ in range(2):
            await one_step(rollouts, trainer)
        assert rollouts.counts["filtered_groups"] > 0
        events = [record.event for record in replayed(rollouts).events]
        filtered = [event for event in events if isinstance(event, ev.GroupFiltered)]
        assert len(filtered) == rollouts.counts["filtered_groups"]


@in_loop
async def test_a_loop_ends_if_every_group_has_equal_rewards(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "rollout.dynamic_sampling.enabled=true",
        "rollout.dynamic_sampling.max_batches=1",
    )
    async with controllers(tmp_path / "run", config, nothing) as (_, rollouts, _):
        with pytest.raises(RuntimeError, match="dynamic_sampling"):
            await rollouts.prepare_batch()
        replayed(rollouts)


@in_loop
async def test_workers_attach_to_running_servers(tmp_path: Path) -> None:
    model = Path(config_of(tmp_path).actor.path)
    engine = await launch_engine(
        "embedded",
        ServerOptions(model=model, version="7", port=0, threads=1, dtype="float32"),
        index=0,
        log_path=tmp_path / "engine.log",
        ready_timeout_s=DEADLINE_S,
        request_timeout_s=DEADLINE_S,
    )
    write_key_file(int(engine.base_url.rsplit(":", 1)[1]), engine.client.key)
    try:
        await logged(tmp_path, f'rollout.addresses=["{engine.base_url}"]', "eta=1")
        assert await engine.client.version() == 3, "it got the weights, and is not stopped"
    finally:
        await engine.stop()


@in_loop
async def test_engines_join_and_leave_a_loop(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "eta=1",
        "gconfig.max_new_tokens=120",
        "rollout.scaling.max_engines=3",
        "rollout.scaling.window_steps=1",
        "rollout.scaling.cooldown_steps=0",
        "rollout.scaling.tolerance=0.01",
        steps=60,
        nodes=2,
    )
    async with controllers(tmp_path / "run", config) as (_, rollouts, trainer):
        workers = rollouts.workers
        while len(workers.alive) < 2:
            await one_step(rollouts, trainer)
        await one_step(rollouts, trainer)
        await until(lambda: not workers.changing, "the engine has joined")
        newest = max(workers.alive)
        assert workers.retire_engine() == newest
        await one_step(rollouts, trainer)
        log = replayed(rollouts)
        events = [record.event for record in log.events]
        assert ev.EngineJoined(1) in events
        assert ev.EngineRetired(newest) in events
        assert any(isinstance(a, ev.StartGroup) and a.engine == 1 for a in actions(log))
        assert rollouts.counts["lost_groups"] == 0
