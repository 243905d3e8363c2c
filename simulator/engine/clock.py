"""Seconds of one process by state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final, TypeAlias

RecordSpan: TypeAlias = Callable[[str, float, float], None]
"""Called with `name, start_s, end_s` of every state when it ends."""

UNCOUNTED: Final = ""
"""State of a clock whose owner adds the seconds itself."""


class Clock:
    """Seconds of one process by what it does or waits for; they sum to the time since 0."""

    __slots__ = ("_record", "seconds", "since_s", "state")

    def __init__(self, state: str, record: RecordSpan | None = None) -> None:
        self.state = state
        self.since_s = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self._record = record

    def set(self, now_s: float, state: str) -> None:
        """Enter `state` at `now_s`; no effect if it is the current one."""
        if state == self.state:
            return
        since_s = self.since_s
        if self.state and now_s > since_s:
            self.seconds[self.state] += now_s - since_s
            if self._record is not None:
                self._record(self.state, since_s, now_s)
        self.state, self.since_s = state, now_s

    def add(self, state: str, seconds: float) -> None:
        """Add seconds to a state."""
        if seconds:
            self.seconds[state] += seconds

    def of(self, now_s: float, state: str) -> float:
        """Seconds in one state so far."""
        seconds = self.seconds.get(state, 0.0)
        return seconds + now_s - self.since_s if state == self.state else seconds

    def read(self, now_s: float) -> dict[str, float]:
        """Seconds by state until `now_s`, or the latest change if that is later."""
        seconds = dict(self.seconds)
        if self.state:
            seconds[self.state] = seconds.get(self.state, 0.0) + max(0.0, now_s - self.since_s)
        return seconds
