"""Samples that wait for a session from outside, and which of them the next session gets.

    group 7   * * .      of task "a": the next session on "a" gets its waiting sample
    group 8   . . .      of nothing yet: the next session on another task, or on none
    group 9   . . .      later

A group is of one task, or of sessions without a task, because advantages compare its samples. Older
groups come first. Nothing here waits: `online` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(slots=True)
class _Group(Generic[S]):
    samples: int = 0
    """Of the group that have not ended."""
    task: str | None = None
    """Of its sessions, empty if they have none; None before the first."""
    waiting: deque[S] = field(default_factory=deque)


class WaitingSamples(Generic[S]):
    """The samples of a run that want a session."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group[S]] = {}  # by their start

    def __len__(self) -> int:
        return sum(len(group.waiting) for group in self._groups.values())

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    @contextmanager
    def member(self, name: str) -> Iterator[None]:
        """A sample of a group: the group is forgotten when its last one ends.

        Args:
            name: of the group.
        """
        group = self._groups.setdefault(name, _Group())
        group.samples += 1
        try:
            yield
        finally:
            group.samples -= 1
            if not group.samples:
                del self._groups[name]

    def add(self, name: str, sample: S) -> None:
        """A sample of a group waits from now on; raises KeyError if it is no `member`."""
        self._groups[name].waiting.append(sample)

    def remove(self, name: str, sample: S) -> None:
        """It waits no longer; nothing if it does not."""
        if sample in self._groups[name].waiting:
            self._groups[name].waiting.remove(sample)

    def next(self, task: str) -> S | None:
        """The sample that a session on this task gets; None if none waits for one.

        Args:
            task: empty for a session without a task.
        """
        found = self._group_for(task)
        return None if found is None else found.waiting[0]

    def take(self, task: str) -> S:
        """Take it out; its group is of this task from now on.

        Raises:
            LookupError: no sample waits for such a session.
        """
        found = self._group_for(task)
        if found is None:
            raise LookupError(f"no sample waits for a session on {task!r}")
        found.task = task
        return found.waiting.popleft()

    def of_group(self, name: str) -> tuple[S, ...]:
        """The waiting samples of a group."""
        group = self._groups.get(name)
        return () if group is None else tuple(group.waiting)

    def unfilled(self) -> dict[str, int]:
        """Tasks that have begun a group, and the sessions that it still wants."""
        found: dict[str, int] = {}
        for group in self._groups.values():
            if group.task and group.waiting:
                found[group.task] = found.get(group.task, 0) + len(group.waiting)
        return found

    def _group_for(self, task: str) -> _Group[S] | None:
        waiting = [group for group in self._groups.values() if group.waiting]
        begun = (group for group in waiting if group.task == task)
        return next(begun, None) or next((group for group in waiting if group.task is None), None)
