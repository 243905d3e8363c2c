"""The actions of the coordinator in a run of controllers, some of which the program performs.

StartGroup --> a worker --> GroupDone, whose tensors this process keeps
Train, PushWeights --> wait for the program: the next batch, new weights
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from areal_lab.control.events import (
    BatchReturned,
    Event,
    GroupFiltered,
    GroupFinished,
    GroupId,
    StartGroup,
    Train,
    TrainStepDone,
    Version,
)
from areal_lab.control.frontier import Frontier
from areal_lab.controllers.batch import HeldShards, ShardMetadata
from areal_lab.controllers.wire import DropGroup, GenerateGroup, GroupDone
from areal_lab.controllers.workers import Worker, Workers
from areal_lab.data.arrays import field_bytes
from areal_lab.data.problems import PromptSource
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.processes import ChildDied
from areal_lab.pipeline.drive import UserRequest


@dataclass(slots=True, eq=False)
class Step:
    """A `Train` that the program performs."""

    train: Train
    ended: asyncio.Future[TrainStepDone | None]
    """None if the batch came back."""
    taken: bool = False
    """Whether `prepare_batch` gave it away."""


@dataclass(slots=True, kw_only=True)
class RolloutPerformer:
    """The groups of a run, and what the program has of them; see `pipeline.drive.Performer`."""

    workers: Workers
    problems: PromptSource
    shards: HeldShards
    """Of the host pool."""
    counts: Counter[str]
    events: asyncio.Queue[Event | UserRequest]
    fail: Callable[[BaseException], None]
    """Gets the errors of tasks."""
    step: Step | None = None
    """The newest."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a step, or the run is over."""
    versions: dict[Version, Version] = field(default_factory=lambda: {0: 0})
    """The coordinator's version, which counts batches, of each version that a trainer brought."""
    offered: WeightsFolder | None = None
    """The newest weights."""
    pushed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when they are loaded."""
    interrupted: bool = False
    """By the coordinator."""
    paused: bool = False
    """By the program."""
    done: dict[GroupId, ShardMetadata] = field(default_factory=dict)
    """Groups that wait for training."""
    _closing: bool = False
    _abandoned: dict[GroupId, asyncio.Task[Any]] = field(default_factory=dict)
    """For each canceled group, the task that has its worker drop it; a recycled one waits."""
    _moves: dict[GroupId, asyncio.Queue[StartGroup]] = field(default_factory=dict)
    """For each running group, a queue with its next engines."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def close(self) -> None:
        """Let groups that are canceled from now on end with their workers."""
        self._closing = True
        for task in self._tasks:
            task.cancel()

    async def generate_group(self, start: StartGroup) -> GroupFinished | GroupFiltered:
        """Have workers generate a group, one after the other if they are lost."""
        moves = self._moves[start.group] = asyncio.Queue()
        try:
            if (abandoned := self._abandoned.get(start.group)) is not None:
                await asyncio.wait([abandoned])
            while True:
                if (worker := self.workers.alive.get(start.engine)) is None:
                    start = await moves.get()
                    continue
                done = await self._generated(worker, start)
                if done is None or worker not in self.workers.workers:  # lost, or right after it
                    self.counts["lost_groups"] += 1
                    start = await moves.get()
                    continue
                while not moves.empty():  # it ended where it was, on an engine that leaves
                    start = moves.get_nowait()
                event = self._ended(done, worker)
                if isinstance(event, GroupFiltered) or event.head_version >= start.version:
                    return event
                self.counts["lost_groups"] += 1  # the coordinator let it start over
                self.counts["discarded_tokens"] += done.tokens
                self.shards.free([self.done.pop(start.group)])
        finally:
            del self._moves[start.group]

    async def _generated(self, worker: Worker, start: StartGroup) -> GroupDone | None:
        """What a worker replies; None if it is lost. If this is canceled, it drops the group."""
        request = GenerateGroup(
            group=start.group,
            problem=self.problems[start.group],
            engine=worker.engines.index(start.engine),
        )
        asking = asyncio.ensure_future(worker.calls.ask(request))
        worker.groups += 1
        try:
            done: GroupDone = await asyncio.shield(asking)
            return done
        except ChildDied:
            return None
        except asyncio.CancelledError:
            if self._closing:
                asking.cancel()
            else:
                abandon = self._abandon(worker, start.group, asking)
                self._abandoned[start.group] = self._spawn(abandon)
            raise
        finally:
            worker.groups -= 1

    async def _abandon(
        self, worker: Worker, group: GroupId, asking: asyncio.Future[GroupDone]
    ) -> None:
        with suppress(ChildDied):
            await worker.calls.ask(DropGroup(group=group))
            await asking
        del self._abandoned[group]

    def _ended(self, done: GroupDone, worker: Worker) -> GroupFinished | GroupFiltered:
        self.counts["groups"] += 1
        self.counts["generated_tokens"] += done.tokens
        if done.packed is None:
            self.counts["filtered_groups"] += 1
            return GroupFiltered(done.group, done.failure)
        self.counts["tensor_bytes"] += sum(map(field_bytes, done.packed.values()))
        self.done[done.group] = self.shards.put(done.packed, worker.host.facts.name)
        head, tail = self.versions[done.head_version], self.versions[done.tail_version]
        return GroupFinished(done.group, head_version=head, tail_version=tail)

    def move_group(self, start: StartGroup) -> None:
        """Give a group its next engine."""
        if (moves := self._moves.get(start.group)) is not None:
            moves.put_nowait(start)

    async def train(self, train: Train) -> TrainStepDone | None:
        """Wait until the program has trained on it: it takes the next batch, or brings weights."""
        self.step = step = Step(train, asyncio.get_running_loop().create_future())
        self.changed.set()
        return await step.ended

    def prepare_save(self, frontier: Frontier) -> None:
        """Nothing: the program saves its trainer."""

    async def save(self, version: Version) -> None:
        """Nothing: the program saves its trainer."""

    def announce_push(self, version: Version) -> None:
        """Nothing: the program keeps the weights until they are loaded."""

    async def interrupt(self, *, by_hand: bool) -> None:
        """Pause every engine."""
        del by_hand
        self.interrupted = True
        await self.workers.pause()

    async def push_weights(self, version: Version) -> None:
        """Load the weights that the program brought."""
        assert self.offered is not None, f"version {version} was offered"
        await self.workers.load(self.offered)
        self.pushed.set()

    async def resume(self) -> None:
        """Resume every engine, unless the program has paused them."""
        self.interrupted = False
        await self.resume_unless_stopped()

    async def resume_unless_stopped(self) -> None:
        """Decode again, unless the coordinator or the program wants it to stop."""
        if not (self.paused or self.interrupted):
            await self.workers.resume()

    async def drop_group(self, group: GroupId) -> None:
        """Free its tensors; one that runs is dropped by its canceled task."""
        if (shard := self.done.pop(group, None)) is not None:
            self.shards.free([shard])

    def give_back(self, train: Train, shards: Iterable[ShardMetadata]) -> None:
        """Have the groups of a batch trained on later."""
        self.done |= zip(train.groups, shards, strict=True)
        self.events.put_nowait(BatchReturned(train.groups, ()))
        step = self.step
        if step is not None and step.train is train and not step.ended.done():
            step.ended.set_result(None)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)
        return task

    def _spawned_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
