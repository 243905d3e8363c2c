r"""Batch orders: the rule that selects finished groups for the next batch, or waits.

Eq. 3 bounds the number of started groups, not the age of each: with "oldest finished first" a
straggler may be trained on at any lag. Lag is the trainer's version minus the version that the
engines held when the group (last) started; the oldest group is the one with the oldest version,
then with the lowest id.

    order                        lag                  a straggler
    oldest_finished_first        no bound             is overtaken
    strict_start_order           <= ceil(eta)         stops training until it ends
    bounded_lag(L)               <= L >= ceil(eta)    is overtaken while the bound permits
    bounded_lag(L, "drop")       <= L                 is dropped, counted and replaced
    bounded_lag(L, "recycle")    <= L                 is dropped, and its prompt starts again

An order is data. Its `Backlog` has the groups between start and training, from which it chooses.

Backlog: groups that were started and not yet trained on, one class per batch order.

    started --> finished --> take
           \--> removed (filtered)      late --> dropped, perhaps to start again

Each class implements one rule of `areal_lab.control.order` at O(log groups) per event; the tests
compare it with a plain version of the rule (`tests/reference/order.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Literal, Protocol, get_args

from areal_lab.control.events import GroupId, Version
from areal_lab.control.schedule import Schedule, lag_bound


class Backlog(Protocol):
    """Groups that were started and not yet trained on, for one batch order."""

    def started(self, group: GroupId, version: Version, /) -> None:
        """Add `group`, the newest one; the engines have `version`, which never decreases.

        Only the groups that a recovery kept, which come first, may have older versions in any
        order.
        """
        ...

    def restarted(self, group: GroupId, old: Version, new: Version, /) -> None:
        """Restart `group`, started at `old`, at version `new` after its engine was lost; it keeps
        its place.
        """
        ...

    def finished(self, group: GroupId, version: Version, /) -> None:
        """Mark `group`, started at `version`, as finished: it may be trained on."""
        ...

    def started_all(self, groups: Sequence[GroupId], version: Version, /) -> None:
        """Add the newest groups, in order."""
        ...

    def finished_all(self, groups: Sequence[GroupId], versions: Sequence[Version], /) -> None:
        """Mark groups, started at these versions, as finished."""
        ...

    def removed(self, group: GroupId, version: Version, /) -> None:
        """Remove `group`, started at `version`, which ended without a result."""
        ...

    def late(self, trained: Version, /) -> list[GroupId]:
        """Remove and return, oldest first, the groups to drop when the trainer has `trained`."""
        ...

    def ready(self, trained: Version, groups: int, rest: int = 0, /) -> bool:
        """Return whether `groups` may be taken while the trainer has version `trained`.

        Args:
            rest: groups of the same batch that are taken later, before the next version.
        """
        ...

    def take(self, groups: int, /) -> tuple[GroupId, ...]:
        """Remove and return groups; only after `ready` returned True, or if nothing runs."""
        ...

    def waiting_for(self, trained: Version, groups: int, rest: int = 0, /) -> str:
        """Return why `ready` returns False, for a progress display."""
        ...


OnLateName = Literal["wait", "drop", "recycle"]
"""What happens to a group that would exceed the bound of its lag: training `wait`s for it before
that; or it is dropped, whether it runs or is finished, and another group starts in its place: of
the next prompt (`drop`), or of the same prompt with the current weights (`recycle`)."""
ON_LATE: Final[tuple[OnLateName, ...]] = get_args(OnLateName)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """A policy for forming batches. Create one with the functions below."""

    name: str
    make_backlog: Callable[[int], Backlog] = field(compare=False, repr=False)
    """Function that creates the backlog for batches of `batch_groups`."""
    max_lag: float = math.inf
    """Guaranteed bound of the lag in whole versions, in addition to eq. 3."""
    on_late: OnLateName = "wait"
    """What keeps the bound: training waits for groups, or late ones are dropped or recycled."""

    @property
    def drops_late(self) -> bool:
        """True if late groups lose their tokens; otherwise training waits for them in time."""
        return self.on_late != "wait"


def oldest_finished_first() -> BatchOrder:
    """Take the B oldest finished groups, while others may still run, as in the released AReaL."""
    return BatchOrder(name="oldest_finished_first", make_backlog=OldestFirst)


def strict_start_order() -> BatchOrder:
    """Take the B oldest of all groups; wait until they are finished. No lag exceeds ceil(eta)."""
    return BatchOrder(name="strict_start_order", make_backlog=StartOrder)


def bounded_lag(max_lag: float, on_late: OnLateName = "wait") -> BatchOrder:
    """Take the B oldest finished groups, if every group can still be trained on within
    `max_lag`.

    Waiting looks ahead (earliest deadline first): a batch is taken only if, for every j >= 0, the
    groups due within the next j batches that are not in this one fit into j batches.

    Args:
        max_lag: versions, rounded down. Waiting needs `max_lag >= ceil(eta)`, which `Limits`
            checks.
        on_late: `drop` and `recycle` drop groups, running or finished, that can no longer be
            trained on in time, instead of waiting. Dropped groups do not count as started, so
            others replace them: those of the next prompts, or first of all their own.
    """
    if math.isnan(max_lag) or max_lag < 0:
        raise ValueError(f"max_lag is {max_lag}, but a lag is a number >= 0 (versions)")
    if on_late not in ON_LATE:
        raise ValueError(f"on_late is {on_late!r}, but must be one of {', '.join(ON_LATE)}")
    whole = max_lag if math.isinf(max_lag) else math.floor(max_lag)
    kind = EarliestDeadlineFirst if on_late == "wait" else OldestFirst
    return BatchOrder(
        name="bounded_lag",
        make_backlog=lambda batch_groups: kind(batch_groups, whole),
        max_lag=whole,
        on_late=on_late,
    )


OrderName = Literal["oldest_finished_first", "strict_start_order", "bounded_lag"]
ORDERS: Final[tuple[OrderName, ...]] = get_args(OrderName)
"""Names of the orders above."""


def order_named(
    name: str, schedule: Schedule, *, max_lag: float | None = None, on_late: OnLateName = "wait"
) -> BatchOrder:
    """Return the batch order of this name, for runs of a schedule.

    Args:
        schedule: gives the bound of `bounded_lag` if `max_lag` is None.
        max_lag: bound of `bounded_lag`, in versions; None uses `lag_bound(schedule)`.
        on_late: of `bounded_lag`.
    """
    match name:
        case "oldest_finished_first":
            return oldest_finished_first()
        case "strict_start_order":
            return strict_start_order()
        case "bounded_lag":
            if max_lag is None:
                max_lag = lag_bound(schedule)
                if math.isinf(max_lag):
                    raise ValueError(
                        f"batch_order is {name}, but eta is infinite, which gives no bound; "
                        "set max_lag"
                    )
            return bounded_lag(max_lag, on_late)
    raise ValueError(f"batch_order is {name!r}, but must be one of {', '.join(ORDERS)}")


def _progress(finished: int, groups: int, trained: Version) -> str:
    return f"{finished} of {groups} groups for step {trained + 1}"


class OldestFirst:
    """Oldest finished groups first; those that started before `trained - max_lag` are `late`."""

    def __init__(self, _batch_groups: int, max_lag: float = math.inf) -> None:
        self._max_lag = max_lag
        self._heap: list[tuple[Version, GroupId]] = []
        # Running groups are needed only to find late ones.
        self._bounded = not math.isinf(max_lag)
        self._running: dict[Version, set[GroupId]] = {}

    def started(self, group: GroupId, version: Version, /) -> None:
        """Record a running group, which only a bounded order needs."""
        if self._bounded:
            self._running.setdefault(version, set()).add(group)

    def restarted(self, group: GroupId, old: Version, new: Version, /) -> None:
        """Count its lag from `new`."""
        self.removed(group, old)
        self.started(group, new)

    def finished(self, group: GroupId, version: Version, /) -> None:
        """Add to the heap, in O(log groups)."""
        heappush(self._heap, (version, group))
        if self._bounded:
            self._running[version].remove(group)

    def started_all(self, groups: Sequence[GroupId], version: Version, /) -> None:
        """Record running groups, which only a bounded order needs."""
        if self._bounded:
            self._running.setdefault(version, set()).update(groups)

    def finished_all(self, groups: Sequence[GroupId], versions: Sequence[Version], /) -> None:
        """Add to the heap, each in O(log groups)."""
        for both in zip(versions, groups, strict=True):
            heappush(self._heap, both)
            if self._bounded:
                self._running[both[0]].remove(both[1])

    def removed(self, group: GroupId, version: Version, /) -> None:
        """Remove the group, which can no longer become late."""
        if self._bounded:
            self._running[version].remove(group)

    def late(self, trained: Version, /) -> list[GroupId]:
        """Remove and return groups, running or finished, that started before `trained -
        max_lag`.
        """
        oldest = trained - self._max_lag
        groups: list[GroupId] = []
        for version in [version for version in self._running if version < oldest]:
            groups.extend(self._running.pop(version))
        while self._heap and self._heap[0][0] < oldest:
            groups.append(heappop(self._heap)[1])
        return sorted(groups)

    def ready(self, _trained: Version, groups: int, _rest: int = 0, /) -> bool:
        """Return whether any `groups` finished."""
        return len(self._heap) >= groups

    def take(self, groups: int, /) -> tuple[GroupId, ...]:
        """Take the oldest groups of the heap."""
        heap = self._heap
        return tuple([heappop(heap)[1] for _ in range(groups)])

    def waiting_for(self, trained: Version, groups: int, _rest: int = 0, /) -> str:
        """Return how many groups finished."""
        return _progress(len(self._heap), groups, trained)


class StartOrder:
    """All groups in start order: the finished prefix, and the rest from the first unfinished."""

    def __init__(self, _batch_groups: int) -> None:
        self._prefix: deque[GroupId] = deque()
        self._rest: deque[GroupId] = deque()
        self._finished: set[GroupId] = set()
        self._removed: set[GroupId] = set()

    def started(self, group: GroupId, _version: Version, /) -> None:
        """Append the group."""
        self._rest.append(group)

    def restarted(self, _group: GroupId, _old: Version, _new: Version, /) -> None:
        """Keep its place; its version does not matter."""

    def finished(self, group: GroupId, _version: Version, /) -> None:
        """Mark as finished, which may extend the finished prefix; O(1) amortized."""
        self._finished.add(group)
        if group == self._rest[0]:
            self._extend_prefix()

    def started_all(self, groups: Sequence[GroupId], _version: Version, /) -> None:
        """Append the groups."""
        self._rest.extend(groups)

    def finished_all(self, groups: Sequence[GroupId], _versions: Sequence[Version], /) -> None:
        """Mark as finished, which may extend the finished prefix."""
        self._finished.update(groups)
        self._extend_prefix()

    def removed(self, group: GroupId, _version: Version, /) -> None:
        """Remove its place, which may extend the finished prefix."""
        self._removed.add(group)
        if group == self._rest[0]:
            self._extend_prefix()

    def late(self, _trained: Version, /) -> list[GroupId]:
        """Return nothing: the order itself bounds the lag."""
        return []

    def ready(self, _trained: Version, groups: int, _rest: int = 0, /) -> bool:
        """Return whether the `groups` oldest of all groups have finished."""
        return len(self._prefix) >= groups

    def take(self, groups: int, /) -> tuple[GroupId, ...]:
        """Take the first groups of the prefix."""
        return tuple([self._prefix.popleft() for _ in range(groups)])

    def waiting_for(self, trained: Version, groups: int, _rest: int = 0, /) -> str:
        """Return how many groups finished, or the group that blocks the others."""
        finished = len(self._prefix) + len(self._finished)
        if finished >= groups and self._rest:
            return f"group {self._rest[0]}, the oldest, to end"
        return _progress(finished, groups, trained)

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


class EarliestDeadlineFirst:
    """Oldest finished groups first, with the look-ahead of `bounded_lag`.

    With v the trainer's version, R(s) running and F(s) finished groups that started at version s
    or earlier: these must be trained on by version s + max_lag, j = s + max_lag - v batches after
    this one. Of a batch of which n groups are taken now and r later, n hold min(F(s), n) of them,
    so these may be taken if for every s

        R(s) + F(s) - min(F(s), n) <= r + j B.

    Only versions with running groups can break this; there are few of them.
    """

    def __init__(self, batch_groups: int, max_lag: float) -> None:
        self._batch_groups = batch_groups
        self._max_lag = max_lag
        self._heap: list[tuple[Version, GroupId]] = []
        # In ascending order: every start but those of a recovery has the engines' newest version.
        self._running: dict[Version, int] = {}
        # While blocked, `_missing` more groups of version `_blocking` or earlier must end before
        # another check makes sense. Counted down, so that waiting costs O(1) per event.
        self._missing = 0
        self._blocking = -1

    def started(self, _group: GroupId, version: Version, /) -> None:
        """Count it with the running groups of its version."""
        unsorted = bool(self._running) and version < next(reversed(self._running))
        self._running[version] = self._running.get(version, 0) + 1
        if unsorted:  # kept by a recovery
            self._running = dict(sorted(self._running.items()))

    def restarted(self, group: GroupId, old: Version, new: Version, /) -> None:
        """Count its deadline from `new`."""
        self._ended(old)
        self.started(group, new)

    def finished(self, group: GroupId, version: Version, /) -> None:
        """Add to the heap, in O(log groups)."""
        heappush(self._heap, (version, group))
        self._ended(version)

    def started_all(self, groups: Sequence[GroupId], version: Version, /) -> None:
        """Count them with the running groups of their version."""
        for group in groups:
            self.started(group, version)

    def finished_all(self, groups: Sequence[GroupId], versions: Sequence[Version], /) -> None:
        """Add to the heap, each in O(log groups)."""
        for group, version in zip(groups, versions, strict=True):
            self.finished(group, version)

    def removed(self, _group: GroupId, version: Version, /) -> None:
        """Count one group less for the deadlines."""
        self._ended(version)

    def _ended(self, version: Version) -> None:
        running = self._running[version] - 1
        if running:
            self._running[version] = running
        else:
            del self._running[version]
        if self._missing and version <= self._blocking:
            self._missing -= 1

    def late(self, _trained: Version, /) -> list[GroupId]:
        """Return nothing: waiting keeps the bound."""
        return []

    def ready(self, trained: Version, groups: int, rest: int = 0, /) -> bool:
        """Return whether enough groups finished and the condition is true; O(1) while blocked, or
        if no group is due.
        """
        if len(self._heap) < groups or self._missing:
            return False
        running = 0
        for version, of_version in self._running.items():
            running += of_version
            room = rest + (version + self._max_lag - trained) * self._batch_groups
            if running > room:
                finished = sum(start <= version for start, _ in self._heap)
                missing = running + finished - min(finished, groups) - room
                if missing > 0:
                    self._missing, self._blocking = int(missing), version
                    return False
        return True

    def take(self, groups: int, /) -> tuple[GroupId, ...]:
        """Take the oldest groups of the heap, which have the earliest deadlines."""
        heap = self._heap
        self._missing = 0
        return tuple([heappop(heap)[1] for _ in range(groups)])

    def waiting_for(self, trained: Version, groups: int, rest: int = 0, /) -> str:
        """Return how many groups finished, or the running groups that block the batch."""
        if len(self._heap) < groups or self.ready(trained, groups, rest):
            return _progress(len(self._heap), groups, trained)
        plural = "s" if self._missing > 1 else ""
        return (
            f"{self._missing} group{plural} started at version {self._blocking} or earlier to end, "
            f"which would otherwise exceed a lag of {self._max_lag}"
        )
