"""Which finished groups form the next batch, and what is waited for if none can be formed yet.

Eq. 3 bounds how many groups are started, not the age of one: with "oldest among the finished" a
straggler may be trained on at any lag. Lag is the trainer's version minus the version that the
engines held when the group (last) started.

    order                        lag                  a straggler
    oldest_finished_first        no bound             is overtaken
    strict_start_order           <= ceil(eta)         stops training until it ends
    bounded_lag(L)               <= L >= ceil(eta)    is overtaken while the bound permits
    bounded_lag(L, drop=True)    <= L                 is dropped, counted and replaced

A `BatchOrder` is data; its `Backlog` is the same decision kept up to date as groups come and go,
so that an event costs O(log groups). `tests/reference/order.py` has the decisions as plain rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from areal_lab.control.events import GroupId, Version


class Backlog(Protocol):
    """Groups that were started and not yet trained on, as one batch order sees them."""

    def started(self, group: GroupId, version: Version) -> None:
        """`group` is the youngest; the engines hold `version`, never older than before."""
        ...

    def restarted(self, group: GroupId, old: Version, new: Version) -> None:
        """`group`, begun at `old`, lost its engine and begins again at `new`, in its old place."""
        ...

    def finished(self, group: GroupId, version: Version) -> None:
        """`group`, started at `version`, may be trained on."""
        ...

    def removed(self, group: GroupId, version: Version) -> None:
        """`group`, started at `version`, ended without a result."""
        ...

    def late(self, trained: Version) -> list[GroupId]:
        """Forget and return, oldest first, the groups to drop when the trainer has `trained`."""
        ...

    def ready(self, trained: Version) -> bool:
        """Whether a batch may be taken while the trainer has version `trained`."""
        ...

    def take(self) -> tuple[GroupId, ...]:
        """The batch, removed from here; only after `ready` said yes."""
        ...

    def waiting_for(self, trained: Version) -> str:
        """Why `ready` says no, for a progress display."""
        ...

    def finished_groups(self) -> list[GroupId]:
        """Groups that finished and were not taken, in no particular order."""
        ...

    def __len__(self) -> int:
        """Number of `finished_groups`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """A policy for forming batches. Make one with the functions below."""

    name: str
    make_backlog: Callable[[int], Backlog] = field(compare=False, repr=False)
    """From `batch_groups`."""
    max_lag: float = math.inf
    """Lag, in whole versions, that is promised never to be exceeded, beside what eq. 3 gives."""
    drop_late: bool = False
    """Whether the promise is kept by dropping; otherwise by waiting."""


def oldest_finished_first() -> BatchOrder:
    """The B oldest among the finished, whatever still runs: what the released AReaL does."""
    return BatchOrder(name="oldest_finished_first", make_backlog=_OldestFinishedFirst)


def strict_start_order() -> BatchOrder:
    """The B oldest of all; waits until they finished. No lag exceeds ceil(eta)."""
    return BatchOrder(name="strict_start_order", make_backlog=_StrictStartOrder)


def bounded_lag(max_lag: float, *, drop: bool = False) -> BatchOrder:
    """The B oldest among the finished, unless a group would be trained on later than `max_lag`.

    Waiting looks ahead (earliest deadline first): a batch is taken only if, for every j >= 0, what
    must be trained on within j further batches and is not in this one fits into j batches.

    Args:
        max_lag: versions; a fraction has no meaning beyond its whole part. Waiting needs
            `max_lag >= ceil(eta)`, which `Limits` checks.
        drop: give up what can no longer be trained on in time, running or finished, instead of
            waiting for it. Dropped groups do not count as started, so that others replace them.
    """
    if math.isnan(max_lag) or max_lag < 0:
        raise ValueError(f"max_lag is {max_lag}, but a lag is a number >= 0 (versions)")
    whole = max_lag if math.isinf(max_lag) else math.floor(max_lag)
    kind = _DropLate if drop else _BoundedLag
    return BatchOrder(
        name="bounded_lag",
        make_backlog=lambda batch_groups: kind(batch_groups, whole),
        max_lag=whole,
        drop_late=drop,
    )


