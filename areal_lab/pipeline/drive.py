"""Event loop of a run: executes the coordinator's actions and reports events back to it.

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

The lanes keep order: actions on the trainer run one at a time, and so do actions on the engines'
weights. Their queues need no bound because the coordinator never has more than one step, one save
and one push outstanding. A refused request gets the reason as its reply and does not become an
event: the log has what happened.

The rule of `control.scaling` adds and retires engines while a run trains.

events of the run --ScaledRun--> log
                      |  after each training step
                      '--ScalingWatch--> number of engines --> ServerPool.add, .retire
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.frontier import Frontier
from areal_lab.control.scaling import ScalingWatch


class Performer(Protocol):
    """Executor of the coordinator's actions; a call returns when its action is done, or raises."""

    async def generate_group(self, start: ev.StartGroup) -> ev.GroupFinished | ev.GroupFiltered:
        """Generate and score the samples of one group; keep them until trained or dropped.

        If the engine is lost, the call waits for `move_group` and continues on the new engine.
        """
        ...

    def move_group(self, start: ev.StartGroup) -> None:
        """Continue on another engine a group that lost its own."""
        ...

    async def train(self, train: ev.Train) -> ev.TrainStepDone | None:
        """Train on kept groups; None if the batch was returned."""
        ...

    def prepare_save(self, frontier: Frontier) -> None:
        """Copy the state of the run; `save(frontier.version)` follows."""
        ...

    async def save(self, version: ev.Version) -> Coroutine[Any, Any, None] | None:
        """Write the prepared checkpoint, or copy its state for a write during training.

        Returns:
            None once the checkpoint is written; after a copy, a coroutine that waits for the write.
        """
        ...

    def announce_push(self, version: ev.Version) -> None:
        """Keep these weights; `push_weights(version)` follows once the engines are ready."""
        ...

    async def interrupt(self, *, by_hand: bool) -> None:
        """Pause every engine."""
        ...

    async def push_weights(self, version: ev.Version) -> None:
        """Load the version into every engine and check the version that each one reports."""
        ...

    async def resume(self) -> None:
        """Resume every engine."""
        ...

    async def drop_group(self, group: ev.GroupId) -> None:
        """Forget the group and abort its running samples."""
        ...


class Observer(Protocol):
    """Receiver of every event and action in order, such as the log."""

    def event(self, event: ev.Event) -> None:
        """Record an event before it is handled."""
        ...

    def action(self, action: ev.Action) -> None:
        """Record an action before it is executed."""
        ...


@dataclass(frozen=True, slots=True)
class UserRequest:
    """A request of a user, which the coordinator may refuse."""

    request: ev.Request
    reply: Callable[[str | None], None] = lambda _: None
    """Called before the request is handled: with None, or with the reason of a refusal."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of actions that are executed one at a time."""

    queue: asyncio.Queue[ev.Action | None]
    """`None` ends the lane after the actions before it."""

    @classmethod
    def new(cls) -> Lane:
        """Return an empty lane."""
        return cls(asyncio.Queue())

    async def run(self, perform: Callable[[ev.Action], Awaitable[None]]) -> None:
        """Execute the actions in the queue until `None` arrives."""
        while (action := await self.queue.get()) is not None:
            await perform(action)


async def drive(
    coordinator: Coordinator,
    performer: Performer,
    started: ev.RunStarted,
    events: asyncio.Queue[ev.Event | UserRequest],
    observer: Observer,
) -> ev.Finish:
    """Drive a run from `started` to its `Finish`.

    Args:
        performer: executes the actions.
        events: queue of events from the tasks, and from callers that report losses and returns of
            engines and requests of users.
        observer: receives all events and actions.

    Raises:
        Exception: the first error of any task, after all other tasks were cancelled.
    """
    groups: dict[ev.GroupId, asyncio.Task[None]] = {}
    train_lane, weights_lane = Lane.new(), Lane.new()

    async with asyncio.TaskGroup() as tasks:
        on_trainer = _on_trainer(performer, events, tasks)
        tasks.create_task(train_lane.run(on_trainer), name="train lane")
        tasks.create_task(weights_lane.run(_on_weights(performer, events)), name="weights lane")
        event: ev.Event = started
        while True:
            observer.event(event)
            actions = coordinator.handle(event)
            saving = any(isinstance(action, ev.Save) for action in actions)
            for action in actions:
                observer.action(action)
                match action:
                    case ev.StartGroup() if action.group in groups:
                        performer.move_group(action)
                    case ev.StartGroup():
                        groups[action.group] = tasks.create_task(
                            _generate(performer, action, events), name=f"group {action.group}"
                        )
                    case ev.Train() | ev.Save():
                        train_lane.queue.put_nowait(action)
                    case ev.Interrupt() | ev.PushWeights() | ev.Resume():
                        if isinstance(action, ev.PushWeights):
                            performer.announce_push(action.version)
                        weights_lane.queue.put_nowait(action)
                    case ev.Drop():
                        await _drop(performer, action, groups.pop(action.group, None), events)
                    case ev.Finish():
                        # Queued actions are executed first: a Resume leaves engines running.
                        train_lane.queue.put_nowait(None)
                        weights_lane.queue.put_nowait(None)
                        return action
            if saving:  # after the other actions of this event are logged and started
                performer.prepare_save(coordinator.frontier())
            event = await _next_event(coordinator, events)
            if isinstance(event, ev.GroupFinished | ev.GroupFiltered):
                groups.pop(event.group, None)


