"""The training side: takes a batch, works as long as it costs, exports the weights.

Train --> (engines loaded) --> switch --> work --> (engines loaded) --> export --> TrainStepDone
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from areal_lab.control.events import Train
from areal_lab.runlog.activity import LOST, WAIT_WEIGHTS
from simulator.run.pools import EXPORT, TO_TRAINING
from simulator.run.system import Process, Timing
from simulator.workload.streams import TRAINER_FAILURES, stream

if TYPE_CHECKING:
    from simulator.run.drive import Drive


class Trainer:
    """Trains on one batch at a time; the coordinator sees to that."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._env = drive.env
        failures = drive.system.failures
        nodes = drive.system.training_nodes if failures is not None else 0
        self._nodes = [stream(drive.seed, TRAINER_FAILURES, node) for node in range(nodes)]
        self._fails_s = [failures.uptime_s(node) for node in self._nodes] if failures else []

    def train(self, train: Train) -> Process:
        """One step, from the batch to the version that can be pushed."""
        drive, env, system = self._drive, self._env, self._drive.system
        flights = [drive.kept.pop(group) for group in train.groups]
        lengths = system.prompt_tokens + np.concatenate([f.draws.tokens for f in flights])
        answers = chain.from_iterable([flight.decoded for flight in flights])
        drive.book.batch(env.now, train.version, answers)
        timing = system.training.step(lengths, minibatches=system.minibatches)
        if system.push_holds_trainer:
            yield from self._until_loaded()
        if system.switch is not None:
            yield from self._busy(TO_TRAINING, system.switch.to_training_s)
        yield from self._work(timing)
        # Engines are done with the weights before these, so that storage holds one set at a time.
        yield from self._until_loaded()
        yield from self._busy(EXPORT, system.weights.export_s)
        drive.step_done(train.version + 1)

    def _until_loaded(self) -> Process:
        begin_s = self._env.now
        while self._drive.loaded is not None:
            yield self._drive.loaded
        self._drive.book.trainer_clock.add(WAIT_WEIGHTS, self._env.now - begin_s)
        self._drive.trainer_span("wait", begin_s, self._env.now, WAIT_WEIGHTS)

    def _busy(self, name: str, seconds: float) -> Process:
        if seconds > 0:
            begin_s = self._env.now
            yield self._env.timeout(seconds)
            self._drive.book.trainer_clock.add(name, seconds)
            self._drive.trainer_span(name, begin_s, self._env.now)

    def _work(self, timing: Timing) -> Process:
        """The step; if a node fails, from its beginning again once the node is back."""
        env, book = self._env, self._drive.book
        begin_s = env.now
        while self._fails_s and min(self._fails_s) < env.now + timing.seconds:
            yield from self._failure()
        book.trainer_clock.add(LOST, env.now - begin_s)
        self._drive.trainer_span("wait", begin_s, env.now, LOST)
        begin_s = env.now
        yield env.timeout(timing.seconds)
        for name, seconds in timing.parts.items():
            book.trainer_clock.add(name, seconds)
            self._drive.trainer_span(name, begin_s, min(begin_s + seconds, env.now))
            begin_s += seconds
        book.trained(timing)

    def _failure(self) -> Process:
        failures = self._drive.system.failures
        assert failures is not None
        first = min(range(len(self._nodes)), key=self._fails_s.__getitem__)
        works_s = self._fails_s[first] + failures.detection_s + failures.restart_s
        # It may have failed, and come back, while nothing was to be done.
        if works_s > self._env.now:
            yield self._env.timeout(works_s - self._env.now)
        self._drive.book.trainer_restarts += 1
        uptime_s = failures.uptime_s(self._nodes[first])
        self._fails_s[first] = works_s + uptime_s if math.isfinite(uptime_s) else math.inf
