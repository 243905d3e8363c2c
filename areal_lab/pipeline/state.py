"""Live status of a running training, for displays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from areal_lab.cluster.run_hosts import RunHosts
from areal_lab.control.coordinator import Coordinator
from areal_lab.host.processes import RunningProcess
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.rollout.workflow import waits_for


@dataclass(slots=True)
class RunState:
    """Parts of a run that a display reads; None until they exist."""

    coordinator: Coordinator | None = None
    performer: RunPerformer | None = None
    children: list[RunningProcess] = field(default_factory=list)
    """Processes of the trainer and the engines."""
    hosts: RunHosts | None = None
    """Hosts of these processes; None if all are on this machine."""

    waiting_for: str = ""
    """Description of what the run waits for; empty before and after training."""
    counts: str = ""
    """Description of versions, groups and tokens; empty before and after training."""

    async def refresh_until_cancelled(self, every_s: float = 0.25) -> None:
        """Update `waiting_for` and `counts` until cancelled.

        Displays read these texts from another thread, which must not use the coordinator.
        """
        try:
            while self.coordinator is not None:
                outside = (
                    "" if self.performer is None else waits_for(self.performer.rollout.workflow)
                )
                waiting = (self.coordinator.waiting_for(), outside)
                self.waiting_for = "; ".join(text for text in waiting if text)
                self.counts = self._counts()
                await asyncio.sleep(every_s)
        finally:
            self.waiting_for = self.counts = ""

    def _counts(self) -> str:
        if self.coordinator is None or self.performer is None:
            return ""
        counts, tally = self.coordinator.counts, self.performer.tally
        servers = self.performer.servers
        missing = len(servers.sources) - len(servers.alive)
        lost = f"{missing} of {len(servers.sources)} engines lost; " if missing else ""
        return (
            f"{lost}weights v{counts.trained_version} trained, v{counts.pushed_version} on "
            f"engines; groups: {counts.in_flight} in flight, {counts.finished} ready, "
            f"{counts.trained} trained, {counts.filtered + counts.dropped} filtered or dropped; "
            f"{tally.generated_tokens:,} tokens"
            + (f"; {evaluating}" if (evaluating := self.performer.evaluations.progress) else "")
        )
