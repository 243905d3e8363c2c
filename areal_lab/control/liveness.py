"""Which hosts are there: replies and missed heartbeats, and the incarnation that counts.

    joined --silent for `lost_after` heartbeats | another incarnation--> lost, for good

A host that was lost may join again, as another incarnation: what the earlier one sends is late, and
is not used.
"""

from __future__ import annotations

from dataclasses import dataclass


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
