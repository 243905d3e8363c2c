"""Executor of the coordinator's actions in a training run, with engines, trainer and rewards.

The executor owns the samples of groups that are not trained on yet, the weights that some engine
has not loaded yet, and the counts of the run. Only tasks of `drive` call it, on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from areal_lab.control.drift import measured
from areal_lab.control.events import (
    GroupFiltered,
    GroupFinished,
    GroupId,
    StartGroup,
    Train,
    TrainStepDone,
    Version,
)
from areal_lab.control.frontier import Frontier
from areal_lab.control.sampling import DynamicSampling
from areal_lab.data.problems import PromptSource
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.client.engine_client import EngineError
from areal_lab.engines.client.resubmit import NO_SAMPLES, PartialSamples
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.pipeline.evaluations import Evaluations
from areal_lab.pipeline.resume.saved_run import OpenTokens
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import (
    ScoredGroup,
    environment_metrics,
    outcome_metrics,
    outcome_of,
    tool_metrics,
)
from areal_lab.pipeline.rollout.turns import Unfinished
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import Server, Weights
from areal_lab.runlog.activity import WAIT_WEIGHTS
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder, SampleText
from areal_lab.runlog.incidents import COUNTED
from areal_lab.runlog.lags import DROPPED_TOKENS
from areal_lab.runlog.records import PIPELINE, TRAINER, engine_process
from areal_lab.runlog.summary import TRAINER_SPEED
from areal_lab.shell.step_report import StepReport
from areal_lab.training.protocol import TrainBatchRequest, Trainer


@dataclass(slots=True)
class Tally:
    """Counts for the display during the run; the summary takes its counts from the log."""

    generated_tokens: int = 0
    interruptions: int = 0
    """Number of interruptions of generation for new weights."""
    filtered_groups: int = 0
    """Groups that ended and are not trained on."""


@dataclass(slots=True, kw_only=True)
class RunPerformer:
    """Executor of the coordinator's actions with real processes."""

    folder: RunFolder
    log: EventLog
    rollout: Rollout
    source: PromptSource
    trainer: Trainer
    servers: ServerPool
    checkpoints: CheckpointWriter
    evaluations: Evaluations
    samples: int
    """Samples per group."""
    total_steps: int
    on_step: Callable[[StepReport], None]
    weights: dict[Version, Weights]
    sampling: DynamicSampling | None = None
    """Rule of dynamic sampling, which replaces groups; None keeps all."""
    mask_truncated: bool = False
    """True if responses that were cut off have no loss."""
    host_losses: Callable[[], int] = lambda: 0
    """Number of hosts lost so far."""
    tally: Tally = field(default_factory=Tally)
    began_s: float = field(default_factory=time.time)
    recovered: OpenTokens = field(default_factory=OpenTokens)
    """Saved tokens of the checkpoint's open groups, which are not generated again."""
    counts_before: Mapping[str, int] = field(default_factory=dict)
    """`counts` at the checkpoint from which the run continues."""
    environment: dict[str, float] = field(default_factory=dict)
    """Metrics of an environment of another library in the last step."""
    _kept: dict[GroupId, tuple[ScoredGroup, tuple[Trajectory, ...]]] = field(default_factory=dict)
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a version is being pushed to the engines."""
    _step_done_s: float = 0.0
    _saved_s: float = 0.0
    """Time at which the newest asynchronous checkpoint was complete."""
    _save_wait_s: float = 0.0
    """Seconds that training waited for checkpoints since the last step."""
    _interrupted: bool = False
    """True while engines stay paused until `resume`."""
    _tokens_at_last_step: int = 0
    _filtered_at_last_step: int = 0
    _last_step_s: float = 0.0
    _span_cursor: dict[Server, int] = field(default_factory=dict)
    _logged_counts: dict[str, int] = field(default_factory=dict)
    _between: dict[GroupId, PartialSamples] = field(default_factory=dict)
    """Samples of each running group at the time it was assigned to its engine."""
    _moves: dict[GroupId, asyncio.Queue[StartGroup]] = field(default_factory=dict)
    """Queue of each running group with its next engine, read if its engine is lost."""

    def begin(self, training_s: float = 0.0) -> None:
        """Start training: step times and rates count from here.

        Args:
            training_s: seconds of training before the checkpoint from which the run continues.
        """
        self._loaded.set()
        self.began_s = time.time() - training_s
        self._last_step_s, self._tokens_at_last_step = training_s, self.tally.generated_tokens
        self._filtered_at_last_step = self.tally.filtered_groups
        self._logged_counts = {name: self.counts_before.get(name, 0) for name in COUNTED}

    @property
    def last_checkpoint(self) -> Version | None:
        """Version of the newest checkpoint, including the one from which the run continued."""
        return self.checkpoints.last

    async def generate_group(self, start: StartGroup) -> GroupFinished | GroupFiltered:
        """Generate and score one group, or take a saved one; keep it if it can be trained on."""
        scored = self.recovered.finished.pop(start.group, None)
        if scored is None:
            start, scored = await self._generate_and_score(start)
            self.tally.generated_tokens += scored.tokens
            self._log_group(start, scored)
        trajectories = () if scored.failure else scored.trajectories(start.group)
        reason = scored.why_filtered(self.sampling, mask_truncated=self.mask_truncated)
        if reason is not None:
            self.tally.filtered_groups += 1
            return GroupFiltered(start.group, reason)
        self._kept[start.group] = (scored, trajectories)
        return GroupFinished(
            start.group,
            head_version=min(t.head_version for t in trajectories),
            tail_version=max(t.tail_version for t in trajectories),
        )

    def move_group(self, start: StartGroup) -> None:
        """Assign the next engine to a group; a group that has all its tokens ignores it."""
        if (moves := self._moves.get(start.group)) is not None:
            moves.put_nowait(start)

    async def _generate_and_score(self, start: StartGroup) -> tuple[StartGroup, ScoredGroup]:
        """Generate the group, on further engines if one is lost; returns its last placement."""
        moves = self._moves[start.group] = asyncio.Queue()
        partial = self.recovered.running.pop(start.group, NO_SAMPLES)
        self._between[start.group] = partial
        if (ended := self.rollout.ended) is not None:
            ended.begin(start.group)
        try:
            while True:
                engine = await self.servers.takes_rollouts_of(start.engine)
                placed = replace(start, engine=engine)
                try:
                    return placed, await self.rollout.training_group(
                        placed, self.source, self.samples, partial
                    )
                except Unfinished as unfinished:
                    self._between[start.group] = partial = unfinished.samples
                    if engine == start.engine:  # otherwise a substitute was lost
                        start = await moves.get()
        finally:
            del self._moves[start.group], self._between[start.group]
            if ended is not None:
                ended.end(start.group)

    async def train(self, train: Train) -> TrainStepDone:
        """Train on one batch in the trainer's process.

        If engines share the trainer's devices, this starts the trainer's turn: engines release
        their memory until `push_weights`.
        """
        if self.servers.takes_turns:
            await self._waited(WAIT_WEIGHTS, self._loaded.wait())  # the engines' turn
            await self._waited("engines release memory", self.servers.release())
        kept = [self._kept.pop(group) for group in train.groups]
        trajectories = tuple(t for _, of_group in kept for t in of_group)
        await asyncio.to_thread(self._write_trajectories, train.version + 1, kept)
        result = await self.trainer.train(
            TrainBatchRequest(version=train.version, trajectories=trajectories)
        )
        await self._export(result.version)
        for span in result.spans:
            self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)
        for name in TRAINER_SPEED:
            if name in result.metrics:
                self.log.metric(TRAINER, name, result.metrics[name])
        if result.profile:
            await asyncio.to_thread(self.folder.write_profile, result.version, result.profile)
        await self.collect_engine_spans()
        groups = [scored for scored, _ in kept]
        samples = [sample for group in groups for sample in group.samples]
        self.environment = environment_metrics(samples)
        found = {**outcome_metrics(samples), **tool_metrics(groups), **self.environment}
        self._report(result.version, {**result.metrics, **found})
        self._step_done_s = time.time()
        bounded = self.checkpoints.config.rollout.schedule == "bounded_drift"
        return TrainStepDone(result.version, *(measured(result.metrics) if bounded else ()))

    async def _waited(self, cause: str, work: Awaitable[object]) -> None:
        """Await `work` and log the time as idle time of the trainer."""
        start_s = time.time()
        await work
        self.log.span(TRAINER, cause, start_s, time.time(), cause=cause)

    def _write_trajectories(
        self, step: Version, kept: list[tuple[ScoredGroup, tuple[Trajectory, ...]]]
    ) -> None:
        codec = self.rollout.codec
        trajectories = [t for _, of_group in kept for t in of_group]
        texts = [
            SampleText(
                scored.problem.prompt if own == scored.prompt_tokens else codec.decode(own),
                completion,
                codec.characters(trajectory.response_tokens, completion),
                scored.samples[trajectory.sample].turns,
            )
            for scored, of_group in kept
            for completion, trajectory in zip(
                chain.from_iterable(scored.completions), of_group, strict=True
            )
            for own in [trajectory.prompt_tokens]
        ]
        self.folder.write_trajectories(step, trajectories, texts, special=codec.special_tokens)

    async def _export(self, version: Version) -> None:
        """Have the trainer write its weights, once the engines have loaded the previous version.

        So shared memory has one set of weights, or two while engines finish running samples before
        they load (a push without interruption).
        """
        await self._loaded.wait()
        held = self.servers.weights.version
        newest = max(self.weights, default=held)
        # The first version is held from the start, and never pushed.
        for old in [known for known in self.weights if known <= held or known < newest]:
            if not self._may_be_needed(old):
                await self._remove(old)
        exported = await self.trainer.export()
        self.weights[version] = exported.weights
        for span in exported.spans:
            self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)

    def _may_be_needed(self, version: Version) -> bool:
        """Return whether a restarted or pinned engine may need the version later."""
        wanted = self.servers.restarts_possible or self.servers.pinned is not None
        return wanted and version >= self.servers.weights.version

    async def _remove(self, version: Version) -> None:
        weights = self.weights.pop(version)
        if isinstance(weights, WeightsFolder):  # the trainer overwrites weights in its memory
            await self.trainer.remove(weights)

    def prepare_save(self, frontier: Frontier) -> None:
        """Copy the run's part of the checkpoint before it changes."""
        what = self.checkpoints.config.checkpoint.open_groups
        tokens = OpenTokens()  # copies running groups only if they are saved: they may be many
        if what != "restart":
            tokens.finished.update((group, scored) for group, (scored, _) in self._kept.items())
        if what == "tokens":
            tokens.running.update((group, self._samples_so_far(group)) for group in self._between)
        self.checkpoints.prepare(
            frontier,
            tokens,
            counts={
                **self.counts(),
                "generated_tokens": self.tally.generated_tokens,
                "interruptions": self.tally.interruptions,
                "filtered_groups": self.tally.filtered_groups,
            },
            training_s=time.time() - self.began_s,
        )

    def _samples_so_far(self, group: GroupId) -> PartialSamples:
        return self.rollout.samples_so_far("train", group) or self._between[group]

    async def save(self, version: Version) -> Coroutine[Any, Any, None] | None:
        """Write the model, the trainer's state and the run's part; see `Performer.save`."""
        # This checkpoint waited if the step ended while an earlier checkpoint was being written.
        waited = self._saved_s > self._step_done_s
        since_s = self._step_done_s if waited else time.time()
        if waited:
            cause = "waiting for the checkpoint before"
            self.log.span(TRAINER, cause, since_s, time.time(), cause=cause)
        later = self.checkpoints.config.checkpoint.asynchronous
        span = await (self.checkpoints.start if later else self.checkpoints.write)(version)
        self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)
        self._save_wait_s += time.time() - since_s
        return self._finish_save() if later else None

    async def _finish_save(self) -> None:
        span = await self.checkpoints.finish()
        self._saved_s = time.time()
        self.log.metric(TRAINER, "checkpoint_write_s", span.end_s - span.start_s)

    def announce_push(self, version: Version) -> None:
        """Keep the weights of `version` from now on."""
        assert version in self.weights, f"version {version} was never exported"
        self._loaded.clear()

    async def interrupt(self, *, by_hand: bool) -> None:
        """Pause all engines at once."""
        self.tally.interruptions += not by_hand
        self._interrupted = True
        await self.servers.pause(also_pinned=by_hand)

    async def push_weights(self, version: Version) -> None:
        """Load one version into all engines, then remove folders that no engine needs again.

        A restarted or pinned engine may still need the folder of this version.
        """
        # The coordinator interrupts rollouts; held-out responses are unknown to it.
        running = self.evaluations.running and not self.servers.paused
        if running:
            await self.servers.pause()
        await self.servers.load(self.weights[version])
        if running or (self.servers.takes_turns and not self._interrupted):
            await self.servers.resume()
        for old in [v for v in self.weights if v <= version]:
            if not self._may_be_needed(old):
                await self._remove(old)
        self._loaded.set()
        self.evaluations.loaded(version)

    async def load_checkpoint(self, version: Version, checkpoint: Path) -> None:
        """Load a saved model into all engines, after training.

        Raises:
            EngineError: if the engines refuse the model.
        """
        # A checksum of its tensors would not match: engines may keep them in another type.
        weights = WeightsFolder(
            path=checkpoint, version=version, checksum=f"checkpoint:{version}", size_bytes=0
        )
        await self.servers.load(weights)

    async def resume(self) -> None:
        """Resume all engines."""
        self._interrupted = False
        await self.servers.resume()

    async def drop_group(self, group: GroupId) -> None:
        """Forget the samples of a group and abort running ones; the log has the reason."""
        if self._kept.pop(group, None) is None:
            samples = self.rollout.samples_so_far("train", group) or self._between.get(group, {})
            if tokens := sum(len(sample.tokens) for sample in samples.values()):
                self.log.metric(PIPELINE, DROPPED_TOKENS, tokens)
            await self.servers.abort(self.rollout.running_requests("train", group))

    async def collect_engine_spans(self, *, final: bool = False) -> None:
        """Copy the engines' spans since the last call into the log.

        The newest span of an engine may still grow, so it waits for the next call.

        Args:
            final: this is the last call; copy the newest spans too.
        """
        for engine, server in list(self.servers.alive.items()):
            try:
                spans, cursor = await server.spans(self._span_cursor.get(server, 0))
            except EngineError:
                continue  # the engine is lost, or is attached and reports no spans
            self._span_cursor[server] = cursor
            for span in spans if final else spans[:-1]:
                times_s = span["start_s"], span["end_s"]
                self.log.span(engine_process(engine), span["name"], *times_s, span.get("counts"))

    def counts(self) -> dict[str, int]:
        """Counts of losses and interruptions so far, and of the tokens that they cost."""
        recomputed = self.rollout.recomputed
        counts = {
            **self.servers.counts,
            "host_losses": self.host_losses(),
            "resubmitted_samples": recomputed.resubmitted_samples,
            "kept_tokens": recomputed.kept_tokens,
            "discarded_tokens": recomputed.discarded_tokens,
            "recomputed_tokens": recomputed.tokens,
        }
        before = self.counts_before
        return {name: counts.get(name, 0) + before.get(name, 0) for name in COUNTED}

    def log_counts(self) -> None:
        """Log the counts that changed; readers take the newest value of each name."""
        for name, value in self.counts().items():
            if value != self._logged_counts.get(name, 0):
                self._logged_counts[name] = value
                self.log.metric(PIPELINE, name, value)

    def _log_group(self, start: StartGroup, scored: ScoredGroup) -> None:
        self.log.group(
            group=start.group,
            engine=start.engine,
            start_s=scored.started_s,
            end_s=scored.scored_s,
            generated_s=scored.generated_s,
            samples=[
                {
                    "segments": [[part.version, len(part.tokens)] for part in sample.segments],
                    "reward": sample.outcome.reward,
                    "finish_reason": sample.end,
                    "outcome": outcome_of(sample),
                }
                for sample in scored.samples
            ],
            turns=scored.turns,
        )

    def _report(self, version: Version, metrics: Mapping[str, float]) -> None:
        self.log_counts()
        now_s = time.time() - self.began_s
        step_s = now_s - self._last_step_s
        tokens = self.tally.generated_tokens - self._tokens_at_last_step
        self._last_step_s, self._tokens_at_last_step = now_s, self.tally.generated_tokens
        filtered = self.tally.filtered_groups - self._filtered_at_last_step
        self._filtered_at_last_step = self.tally.filtered_groups
        counted = {
            "generated_tokens": self.tally.generated_tokens,
            "interruptions": self.tally.interruptions,
            "kept_groups": len(self._kept),
            "filtered_groups": filtered,
            "save_wait_s": self._save_wait_s,
            **self.log.ledger.metrics,
        }
        self._save_wait_s = 0.0
        report = StepReport.of(
            version,
            {**metrics, **counted},
            total_steps=self.total_steps,
            time_s=now_s,
            step_s=step_s,
            tokens=tokens,
            evaluating=self.evaluations.progress,
        )
        self.folder.append_metrics(report.line)
        self.on_step(report)
