"""Which hosts are there, and whether the run is: heartbeats that were missed, and what is late.

    host, to its run    joined --silent for `lost_after` heartbeats | another incarnation--> lost
    run, to its host    heard --no heartbeat--> silent --lease is over--> given up
                          '<--one that is not late--'

A host that was lost may join again, as another incarnation: what the earlier one sends is late, and
is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MARGIN: Final = 0.5
"""Of the interval between two heartbeats: the last one that may be missed is given this long."""


def loss_s(heartbeat_s: float, lost_after: int) -> float:
    """Longest time in which a run finds a lost host: it waits for the last reply, too."""
    return heartbeat_s * (lost_after + 1)


def silence_s(heartbeat_s: float, lost_after: int) -> float:
    """Seconds without a heartbeat after which a host counts its run as silent: it has then missed
    as many as a run does of a host that it counts as lost."""
    return heartbeat_s * (lost_after + _MARGIN)


@dataclass(slots=True)
class HostLiveness:
    """What is known of one incarnation of a host."""

    incarnation: str
    lost_after: int
    """Heartbeats in a row without a reply after which it is lost."""
    missed: int = 0
    lost: str = ""
    """Why it is lost; empty while it is not."""

    def replied(self, incarnation: str) -> None:
        """It replied to a heartbeat."""
        self.missed = 0
        if incarnation != self.incarnation:
            self.lost = self.lost or "it has started again, without its processes"

    def silent(self, why: str) -> None:
        """It did not reply to a heartbeat."""
        self.missed += 1
        if self.missed >= self.lost_after:
            self.lost = self.lost or f"it did not reply to {self.missed} heartbeats ({why})"


@dataclass(slots=True, kw_only=True)
class RunLiveness:
    """What one incarnation of a host knows of its run; times are in seconds of one clock.

    After a silence heartbeats may be late: a link that was healed delivers those of before, and a
    host that hung reads them when it continues. So the host numbers its replies, each heartbeat
    names the newest reply that the run has received, and a silence ends with one that names a reply
    given after the silence was noticed.
    """

    silent_after_s: float
    lease_s: float
    heard_s: float
    """When the last heartbeat came that was not late."""
    replies: int = 0
    """Number of the newest reply."""
    silent: bool = False
    """Whether the run is silent."""
    _replies_before: int = 0
    """Replies given when the silence was noticed."""

    def unheard_s(self, now_s: float) -> float:
        """Seconds since the last heartbeat that was not late."""
        return now_s - self.heard_s

    def look(self, now_s: float) -> None:
        """Notice a silence."""
        if not self.silent and self.unheard_s(now_s) >= self.silent_after_s:
            self.silent, self._replies_before = True, self.replies

    def heartbeat(self, now_s: float, received: int) -> None:
        """A heartbeat came, and is replied to.

        Args:
            now_s: when.
            received: number of the newest reply that the run had received when it sent this.
        """
        self.look(now_s)
        if not self.silent or received > self._replies_before:
            self.heard_s, self.silent = now_s, False
        self.replies += 1

    def given_up(self, now_s: float) -> bool:
        """Whether the lease is over."""
        return self.unheard_s(now_s) >= self.lease_s

    def next_look_s(self, now_s: float) -> float:
        """Seconds until something changes without another heartbeat."""
        first_s = self.lease_s if self.silent else min(self.lease_s, self.silent_after_s)
        return max(0.0, first_s - self.unheard_s(now_s))
