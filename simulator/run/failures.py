"""Node failures: what engines lose, when the run notices, and how they come back.

    works --uptime--> dead --detection--> EngineLost --restart--> EngineJoined --> works

Groups sent to a dead engine before the failure is detected start over on another engine. A run
without engines would end, so the last engine is restarted in place and its groups start over on it.
"""

from __future__ import annotations

import math
from typing import Protocol

import simpy

from areal_lab.control.events import EngineJoined, EngineLost, Event
from simulator.run.flights import Slot
from simulator.run.system import Failures, Process
from simulator.workload.streams import ENGINE_FAILURES, stream


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

    def may_lose(self, slot: Slot) -> bool:
        """Count an engine as lost, unless it is the last one."""
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
        in_place: list[Slot] = []
        for slot in slots:
            if run.may_lose(slot):
                run.tell(EngineLost(slot.number))
            else:
                in_place.append(slot)
        yield run.env.timeout(failures.restart_s)
        yield from run.until_loaded()
        for slot in slots:
            run.restart(slot)
            if slot not in in_place:
                run.tell(EngineJoined(slot.number))
