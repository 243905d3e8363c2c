"""Engines whose nodes fail and come back, and engines that join and leave by a scaling rule.

Node failures: what engines lose, when the run notices, and how they come back.

    works --uptime--> dead --detection--> EngineLost --restart--> EngineJoined --> works

Groups sent to a dead engine before the failure is detected start over on another engine, or wait
until one comes back.

Engines that join and leave while a simulated run continues, by the rule of `control.scaling`.

    absent --start-up--> starting --weights loaded--> EngineJoined --> works
       ^------ its groups have ended <-- EngineRetired <-- not needed --'

An engine that is not needed gets no more groups and generates those that it has: the coordinator
counts them on other engines, where the pipeline continues them with their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import simpy

from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import EngineJoined, EngineLost, EngineRetired, Event
from areal_lab.control.scaling import ScalingRule, ScalingWatch
from simulator.engine.clock import UNCOUNTED
from simulator.run.accounting import Accounting
from simulator.run.flights import Slot
from simulator.run.pools import LOAD, STARTING
from simulator.run.result import EngineChanges
from simulator.run.system import Failures, Process, System
from simulator.workload.randomness import ENGINE_FAILURES, stream


class Run(Protocol):
    """The part of the event loop that a node uses."""

    env: simpy.Environment
    seed: int

    def tell(self, event: Event) -> None:
        """Let the coordinator handle an event."""
        ...

    def fail(self, slot: Slot) -> None:
        """Let an engine lose everything, before the coordinator knows."""
        ...

    def lose(self, slot: Slot) -> None:
        """Count an engine as lost, with its groups."""
        ...

    def until_loaded(self) -> Process:
        """Wait until all engines hold the newest weights."""
        ...

    def restart(self, slot: Slot) -> None:
        """Let an engine work again."""
        ...


def node_of_engines(
    run: Run, failures: Failures, node: int, slots: list[Slot], nodes: int = 1
) -> Process:
    """The life of one node, or of the `nodes` of one engine, which any of them stops."""
    generator = stream(run.seed, ENGINE_FAILURES, node)
    while True:
        uptime_s = min(failures.uptime_s(generator) for _ in range(nodes))
        if math.isinf(uptime_s):
            return
        yield run.env.timeout(uptime_s)
        for slot in slots:
            run.fail(slot)
        yield run.env.timeout(failures.detection_s)
        for slot in slots:
            run.lose(slot)
            run.tell(EngineLost(slot.number, returns=True))
        yield run.env.timeout(failures.restart_s)
        yield from run.until_loaded()
        for slot in slots:
            run.restart(slot)
            run.tell(EngineJoined(slot.number))


class ScaledRun(Run, Protocol):
    """The part of the event loop that joining and leaving engines use."""

    system: System
    slots: list[Slot]
    accounting: Accounting
    coordinator: Coordinator
    """Not of ranks, which keep their engines."""


class Scaling:
    """The changing engines of one run."""

    def __init__(self, run: ScaledRun, rule: ScalingRule) -> None:
        self._run = run
        self._watch = ScalingWatch(rule, run.coordinator)
        self.tokens = 0
        """Generated, of groups that have ended."""
        self._joined = self._retired = 0
        for slot in run.slots[run.system.engines :]:
            slot.dead, slot.away = True, UNCOUNTED

    def note(self, now_s: float) -> None:
        """Count the time since the last event, before the coordinator handles another."""
        self._watch.note(now_s)

    def step_done(self, now_s: float) -> None:
        """Let engines join or leave after a training step."""
        run = self._run
        if run.coordinator.ending is not None:
            return
        working = [slot for slot in run.slots if not (slot.dead or slot.retires)]
        changing = any(slot.retires or slot.away != UNCOUNTED for slot in run.slots if slot.dead)
        changing |= any(slot.retires for slot in run.slots)
        wanted = self._watch.step_done(
            now_s, engines=len(working), changing=changing, tokens=self.tokens
        )
        absent = [slot for slot in run.slots if slot.dead]
        for slot in absent[: max(0, wanted - len(working))]:
            run.env.process(self._join(slot))
        for slot in working[wanted:]:
            self._retire(now_s, slot)

    def changes(self, by_step: Sequence[float]) -> EngineChanges:
        """Changes, with the mean number of engines in each step."""
        return EngineChanges(by_step=tuple(by_step), joined=self._joined, retired=self._retired)

    def _join(self, slot: Slot) -> Process:
        run = self._run
        self._is(slot, STARTING)
        yield run.env.timeout(self._watch.rule.startup_s)
        yield from run.until_loaded()
        self._is(slot, LOAD)
        yield run.env.timeout(run.system.weights.load_s)
        yield from run.until_loaded()  # a version that came meanwhile goes to this one, too
        self._joined += 1
        run.restart(slot)
        run.tell(EngineJoined(slot.number))

    def _is(self, slot: Slot, away: str) -> None:
        slot.away = away
        self._run.accounting.engine_changed(self._run.env.now, slot)

    def _retire(self, now_s: float, slot: Slot) -> None:
        slot.retires = True
        self._retired += 1
        self._run.tell(EngineRetired(slot.number))
        if not slot.flights:
            self.leave(slot)
            self._run.accounting.engine_changed(now_s, slot)

    def leave(self, slot: Slot) -> None:
        """Free the GPUs of an engine whose last group has ended."""
        slot.engine.fail(self._run.env.now)  # it has nothing to lose, and forgets its cache
        slot.dead, slot.retires, slot.paused, slot.away = True, False, False, UNCOUNTED
