"""Perform the coordinator's actions for real: one queue of events, one owner of the state.

    actions --> lanes and group tasks --> events queue --> Coordinator.handle() --> actions

    task          produces                         waits for              unblocked by
    drive         actions                          an event               any task below
    group (many)  GroupFinished, GroupFiltered     engine, then reward    the engine's reply
    train lane    TrainStepDone, CheckpointDone    Train, Save            the trainer's reply
    weights lane  WeightsPushed                    Interrupt, PushWeights, Resume
                                                                          every engine's echo
    others        EngineLost, EngineJoined, StopRequested: whoever was given the queue

The lanes keep order: what touches the trainer happens one after the other, and so does what touches
the weights of the engines. Their queues are unbounded because the coordinator bounds them: it never
has more than one step, one save and one push outstanding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import (
    Action,
    CheckpointDone,
    Drop,
    Event,
    Finish,
    GroupFiltered,
    GroupFinished,
    GroupId,
    Interrupt,
    PushWeights,
    Resume,
    RunStarted,
    Save,
    StartGroup,
    Train,
    TrainStepDone,
    Version,
    WeightsPushed,
)


class Performer(Protocol):
    """What a run can do; each call returns when it is done, and raises when it cannot be."""

    async def generate_group(self, start: StartGroup) -> GroupFinished | GroupFiltered:
        """Draw and reward the samples of one group, and keep them until trained or dropped.

        If its engine is lost meanwhile, the call waits for `move_group` and goes on.
        """
        ...

    def move_group(self, start: StartGroup) -> None:
        """The engine of a group was lost: what is left of it is generated elsewhere."""
        ...

    async def train(self, train: Train) -> Version:
        """Train on the kept groups and return the new version."""
        ...

    async def save(self, version: Version) -> None:
        """Write a checkpoint of the trainer."""
        ...

    def announce_push(self, version: Version) -> None:
        """`push_weights(version)` comes as soon as engines are ready: keep these weights."""
        ...

    async def interrupt(self) -> None:
        """Pause every engine."""
        ...

    async def push_weights(self, version: Version) -> None:
        """Load the version into every engine and compare what they echo."""
        ...

    async def resume(self) -> None:
        """Let every engine go on."""
        ...

    async def drop_group(self, group: GroupId) -> None:
        """Forget the group; abort what still runs of it."""
        ...


class Observer(Protocol):
    """Who is told of everything, in order: the log and the progress display."""

    def event(self, event: Event) -> None:
        """An event, before it is handled."""
        ...

    def action(self, action: Action) -> None:
        """An action, before it is performed."""
        ...


@dataclass(frozen=True, slots=True)
class Lane:
    """Actions performed strictly one after the other."""

    queue: asyncio.Queue[Action | None]
    """`None` ends the lane, after what was put before it."""

    @classmethod
    def new(cls) -> Lane:
        """An empty lane."""
        return cls(asyncio.Queue())

    async def run(self, perform: Callable[[Action], Awaitable[None]]) -> None:
        """Perform what arrives, until the end is put."""
        while (action := await self.queue.get()) is not None:
            await perform(action)


async def drive(
    coordinator: Coordinator,
    performer: Performer,
    started: RunStarted,
    events: asyncio.Queue[Event],
    observer: Observer,
) -> Finish:
    """Drive a run from `started` to its `Finish`.

    Args:
        events: where the tasks put what happened; others put what happens to engines into it, and
            `StopRequested`.

    Raises:
        Exception: the first error of any task, after all others were cancelled.
    """
    groups: dict[GroupId, asyncio.Task[None]] = {}
    train_lane, weights_lane = Lane.new(), Lane.new()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(train_lane.run(_on_trainer(performer, events)), name="train lane")
        tasks.create_task(weights_lane.run(_on_weights(performer, events)), name="weights lane")
        event: Event = started
        while True:
            observer.event(event)
            for action in coordinator.handle(event):
                observer.action(action)
                match action:
                    case StartGroup() if action.group in groups:
                        performer.move_group(action)
                    case StartGroup():
                        groups[action.group] = tasks.create_task(
                            _generate(performer, action, events), name=f"group {action.group}"
                        )
                    case Train() | Save():
                        train_lane.queue.put_nowait(action)
                    case Interrupt() | PushWeights() | Resume():
                        if isinstance(action, PushWeights):
                            performer.announce_push(action.version)
                        weights_lane.queue.put_nowait(action)
                    case Drop():
                        if (task := groups.pop(action.group, None)) is not None:
                            task.cancel()
                        await performer.drop_group(action.group)
                    case Finish():
                        # A Resume may still be queued: engines are left running, not paused.
                        train_lane.queue.put_nowait(None)
                        weights_lane.queue.put_nowait(None)
                        return action
            event = await events.get()
            if isinstance(event, GroupFinished | GroupFiltered):
                groups.pop(event.group, None)


async def _generate(performer: Performer, start: StartGroup, events: asyncio.Queue[Event]) -> None:
    events.put_nowait(await performer.generate_group(start))


def _on_trainer(
    performer: Performer, events: asyncio.Queue[Event]
) -> Callable[[Action], Awaitable[None]]:
    async def perform(action: Action) -> None:
        match action:
            case Train():
                events.put_nowait(TrainStepDone(await performer.train(action)))
            case Save():
                await performer.save(action.version)
                events.put_nowait(CheckpointDone(action.version))

    return perform


def _on_weights(
    performer: Performer, events: asyncio.Queue[Event]
) -> Callable[[Action], Awaitable[None]]:
    async def perform(action: Action) -> None:
        match action:
            case Interrupt():
                await performer.interrupt()
            case PushWeights():
                await performer.push_weights(action.version)
                events.put_nowait(WeightsPushed(action.version))
            case Resume():
                await performer.resume()

    return perform
