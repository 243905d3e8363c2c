"""The reward service: samples wait in one queue for the next free worker."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace


class RewardQueue:
    """First come, first served by `workers` workers; 0 means a worker for every sample."""

    def __init__(self, workers: int) -> None:
        self._free_s = [0.0] * workers
        heapify(self._free_s)

    def scored_s(self, now_s: float, latencies_s: Iterable[float]) -> float:
        """When the last of the samples that arrive now is scored.

        Calls must come in order of time: the end of a sample is known when it joins the queue.
        """
        free_s = self._free_s
        if not free_s:
            return max((now_s + latency_s for latency_s in latencies_s), default=now_s)
        last_s = now_s
        for latency_s in latencies_s:
            end_s = max(now_s, free_s[0]) + latency_s
            heapreplace(free_s, end_s)
            last_s = max(last_s, end_s)
        return last_s
