"""State shared with a running training: the stop signal and the live status for displays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from areal_lab.cluster.run_hosts import RunHosts
from areal_lab.control.coordinator import Coordinator
from areal_lab.host.processes import RunningProcess
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.rollout.attended import waits_for


@dataclass(slots=True)
class StopSignal:
    """Tells a run to finish its step, save and end; `request` may be called from any thread."""

    _requested: bool = False
    _event: asyncio.Event | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def request(self) -> None:
        """Request the stop. Idempotent."""
        self._requested = True
        if self._loop is not None and self._event is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested

    async def wait(self) -> None:
        """Return once a stop is requested."""
        if self._event is None:
            self._event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._requested:
            return
        await self._event.wait()


@dataclass(slots=True)
class RunState:
    """The parts of a run that a display reads; empty until they exist."""

    coordinator: Coordinator | None = None
    performer: RunPerformer | None = None
    children: list[RunningProcess] = field(default_factory=list)
    """The trainer and the engines."""
    hosts: RunHosts | None = None
    """Where they are, unless they are on this machine."""

    waiting_for: str = ""
    """What the run is waiting for; empty before and after training."""
    counts: str = ""
    """Versions, groups and tokens; empty before and after training."""

    async def refresh_until_cancelled(self, every_s: float = 0.25) -> None:
        """Update the two texts until cancelled.

        A display runs in its own thread; the coordinator belongs to the event loop's thread.
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
