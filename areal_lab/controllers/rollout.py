"""The controller of rollouts: `control.Coordinator` decides, and a program trains at its own pace.

    problems --StartGroup--> workers --arrays--> finished groups --Train--> prepare_batch()
                                | host lost: its running groups start over elsewhere
    update_weights() --WeightsOffered--> PushWeights: every host gets the folder once

The pool keeps the tensors of a batch until `free`. `events.jsonl` has what happened and what was
decided. A step counts as done when the program takes the next batch or brings weights; checkpoints
are the program's, so `Save` does nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from areal_lab.config.functions import pickle_function
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import TOO_FEW_GROUPS, Coordinator
from areal_lab.control.events import (
    Event,
    Finish,
    RunStarted,
    Train,
    TrainStepDone,
    Version,
    WeightsOffered,
)
from areal_lab.control.limits import Limits
from areal_lab.control.scaling import ScalingWatch
from areal_lab.controllers.batch import BatchMetadata, DistributedBatch, ShardMetadata
from areal_lab.controllers.calls import Traffic
from areal_lab.controllers.host_pool import HostPool
from areal_lab.controllers.performer import RolloutPerformer
from areal_lab.controllers.workers import Workers
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.durable import replace_bytes
from areal_lab.pipeline.drive import Observer, ScaledRun, UserRequest, drive
from areal_lab.pipeline.fleet import first_error
from areal_lab.resolve.limits import limits_of
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import TRAINER, RunHeader, engine_process
from areal_lab.runlog.replay import limits_to_fields


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
    coordinator: Coordinator = field(init=False)
    workers: Workers = field(init=False)
    _performer: RolloutPerformer = field(init=False)
    _log: EventLog = field(init=False)
    _driving: asyncio.Task[Finish] = field(init=False)
    _given: dict[str, tuple[Train, list[ShardMetadata]]] = field(default_factory=dict)
    """Batches that were prepared and not freed."""
    _batches: count[int] = field(default_factory=count)
    _prepared: int = 0
    """Batches, without those that came back."""
    _preparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _error: BaseException | None = None

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
            CallFailed: a worker could not start.
            ChildDied: it ended, or its host is lost.
        """
        reward = config.reward.fn
        if reward_fn is not None:
            file = pool.folder / "reward.pickle"
            replace_bytes(file, pickle_function(reward_fn))
            reward = str(file)
        controller = AsyncRolloutController(
            pool=pool,
            config=config,
            problems=PromptSource(problems, seed=config.seed),
            reward=reward,
            limits=replace(limits_of(config), save_every_steps=0, weights_offered=True),
        )
        await controller.workers.start()
        controller._begin()
        return controller

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.limits)
        events: asyncio.Queue[Event | UserRequest] = asyncio.Queue()
        self.workers = Workers(
            pool=self.pool,
            config=self.config,
            reward=self.reward,
            tell=events.put_nowait,
            fail=self._fail,
            counts=self.counts,
        )
        self._performer = RolloutPerformer(
            workers=self.workers,
            problems=self.problems,
            shards=self.pool.shards,
            counts=self.counts,
            events=events,
            fail=self._fail,
        )

    @property
    def events(self) -> Path:
        """The event log."""
        return RunFolder(self.pool.folder / self.owner).events

    @property
    def traffic(self) -> Traffic:
        """Bytes between this process and its workers."""
        return self.workers.traffic

    async def prepare_batch(self) -> DistributedBatch:
        """The next batch: `dataset.batch_size` groups, the oldest finished ones first.

        Generation runs ahead by `rollout.max_head_offpolicyness` versions at most (eq. 3), or as
        `rollout.schedule` says.

        Raises:
            Exception: what a worker failed with, or that no host is left.
        """
        performer = self._performer
        async with self._preparing:
            self._check_goes_on()
            self._end_step()
            while (step := performer.step) is None or step.taken or step.ended.done():
                self._check_goes_on()
                performer.changed.clear()
                await performer.changed.wait()
            step.taken = True
        self._prepared += 1
        shards = [performer.done.pop(group) for group in step.train.groups]
        batch = DistributedBatch(
            BatchMetadata(
                batch_id=f"{self.owner}-{next(self._batches)}",
                global_step=self._prepared,
                total_batch_size=sum(shard.batch_size for shard in shards),
                shards=shards,
            )
        )
        self._given[batch.metadata.batch_id] = step.train, shards
        return batch

    def take_back(self, batch: DistributedBatch) -> None:
        """Take a batch back that was not trained on: it comes again in later ones.

        Raises:
            ValueError: it was freed, or taken back before, or weights were brought since.
        """
        given = self._given.get(batch.metadata.batch_id)
        if given is None:
            raise ValueError(
                f"batch {batch.metadata.batch_id!r} was freed or taken back before; nothing of it "
                "is left"
            )
        if self._prepared <= self._performer.versions[self.version]:
            raise ValueError(
                f"batch {batch.metadata.batch_id!r} was followed by weights, with which every "
                "batch so far was trained on"
            )
        del self._given[batch.metadata.batch_id]
        self._prepared -= 1
        self._performer.give_back(*given)

    async def update_weights(self, weights: WeightsFolder) -> None:
        """Interrupt generation, bring a trainer's weights to every host, and continue.

        With `rollout.interruptible=false`, and with `rollout.schedule=one_step_overlap`, it waits
        for the responses that run.

        Args:
            weights: what `AsyncTrainController.export` returned.

        Raises:
            Exception: no worker could load them.
        """
        performer, version = self._performer, min(weights.version, self._prepared)
        performer.versions.setdefault(weights.version, version)
        if version <= self.coordinator.counts.pushed_version or self._driving.done():
            await self.workers.pause()
            await self.workers.load(weights)
            await performer.resume_unless_stopped()
        else:
            performer.offered = weights
            performer.pushed.clear()
            performer.events.put_nowait(WeightsOffered(version))
            if version == self._prepared:
                self._end_step()
            pushing = asyncio.create_task(performer.pushed.wait())
            await asyncio.wait({pushing, self._driving}, return_when=asyncio.FIRST_COMPLETED)
            if not pushing.done():
                pushing.cancel()
                self._check_goes_on()
        self.version = weights.version

    async def pause(self) -> None:
        """Stop decoding on all hosts, until `resume`."""
        self._performer.paused = True
        await self.workers.pause()

    async def resume(self) -> None:
        """Decode again."""
        self._performer.paused = False
        await self._performer.resume_unless_stopped()

    async def free(self, batch: DistributedBatch) -> None:
        """Free the tensors of a batch that was trained on."""
        self._given.pop(batch.metadata.batch_id, None)
        self.pool.shards.free(batch.shards)

    async def close(self) -> None:
        """End the workers, and free what was not trained on."""
        self._performer.close()
        self._driving.cancel()
        await asyncio.gather(self._driving, return_exceptions=True)
        await self.workers.close()
        self.pool.shards.free(self._performer.done.values())
        for _, shards in self._given.values():
            self.pool.shards.free(shards)
        self._log.close()

    # --- internal --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.events.parent.mkdir(parents=True)
        engines = tuple(self.workers.alive)
        self._log = EventLog(
            self.events,
            RunHeader(
                mode="train",
                started_at=time.time(),
                limits=limits_to_fields(self.limits),
                processes=(TRAINER, *map(engine_process, engines)),
            ),
            clock=time.time,
        )
        observer: Observer = self._log
        if rule := self.config.rollout.scaling.rule(self.workers.startup_s):
            observer = ScaledRun(
                log=self._log,
                watch=ScalingWatch(rule, self.coordinator),
                pool=self.workers,
                generated_tokens=lambda: self.counts["generated_tokens"],
            )
        self._driving = asyncio.create_task(
            drive(
                self.coordinator,
                self._performer,
                RunStarted(engines),
                self._performer.events,
                observer,
            )
        )
        self._driving.add_done_callback(self._over)

    def _over(self, driving: asyncio.Task[Finish]) -> None:
        if not driving.cancelled() and (error := driving.exception()) is not None:
            self._fail(first_error(error))
        self._performer.changed.set()

    def _end_step(self) -> None:
        """Tell that the program has trained on the batch that it took last."""
        step = self._performer.step
        if step is not None and step.taken and not step.ended.done():
            version = self.coordinator.counts.trained_version + 1
            step.ended.set_result(TrainStepDone(version))

    def _check_goes_on(self) -> None:
        """Refuse to wait for groups that never come."""
        if self._error is not None:
            raise self._error
        steps = self.limits.train_steps
        if steps is not None and self._prepared >= steps:
            raise RuntimeError(
                f"total_train_steps is {steps}, and as many batches were prepared; raise it, or "
                "take back a batch that was not trained on"
            )
        if self._driving.done():
            reason = self._driving.result().reason
            too_few = f"rollout.dynamic_sampling: {self.coordinator.failure}"
            raise RuntimeError(
                too_few if reason == TOO_FEW_GROUPS else f"the run is over ({reason})"
            )

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._performer.changed.set()
