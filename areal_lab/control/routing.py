"""Which engine takes the next group: the one with the fewest running, ties to the lowest id."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from areal_lab.control.events import EngineId

SPARE_ENTRIES: Final = 64
"""Outdated heap entries that are tolerated beside two per engine before the heap is rebuilt."""


class Router:
    """Running groups per engine, and the least loaded engine in O(log engines), amortized.

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
        """Running groups of each engine."""
        return dict(self._loads)

    def add(self, engine: EngineId) -> None:
        """Let an engine without work take groups."""
        assert engine not in self._loads
        self._loads[engine] = 0
        heappush(self._heap, (0, engine))

    def remove(self, engine: EngineId) -> None:
        """Forget an engine; its groups are the caller's to place again."""
        del self._loads[engine]

    def acquire(self) -> EngineId:
        """The least loaded engine, which now runs one group more."""
        heap, loads = self._heap, self._loads
        load, engine = heap[0]
        while loads.get(engine) != load:
            heappop(heap)
            load, engine = heap[0]
        loads[engine] = load + 1
        heapreplace(heap, (load + 1, engine))
        return engine

    def release(self, engine: EngineId) -> None:
        """One group of `engine` ended."""
        loads = self._loads
        loads[engine] = load = loads[engine] - 1
        heappush(self._heap, (load, engine))
        if len(self._heap) > 2 * len(loads) + SPARE_ENTRIES:
            self._heap = [(load, engine) for engine, load in loads.items()]
            heapify(self._heap)
