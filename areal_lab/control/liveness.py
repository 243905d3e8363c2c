"""Liveness of hosts, processes and runs, by heartbeats: silence that counts, and late messages.

    host, to its run    joined --silent for `lost_after` heartbeats | another incarnation--> lost
    run, to its host    heard --no heartbeat--> silent --lease is over--> given up
                          '<--one that is not late--'

A lost host may join again, as another incarnation: late messages of the earlier one are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MARGIN: Final = 0.5
"""Share of the interval between two heartbeats that the last one that may be missed gets."""
_MOST_EXCUSED: Final = 10.0
"""Multiple of the limit of a silence: a process that computes silently for longer is hung."""
_LATE: Final = 2.0
"""Multiple of an intended wait: a longer wait is the waiter's own delay."""


def loss_s(heartbeat_s: float, lost_after: int) -> float:
    """Longest time in which a run detects a lost host, including the wait for the last reply."""
    return heartbeat_s * (lost_after + 1)


def silence_s(heartbeat_s: float, lost_after: int) -> float:
    """Seconds without a heartbeat after which a host counts its run as silent: as many missed
    heartbeats as a run allows a host.
    """
    return heartbeat_s * (lost_after + _MARGIN)


@dataclass(slots=True)
class HostLiveness:
    """Liveness of one incarnation of a host."""

    incarnation: str
    lost_after: int
    """Missed heartbeats in a row after which the host is lost."""
    missed: int = 0
    late: int = 0
    """Heartbeats in a row whose replies the run itself read too late."""
    lost: str = ""
    """Reason why the host is lost; empty while it is not."""

    def replied(self, incarnation: str) -> None:
        """Record a reply to a heartbeat."""
        self.missed = self.late = 0
        if incarnation != self.incarnation:
            self.lost = self.lost or "it has started again, without its processes"

    def silent(self, why: str, *, waited_s: float = 0.0, meant_s: float = 0.0) -> None:
        """Record a missing reply to a heartbeat.

        Args:
            meant_s: intended wait: if the wait was far longer, the run itself was late, and the
                reply may be there.
        """
        if waited_s > _LATE * meant_s > 0 and self.late < _MOST_EXCUSED * self.lost_after:
            self.late += 1
            return
        self.missed += 1
        if self.missed >= self.lost_after:
            self.lost = self.lost or f"it did not reply to {self.missed} heartbeats ({why})"


@dataclass(slots=True, kw_only=True)
class RunLiveness:
    """Liveness of a run for one incarnation of a host; times are in seconds of one clock.

    After a silence heartbeats may be late: a repaired link delivers earlier ones, and a
    host that hung reads them when it continues. So the host numbers its replies, each heartbeat
    names the newest reply that the run has received, and a silence ends with one that names a reply
    given after the silence was noticed.
    """

    silent_after_s: float
    lease_s: float
    heard_s: float
    """Time of the last heartbeat that was not late."""
    replies: int = 0
    """Number of the newest reply."""
    silent: bool = False
    """True if the run is silent."""
    _replies_before: int = 0
    """Number of replies when the silence was noticed."""

    def unheard_s(self, now_s: float) -> float:
        """Seconds since the last heartbeat that was not late."""
        return now_s - self.heard_s

    def look(self, now_s: float) -> None:
        """Check for a silence."""
        if not self.silent and self.unheard_s(now_s) >= self.silent_after_s:
            self.silent, self._replies_before = True, self.replies

    def heartbeat(self, now_s: float, received: int) -> None:
        """Record a heartbeat and its reply.

        Args:
            received: number of the newest reply that the run had received when it sent this.
        """
        self.look(now_s)
        if not self.silent or received > self._replies_before:
            self.heard_s, self.silent = now_s, False
        self.replies += 1

    def given_up(self, now_s: float) -> bool:
        """Return whether the lease is over."""
        return self.unheard_s(now_s) >= self.lease_s

    def next_look_s(self, now_s: float) -> float:
        """Seconds until the state can change without another heartbeat."""
        first_s = self.lease_s if self.silent else min(self.lease_s, self.silent_after_s)
        return max(0.0, first_s - self.unheard_s(now_s))


@dataclass(slots=True)
class Silence:
    """Time without messages from a process, not counting time that it could not use.

    Not counted are times in which the process computed or waited for a CPU, and times in which
    the listener itself could not run.
    """

    limit_s: float
    counted_s: float = 0.0
    busy_s: float = 0.0
    late_s: float = 0.0

    def passed(self, elapsed_s: float, meant_s: float, busy: bool) -> bool:
        """Add some time; return whether the silence is over its limit."""
        heard_s = min(elapsed_s, _LATE * meant_s)
        self.late_s += elapsed_s - heard_s
        if busy:
            self.busy_s += heard_s
        else:
            self.counted_s += heard_s
        return self.counted_s >= self.limit_s or self.busy_s >= _MOST_EXCUSED * self.limit_s

    @property
    def total_s(self) -> float:
        """Total time without messages."""
        return self.counted_s + self.busy_s + self.late_s
