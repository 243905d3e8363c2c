"""Engines join and leave while a run trains, by the rule of `control.scaling`.

events of the run --ScaledRun--> log
                      |  after each training step
                      '--ScalingWatch--> number of engines --> ServerPool.add, .retire
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from areal_lab.control.events import Action, Event, TrainStepDone
from areal_lab.control.scaling import ScalingWatch
from areal_lab.pipeline.drive import Observer
from areal_lab.pipeline.servers.pool import ServerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRun:
    """Observes a run for the rule, and lets its pool follow; the log gets everything."""

    log: Observer
    watch: ScalingWatch
    pool: ServerPool
    generated_tokens: Callable[[], int]
    """Of groups that have ended."""
    clock: Callable[[], float] = time.monotonic

    def event(self, event: Event) -> None:
        """Log an event; the end of a training step may add engines or retire some."""
        now_s = self.clock()
        self.log.event(event)
        self.watch.note(now_s)
        if isinstance(event, TrainStepDone):
            self._step_done(now_s)

    def action(self, action: Action) -> None:
        """Log an action."""
        self.log.action(action)

    def _step_done(self, now_s: float) -> None:
        pool = self.pool
        engines = len(pool.alive)
        wanted = self.watch.step_done(
            now_s, engines=engines, changing=pool.changing, tokens=self.generated_tokens()
        )
        for _ in range(wanted - engines):
            pool.add_engine()
        for _ in range(engines - wanted):
            pool.retire_engine()
