"""One run with a fault: what happened in it, and whether everything is accounted for."""

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
from areal_lab.pipeline.rollout import RecomputeCounts
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.replay import check_replay
from tests.fault_lab.stand_in import StandInTrainer, rescored_gap

STEPS = 5
GROUPS, SAMPLES = 2, 2
"""A batch; one group of samples has one prompt."""
LIMITS = Limits(
    batch_groups=GROUPS,
    max_in_flight=2 * GROUPS,
    train_steps=STEPS,
    schedule=asynchronous(1),
)
SHORT = 20
LONG = 200
"""Tokens of an answer that is still running when something happens."""
VICTIM: EngineId = 1
MAX_GAP = 1e-4


def response_tokens(group: int, sample: int) -> int:
    """Half of every group runs for long."""
    return LONG if (group + sample) % 2 == 0 else SHORT


@dataclass
class Case:
    """One run and what came of it."""

    servers: ServerPool
    trainer: StandInTrainer
    folder: RunFolder
    notes: list[str]
    """What the user was told."""
    happened: list[tuple[float, Event | Action]] = field(default_factory=list)
    """With the seconds of the monotonic clock."""
    finish: Finish | None = None
    recomputed: RecomputeCounts = field(default_factory=RecomputeCounts)
    on: Callable[[Event | Action], None] = lambda _: None
    """Called with all that happens, to make more happen."""
    before_load: Callable[[EngineClient, int], None] = lambda *_: None
    """Called when an engine is about to be sent a version."""
    struck: bool = True
    """What is to happen to the victim in the middle of an answer has happened."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """What goes on beside the run."""
    log: EventLog = field(init=False)

    def event(self, event: Event) -> None:
        """As an observer."""
        self._see(event)
        self.log.event(event)

    def action(self, action: Action) -> None:
        """As an observer."""
        self._see(action)
        self.log.action(action)

    def _see(self, what: Event | Action) -> None:
        self.happened.append((time.monotonic(), what))
        self.on(what)

    def seconds_to(self, kind: type[Event | Action], since_s: float) -> float:
        """From a moment to the first event or action of a kind after it."""
        times = (t for t, what in self.happened if isinstance(what, kind) and t >= since_s)
        return next(times) - since_s

    @property
    def losses_told(self) -> int:
        """How often the coordinator was told that an engine is lost, or given up."""
        return sum(isinstance(what, EngineLost) for _, what in self.happened)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """From the third on, steps wait for this; not while the victim, which nothing has happened
        to, has no answer to be met in: the next version brings some."""
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
        """The connection to engine 1 while it is in use, after the first update, and no other one
        is on its way to it."""
        server = self.servers.alive.get(VICTIM) if self.trainer.version else None
        return None if server is None or server.paused else server.client

    def check_nothing_was_lost(self) -> None:
        """Every sample of every group was trained on once, and every token's version is true.

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
        """The incidents were counted.

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
        """Samples moved, and not all of their tokens were drawn again.

        Raises:
            AssertionError: otherwise.
        """
        assert self.recomputed.resubmitted_samples > 0
        assert self.recomputed.kept_tokens > 0


def check_log(path: Path) -> None:
    """The coordinator decides the same again from the events of the log.

    Raises:
        AssertionError: otherwise.
    """
    replay = check_replay(read_log_file(path))
    assert replay.agrees, replay.difference
