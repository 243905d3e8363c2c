"""What the engine was doing when, for the timeline of a run; seconds since the epoch.

Steps are short and many; neighbors of one name are joined, so that hours stay a few thousand spans.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

ActivityName: TypeAlias = Literal[
    "prefill", "decode", "prefill_and_decode", "paused", "idle", "load_weights"
]

JOIN_GAP_S = 0.02
"""Neighbors closer than this are one span; idling shorter than this is not recorded."""
KEPT_SPANS = 200_000


@dataclass(slots=True)
class ActivitySpan:
    """A stretch of one activity."""

    id: int
    name: ActivityName
    start_s: float
    end_s: float


class ActivityLog:
    """Written by the scheduler's thread, read by HTTP handlers."""

    def __init__(self) -> None:
        self._spans: deque[ActivitySpan] = deque(maxlen=KEPT_SPANS)
        self._lock = threading.Lock()

    def add(self, name: ActivityName, start_s: float, end_s: float) -> None:
        """Record an activity that ended; `start_s` is not before the last one's end."""
        if name == "idle" and end_s - start_s < JOIN_GAP_S:
            return
        with self._lock:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.name == name and start_s - last.end_s < JOIN_GAP_S:
                last.end_s = end_s
            else:
                number = last.id + 1 if last is not None else 0
                self._spans.append(ActivitySpan(number, name, start_s, end_s))

    def since(self, first_id: int) -> list[ActivitySpan]:
        """Spans from this id on. The newest may still grow: ask for it again and replace it."""
        with self._lock:
            return [
                ActivitySpan(span.id, span.name, span.start_s, span.end_s)
                for span in self._spans
                if span.id >= first_id
            ]
