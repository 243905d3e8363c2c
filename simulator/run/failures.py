"""Nodes of engines that fail: what they lose, when the run knows, and how they come back.

    works --uptime--> dead --detection--> EngineLost --restart--> EngineJoined --> works

Work that is sent to a dead engine before the failure is known waits for nobody: it begins again
elsewhere. A run without any engine ends; the last one is restarted by its supervisor in place, and
the groups on it begin again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal_lab.control.events import EngineJoined, EngineLost
from simulator.run.system import Failures, Process
from simulator.workload.streams import ENGINE_FAILURES, stream

if TYPE_CHECKING:
    from simulator.run.drive import Drive, Slot


def node_of_engines(run: Drive, failures: Failures, node: int, slots: list[Slot]) -> Process:
    """The life of one node."""
    generator = stream(run.seed, ENGINE_FAILURES, node)
    while not math.isinf(uptime_s := failures.uptime_s(generator)):
        yield run.env.timeout(uptime_s)
        for slot in slots:
            run.fail(slot)
        yield run.env.timeout(failures.detection_s)
        in_place: list[Slot] = []
        for slot in slots:
            if len(run.coordinator.engine_loads) == 1:
                in_place.append(slot)
                continue
            slot.flights.clear()
            run.book.engine_losses += 1
            run.tell(EngineLost(slot.number))
        yield run.env.timeout(failures.restart_s)
        while run.loaded is not None:
            yield run.loaded
        for slot in slots:
            run.mend(slot)
            if slot not in in_place:
                run.tell(EngineJoined(slot.number))