async def _drop(
    performer: Performer,
    drop: ev.Drop,
    task: asyncio.Task[None] | None,
    events: asyncio.Queue[ev.Event | UserRequest],
) -> None:
    if task is not None:
        task.cancel()
    await performer.drop_group(drop.group)
    if drop.reason != ev.RECYCLED:
        return
    # The next attempt has the same requests and queues, and events after this are of it.
    if task is not None:
        await asyncio.wait([task])
    for event in [events.get_nowait() for _ in range(events.qsize())]:
        if getattr(event, "group", None) != drop.group:
            events.put_nowait(event)


async def _next_event(
    coordinator: Coordinator, events: asyncio.Queue[ev.Event | UserRequest]
) -> ev.Event:
    """Return the next event or accepted request."""
    while isinstance(item := await events.get(), UserRequest):
        reason = coordinator.refusal(item.request)
        item.reply(reason)
        if reason is None:
            return item.request
    return item


async def _generate(
    performer: Performer, start: ev.StartGroup, events: asyncio.Queue[ev.Event | UserRequest]
) -> None:
    events.put_nowait(await performer.generate_group(start))


def _on_trainer(
    performer: Performer, events: asyncio.Queue[ev.Event | UserRequest], tasks: asyncio.TaskGroup
) -> Callable[[ev.Action], Awaitable[None]]:
    async def written(version: ev.Version, writing: Coroutine[Any, Any, None]) -> None:
        await writing
        events.put_nowait(ev.CheckpointDone(version))

    async def perform(action: ev.Action) -> None:
        match action:
            case ev.Train():
                if (done := await performer.train(action)) is not None:
                    events.put_nowait(done)
            case ev.Save():
                writing = await performer.save(action.version)
                if writing is None:
                    events.put_nowait(ev.CheckpointDone(action.version))
                else:
                    events.put_nowait(ev.CheckpointCopied(action.version))
                    tasks.create_task(written(action.version, writing), name="writing")

    return perform


def _on_weights(
    performer: Performer, events: asyncio.Queue[ev.Event | UserRequest]
) -> Callable[[ev.Action], Awaitable[None]]:
    async def perform(action: ev.Action) -> None:
        match action:
            case ev.Interrupt(by_hand):
                await performer.interrupt(by_hand=by_hand)
            case ev.PushWeights():
                await performer.push_weights(action.version)
                events.put_nowait(ev.WeightsPushed(action.version))
            case ev.Resume():
                await performer.resume()

    return perform


class ScaledPool(Protocol):
    """Engines that may join or leave: `ServerPool`, or the workers of controllers."""

    @property
    def alive(self) -> Sized:
        """The engines that generate."""
        ...

    @property
    def changing(self) -> bool:
        """True while engines are starting or leaving."""
        ...

    def add_engine(self) -> ev.EngineId | None:
        """Start another engine; returns its number, or None if none is free."""
        ...

    def retire_engine(self) -> ev.EngineId | None:
        """Retire an engine; returns its number, or None if all must stay."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRun:
    """Observer that scales the engines of a run by a rule and passes everything to the log."""

    log: Observer
    watch: ScalingWatch
    pool: ScaledPool
    generated_tokens: Callable[[], int]
    """Returns the number of generated tokens in groups that have ended."""
    clock: Callable[[], float] = time.monotonic

    def event(self, event: ev.Event) -> None:
        """Log an event; at the end of a training step, add or retire engines."""
        now_s = self.clock()
        self.log.event(event)
        self.watch.note(now_s)
        if isinstance(event, ev.TrainStepDone):
            self._step_done(now_s)

    def action(self, action: ev.Action) -> None:
        """Log an action."""
        self.log.action(action)

    def _step_done(self, now_s: float) -> None:
        pool = self.pool
        engines = len(pool.alive)
        wanted = self.watch.step_done(
            now_s, engines=engines, changing=pool.changing, tokens=self.generated_tokens()
        )
        for _ in range(wanted - engines):
            pool.add_engine()
        for _ in range(engines - wanted):
            pool.retire_engine()
