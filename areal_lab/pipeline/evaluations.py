"""Measure versions on held-out problems while training continues, beside its rollouts.

    engines hold 20 --held--> two or more: one of them keeps 20 until the measurement of 20 is over
                              one: it takes a share of it, and unfinished responses continue under
                              21, 22, ..., which is counted
                    --------> held_out.jsonl, best

    task            produces                         waits for            unblocked by
    measurement     a line of held_out.jsonl         engines, rewards     their replies
                    `failed`, if rewards fail too often

Held-out responses are no rollouts: the coordinator does not know of them, so that admission and
staleness are as without them. One measurement runs at a time. No measurement ends the run, except
that a reward function that fails too often does so wherever it is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from areal_lab.config.schema import TrainConfig
from areal_lab.control.evaluation import is_due, missed
from areal_lab.control.events import EngineId, Version
from areal_lab.data.problems import Problem
from areal_lab.pipeline.evaluate import HeldOutReward, measure
from areal_lab.pipeline.fleet import first_error
from areal_lab.pipeline.resume.retention import measurements
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import RecomputeCounts, Rollout
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import Server
from areal_lab.rewards.failure_rate import RewardError
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import append_held_out


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """The measurements of one run."""

    config: TrainConfig
    rollout: Rollout
    """Samples as `config.evaluation` says; for measurements before and after training."""
    servers: ServerPool
    """The engines of the rollout."""
    problems: Sequence[Problem]
    """Held-out problems."""
    folder: RunFolder
    checkpoints: CheckpointWriter
    note: Callable[[str], None]
    """Shows a message to the user."""
    tokens: int = 0
    """Response tokens of the measurements that ended."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run must end because of `error`."""
    error: BaseException | None = None
    costs: RecomputeCounts = field(default_factory=RecomputeCounts)
    """What interruptions of measurements cost, apart from those of rollouts."""
    _held: Version = 0
    """Version that the engines hold."""
    _running: tuple[Version, asyncio.Task[None]] | None = None
    _done: int = 0
    """Problems of the running measurement that are scored."""

    @property
    def every(self) -> int:
        """Steps between two measurements; 0 is never."""
        return self.config.eval_every_steps if self.problems else 0

    @property
    def running(self) -> bool:
        """Whether a measurement runs."""
        return self._running is not None

    @property
    def progress(self) -> str:
        """`evaluating step 20: 37/128`; empty if no measurement runs."""
        if self._running is None:
            return ""
        return f"evaluating step {self._running[0]}: {self._done}/{len(self.problems)}"

    def begin(self, version: Version) -> None:
        """Training begins with engines that hold `version`.

        A run that continues measures its checkpoint if that was due and is not in its file.
        """
        self._held = version
        # Of the version before it, as if it had just reached the engines.
        due = version > 0 and self._is_due(version, version - 1)
        if due and version not in measurements(self.folder):
            self._start(version)

    def held(self, version: Version) -> None:
        """The engines hold `version` from now on: measure it if it is due."""
        held, self._held = self._held, version
        if not self._is_due(version, held):
            return
        if self._running is None:
            self._start(version)
        else:
            self.note(
                f"step {version} is not evaluated: that of step {self._running[0]} still runs "
                f"({self._done}/{len(self.problems)}); raise eval_every_steps, or lower "
                "evaluation.max_problems or evaluation.samples_per_problem"
            )

    async def finish(self) -> None:
        """Wait for the running measurement.

        Raises:
            RewardError: if the reward function failed too often.
        """
        if self._running is not None:
            await asyncio.wait({self._running[1]})
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """End the running measurement without a result."""
        if self._running is None:
            return
        version, task = self._running
        self.note(f"step {version} is not evaluated: the run ended before it was")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def summary(self, version: Version) -> dict[str, object]:
        """For summary.json: what was measured and missed until `version`, and what it cost.

        Tokens are of this life of the run, if it was continued.
        """
        known = measurements(self.folder)
        gaps = missed(known, every=self.every, until=min(version, self.config.total_train_steps))
        return {
            "versions": sorted(known),
            "mixed": [of for of, one in sorted(known.items()) if not one.exact],
            "missed": list(gaps),
            "tokens": self.tokens,
            "resubmitted_samples": self.costs.resubmitted_samples,
            "recomputed_tokens": self.costs.tokens,
        }

    def _is_due(self, version: Version, held: Version) -> bool:
        return is_due(version, held, every=self.every, last=self.config.total_train_steps)

    def _start(self, version: Version) -> None:
        self._done = 0
        self.checkpoints.measuring.add(version)
        rollout = self._beside(self.servers.pin())  # now: the next version may already be coming
        task = asyncio.create_task(self._evaluate(version, rollout), name=f"evaluate {version}")
        self._running = version, task

    def _beside(self, pinned: EngineId | None) -> Rollout:
        """The rollout of a measurement: on the pinned engine, or on a share of all."""
        running = self.rollout.running_samples
        if pinned is not None:
            engines = _Pinned(self.servers, pinned)
            return replace(self.rollout, engines=engines, recomputed=self.costs, open={})
        evaluation = self.config.evaluation
        share = max(evaluation.samples_per_problem, int(evaluation.engine_share * running))
        return replace(self.rollout, running_samples=share, recomputed=self.costs, open={})

    async def _evaluate(self, version: Version, rollout: Rollout) -> None:
        evaluation = self.config.evaluation

        def count_problem() -> None:
            self._done += 1

        try:
            found = await measure(
                rollout,
                self.problems,
                samples=evaluation.samples_per_problem,
                ks=evaluation.pass_at,
                done=count_problem,
            )
            await self.servers.unpin()
            await self._keep(version, found)
        except Exception as error:
            self._failed(version, first_error(error))
            await self.servers.unpin()
        finally:
            self._running = None
            self.checkpoints.measuring.discard(version)

    async def _keep(self, version: Version, found: HeldOutReward) -> None:
        """Write a measurement down, and decide again which checkpoint is the best."""
        self.tokens += sum(found.tokens.values())
        measured = found.measured(version)
        self.folder.check_claim()
        append_held_out(self.folder.path, measured)
        self.checkpoints.measuring.discard(version)
        best = (await self.checkpoints.retain()).best
        told = "no problem has a reward" if measured is None else str(measured)
        also = ", the best so far" if best == version else ""
        self.note(f"held-out reward of step {version}{also}: {told}")

    def _failed(self, version: Version, error: BaseException) -> None:
        if isinstance(error, RewardError):
            self.error = error
            self.failed.set()
        else:  # of the engines, whose losses the run handles itself
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.note(f"step {version} is not evaluated: {reason}")


@dataclass(frozen=True, slots=True)
class _Pinned:
    """The pinned engine; once it is lost or unpinned, all engines."""

    servers: ServerPool
    pinned: EngineId

    def engine(self, number: EngineId) -> Server:
        """See `EnginePool`."""
        return self.servers.engine(number)

    async def for_rollouts(self) -> Sequence[EngineId]:
        """See `EnginePool`."""
        if self.servers.pinned == self.pinned:
            return [self.pinned]
        return await self.servers.for_rollouts()

    async def round_robin(self, turn: int) -> EngineId:
        """See `EnginePool`."""
        if self.servers.pinned == self.pinned:
            return self.pinned
        return await self.servers.round_robin(turn)
