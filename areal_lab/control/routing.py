"""Which engine takes the next piece of work: a group, or a turn of a conversation.

    policy        an engine for work with a key               for
    least_loaded  the fewest running, ties to the lowest id   work of unequal length
    round_robin   the next in the circle of ids               work of equal length
    sticky        the one that had the key before, while it   turns of a conversation, which find
                  lives; the least loaded for a new key       their prefix in the engine's cache

A group has its id as key. All its samples are one piece of work, so they share an engine, and
their prompt's cache, under every policy. It asks once, and again only if its engine is lost, so in
a run `sticky` decides as `least_loaded` does: it acts where a caller has several pieces of work
with one key, as an agent with turns would, and the coordinator is no such caller.

Routing is data: `Routing` names the policy and makes its `Router`, which decides from nothing but
the calls it had, so that a log replays.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Literal, Protocol

from areal_lab.control.events import EngineId

SPARE_ENTRIES: Final = 64
"""Outdated heap entries that are tolerated beside two per engine before the heap is rebuilt."""


class Router(Protocol):
    """The engines, what runs on each, and a rule."""

    def __contains__(self, engine: EngineId) -> bool: ...

    def __len__(self) -> int: ...

    def loads(self) -> dict[EngineId, int]:
        """Running pieces of work of each engine."""
        ...

    def add(self, engine: EngineId) -> None:
        """Let an engine without work take some."""
        ...

    def remove(self, engine: EngineId) -> None:
        """Forget an engine; its work is the caller's to place again."""
        ...

    def acquire(self, key: Hashable) -> EngineId:
        """The engine for work with this key, which now runs one piece more."""
        ...

    def release(self, engine: EngineId) -> None:
        """One piece of work of `engine` ended."""
        ...

    def forget(self, key: Hashable) -> None:
        """No work with this key comes any more."""
        ...


class LeastLoaded:
    """Running work per engine, and the least loaded engine in O(log engines), amortized.

    The heap is lazy: a change of load adds an entry, and an entry counts only while it tells the
    engine's present load.
    """

    def __init__(self) -> None:
        self._loads: dict[EngineId, int] = {}
        self._heap: list[tuple[int, EngineId]] = []

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def loads(self) -> dict[EngineId, int]:
        """Running pieces of work of each engine."""
        return dict(self._loads)

    def add(self, engine: EngineId) -> None:
        """O(log engines)."""
        assert engine not in self._loads
        self._loads[engine] = 0
        heappush(self._heap, (0, engine))

    def remove(self, engine: EngineId) -> None:
        """Its heap entries are outdated from now on."""
        del self._loads[engine]

    def acquire(self, _key: Hashable = None) -> EngineId:
        """The least loaded engine, whatever the key."""
        heap, loads = self._heap, self._loads
        load, engine = heap[0]
        while loads.get(engine) != load:
            heappop(heap)
            load, engine = heap[0]
        loads[engine] = load + 1
        heapreplace(heap, (load + 1, engine))
        return engine

    def take(self, engine: EngineId) -> None:
        """`engine`, chosen by the caller, runs one piece more."""
        self._loads[engine] = load = self._loads[engine] + 1
        self._note(load, engine)

    def release(self, engine: EngineId) -> None:
        """O(log engines), amortized."""
        self._loads[engine] = load = self._loads[engine] - 1
        self._note(load, engine)

    def forget(self, _key: Hashable) -> None:
        """Keys mean nothing here."""

    def _note(self, load: int, engine: EngineId) -> None:
        heappush(self._heap, (load, engine))
        if len(self._heap) > 2 * len(self._loads) + SPARE_ENTRIES:
            self._heap = [(load, engine) for engine, load in self._loads.items()]
            heapify(self._heap)


class RoundRobin:
    """The engines in the order of their ids, one piece of work each, again and again."""

    def __init__(self) -> None:
        self._loads: dict[EngineId, int] = {}
        self._circle: list[EngineId] = []
        self._last: EngineId = -1

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def loads(self) -> dict[EngineId, int]:
        """Running pieces of work of each engine."""
        return dict(self._loads)

    def add(self, engine: EngineId) -> None:
        """It takes its place in the circle."""
        assert engine not in self._loads
        self._loads[engine] = 0
        insort(self._circle, engine)

    def remove(self, engine: EngineId) -> None:
        """The circle closes up."""
        del self._loads[engine]
        self._circle.remove(engine)

    def acquire(self, _key: Hashable = None) -> EngineId:
        """The first id above the last one taken, or the lowest."""
        place = bisect_right(self._circle, self._last)
        self._last = engine = self._circle[place % len(self._circle)]
        self._loads[engine] += 1
        return engine

    def release(self, engine: EngineId) -> None:
        """O(1)."""
        self._loads[engine] -= 1

    def forget(self, _key: Hashable) -> None:
        """Keys mean nothing here."""


class Sticky(LeastLoaded):
    """A key stays where it was first put, while that engine lives."""

    def __init__(self) -> None:
        super().__init__()
        self._home: dict[Hashable, EngineId] = {}

    def remove(self, engine: EngineId) -> None:
        """Its keys have no engine any more: one of its number that comes back has an empty cache.

        O(keys), and rare: an engine was lost.
        """
        super().remove(engine)
        self._home = {key: home for key, home in self._home.items() if home != engine}

    def acquire(self, key: Hashable = None) -> EngineId:
        """The key's engine; a new key, or one whose engine is gone, goes to the least loaded."""
        engine = self._home.get(key)
        if engine is not None:
            self.take(engine)
            return engine
        self._home[key] = engine = super().acquire()
        return engine

    def forget(self, key: Hashable) -> None:
        """The next work with this key is new."""
        self._home.pop(key, None)


@dataclass(frozen=True, slots=True)
class Routing:
    """A policy for placing work. Make one with the functions below."""

    name: str
    make_router: Callable[[], Router] = field(compare=False, repr=False)


def least_loaded() -> Routing:
    """The engine with the fewest running groups."""
    return Routing("least_loaded", LeastLoaded)


def round_robin() -> Routing:
    """The engines in turn."""
    return Routing("round_robin", RoundRobin)


def sticky() -> Routing:
    """The engine that had the key before; in a run, whose keys ask once, as `least_loaded`."""
    return Routing("sticky", Sticky)


RoutingName = Literal["least_loaded", "round_robin", "sticky"]
ROUTINGS: Final = {make().name: make for make in (least_loaded, round_robin, sticky)}
"""The functions above, by the names they give."""


def routing_named(name: str) -> Routing:
    """The policy of this name.

    Raises:
        ValueError: if there is none, with the names there are.
    """
    if name not in ROUTINGS:
        raise ValueError(f"routing is {name!r}, but must be one of {', '.join(ROUTINGS)}")
    return ROUTINGS[name]()
