"""Controllers on hosts of this machine: the steps of a run, and what is lost with a host."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.cluster.scheduler import LocalScheduler as LocalAgents
from areal_lab.config.problem import ConfigError
from areal_lab.controllers.batch import BatchMissing, DistributedBatch
from areal_lab.controllers.calls import Caller, CallFailed, serve
from areal_lab.controllers.fronts import (
    EmbeddedEngine,
    FSDPPPOActor,
    LocalScheduler,
    RolloutController,
    TrainController,
)
from areal_lab.controllers.workers import of_worker
from areal_lab.host.pipes import open_pipe, socket_pair
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.placement import runs_on_hosts
from tests.asynchronous import in_loop
from tests.cluster.host_lab import DEADLINE_S, until
from tests.controllers.loop import controllers
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

EXACT = (
    "eta=0",
    "rollout.max_running_requests=1",
    "evaluation.max_problems=0",
    "total_train_steps=3",
)


@pytest.mark.slow
def test_a_loop_of_ones_own_takes_the_steps_of_a_run(tmp_path: Path) -> None:
    """Programs of the articles' names, on hosts that share no files."""
    config = tiny_config(tmp_path, *EXACT)
    expected = metrics(do_run(config, reward_fn=even_digits).folder)
    said: list[str] = []
    scheduler = LocalScheduler(n_nodes=2, shared_files="never", say=said.append)
    config = config.with_settings({"sinks": ["tensorboard"]})
    rollout = RolloutController(EmbeddedEngine(config), scheduler, reward_fn=even_digits)
    actor = TrainController(engine=FSDPPPOActor(config=config), scheduler=scheduler)
    found = []
    with actor, rollout:
        for _ in range(config.total_train_steps):
            batch = rollout.prepare_batch()
            assert len(batch) == config.dataset.batch_size * config.gconfig.n_samples
            halves = [rollout.fields(part)["group"] for part in batch.chunk(2)]
            assert list(map(len, halves)) == [6, 6]
            found.append(actor.ppo_update(batch))
            rollout.update_weights(actor)
        assert rollout.counts["groups"] == 9
        with pytest.raises(ConfigError, match="compute_advantages is part of ppo_update"):
            actor.compute_advantages(batch)
        saved = actor.save(tmp_path / "saved")
    assert (saved / "model.safetensors").is_file()
    assert any("hosts have joined" in text for text in said)
    assert any("sinks (tensorboard) receive nothing" in text for text in said)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("reward_mean", "loss", "grad_norm"):
            assert ours[name] == theirs[name], name


@pytest.mark.slow
@in_loop
async def test_while_no_worker_is_left_groups_wait_for_one(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "eta=1",
        "evaluation.max_problems=0",
        "total_train_steps=2",
        "cluster.n_nodes=2",
        "cluster.heartbeat_s=0.3",
    )
    async with controllers(tmp_path / "run", config) as (pool, rollouts, _):
        agents = pool.hosts.hosts.scheduler
        assert isinstance(agents, LocalAgents)
        first = await rollouts.prepare_batch()
        await until(lambda: rollouts.coordinator.counts.finished > 0, "a group is finished")
        os.kill(agents.agents["h1"].pid, signal.SIGKILL)
        await until(lambda: rollouts.counts["worker_losses"] == 1, "it was noticed")
        assert not rollouts.workers.workers
        rollouts.take_back(first)
        async with asyncio.timeout(DEADLINE_S):
            batches = [await rollouts.prepare_batch() for _ in range(2)]
        assert [len(batch) for batch in batches] == [12, 12]
        shards = {shard for batch in batches for shard in ids(batch)}
        assert len(shards) == 6
        assert set(ids(first)) <= shards, "it is not lost with it"


def ids(batch: DistributedBatch) -> list[str]:
    """Its shards, one for each group."""
    return [shard.shard_id for shard in batch.shards]


