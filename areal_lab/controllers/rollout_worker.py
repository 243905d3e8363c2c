"""The rollout worker of a host: `python -m areal_lab.controllers.rollout_worker --pipe WHERE`.

    GenerateGroup --> engines of this host --> rewards --> arrays
                  <-- GroupDone, with the arrays

It starts the engines and reward workers of its host. If an engine is lost, its samples continue on
another one of the host.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from areal_lab.config.functions import unpickle_function
from areal_lab.control.events import GroupId
from areal_lab.control.sampling import DynamicSampling
from areal_lab.controllers.calls import serve
from areal_lab.controllers.wire import (
    AddEngine,
    DropGroup,
    GenerateGroup,
    GroupDone,
    LoadWeights,
    Pause,
    Resume,
    RetireEngine,
    StartWorker,
)
from areal_lab.data.arrays import pack_samples
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.resubmit import NO_SAMPLES
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.host.pipes import open_pipe
from areal_lab.host.processes import watch_parent
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.rollout.turns import Unfinished
from areal_lab.pipeline.rollout.workflow import open_rollout
from areal_lab.pipeline.servers.fixed_model import start_servers
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import PushTo, Weights
from areal_lab.resolve.limits import sampling_of
from areal_lab.resolve.resolved import serve_unchecked
from areal_lab.rewards.service import RewardFunction, RewardService
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Lines

_POLL_S: Final = 0.1


@dataclass(slots=True)
class Worker:
    """A worker that has started."""

    setup: StartWorker
    pool: ServerPool
    rollout: Rollout
    rewards: RewardService
    sampling: DynamicSampling | None
    """Which groups are replaced."""
    _running: dict[GroupId, asyncio.Task[ScoredGroup]] = field(default_factory=dict)

    async def handle(self, request: object) -> GroupDone | None:
        """The reply to a request."""
        if isinstance(request, GenerateGroup):
            return await self._generate(request)
        match request:
            case LoadWeights(weights=weights):
                await self.pool.load(weights)
            case DropGroup(group=group):
                if (running := self._running.get(group)) is not None:
                    running.cancel()
                    await self.pool.abort(self.rollout.running_requests("train", group))
            case AddEngine():
                await self._add_engine()
            case RetireEngine():
                self.pool.retire_engine()
            case Pause():
                await self.pool.pause()
            case Resume():
                await self.pool.resume()
            case _:
                name = type(request).__name__
                raise TypeError(f"a rollout worker got a {name}, which is no request")
        return None

    async def _add_engine(self) -> None:
        number = self.pool.add_engine()
        while self.pool.changing:
            await asyncio.sleep(_POLL_S)
        if number not in self.pool.alive:
            raise RuntimeError("it did not become ready; rollouts.log of its host has the reason")

    async def _generate(self, request: GenerateGroup) -> GroupDone:
        running = self._running[request.group] = asyncio.create_task(self._scored(request))
        try:
            scored = await running
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
            return _unusable(request.group, "dropped")
        except Exception:
            if self.pool.given_up.is_set():
                await asyncio.Event().wait()  # this process ends, and another host generates it
            raise
        finally:
            running.cancel()
            del self._running[request.group]
        rewards = tuple(sample.outcome.reward for sample in scored.samples)
        trajectories = () if scored.failure else scored.trajectories(request.group)
        mask_truncated = self.setup.config.actor.mask_truncated
        failure = scored.why_filtered(self.sampling, mask_truncated=mask_truncated)
        if failure:
            return _unusable(request.group, failure, rewards=rewards, tokens=scored.tokens)
        return GroupDone(
            group=request.group,
            packed=await asyncio.to_thread(pack_samples, trajectories),
            failure="",
            rewards=rewards,
            tokens=scored.tokens,
            head_version=min(t.head_version for t in trajectories),
            tail_version=max(t.tail_version for t in trajectories),
        )

    async def _scored(self, request: GenerateGroup) -> ScoredGroup:
        """Generate on as many engines as it takes."""
        partial = NO_SAMPLES
        while True:
            engines = await self.pool.for_rollouts()
            try:
                return await self.rollout.group(
                    request.problem,
                    engine=engines[request.engine % len(engines)],
                    stream="train",
                    group=request.group,
                    samples=self.setup.config.gconfig.n_samples,
                    partial=partial,
                )
            except Unfinished as unfinished:
                partial = unfinished.samples


async def start_worker(setup: StartWorker, fleet: Fleet) -> Worker:
    """Start engines and rewards; `fleet` stops them."""
    config, display = setup.config, Lines(Console(file=sys.stderr))
    folder = RunFolder(setup.log_folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "logs").mkdir(exist_ok=True)
    served = serve_unchecked(config, setup.model)
    pool = await start_servers(
        served,
        folder,
        fleet=fleet,
        display=display,
        restarts=config.rollout.max_engine_restarts,
        prepare_push=partial(_load_folder, attached=bool(config.rollout.addresses)),
    )
    rewards = await fleet.stack.enter_async_context(
        RewardService.of(config.reward, _reward(setup.reward), log_folder=folder.path / "logs")
    )
    rollout = await open_rollout(
        served,
        engines=pool,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
    )
    return Worker(setup, pool, rollout, rewards, sampling_of(config))


def _unusable(
    group: GroupId, failure: str, *, rewards: tuple[float, ...] = (), tokens: int = 0
) -> GroupDone:
    return GroupDone(
        group=group,
        packed=None,
        failure=failure,
        rewards=rewards,
        tokens=tokens,
        head_version=0,
        tail_version=0,
    )


def _load_folder(
    weights: Weights, clients: Sequence[EngineClient], mode: PauseMode, *, attached: bool
) -> PushTo:
    """Every engine reads the folder, which is on this host."""
    del clients
    assert isinstance(weights, WeightsFolder), "controllers send folders"
    return lambda client: _load(client, weights, mode, attached=attached)


async def _load(
    client: EngineClient, weights: WeightsFolder, mode: PauseMode, *, attached: bool
) -> None:
    if weights.checksum or attached:  # else the model that it was started with
        await client.load_weights(weights, mode)


def _reward(reward: str) -> RewardFunction | str:
    path = Path(reward)
    return unpickle_function(path.read_bytes()) if path.suffix == ".pickle" else reward


async def _run(where: str) -> int:
    """Serve until the controller is gone (0), or no engine is left (1)."""
    pipe, worker = open_pipe(where), None
    started = asyncio.Event()
    async with Fleet() as fleet:

        async def handle(request: Any) -> object:
            nonlocal worker
            if isinstance(request, StartWorker):
                worker = await start_worker(request, fleet)
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
    code = asyncio.run(_run(arguments.pipe))
    del watcher
    return code


if __name__ == "__main__":
    sys.exit(main())