def _progress(finished: int, batch_groups: int, trained: Version) -> str:
    return f"{finished} of {batch_groups} groups for step {trained + 1}"


class _OldestFinishedFirst:
    """A heap of (start version, group) of what finished."""

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._heap: list[tuple[Version, GroupId]] = []

    def started(self, group: GroupId, version: Version) -> None:
        pass

    def restarted(self, group: GroupId, old: Version, new: Version) -> None:
        pass

    def finished(self, group: GroupId, version: Version) -> None:
        heappush(self._heap, (version, group))

    def removed(self, group: GroupId, version: Version) -> None:
        pass

    def late(self, trained: Version) -> list[GroupId]:
        return []

    def ready(self, trained: Version) -> bool:
        return len(self._heap) >= self._batch_groups

    def take(self) -> tuple[GroupId, ...]:
        heap = self._heap
        return tuple([heappop(heap)[1] for _ in range(self._batch_groups)])

    def waiting_for(self, trained: Version) -> str:
        return _progress(len(self._heap), self._batch_groups, trained)

    def finished_groups(self) -> list[GroupId]:
        return [group for _, group in self._heap]

    def __len__(self) -> int:
        return len(self._heap)


class _StrictStartOrder:
    """The finished prefix of all groups in start order, and what follows the first unfinished."""

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._prefix: deque[GroupId] = deque()
        self._rest: deque[GroupId] = deque()
        self._finished: set[GroupId] = set()
        self._removed: set[GroupId] = set()

    def started(self, group: GroupId, version: Version) -> None:
        self._rest.append(group)

    def restarted(self, group: GroupId, old: Version, new: Version) -> None:
        pass

    def finished(self, group: GroupId, version: Version) -> None:
        self._finished.add(group)
        if group == self._rest[0]:
            self._extend_prefix()

    def removed(self, group: GroupId, version: Version) -> None:
        self._removed.add(group)
        if group == self._rest[0]:
            self._extend_prefix()

    def late(self, trained: Version) -> list[GroupId]:
        return []

    def ready(self, trained: Version) -> bool:
        return len(self._prefix) >= self._batch_groups

    def take(self) -> tuple[GroupId, ...]:
        return tuple([self._prefix.popleft() for _ in range(self._batch_groups)])

    def waiting_for(self, trained: Version) -> str:
        if len(self) >= self._batch_groups and self._rest:
            return f"group {self._rest[0]}, the oldest, to end"
        return _progress(len(self), self._batch_groups, trained)

    def finished_groups(self) -> list[GroupId]:
        return [*self._prefix, *self._finished]

    def __len__(self) -> int:
        return len(self._prefix) + len(self._finished)

    def _extend_prefix(self) -> None:
        rest, finished, removed = self._rest, self._finished, self._removed
        while rest:
            group = rest[0]
            if group in finished:
                finished.remove(group)
                self._prefix.append(group)
            elif group in removed:
                removed.remove(group)
            else:
                return
            rest.popleft()


