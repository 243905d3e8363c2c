"""Measure versions on held-out problems during training, in parallel with the rollouts.

    engines load version 20 --loaded--> two or more engines: one keeps 20 until it is measured
                                        one engine: it runs rollouts and held-out responses, which
                                        may continue under 21, 22, ...; this is counted
                            ----------> held_out.jsonl, best

    task            produces                         waits for            unblocked by
    measurement     a line of held_out.jsonl         engines, rewards     their replies
                    `failed`, if rewards fail too often

The coordinator does not count held-out responses as rollouts, so they do not change admission or
staleness. One measurement runs at a time. A failed measurement does not end the run, unless the
reward function fails too often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from areal_lab.config.schema import TrainConfig
from areal_lab.control.evaluation import is_due, missed
from areal_lab.control.events import EngineId, Version
from areal_lab.data.problems import Problem
from areal_lab.pipeline.evaluate import measure
from areal_lab.pipeline.fleet import first_error
from areal_lab.pipeline.resume.checkpoints import measurements
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import RecomputeCounts, Rollout
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import Server
from areal_lab.rewards.service import RewardError
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """The measurements of one run."""

    config: TrainConfig
    rollout: Rollout
    """Rollout with the sampling of `config.evaluation`, also used before and after training."""
    servers: ServerPool
    """The engines of the rollout."""
    problems: Sequence[Problem]
    """Held-out problems."""
    folder: RunFolder
    checkpoints: CheckpointWriter
    note: Callable[[str], None]
    """Shows a message to the user."""
    tokens: int = 0
    """Response tokens of the finished measurements."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run must end because of `error`."""
    error: BaseException | None = None
    costs: RecomputeCounts = field(default_factory=RecomputeCounts)
    """Cost of interruptions of measurements; rollouts are counted separately."""
    _loaded: Version = 0
    """Version that the engines have loaded."""
    _running: tuple[Version, asyncio.Task[None]] | None = None
    _done: int = 0
    """Number of scored problems in the running measurement."""

    @property
    def every(self) -> int:
        """Steps between two measurements; 0 means no measurements."""
        return self.config.eval_every_steps if self.problems else 0

    @property
    def running(self) -> bool:
        """True while a measurement runs."""
        return self._running is not None

    @property
    def progress(self) -> str:
        """`evaluating step 20: 37/128`; empty if no measurement runs."""
        if self._running is None:
            return ""
        return f"evaluating step {self._running[0]}: {self._done}/{len(self.problems)}"

    def begin(self, version: Version) -> None:
        """Start training with engines that have loaded `version`.

        A continued run measures its checkpoint if that was due and is not in held_out.jsonl.
        """
        self._loaded = version
        # As if the engines had the previous version until now.
        due = version > 0 and self._is_due(version, version - 1)
        if due and version not in measurements(self.folder):
            self._start(version)

    def loaded(self, version: Version) -> None:
        """Note that the engines have loaded `version`, and measure it if it is due."""
        before, self._loaded = self._loaded, version
        if not self._is_due(version, before):
            return
        if self._running is None:
            self._start(version)
        else:
            self.note(
                f"step {version} is not evaluated: step {self._running[0]} is still evaluated "
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
        """Cancel the running measurement without a result."""
        if self._running is None:
            return
        version, task = self._running
        self.note(f"step {version} is not evaluated: the run ended before it was")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def summary(self, version: Version) -> dict[str, object]:
        """Return the measured and missed versions and their cost, for summary.json.

        Args:
            version: newest trained version. Tokens count since the last start of the run.
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

    def _is_due(self, version: Version, before: Version) -> bool:
        return is_due(version, before, every=self.every, last=self.config.total_train_steps)

    def _start(self, version: Version) -> None:
        self._done = 0
        self.checkpoints.measuring.add(version)
        rollout = self._rollout_for(self.servers.pin())  # now, before the next push
        task = asyncio.create_task(self._evaluate(version, rollout), name=f"evaluate {version}")
        self._running = version, task

    def _rollout_for(self, pinned: EngineId | None) -> Rollout:
        """Return the rollout of a measurement, on the pinned engine or a share of all engines."""
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
        """Write a measurement to held_out.jsonl, and update the best checkpoint."""
        self.tokens += sum(found.tokens.values())
        measured = found.measured(version)
        self.folder.check_claim()
        append_held_out(self.folder.path, measured)
        self.checkpoints.measuring.discard(version)
        best = (await self.checkpoints.retain()).best
        text = "no problem has a reward" if measured is None else str(measured)
        also = ", the best so far" if best == version else ""
        self.note(f"held-out reward of step {version}{also}: {text}")

    def _failed(self, version: Version, error: BaseException) -> None:
        if isinstance(error, RewardError):
            self.error = error
            self.failed.set()
        else:  # an error of the engines, whose losses the run handles itself
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.note(f"step {version} is not evaluated: {reason}")


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Pool with the pinned engine only; once it is lost or unpinned, with all engines."""

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