@pytest.mark.slow
@in_loop
async def test_what_is_lost_with_a_host_is_generated_again(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "eta=1",
        "rollout.engines=2",
        "evaluation.max_problems=0",
        "total_train_steps=4",
        "cluster.n_nodes=3",
        "cluster.shared_files=never",
        "cluster.heartbeat_s=0.3",
    )
    async with controllers(tmp_path / "run", config) as (pool, rollouts, trainer):
        agents = pool.hosts.hosts.scheduler
        assert isinstance(agents, LocalAgents)
        trained: list[str] = []
        for step in range(config.total_train_steps):
            batch = await rollouts.prepare_batch()
            if step == 1:
                os.kill(agents.agents[max(one.node_id for one in batch.shards)].pid, signal.SIGKILL)
                await until(lambda: rollouts.counts["worker_losses"] == 1, "it was noticed")
                rollouts.take_back(batch)
                with pytest.raises(ValueError, match="taken back before"):
                    rollouts.take_back(batch)
                before, batch = batch, await rollouts.prepare_batch()
                assert set(ids(before)) & set(ids(batch)), "its tensors are here"
            await trainer.train(batch)
            trained += ids(batch)
            await rollouts.update_weights(await trainer.export())
            await rollouts.free(batch)
            with pytest.raises(BatchMissing, match="it was freed"):
                await trainer.train(batch)
        assert trainer.version == rollouts.version == 4
        assert len(trained) == len(set(trained)) == 12
        assert len(pool.shards) == len(rollouts._performer.done), "of groups not trained yet"


def test_a_worker_starts_the_engines_of_the_allocation(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "cluster.n_nodes=3",
        "cluster.n_gpus_per_node=4",
        "allocation_mode=sglang:d4t2+fsdp:d1",
        "actor.device=cuda",
    )
    plan, part = layout_of(config).engines, of_worker(config, (0, 1))
    assert (plan.backend, plan.servers, plan.tensor_parallel) == ("sglang", 4, 2)
    assert layout_of(part).engines == replace(plan, servers=2)
    assert part.rollout.device == "cuda"
    assert not runs_on_hosts(part)


class _Living:
    """A process that does not end."""

    name = "worker"

    async def died(self) -> Exception:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@in_loop
async def test_calls_are_answered_in_any_order_and_errors_are_the_callers() -> None:
    ours, theirs = socket_pair()
    other = open_pipe(f"fd:{os.dup(theirs.fileno())}")
    theirs.close()
    released = asyncio.Event()

    async def handle(body: object) -> object:
        match body:
            case "wait":
                await released.wait()
                return "waited"
            case "fail":
                raise ValueError("no such thing")
        released.set()
        return body

    serving = asyncio.create_task(serve(other, handle))
    caller = Caller(ours, _Living())  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(caller.ask("wait"))
        with pytest.raises(CallFailed, match="no such thing"):
            await caller.ask("fail")
        assert await caller.ask([1, 2]) == [1, 2]
        long = [bytes([number]) * 300_000 for number in range(16)]
        assert await asyncio.gather(*map(caller.ask, long)) == long
        assert await waiting == "waited"
        assert caller.traffic.sent_bytes > 0 < caller.traffic.received_bytes
        await caller.close()
        await serving


@in_loop
async def test_calls_of_many_workers_at_once_leave_threads_to_the_others() -> None:
    async def handle(body: object) -> object:
        return body

    workers = min(32, (os.cpu_count() or 1) + 4) + 1  # threads of an event loop, and one more
    callers: list[Caller] = []
    echoes: list[threading.Thread] = []
    for _ in range(workers):
        ours, theirs = socket_pair()
        other = open_pipe(f"fd:{os.dup(theirs.fileno())}")
        theirs.close()
        echo = threading.Thread(target=lambda pipe: asyncio.run(serve(pipe, handle)), args=[other])
        echo.start()
        echoes.append(echo)
        callers.append(Caller(ours, _Living()))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(DEADLINE_S):
            replies = await asyncio.gather(*(c.ask(n) for n, c in enumerate(callers)))
    finally:
        for caller in callers:
            await caller.close()
        for echo in echoes:
            echo.join(DEADLINE_S)
    assert replies == list(range(workers))
