"""The trainer: takes a batch, works for the time it costs, exports the weights.

Train --> (engines loaded) --> responses --> data --> switch --> work --> (engines loaded)
      --> export --> validation, checkpoint --> TrainStepDone

Of a batch in parts, those before the last one end with the work and TrainPartDone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import simpy

from areal_lab.control.events import GroupId, Train, Version
from areal_lab.runlog.activity import LOST, WAIT_CONTROLLER, WAIT_WEIGHTS
from simulator.costs.training_timing import FETCH
from simulator.run.accounting import Accounting
from simulator.run.flights import Batch, ControllerQueue
from simulator.run.pools import EXPORT
from simulator.run.responses import Responses
from simulator.run.system import Process, System, Timing
from simulator.workload.randomness import TRAINER_FAILURES, stream


class Run(Protocol):
    """The part of the event loop that the trainer uses."""

    env: simpy.Environment
    seed: int
    system: System
    accounting: Accounting
    responses: Responses
    controller: ControllerQueue | None

    def take(self, groups: Sequence[GroupId], /) -> Batch:
        """The responses of groups that are trained on now."""
        ...

    def until_loaded(self) -> Process:
        """Wait until all engines hold the newest weights."""
        ...

    def trainer_span(self, name: str, begin_s: float, end_s: float, cause: str = "") -> None:
        """Record what the trainer did or waited for."""
        ...

    def part_done(self, version: Version) -> None:
        """Report that a part of the batch that leads to `version` is done."""
        ...

    def step_done(self, version: Version) -> None:
        """Report a new version."""
        ...


class Trainer:
    """Trains on one batch, or part of it, at a time, which the coordinator ensures."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._env = run.env
        failures = run.system.failures
        nodes = run.system.training_nodes if failures is not None else 0
        self._nodes = [stream(run.seed, TRAINER_FAILURES, node) for node in range(nodes)]
        self._fails_s = [failures.uptime_s(node) for node in self._nodes] if failures else []
        self._earlier_s = 0.0
        """Work on the parts of this batch so far, which a failure undoes."""

    def train(self, train: Train) -> Process:
        """Perform one step, from the batch to a version that can be pushed, or a part of one."""
        run, env, system = self._run, self._env, self._run.system
        run.responses.learn(train)
        batch = run.take(train.groups)
        run.accounting.batch(env.now, train.version, batch.tally)
        minibatches = system.workload.minibatches // system.limits.batch_parts
        timing = system.training.step(batch.lengths, minibatches=minibatches)
        if system.push_holds_trainer:
            yield from self._until_loaded()
        if run.controller is not None:
            yield from self._responses(run.controller, batch)
        if system.outside is not None:
            yield from self._all_of(system.outside.before_training(len(batch.lengths)))
        if system.switch is not None:
            yield from self._all_of(system.switch.to_training)
        yield from self._work(timing)
        if train.rest:
            self._earlier_s += timing.seconds
            run.part_done(train.version + 1)
            return
        self._earlier_s = 0.0
        # Engines must have loaded the previous weights: storage holds one set at a time.
        yield from self._until_loaded()
        yield from self._busy(EXPORT, system.weights.export_s)
        if system.outside is not None:
            yield from self._all_of(system.outside.after_training(train.version + 1))
        run.step_done(train.version + 1)

    def _until_loaded(self) -> Process:
        begin_s = self._env.now
        yield from self._run.until_loaded()
        self._run.accounting.trainer_clock.add(WAIT_WEIGHTS, self._env.now - begin_s)
        self._run.trainer_span("wait", begin_s, self._env.now, WAIT_WEIGHTS)

    def _responses(self, controller: ControllerQueue, batch: Batch) -> Process:
        begin_s = self._env.now
        responses, tokens = len(batch.lengths), sum(batch.tally.tokens.values())
        yield from controller.batch(responses, tokens)
        waited_s = self._env.now - begin_s
        self._run.accounting.trainer_clock.add(WAIT_CONTROLLER, waited_s)
        self._run.trainer_span("wait", begin_s, self._env.now, WAIT_CONTROLLER)
        yield from self._busy(FETCH, controller.fetched(responses, tokens).seconds)

    def _all_of(self, seconds: Mapping[str, float]) -> Process:
        for name, taken_s in seconds.items():
            yield from self._busy(name, taken_s)

    def _busy(self, name: str, seconds: float) -> Process:
        if seconds > 0:
            begin_s = self._env.now
            yield self._env.timeout(seconds)
            self._run.accounting.trainer_clock.add(name, seconds)
            self._run.trainer_span(name, begin_s, self._env.now)

    def _work(self, timing: Timing) -> Process:
        """Train; if a node fails, start the step over once the node is back."""
        env, accounting = self._env, self._run.accounting
        begin_s, again_s = env.now, 0.0
        while self._fails_s and min(self._fails_s) < env.now + again_s + timing.seconds:
            yield from self._failure()
            again_s = self._earlier_s
        if again_s:
            yield env.timeout(again_s)
        accounting.trainer_clock.add(LOST, env.now - begin_s)
        self._run.trainer_span("wait", begin_s, env.now, LOST)
        begin_s = env.now
        yield env.timeout(timing.seconds)
        for name, seconds in timing.parts.items():
            accounting.trainer_clock.add(name, seconds)
            self._run.trainer_span(name, begin_s, min(begin_s + seconds, env.now))
            begin_s += seconds
        accounting.trained(timing)

    def _failure(self) -> Process:
        failures = self._run.system.failures
        assert failures is not None
        first = min(range(len(self._nodes)), key=self._fails_s.__getitem__)
        works_s = self._fails_s[first] + failures.detection_s + failures.restart_s
        # It may have failed and come back while the trainer had nothing to do.
        if works_s > self._env.now:
            yield self._env.timeout(works_s - self._env.now)
        self._run.accounting.trainer_restarts += 1
        uptime_s = failures.uptime_s(self._nodes[first])
        self._fails_s[first] = works_s + uptime_s if math.isfinite(uptime_s) else math.inf
