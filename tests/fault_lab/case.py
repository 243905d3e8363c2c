"""One run with a fault: its events, and checks that no sample is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.control.coordinator import Limits
from areal_lab.control.events import (
    Action,
    EngineId,
    EngineLost,
    Event,
    Finish,
    GroupFinished,
    StartGroup,
)
from areal_lab.control.schedule import asynchronous
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.pipeline.rollout.groups import RecomputeCounts
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.replay import check_replay
from tests.fault_lab.stand_in import StandInTrainer, rescored_gap

STEPS = 5
GROUPS, SAMPLES = 2, 2
"""Size of a batch; all samples of a group have the same prompt."""
LIMITS = Limits(
    batch_groups=GROUPS,
    max_in_flight=2 * GROUPS,
    train_steps=STEPS,
    schedule=asynchronous(1),
)
SHORT = 20
LONG = 200
"""Tokens of a response that is still running when the fault happens."""
VICTIM: EngineId = 1
MAX_GAP = 1e-4


def response_tokens(group: int, sample: int) -> int:
    """Half of every group has long responses."""
    return LONG if (group + sample) % 2 == 0 else SHORT


@dataclass
class Case:
    """One run and its result."""

    servers: ServerPool
    trainer: StandInTrainer
    folder: RunFolder
    notes: list[str]
    """Messages shown to the user."""
    happened: list[tuple[float, Event | Action]] = field(default_factory=list)
    """Events and actions with the seconds of the monotonic clock."""
    finish: Finish | None = None
    recomputed: RecomputeCounts = field(default_factory=RecomputeCounts)
    on: Callable[[Event | Action], None] = lambda _: None
    """Called with every event and action; a fault may start here."""
    before_load: Callable[[EngineClient, int], None] = lambda *_: None
    """Called before an engine is sent a version."""
    struck: bool = True
    """False until a fault during a response of the victim has happened."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks of the fault, concurrent with the run."""
    log: EventLog = field(init=False)

    def event(self, event: Event) -> None:
        """Observe an event."""
        self._see(event)
        self.log.event(event)

    def action(self, action: Action) -> None:
        """Observe an action."""
        self._see(action)
        self.log.action(action)

    def _see(self, what: Event | Action) -> None:
        self.happened.append((time.monotonic(), what))
        self.on(what)

    def seconds_to(self, kind: type[Event | Action], since_s: float) -> float:
        """Seconds from a moment to the first later event or action of a kind."""
        times = (t for t, what in self.happened if isinstance(what, kind) and t >= since_s)
        return next(times) - since_s

    @property
    def losses_told(self) -> int:
        """Number of `EngineLost` events, which report a loss or that an engine is given up."""
        return sum(isinstance(what, EngineLost) for _, what in self.happened)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Hold steps from the third one on until `done`, unless the fault has not happened and the
        victim has no running response to hit: then the next version starts some."""
        self.trainer.hold = lambda: not done() and (self.struck or self._victim_works())

    def _victim_works(self) -> bool:
        started = {
            what.group
            for _, what in self.happened
            if isinstance(what, StartGroup) and what.engine == VICTIM
        }
        ended = {what.group for _, what in self.happened if isinstance(what, GroupFinished)}
        return bool(started - ended)

    def victim(self) -> EngineClient | None:
        """The client of engine 1 while it is in use, after the first update and between updates."""
        server = self.servers.alive.get(VICTIM) if self.trainer.version else None
        return None if server is None or server.paused else server.client

    def check_nothing_was_lost(self) -> None:
        """Check that every sample was trained on once, and that every token's version is correct.

        Raises:
            AssertionError: otherwise.
        """
        assert self.finish == Finish("complete"), self.notes
        seen = [(t.group, t.sample) for t in self.trainer.trained]
        assert len(seen) == len(set(seen)) == STEPS * GROUPS * SAMPLES
        assert {sample for _, sample in seen} == set(range(SAMPLES))
        for trajectory in self.trainer.trained:
            generated = sum(len(part.tokens) for part in trajectory.segments)
            assert generated == response_tokens(trajectory.group, trajectory.sample)
        check_log(self.folder.events)
        gaps = [rescored_gap(self.trainer.versions, t) for t in self.trainer.trained]
        assert max(gaps) < MAX_GAP, gaps

    def check_counts(self, *, losses: int, restarts: int = 0, mismatches: int = 0) -> None:
        """Check the counts of incidents.

        Raises:
            AssertionError: otherwise.
        """
        expected = {
            "engine_losses": losses,
            "engine_restarts": restarts,
            "version_mismatches": mismatches,
        }
        found = {name: self.servers.counts[name] for name in expected}
        assert found == expected, self.notes

    def check_tokens_were_kept(self) -> None:
        """Check that samples moved and kept tokens.

        Raises:
            AssertionError: otherwise.
        """
        assert self.recomputed.resubmitted_samples > 0
        assert self.recomputed.kept_tokens > 0


def check_log(path: Path) -> None:
    """Check that a replay of the log's events gives its actions.

    Raises:
        AssertionError: otherwise.
    """
    replay = check_replay(read_log_file(path))
    assert replay.agrees, replay.difference