class _BoundedLag:
    """Oldest finished first under the look-ahead of `bounded_lag`.

    With v the trainer's version, R(s) running and F(s) finished groups that started at version s
    or earlier: these must be trained on by version s + max_lag, j = s + max_lag - v batches after
    this one. The batch holds min(F(s), B) of them, so it may be taken if for every s

        R(s) + F(s) - min(F(s), B) <= j B.

    Only versions with running groups can break this; there are few of them.
    """

    def __init__(self, batch_groups: int, max_lag: float) -> None:
        self._batch_groups = batch_groups
        self._max_lag = max_lag
        self._heap: list[tuple[Version, GroupId]] = []
        # Both ascending in version, since starts come with the newest version the engines hold.
        self._running: dict[Version, int] = {}
        self._done: dict[Version, int] = {}
        # While blocked: `_missing` more groups of `_blocking` or earlier must end before another
        # look makes sense. Counted down, so that waiting costs O(1) per event.
        self._missing = 0
        self._blocking = -1

    def started(self, group: GroupId, version: Version) -> None:
        self._running[version] = self._running.get(version, 0) + 1

    def restarted(self, group: GroupId, old: Version, new: Version) -> None:
        self.removed(group, old)
        self.started(group, new)

    def finished(self, group: GroupId, version: Version) -> None:
        heappush(self._heap, (version, group))
        self._done[version] = self._done.get(version, 0) + 1
        self.removed(group, version)

    def removed(self, group: GroupId, version: Version) -> None:
        running = self._running[version] - 1
        if running:
            self._running[version] = running
        else:
            del self._running[version]
        if self._missing and version <= self._blocking:
            self._missing -= 1

    def late(self, trained: Version) -> list[GroupId]:
        return []

    def ready(self, trained: Version) -> bool:
        if len(self._heap) < self._batch_groups or self._missing:
            return False
        running = 0
        for version, groups in self._running.items():
            running += groups
            room = (version + self._max_lag - trained) * self._batch_groups
            if running > room:
                finished = sum(n for start, n in self._done.items() if start <= version)
                missing = running + finished - min(finished, self._batch_groups) - room
                if missing > 0:
                    self._missing, self._blocking = int(missing), version
                    return False
        return True

    def take(self) -> tuple[GroupId, ...]:
        heap, done = self._heap, self._done
        batch = []
        for _ in range(self._batch_groups):
            version, group = heappop(heap)
            done[version] -= 1
            batch.append(group)
        for version in [version for version, groups in done.items() if not groups]:
            del done[version]
        self._missing = 0
        return tuple(batch)

    def waiting_for(self, trained: Version) -> str:
        if len(self._heap) < self._batch_groups or self.ready(trained):
            return _progress(len(self._heap), self._batch_groups, trained)
        plural = "s" if self._missing > 1 else ""
        return (
            f"{self._missing} group{plural} started at version {self._blocking} or earlier to end, "
            f"which would otherwise exceed a lag of {self._max_lag}"
        )

    def finished_groups(self) -> list[GroupId]:
        return [group for _, group in self._heap]

    def __len__(self) -> int:
        return len(self._heap)


class _DropLate:
    """Oldest finished first; what started before `trained - max_lag` is given up."""

    def __init__(self, batch_groups: int, max_lag: float) -> None:
        self._batch_groups = batch_groups
        self._max_lag = max_lag
        self._heap: list[tuple[Version, GroupId]] = []
        self._running: dict[Version, set[GroupId]] = {}

    def started(self, group: GroupId, version: Version) -> None:
        running = self._running.get(version)
        if running is None:
            self._running[version] = {group}
        else:
            running.add(group)

    def restarted(self, group: GroupId, old: Version, new: Version) -> None:
        self.removed(group, old)
        self.started(group, new)

    def finished(self, group: GroupId, version: Version) -> None:
        heappush(self._heap, (version, group))
        self.removed(group, version)

    def removed(self, group: GroupId, version: Version) -> None:
        running = self._running[version]
        running.remove(group)
        if not running:
            del self._running[version]

    def late(self, trained: Version) -> list[GroupId]:
        oldest = trained - self._max_lag
        groups: list[GroupId] = []
        for version in [version for version in self._running if version < oldest]:
            groups.extend(self._running.pop(version))
        while self._heap and self._heap[0][0] < oldest:
            groups.append(heappop(self._heap)[1])
        return sorted(groups)

    def ready(self, trained: Version) -> bool:
        return len(self._heap) >= self._batch_groups

    def take(self) -> tuple[GroupId, ...]:
        heap = self._heap
        return tuple([heappop(heap)[1] for _ in range(self._batch_groups)])

    def waiting_for(self, trained: Version) -> str:
        return _progress(len(self._heap), self._batch_groups, trained)

    def finished_groups(self) -> list[GroupId]:
        return [group for _, group in self._heap]

    def __len__(self) -> int:
        return len(self._heap)
