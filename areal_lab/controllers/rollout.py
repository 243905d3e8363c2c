"""The controller of rollouts: groups for workers, batches as metadata, staleness by eq. 3.

    next problems --least loaded host--> workers --metadata--> backlog --oldest first--> batch
                                          | host lost: its groups start again elsewhere
    update_weights: every host gets the folder once; its engines load it and continue

The tensors of a batch stay on the hosts that made them until `free`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from areal_lab.capacity import open_slots
from areal_lab.cluster.host import Host
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.shards.client import HttpStore
from areal_lab.cluster.shards.connections import Agent, Connections, Fence
from areal_lab.cluster.shards.errors import DataPlaneError
from areal_lab.cluster.shards.metadata import BatchMetadata, DistributedBatch
from areal_lab.cluster.shards.protocol import AsyncStore
from areal_lab.config.functions import pickle_function
from areal_lab.config.problem import ConfigError, Kind
from areal_lab.config.problem import Problem as SettingsProblem
from areal_lab.config.record import value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.control.admission import start_limit
from areal_lab.control.backlog import Backlog
from areal_lab.control.events import GroupId, Version
from areal_lab.control.limits import Limits
from areal_lab.controllers.calls import Caller, CallFailed, Traffic
from areal_lab.controllers.host_pool import HostPool
from areal_lab.controllers.wire import (
    GenerateGroup,
    GroupDone,
    LoadWeights,
    Pause,
    Resume,
    StartWorker,
)
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.pipes import KEY_VARIABLE
from areal_lab.host.processes import ChildDied
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import limits_of
from areal_lab.preflight.placement import machine_of, place_engines
from areal_lab.rewards.service import RewardFunction

_WORKER: Final = "areal_lab.controllers.rollout_worker"
_CONNECT_S: Final = 120.0


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker and its host."""

    seat: str
    host: Host
    calls: Caller
    engines: int
    running: set[GroupId] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class AsyncRolloutController:
    """Rollout workers on hosts. Create it with `start`, and always `close` it."""

    pool: HostPool
    config: TrainConfig
    problems: PromptSource
    reward: str
    limits: Limits
    version: Version = 0
    """Of the engines' weights."""
    counts: Counter[str] = field(default_factory=Counter)
    """`groups`, `filtered_groups`, `lost_groups`, `generated_tokens`, `discarded_tokens`,
    `tensor_bytes`, `worker_losses`."""
    owner: str = field(default_factory=lambda: f"rollouts-{secrets.token_hex(4)}")
    _workers: list[_Worker] = field(default_factory=list)
    _unsent: list[GroupId] = field(default_factory=list)
    """Groups that wait for a worker, while there is none."""
    _store: AsyncStore = field(init=False)
    _connections: Connections = field(init=False)
    _backlog: Backlog = field(init=False)
    _began: dict[GroupId, Version] = field(default_factory=dict)
    """Groups that run or wait, with the version at which they started."""
    _done: dict[GroupId, GroupDone] = field(default_factory=dict)
    _given: dict[str, list[GroupDone]] = field(default_factory=dict)
    """Groups of the batches that were prepared and not freed, by batch."""
    _numbers: count[int] = field(default_factory=count)
    _batches: count[int] = field(default_factory=count)
    _trained: int = 0
    """Groups that `prepare_batch` gave away."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _restarts: Counter[str] = field(default_factory=Counter)
    """Of workers whose hosts were there, by seat."""
    _error: BaseException | None = None
    _weights: WeightsFolder | None = None
    """The newest, which a worker that starts later gets."""
    _weights_host: Host | None = None
    _closed_traffic: Traffic = field(default_factory=Traffic)
    """Of workers that are gone."""

    @staticmethod
    async def start(
        pool: HostPool,
        config: TrainConfig,
        problems: Sequence[Problem],
        *,
        reward_fn: RewardFunction | None = None,
    ) -> AsyncRolloutController:
        """Start a worker on each host that generates; returns when their engines are ready.

        Args:
            pool: the hosts.
            config: of engines, sampling, rewards and staleness.
            problems: to draw from, epoch by epoch.
            reward_fn: instead of `config.reward.fn`.

        Raises:
            ConfigError: the configuration has settings that controllers do not follow.
            CallFailed: a worker could not start.
            ChildDied: it ended, or its host is lost.
        """
        check_settings(config)
        reward = config.reward.fn
        if reward_fn is not None:
            file = pool.folder / "reward.pickle"
            file.write_bytes(pickle_function(reward_fn))
            reward = str(file)
        controller = AsyncRolloutController(
            pool=pool,
            config=config,
            problems=PromptSource(problems, seed=config.seed),
            reward=reward,
            limits=limits_of(config),
        )
        seats = dict.fromkeys(pool.hosts.placement.engines)
        tasks: list[asyncio.Task[_Worker]] = []
        try:
            async with asyncio.TaskGroup() as starting:
                tasks += [starting.create_task(controller._start_worker(seat)) for seat in seats]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            started = [task for task in tasks if not task.cancelled() and not task.exception()]
            controller._workers = [task.result() for task in started]
            if len(started) < len(seats):
                await controller.close()
        for worker in controller._workers:
            controller._spawn(controller._watch(worker))
        return controller

    def __post_init__(self) -> None:
        self._connections = Connections(self.pool.hosts.hosts.token, fence=Fence())
        self._store = AsyncStore(HttpStore(Agent("127.0.0.1:1"), self._connections))
        self._backlog = self.limits.order.make_backlog(self.limits.batch_groups)

    @property
    def traffic(self) -> Traffic:
        """Bytes between this process and its workers."""
        ours = [worker.calls.traffic for worker in self._workers]
        every = [self._closed_traffic, *ours]
        return Traffic(
            sum(one.sent_bytes for one in every), sum(one.received_bytes for one in every)
        )

    async def prepare_batch(self) -> DistributedBatch:
        """The next batch: `dataset.batch_size` groups, the oldest finished ones first.

        Generation runs ahead by `rollout.max_head_offpolicyness` versions at most (eq. 3).

        Raises:
            Exception: what a worker failed with, or that no host is left.
        """
        wanted, chosen = self.limits.batch_groups, list[GroupDone]()
        while len(chosen) < wanted:
            self._fill()
            if self._error is not None:
                raise self._error
            if not self._backlog.ready(self.version, wanted - len(chosen)):
                self._check_not_over(wanted)
                self._changed.clear()
                await self._changed.wait()
                continue
            for group in self._backlog.take(wanted - len(chosen)):
                done = self._done.pop(group)
                if self._is_here(done):
                    chosen.append(done)
                    del self._began[group]
                else:
                    self._start_again(group, done)
        self._trained += wanted
        shards = [done.shard for done in chosen if done.shard is not None]
        self._fill()
        batch = DistributedBatch(
            BatchMetadata(
                batch_id=f"{self.owner}-{next(self._batches)}",
                global_step=self._trained // wanted,
                total_batch_size=sum(shard.batch_size for shard in shards),
                shards=shards,
            )
        )
        self._given[batch.metadata.batch_id] = chosen
        return batch

    def take_back(self, batch: DistributedBatch) -> None:
        """Take a batch back that was not trained on, as after `BatchMissing`: what is left of it
        comes again in a later one, and what is lost is generated again.

        Raises:
            ValueError: it was freed, or taken back before.
        """
        given = self._given.pop(batch.metadata.batch_id, None)
        if given is None:
            raise ValueError(
                f"batch {batch.metadata.batch_id!r} was freed or taken back before; nothing of it "
                "is left"
            )
        self._trained -= len(given)
        for done in given:
            if self._is_here(done):
                self._began[done.group] = self.version
                self._backlog.started(done.group, self.version)
                self._done[done.group] = done
                self._backlog.finished(done.group, self.version)
            else:
                self._start_again(done.group, done)
        self._changed.set()

    async def update_weights(self, weights: WeightsFolder) -> None:
        """Interrupt generation, bring a trainer's weights to every host, and continue.

        Args:
            weights: what `AsyncTrainController.export` returned.

        Raises:
            Exception: no worker could load them.
        """
        self._weights, self._weights_host = weights, self.pool.hosts.trainer_host
        workers = list(self._workers)
        results = await asyncio.gather(
            *(self._load(worker) for worker in workers), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and len(errors) == len(workers):
            raise errors[0]
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, BaseException):  # it would generate with older weights
                await worker.calls.process.stop(at_once=True)
        self.version = weights.version
        self._fill()

    async def pause(self) -> None:
        """Stop decoding on all hosts, until `resume`."""
        await asyncio.gather(*(worker.calls.ask(Pause()) for worker in self._workers))

    async def resume(self) -> None:
        """Decode again."""
        await asyncio.gather(*(worker.calls.ask(Resume()) for worker in self._workers))

    async def free(self, batch: DistributedBatch) -> None:
        """Free the tensors of a batch that was trained on; those of lost hosts are gone."""
        self._given.pop(batch.metadata.batch_id, None)
        await self._store.free(batch.shards)

    async def close(self) -> None:
        """End the workers and free what they hold."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._end, self._workers))
        await asyncio.to_thread(self._connections.close)

    async def _end(self, worker: _Worker) -> None:
        """End a worker, and free what its host holds for this controller."""
        with suppress(ChildDied):
            await worker.calls.process.stop()
        await worker.calls.close()
        if not worker.host.lost.is_set():
            facts = worker.host.facts
            home = Agent(f"{facts.address}:{facts.port}", facts.incarnation)
            with suppress(DataPlaneError):  # it is gone, with what it held
                await AsyncStore(HttpStore(home, self._connections)).free(owner=self.owner)

    def _check_not_over(self, wanted: int) -> None:
        """Refuse to wait for groups that never come."""
        steps, running = self.limits.train_steps, any(one.running for one in self._workers)
        if steps is not None and self._trained >= steps * wanted and not running:
            raise RuntimeError(
                f"total_train_steps is {steps}, and as many batches were prepared; raise it, or "
                "take back a batch that was not trained on"
            )

    # --- groups ---

    def _fill(self) -> None:
        """Start groups, as eq. 3 and the engines allow."""
        if not self._workers:
            return
        limit = start_limit(
            self.limits.schedule,
            version=self.version,
            batch_groups=self.limits.batch_groups,
            train_steps=self.limits.train_steps,
        )
        running = sum(len(worker.running) for worker in self._workers)
        slots = open_slots(
            started=self._trained + len(self._began),
            in_flight=running,
            limit=limit,
            max_in_flight=self.limits.max_in_flight,
        )
        for _ in range(slots):
            group = next(self._numbers)
            self._began[group] = self.version
            self._backlog.started(group, self.version)
            self._send(group)

    def _send(self, group: GroupId) -> None:
        """Send a group to the worker with the fewest groups for its engines; while there is none,
        it waits for one."""
        if not self._workers:
            self._unsent.append(group)
            return
        worker = min(self._workers, key=lambda one: len(one.running) / one.engines)
        worker.running.add(group)
        self._spawn(self._generate(worker, group))

    async def _generate(self, worker: _Worker, group: GroupId) -> None:
        request = GenerateGroup(group=group, problem=self.problems[group])
        try:
            done: GroupDone = await worker.calls.ask(request)
        except ChildDied:
            return  # `_watch` starts it again elsewhere
        except CallFailed as error:
            self._fail(error)
            return
        if group not in worker.running:
            return  # it was started again elsewhere meanwhile
        worker.running.discard(group)
        began = self._began[group]
        self.counts["groups"] += 1
        self.counts["generated_tokens"] += done.tokens
        self.counts["tensor_bytes"] += done.tensor_bytes
        if done.failure:
            self.counts["filtered_groups"] += 1
            self._backlog.removed(group, began)
            del self._began[group]
        else:
            self._done[group] = done
            self._backlog.finished(group, began)
        self._changed.set()

    def _is_here(self, done: GroupDone) -> bool:
        """Whether the host that has its tensors is not lost."""
        assert done.shard is not None, "it can be trained on"
        alive = {worker.host.facts.incarnation for worker in self._workers}
        return done.shard.incarnation in alive

    def _start_again(self, group: GroupId, done: GroupDone) -> None:
        """Generate a group whose tensors were lost with their host."""
        self.counts["lost_groups"] += 1
        self.counts["discarded_tokens"] += done.tokens
        assert done.shard is not None, "it could be trained on"
        self._spawn(self._store.free([done.shard]))  # only its worker may be lost
        self._began[group] = self.version
        self._backlog.started(group, self.version)
        self._send(group)

    # --- workers ---

    async def _start_worker(self, seat: str) -> _Worker:
        """Start the worker of the host that sits in a seat."""
        hosts = self.pool.hosts
        host = await hosts.hosts.host_in(seat)
        engines = hosts.placement.engines.count(seat)
        where, connection = hosts.listener.expect()
        process = await host.start_module(
            f"rollout worker of {host.name}",
            _WORKER,
            ["--pipe", where],
            log="rollouts.log",
            environment={
                KEY_VARIABLE: hosts.listener.key.hex(),
                TOKEN_VARIABLE: hosts.hosts.token,
            },
        )
        try:
            pipe = await _first(connection, process.ended())
            if pipe is None:
                raise await process.died()
        except BaseException:
            await process.stop(at_once=True)
            raise
        worker = _Worker(seat, host, Caller(pipe, process), engines)
        try:
            await worker.calls.ask(await self._setup(worker))
            held = None
            while held is not self._weights:  # there may be newer ones meanwhile
                held = self._weights
                await self._load(worker)
        except BaseException:
            await process.stop(at_once=True)
            await worker.calls.close()
            raise
        return worker

    async def _setup(self, worker: _Worker) -> StartWorker:
        host, reward = worker.host, self.reward
        config = of_worker(self.config, worker.engines)
        if reward.endswith(".pickle"):
            content = await asyncio.to_thread(Path(reward).read_bytes)
            reward = str(await host.put_file("reward.pickle", content))
        return StartWorker(
            config=config,
            model=await self.pool.hosts.files.on(host, self.pool.model),
            reward=reward,
            agent=f"{host.facts.address}:{host.facts.port}",
            incarnation=host.facts.incarnation,
            owner=self.owner,
            log_folder=Path(host.facts.folder) / "rollouts",
        )

    async def _load(self, worker: _Worker) -> None:
        """Bring the newest weights to a worker's host, and into its engines."""
        assert self._weights is not None, "set by the caller"
        there, _ = await self.pool.hosts.files.read_weights(
            worker.host, self._weights, self._weights_host
        )
        await worker.calls.ask(LoadWeights(weights=there))

    async def _watch(self, worker: _Worker) -> None:
        """Wait for the end of a worker; its groups start again elsewhere, and so does it."""
        error = await worker.calls.process.died()
        self.counts["worker_losses"] += 1
        self.pool.say(str(error).splitlines()[0])
        self._workers.remove(worker)
        if worker.host.lost.is_set():
            self._connections.fence.lose(f"{worker.host.facts.address}:{worker.host.facts.port}")
        traffic = worker.calls.traffic
        self._closed_traffic.sent_bytes += traffic.sent_bytes
        self._closed_traffic.received_bytes += traffic.received_bytes
        await worker.calls.close()
        running, worker.running = sorted(worker.running), set()
        self._spawn(self._replace(worker, error))
        for group in running:
            self.counts["lost_groups"] += 1
            self._backlog.restarted(group, self._began[group], self.version)
            self._began[group] = self.version
            self._send(group)

    async def _replace(self, worker: _Worker, error: BaseException) -> None:
        """Start a worker on the host that takes the seat of a lost one's; on the same host at most
        `rollout.max_engine_restarts` times."""
        if not worker.host.lost.is_set():
            self._restarts[worker.seat] += 1
            if self._restarts[worker.seat] > self.config.rollout.max_engine_restarts:
                if not self._workers:
                    self._fail(error)
                return
        try:
            fresh = await self._start_worker(worker.seat)
        except Exception as failed:
            self.pool.say(f"no worker could be started in place of {worker.host.name}: {failed}")
            if not self._workers:
                self._fail(error)
            return
        self._workers.append(fresh)
        self._spawn(self._watch(fresh))
        unsent, self._unsent = self._unsent, []
        for group in unsent:
            self._send(group)
        self._fill()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def check_settings(config: TrainConfig) -> None:
    """Refuse settings of runs that controllers do not follow.

    Raises:
        ConfigError: with all of them.
    """
    rollout = config.rollout
    refused = {
        "rollout.addresses": (bool(rollout.addresses), "start engines of their own"),
        "rollout.schedule": (
            rollout.schedule not in ("asynchronous", "synchronous"),
            "leave it to their program when weights change; take asynchronous and its eta",
        ),
        "rollout.interruptible": (not rollout.interruptible, "interrupt for new weights"),
        "rollout.drop_late": (rollout.drop_late, "drop no groups"),
        "rollout.dynamic_sampling.enabled": (
            rollout.dynamic_sampling.enabled,
            "replace no groups of equal rewards",
        ),
        "rollout.scaling.max_engines": (
            rollout.scaling.max_engines > 0,
            "have a fixed number of engines",
        ),
    }
    if problems := [
        SettingsProblem(
            Kind.SETTINGS,
            name,
            f"{name} is {value_of(config, name)!r}, but controllers {why}; leave it out",
        )
        for name, (wrong, why) in refused.items()
        if wrong
    ]:
        raise ConfigError(*problems)


def of_worker(config: TrainConfig, engines: int) -> TrainConfig:
    """The configuration of a worker: this many of the run's engines, on its own host."""
    plan = engine_plan(config)
    tensor = plan.tensor_parallel
    rollout = {
        "engines": engines,
        "backend": f"{plan.backend}:d{engines}t{tensor}" if tensor > 1 else plan.backend,
        "device": place_engines(config, machine_of(config)).device,
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
