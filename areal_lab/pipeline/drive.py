"""The event loop of a run: performs the coordinator's actions and reports events back to it.

    actions --> lanes and group tasks --> events queue --> Coordinator.handle() --> actions

    task          produces                         waits for              unblocked by
    drive         actions                          an event               any task below
    group (many)  GroupFinished, GroupFiltered     engine, then reward    the engine's reply
    train lane    TrainStepDone, CheckpointCopied, CheckpointDone
                                                   Train, Save            the trainer's reply
    writing       CheckpointDone                   CheckpointCopied       the checkpoint
    weights lane  WeightsPushed                    Interrupt, PushWeights, Resume
                                                                          every engine's echo
    others        EngineLost, EngineJoined, requests: callers that hold the queue

The lanes keep order: actions on the trainer run one after the other, and so do actions on the
engines' weights. Their queues need no bound because the coordinator never has more than one step,
one save and one push outstanding. A request that cannot be done is answered with the reason and is
no event: the log has what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import (
    Action,
    CheckpointCopied,
    CheckpointDone,
    Drop,
    Event,
    Finish,
    GroupFiltered,
    GroupFinished,
    GroupId,
    Interrupt,
    PushWeights,
    Request,
    Resume,
    RunStarted,
    Save,
    StartGroup,
    Train,
    TrainStepDone,
    Version,
    WeightsPushed,
)
from areal_lab.control.frontier import Frontier


class Performer(Protocol):
    """The actions of a run; each call returns when the action is done, or raises."""

    async def generate_group(self, start: StartGroup) -> GroupFinished | GroupFiltered:
        """Generate and score the samples of one group; keep them until trained or dropped.

        If the engine is lost meanwhile, the call waits for `move_group` and continues there.
        """
        ...

    def move_group(self, start: StartGroup) -> None:
        """Continue a group whose engine was lost on another engine."""
        ...

    async def train(self, train: Train) -> Version:
        """Train on the kept groups and return the new version."""
        ...

    def prepare_save(self, frontier: Frontier) -> None:
        """Keep what the run is now: `save(frontier.version)` follows."""
        ...

    async def save(self, version: Version) -> Coroutine[Any, Any, None] | None:
        """Write the checkpoint that was prepared; or copy what it is written from, and return what
        waits until it is written, while training continues."""
        ...

    def announce_push(self, version: Version) -> None:
        """Keep these weights: `push_weights(version)` follows as soon as the engines are ready."""
        ...

    async def interrupt(self, *, by_hand: bool) -> None:
        """Pause every engine."""
        ...

    async def push_weights(self, version: Version) -> None:
        """Load the version into every engine and check the version each of them reports."""
        ...

    async def resume(self) -> None:
        """Resume every engine."""
        ...

    async def drop_group(self, group: GroupId) -> None:
        """Forget the group and abort its running samples."""
        ...


class Observer(Protocol):
    """Receives every event and action in order, as the log does."""

    def event(self, event: Event) -> None:
        """An event, before it is handled."""
        ...

    def action(self, action: Action) -> None:
        """An action, before it is performed."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a person, which the coordinator may refuse."""

    request: Request
    answer: Callable[[str | None], None] = lambda _: None
    """Called with the reason if it is refused, else with None, before it is handled."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of actions, performed strictly one after the other."""

    queue: asyncio.Queue[Action | None]
    """`None` ends the lane after the actions before it."""

    @classmethod
    def new(cls) -> Lane:
        """An empty lane."""
        return cls(asyncio.Queue())

    async def run(self, perform: Callable[[Action], Awaitable[None]]) -> None:
        """Perform the actions in the queue until `None` arrives."""
        while (action := await self.queue.get()) is not None:
            await perform(action)


async def drive(
    coordinator: Coordinator,
    performer: Performer,
    started: RunStarted,
    events: asyncio.Queue[Event | Asked],
    observer: Observer,
) -> Finish:
    """Drive a run from `started` to its `Finish`.

    Args:
        events: the tasks put their events here; callers put losses and returns of engines, and what
            is asked of the run.

    Raises:
        Exception: the first error of any task, after all others were cancelled.
    """
    groups: dict[GroupId, asyncio.Task[None]] = {}
    train_lane, weights_lane = Lane.new(), Lane.new()

    async with asyncio.TaskGroup() as tasks:
        on_trainer = _on_trainer(performer, events, tasks)
        tasks.create_task(train_lane.run(on_trainer), name="train lane")
        tasks.create_task(weights_lane.run(_on_weights(performer, events)), name="weights lane")
        event: Event = started
        while True:
            observer.event(event)
            actions = coordinator.handle(event)
            saving = any(isinstance(action, Save) for action in actions)
            for action in actions:
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
                        # Queued actions are performed first: a Resume leaves engines running.
                        train_lane.queue.put_nowait(None)
                        weights_lane.queue.put_nowait(None)
                        return action
            if saving:  # all that was decided with it is logged and performed now
                performer.prepare_save(coordinator.frontier())
            event = await _next_event(coordinator, events)
            if isinstance(event, GroupFinished | GroupFiltered):
                groups.pop(event.group, None)


async def _next_event(coordinator: Coordinator, events: asyncio.Queue[Event | Asked]) -> Event:
    """The next event, or the next request that is not refused."""
    while isinstance(item := await events.get(), Asked):
        reason = coordinator.refusal(item.request)
        item.answer(reason)
        if reason is None:
            return item.request
    return item


async def _generate(
    performer: Performer, start: StartGroup, events: asyncio.Queue[Event | Asked]
) -> None:
    events.put_nowait(await performer.generate_group(start))


def _on_trainer(
    performer: Performer, events: asyncio.Queue[Event | Asked], tasks: asyncio.TaskGroup
) -> Callable[[Action], Awaitable[None]]:
    async def written(version: Version, writing: Coroutine[Any, Any, None]) -> None:
        await writing
        events.put_nowait(CheckpointDone(version))

    async def perform(action: Action) -> None:
        match action:
            case Train():
                events.put_nowait(TrainStepDone(await performer.train(action)))
            case Save():
                writing = await performer.save(action.version)
                if writing is None:
                    events.put_nowait(CheckpointDone(action.version))
                else:
                    events.put_nowait(CheckpointCopied(action.version))
                    tasks.create_task(written(action.version, writing), name="writing")

    return perform


def _on_weights(
    performer: Performer, events: asyncio.Queue[Event | Asked]
) -> Callable[[Action], Awaitable[None]]:
    async def perform(action: Action) -> None:
        match action:
            case Interrupt(by_hand):
                await performer.interrupt(by_hand=by_hand)
            case PushWeights():
                await performer.push_weights(action.version)
                events.put_nowait(WeightsPushed(action.version))
            case Resume():
                await performer.resume()

    return perform
