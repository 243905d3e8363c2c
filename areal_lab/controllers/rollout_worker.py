"""The rollout worker of a host: `python -m areal_lab.controllers.rollout_worker --pipe WHERE`.

    GenerateGroup --> engines of this host --> rewards --> arrays, held by this host's agent
                  <-- GroupDone: their metadata

It starts the engines and reward workers of its host. If an engine is lost, its samples continue on
another one of the host.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.shards.client import HttpStore
from areal_lab.cluster.shards.connections import Agent, Connections
from areal_lab.cluster.shards.protocol import AsyncStore
from areal_lab.config.functions import unpickle_function
from areal_lab.controllers.calls import serve
from areal_lab.controllers.wire import (
    GenerateGroup,
    GroupDone,
    LoadWeights,
    Pause,
    Resume,
    StartWorker,
)
from areal_lab.data.arrays.jagged import field_bytes
from areal_lab.data.arrays.samples import pack_samples
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.resubmit import NO_SAMPLES
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.host.pipes import open_pipe
from areal_lab.host.processes import watch_parent
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.progress import Lines
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.opened import opened_rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.rollout.turns import Unfinished
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.push import PushTo, Weights
from areal_lab.pipeline.servers.standing import start_standing
from areal_lab.rewards.service import RewardFunction, RewardService
from areal_lab.runlog.folder import RunFolder


@dataclass(slots=True)
class Worker:
    """A worker that has started."""

    setup: StartWorker
    pool: ServerPool
    rollout: Rollout
    rewards: RewardService
    store: AsyncStore
    _running: Counter[int] = field(default_factory=Counter)
    """Groups on each engine."""

    async def handle(self, request: object) -> object:
        """The reply to a request."""
        match request:
            case GenerateGroup():
                return await self._generate(request)
            case LoadWeights(weights=weights):
                await self.pool.pause()
                await self.pool.load(weights)
                await self.pool.resume()
                return None
            case Pause():
                await self.pool.pause()
                return None
            case Resume():
                await self.pool.resume()
                return None
        raise TypeError(f"a rollout worker got a {type(request).__name__}, which is no request")

    async def _generate(self, request: GenerateGroup) -> GroupDone:
        try:
            scored = await self._scored(request)
        except Exception:
            if self.pool.given_up.is_set():
                await asyncio.Event().wait()  # this process ends, and another host generates it
            raise
        rewards = tuple(sample.outcome.reward for sample in scored.samples)
        if scored.failure is not None:
            return GroupDone(
                group=request.group,
                shard=None,
                failure=scored.failure,
                rewards=rewards,
                tokens=scored.tokens,
                head_version=0,
                tail_version=0,
                tensor_bytes=0,
            )
        trajectories = scored.trajectories(request.group)
        fields = await asyncio.to_thread(pack_samples, trajectories)
        shard = await self.store.put(fields, owner=self.setup.owner)
        return GroupDone(
            group=request.group,
            shard=shard,
            failure="",
            rewards=rewards,
            tokens=scored.tokens,
            head_version=min(t.head_version for t in trajectories),
            tail_version=max(t.tail_version for t in trajectories),
            tensor_bytes=sum(map(field_bytes, fields.values())),
        )

    async def _scored(self, request: GenerateGroup) -> ScoredGroup:
        """Generate on as many engines as it takes."""
        partial = NO_SAMPLES
        while True:
            engines = await self.pool.for_rollouts()
            engine = min(engines, key=lambda number: (self._running[number], number))
            self._running[engine] += 1
            try:
                return await self.rollout.group(
                    request.problem,
                    engine=engine,
                    stream="train",
                    group=request.group,
                    samples=self.setup.config.gconfig.n_samples,
                    partial=partial,
                )
            except Unfinished as unfinished:
                partial = unfinished.samples
            finally:
                self._running[engine] -= 1


async def start_worker(setup: StartWorker, fleet: Fleet, token: str) -> Worker:
    """Start engines and rewards; `fleet` stops them."""
    config, display = setup.config, Lines(Console(file=sys.stderr))
    folder = RunFolder(setup.log_folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "logs").mkdir(exist_ok=True)
    pool = await start_standing(
        config,
        folder,
        setup.model,
        fleet=fleet,
        display=display,
        restarts=config.rollout.max_engine_restarts,
        conversations=bool(config.rollout.workflow),
        prepare_push=_load_folder,
    )
    rewards = await fleet.stack.enter_async_context(
        RewardService.of(config.reward, _reward(setup.reward), log_folder=folder.path / "logs")
    )
    rollout = await opened_rollout(
        config,
        setup.model,
        codec=TextCodec.load(setup.model),
        engines=pool,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
    )
    connections = Connections(token)
    fleet.stack.callback(connections.close)
    store = AsyncStore(HttpStore(Agent(setup.agent, setup.incarnation), connections))
    return Worker(setup, pool, rollout, rewards, store)


def _load_folder(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
    """Every engine reads the folder, which is on this host."""
    del clients
    assert isinstance(weights, WeightsFolder), "controllers send folders"
    return lambda client: _load(client, weights, mode)


async def _load(client: EngineClient, weights: WeightsFolder, mode: PauseMode) -> None:
    if weights.checksum:  # else the model that it was started with
        await client.load_weights(weights, mode)


def _reward(reward: str) -> RewardFunction | str:
    path = Path(reward)
    return unpickle_function(path.read_bytes()) if path.suffix == ".pickle" else reward


async def _run(where: str, token: str) -> int:
    """Serve until the controller is gone (0), or no engine is left (1)."""
    pipe, worker = open_pipe(where), None
    started = asyncio.Event()
    async with Fleet() as fleet:

        async def handle(request: Any) -> object:
            nonlocal worker
            if isinstance(request, StartWorker):
                worker = await start_worker(request, fleet, token)
                started.set()
                return None
            if worker is None:
                raise RuntimeError("the worker has not started")
            return await worker.handle(request)

        async def engines_lost() -> None:
            await started.wait()
            assert worker is not None, "it has started"
            await worker.pool.given_up.wait()
            print(f"no engine is left: {worker.pool.last_error}", file=sys.stderr)

        serving = asyncio.create_task(serve(pipe, handle))
        losing = asyncio.create_task(engines_lost())
        await asyncio.wait({serving, losing}, return_when=asyncio.FIRST_COMPLETED)
        code = int(not serving.done())
        for task in (serving, losing):
            task.cancel()
        await asyncio.gather(serving, losing, return_exceptions=True)
        return code


def main() -> int:
    """Serve until the controller is gone. Returns the exit code."""
    watcher = watch_parent()
    parser = argparse.ArgumentParser(description="rollout worker of areal_lab")
    parser.add_argument("--pipe", required=True, help="to the controller (host.pipes.open_pipe)")
    arguments = parser.parse_args()
    code = asyncio.run(_run(arguments.pipe, os.environ.pop(TOKEN_VARIABLE, "")))
    del watcher
    return code


if __name__ == "__main__":
    sys.exit(main())
