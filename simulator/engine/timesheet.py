"""Seconds of one process by activity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

RecordSpan: TypeAlias = Callable[[str, float, float], None]
"""Called with `name, start_s, end_s` of every activity when it ends."""


class Timesheet:
    """Seconds by activity; they sum to the time since 0."""

    __slots__ = ("_record", "activity", "seconds", "since_s")

    def __init__(self, activities: tuple[str, ...], record: RecordSpan | None = None) -> None:
        """Start at 0 s with the first of the activities."""
        self.seconds = dict.fromkeys(activities, 0.0)
        self.activity = activities[0]
        self.since_s = 0.0
        self._record = record

    def begin(self, activity: str, time_s: float) -> None:
        """Switch to `activity` at `time_s`; no effect if it is the current one."""
        if activity == self.activity:
            return
        since_s = self.since_s
        if time_s > since_s:
            self.seconds[self.activity] += time_s - since_s
            if self._record is not None:
                self._record(self.activity, since_s, time_s)
        self.activity, self.since_s = activity, time_s

    def until(self, time_s: float) -> dict[str, float]:
        """Seconds by activity until `time_s`, or until the latest switch if that is later."""
        seconds = dict(self.seconds)
        seconds[self.activity] += max(0.0, time_s - self.since_s)
        return seconds
