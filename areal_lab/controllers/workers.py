"""Rollout workers: a process on each host that generates, with the engines of its seat.

seat --> host --> worker process --pipe--> calls
                       |  it ends: EngineLost for each of its engines
                       '--> started again, here or on the host that takes the seat: EngineJoined
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_lab.cluster.host import Host
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId, EngineJoined, EngineLost, EngineRetired, Event
from areal_lab.controllers.calls import Caller, Traffic
from areal_lab.controllers.host_pool import HostPool
from areal_lab.controllers.wire import (
    AddEngine,
    LoadWeights,
    Pause,
    Resume,
    RetireEngine,
    StartWorker,
)
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.pipes import KEY_VARIABLE
from areal_lab.host.processes import ChildDied
from areal_lab.resolve.placement import place_servers

_MODULE: Final = "areal_lab.controllers.rollout_worker"
_CONNECT_S: Final = 120.0
_POLL_S: Final = 0.1


@dataclass(slots=True, eq=False)
class Worker:
    """A worker and its host."""

    seat: str
    host: Host
    calls: Caller
    engines: list[EngineId]
    """In the order of its own numbers."""
    groups: int = 0
    """That run there."""


@dataclass(slots=True, kw_only=True)
class Workers:
    """The workers of one controller, and by that the engines of its run."""

    pool: HostPool
    config: TrainConfig
    reward: str
    """The reward function by its name, or the path of a pickled one."""
    tell: Callable[[Event], None]
    """Gets the events of engines."""
    fail: Callable[[BaseException], None]
    """Gets the error when no worker is left."""
    counts: Counter[str]
    workers: list[Worker] = field(default_factory=list)
    """All that run; one whose last engine is leaving has groups, but no engine."""
    alive: dict[EngineId, Worker] = field(default_factory=dict)
    weights: WeightsFolder | None = None
    """The newest, which a worker that starts later gets."""
    startup_s: float = 0.0
    """What the first ones took to start."""
    _paused: bool = False
    _weights_host: Host | None = None
    _starting: set[EngineId] = field(default_factory=set)
    """Engines that join for the first time, or again."""
    _leaving: set[EngineId] = field(default_factory=set)
    _restarts: Counter[str] = field(default_factory=Counter)
    """Of workers whose hosts were there, by seat."""
    _closed_traffic: Traffic = field(default_factory=Traffic)
    """Of workers that are gone."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def changing(self) -> bool:
        """Whether engines are starting or leaving."""
        return bool(self._starting or self._leaving)

    @property
    def traffic(self) -> Traffic:
        """Bytes between this process and all workers so far."""
        every = [self._closed_traffic, *(worker.calls.traffic for worker in self.workers)]
        return Traffic(
            sum(one.sent_bytes for one in every), sum(one.received_bytes for one in every)
        )

    async def start(self) -> None:
        """Start a worker in each seat that has engines; if one fails, the others are ended.

        Raises:
            CallFailed: a worker could not start.
            ChildDied: it ended, or its host is lost.
        """
        seats: dict[str, list[EngineId]] = {}
        for engine, seat in enumerate(self.pool.hosts.placement.engines):
            seats.setdefault(seat, []).append(engine)
        began_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as starting:
                for seat, engines in seats.items():
                    starting.create_task(self._start_worker(seat, engines))
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from errors
        except BaseException:
            await self.close()
            raise
        self.alive = dict(sorted(self.alive.items()))
        self.startup_s = time.monotonic() - began_s

    async def close(self) -> None:
        """End the workers."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._end, self.workers))

    async def pause(self) -> None:
        """Stop decoding on all hosts, those that join before `resume` included."""
        self._paused = True
        await self._each(Pause())

    async def resume(self) -> None:
        """Decode again."""
        self._paused = False
        await self._each(Resume())

    async def load(self, weights: WeightsFolder) -> None:
        """Bring a trainer's weights to every host, and into its engines.

        Raises:
            Exception: no worker could load them; one that alone fails is ended.
        """
        self.weights, self._weights_host = weights, self.pool.hosts.trainer_host
        workers = list(self.workers)
        results = await asyncio.gather(*map(self._load, workers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and len(errors) == len(workers):
            raise errors[0]
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, BaseException):  # it would generate with older weights
                await worker.calls.process.stop(at_once=True)

    def add_engine(self) -> EngineId | None:
        """Start another engine; returns its number, or None. It joins once it has the weights."""
        busy = {*self.alive, *self._starting, *self._leaving}
        free = set(range(self.config.rollout.scaling.max_engines)) - busy
        if (number := min(free, default=None)) is not None:
            self._starting.add(number)
            self._spawn(self._add(number))
        return number

    def retire_engine(self) -> EngineId | None:
        """Let the engine with the highest number leave; returns it, or None if it is the last.

        Its groups continue on the others of its host with their tokens, or end on it.
        """
        if len(self.alive) < 2:
            return None
        number = max(self.alive)
        worker = self.alive.pop(number)
        worker.engines.remove(number)
        self._leaving.add(number)
        self.tell(EngineRetired(number))
        self._spawn(self._retire(worker, number))
        return number

    # --- internal --------------------------------------------------------------------------------

    async def _each(self, request: object) -> None:
        results = await asyncio.gather(
            *(worker.calls.ask(request) for worker in self.workers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ChildDied):
                raise result

    async def _start_worker(self, seat: str, engines: Sequence[EngineId]) -> None:
        """Start the worker of the host in a seat; its engines then hold the newest weights."""
        hosts = self.pool.hosts
        host = await hosts.hosts.host_in(seat)
        where, connection = hosts.listener.expect()
        process = await host.start_module(
            f"rollout worker of {host.name}",
            _MODULE,
            ["--pipe", where],
            log="rollouts.log",
            environment={KEY_VARIABLE: hosts.listener.key.hex()},
        )
        try:
            pipe = await _first(connection, process.ended())
            if pipe is None:
                raise await process.died()
        except BaseException:
            await process.stop(at_once=True)
            raise
        worker = Worker(seat, host, Caller(pipe, process), list(engines))
        try:
            await worker.calls.ask(await self._setup(worker))
            held, paused = None, False
            while held is not self.weights or paused is not self._paused:  # they may change here
                if paused is not self._paused:
                    paused = self._paused
                    await worker.calls.ask(Pause() if paused else Resume())
                else:
                    held = self.weights
                    await self._load(worker)
        except BaseException:
            await process.stop(at_once=True)
            await worker.calls.close()
            raise
        self.workers.append(worker)
        self.alive.update(dict.fromkeys(engines, worker))
        self._spawn(self._watch(worker))

    async def _setup(self, worker: Worker) -> StartWorker:
        host, reward = worker.host, self.reward
        if reward.endswith(".pickle"):
            content = await asyncio.to_thread(Path(reward).read_bytes)
            reward = str(await host.put_file("reward.pickle", content))
        return StartWorker(
            config=of_worker(self.config, worker.engines),
            model=await self.pool.hosts.files.on(host, self.pool.model),
            reward=reward,
            log_folder=Path(host.facts.folder) / "rollouts",
        )

    async def _load(self, worker: Worker) -> None:
        """Bring the newest weights to a worker's host, and into its engines."""
        assert self.weights is not None, "set by the caller"
        there, _ = await self.pool.hosts.files.read_weights(
            worker.host, self.weights, self._weights_host
        )
        await worker.calls.ask(LoadWeights(weights=there))

    async def _watch(self, worker: Worker) -> None:
        """Wait for the end of a worker, and start it again."""
        error = await worker.calls.process.died()
        if worker not in self.workers:
            return  # it has left
        self.workers.remove(worker)
        self.counts["worker_losses"] += 1
        self.pool.say(str(error).splitlines()[0])
        host, engines = worker.host, worker.engines
        if not host.lost.is_set():
            self._restarts[worker.seat] += 1
        returns = self._restarts[worker.seat] <= self.config.rollout.max_engine_restarts
        for engine in engines:
            del self.alive[engine]
            self.tell(EngineLost(engine, returns=returns or host.lost.is_set()))
        await self._forget(worker)
        if not returns and not host.lost.is_set():
            self._fail_if_none_left(error)
            return
        self._starting.update(engines)
        try:
            await self._start_worker(worker.seat, engines)
        except Exception as failed:
            self.pool.say(f"no worker could be started in place of {host.name}: {failed}")
            self._starting.difference_update(engines)
            self._fail_if_none_left(error)
            for engine in engines:
                self.tell(EngineLost(engine))
        else:
            self._joined(engines)

    def _joined(self, engines: Sequence[EngineId]) -> None:
        self._starting.difference_update(engines)
        for engine in engines:
            self.tell(EngineJoined(engine))

    def _fail_if_none_left(self, error: BaseException) -> None:
        if not self.alive and not self._starting:
            self.fail(error)

    async def _add(self, number: EngineId) -> None:
        try:
            seat = self.pool.hosts.seat_of(number)
            worker = next((one for one in self.alive.values() if one.seat == seat), None)
            if worker is None:
                await self._start_worker(seat, [number])
            else:
                await worker.calls.ask(AddEngine())
                worker.engines.append(number)
                self.alive[number] = worker
        except Exception as error:  # whatever it is, the run does without this engine
            self._starting.discard(number)
            self.pool.say(f"engine {number} did not start: {str(error).splitlines()[0]}")
        else:
            self._joined([number])

    async def _retire(self, worker: Worker, number: EngineId) -> None:
        try:
            if worker.engines:
                await worker.calls.ask(RetireEngine())
            else:
                while worker.groups:
                    await asyncio.sleep(_POLL_S)
                if worker in self.workers:
                    self.workers.remove(worker)
                    await self._end(worker)
                    await self._forget(worker)
        except ChildDied:
            pass  # `_watch` has seen it
        finally:
            self._leaving.discard(number)

    async def _forget(self, worker: Worker) -> None:
        traffic = worker.calls.traffic
        self._closed_traffic.sent_bytes += traffic.sent_bytes
        self._closed_traffic.received_bytes += traffic.received_bytes
        await worker.calls.close()

    async def _end(self, worker: Worker) -> None:
        with suppress(ChildDied):
            await worker.calls.process.stop()
        await worker.calls.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def of_worker(config: TrainConfig, engines: Sequence[EngineId]) -> TrainConfig:
    """The configuration of a worker: these of the run's engines, on its own host."""
    plan = place_servers(config).engines
    tensor, addresses = plan.tensor_parallel, config.rollout.addresses
    rollout = {
        "engines": len(engines),
        "backend": f"{plan.backend}:d{len(engines)}t{tensor}" if tensor > 1 else plan.backend,
        "device": plan.device,
        "addresses": [addresses[engine] for engine in engines] if addresses else [],
    }
    update = {
        "rollout": config.rollout.model_copy(update=rollout),
        "allocation_mode": "",
        "cluster": config.cluster.model_copy(update={"n_nodes": 1}),
        "scheduler": config.scheduler.model_copy(update={"type": "local"}),
    }
    return config.model_copy(update=update)


async def _first(connection: asyncio.Future[Any], ending: Any) -> Any:
    """The connection of a process; None if it ends before it connects."""
    ended = asyncio.ensure_future(ending)
    try:
        await asyncio.wait(
            {connection, ended}, timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if connection.done():
            return connection.result()
        if ended.done():
            return None
        raise TimeoutError(
            f"a rollout worker did not connect within {_CONNECT_S:g} s; does a firewall let it "
            "through?"
        )
    finally:
        ended.cancel()
