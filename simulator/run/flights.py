"""Groups between start and training, and the engines that generate them.

start --> generated --> scored --> trained on
a Slot (engine, timer) holds the Flights that its engine still generates
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from areal_lab.control.events import EngineId, GroupId
from areal_lab.runlog.activity import LOST
from simulator.engine.versions import Decoded
from simulator.run.responses import GroupDraws
from simulator.run.system import Done, Engine


class Flight:
    """A group from its start until it is trained on."""

    __slots__ = ("decoded", "done", "draws", "generated_s", "group", "slot", "start_s")

    def __init__(self, group: GroupId, slot: Slot, start_s: float, draws: GroupDraws) -> None:
        self.group = group
        self.slot = slot
        self.start_s = start_s
        self.draws = draws
        self.generated_s = math.nan
        self.done: Done
        self.decoded: Sequence[Decoded]


class Slot:
    """An engine, its timer, and the groups the coordinator runs on it."""

    __slots__ = (
        *("away", "dead", "engine", "flights", "lent_s", "number", "paused", "retires", "trains"),
        "wake_s",
    )

    def __init__(self, number: EngineId, engine: Engine) -> None:
        self.number = number
        self.engine = engine
        self.wake_s = math.inf
        self.flights: dict[GroupId, Flight] = {}  # not yet generated
        self.paused = False
        self.dead = False
        self.away = LOST
        """What it does while it is dead."""
        self.retires = False
        """It leaves when its groups have ended."""
        self.trains = False
        """Its GPUs train, or get ready to generate again."""
        self.lent_s = math.nan
        """Since when."""
