"""Routing of tasks to engines; a task is a group or a turn of a conversation.

    policy        the engine for a task with a key            useful for
    least_loaded  the fewest running, ties to the lowest id   tasks of unequal length
    round_robin   the next id in turn                         tasks of equal length
    sticky        the engine that had the key before, while   turns of a conversation, which find
                  it lives; else the least loaded             their prefix in the engine's cache

The key of a group is its id. All its samples are one task, or with slots by sample several that
stay together, so they share an engine, and their prompt's cache, under every policy. A group is
routed once, and again only if its engine is lost, so in a run `sticky` equals `least_loaded`; it
differs for callers with several tasks per key, such as agents with turns.

Routing is data: `Routing` names the policy and creates its `Router`, which depends on its earlier
calls only, so that a log replays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Literal

from areal_lab.control.events import EngineId

SPARE_ENTRIES: Final = 64
"""Outdated heap entries, in addition to two per engine, before the heap is rebuilt."""


class Router(ABC):
    """Live engines, their running tasks, and the rule that assigns new tasks."""

    def __init__(self) -> None:
        self._loads: dict[EngineId, int] = {}

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def loads(self) -> dict[EngineId, int]:
        """Number of running tasks of each engine."""
        return dict(self._loads)

    def add(self, engine: EngineId) -> None:
        """Add an engine, which has no tasks yet."""
        assert engine not in self._loads
        self._loads[engine] = 0

    def remove(self, engine: EngineId) -> None:
        """Remove an engine; the caller routes its tasks again."""
        del self._loads[engine]

    @abstractmethod
    def acquire(self, key: Hashable = None, tasks: int = 1) -> EngineId:
        """Assign a task with this key, or several that stay together; return their engine."""

    def take(self, engine: EngineId, tasks: int = 1) -> None:
        """Assign tasks to `engine`, chosen by the caller."""
        self._loads[engine] += tasks

    def release(self, engine: EngineId, tasks: int = 1) -> None:
        """Record that tasks of `engine` ended."""
        self._loads[engine] -= tasks

    def recount(self, loads: Mapping[EngineId, int]) -> None:
        """Replace the numbers of running tasks of these engines, which the caller assigned."""
        self._loads |= loads

    def forget(self, key: Hashable) -> None:  # noqa: B027 - most policies have no keys
        """Forget a key that gets no more tasks."""


class LeastLoaded(Router):
    """Router to the least loaded engine in O(log engines), amortized.

    The heap is lazy: a change of load adds an entry, and an entry is valid only while it equals the
    engine's current load. A removed engine's entries are outdated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, EngineId]] = []

    def add(self, engine: EngineId) -> None:
        """Add an engine, in O(log engines)."""
        super().add(engine)
        heappush(self._heap, (0, engine))

    def acquire(self, key: Hashable = None, tasks: int = 1) -> EngineId:  # noqa: ARG002 - others read it
        """Return the least loaded engine, for any key."""
        heap, loads = self._heap, self._loads
        load, engine = heap[0]
        while loads.get(engine) != load:
            heappop(heap)
            load, engine = heap[0]
        loads[engine] = load + tasks
        heapreplace(heap, (load + tasks, engine))
        return engine

    def take(self, engine: EngineId, tasks: int = 1) -> None:
        """Add tasks to the engine, in O(log engines), amortized."""
        self._loads[engine] = load = self._loads[engine] + tasks
        self._note(load, engine)

    def release(self, engine: EngineId, tasks: int = 1) -> None:
        """Remove tasks of the engine, in O(log engines), amortized."""
        self._loads[engine] = load = self._loads[engine] - tasks
        self._note(load, engine)

    def recount(self, loads: Mapping[EngineId, int]) -> None:
        """Replace loads, in O(engines)."""
        super().recount(loads)
        self._rebuild()

    def _note(self, load: int, engine: EngineId) -> None:
        heappush(self._heap, (load, engine))
        if len(self._heap) > 2 * len(self._loads) + SPARE_ENTRIES:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(load, engine) for engine, load in self._loads.items()]
        heapify(self._heap)


class RoundRobin(Router):
    """Router to the engines in the order of their ids, one task each, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[EngineId] = []
        self._last: EngineId = -1

    def add(self, engine: EngineId) -> None:
        """Add the engine to the rotation."""
        super().add(engine)
        insort(self._ring, engine)

    def remove(self, engine: EngineId) -> None:
        """Remove the engine from the rotation."""
        super().remove(engine)
        self._ring.remove(engine)

    def acquire(self, key: Hashable = None, tasks: int = 1) -> EngineId:  # noqa: ARG002 - others read it
        """Return the next id after the last one taken, or the lowest."""
        place = bisect_right(self._ring, self._last)
        self._last = engine = self._ring[place % len(self._ring)]
        self._loads[engine] += tasks
        return engine


class Sticky(LeastLoaded):
    """Router that keeps a key on its first engine while that engine lives."""

    def __init__(self) -> None:
        super().__init__()
        self._home: dict[Hashable, EngineId] = {}

    def remove(self, engine: EngineId) -> None:
        """Remove the engine and its keys: if it comes back, its cache is empty. O(keys)."""
        super().remove(engine)
        self._home = {key: home for key, home in self._home.items() if home != engine}

    def acquire(self, key: Hashable = None, tasks: int = 1) -> EngineId:
        """Return the key's engine; a new key, or one whose engine is gone, goes to the least
        loaded.
        """
        engine = self._home.get(key)
        if engine is not None:
            self.take(engine, tasks)
            return engine
        self._home[key] = engine = super().acquire(tasks=tasks)
        return engine

    def forget(self, key: Hashable) -> None:
        """Treat the next task with this key as new."""
        self._home.pop(key, None)


@dataclass(frozen=True, slots=True)
class Routing:
    """Policy for assigning tasks. Create one with the functions below."""

    name: str
    make_router: Callable[[], Router] = field(compare=False, repr=False)


def least_loaded() -> Routing:
    """Route to the engine with the fewest running groups."""
    return Routing("least_loaded", LeastLoaded)


def round_robin() -> Routing:
    """Route to the engines in turn."""
    return Routing("round_robin", RoundRobin)


def sticky() -> Routing:
    """Route to the earlier engine of the key; in a run, which routes keys once, `least_loaded`."""
    return Routing("sticky", Sticky)


RoutingName = Literal["least_loaded", "round_robin", "sticky"]
ROUTINGS: Final = {make().name: make for make in (least_loaded, round_robin, sticky)}
"""Policies of this module, by name."""


def routing_named(name: str) -> Routing:
    """Return the policy of this name."""
    if name not in ROUTINGS:
        raise ValueError(f"routing is {name!r}, but must be one of {', '.join(ROUTINGS)}")
    return ROUTINGS[name]()
