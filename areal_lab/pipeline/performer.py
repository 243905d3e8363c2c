"""The real performer: engines, trainer and rewards behind the coordinator's actions.

It owns what the actions are about: the samples of groups not yet trained on, the weight folders not
yet loaded everywhere, and the counts of the run. Only `drive`'s tasks call it, one step at a time,
on one event loop.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_lab.control.events import (
    GroupFiltered,
    GroupFinished,
    GroupId,
    StartGroup,
    Train,
    Version,
)
from areal_lab.data.problems import PromptSource
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.client.engine_client import EngineError
from areal_lab.engines.client.resubmit import NO_SAMPLES, PartialSamples
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.pipeline.rollout import Rollout, ScoredGroup, Unfinished, request_id
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.push import Weights
from areal_lab.pipeline.servers.server import Server
from areal_lab.pipeline.step_report import StepReport
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.incidents import COUNTED
from areal_lab.runlog.records import PIPELINE, TRAINER, engine_process
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import SaveRequest, TrainBatchRequest


@dataclass(slots=True)
class Tally:
    """Counts that a display shows while the run goes on; the summary counts from the log."""

    generated_tokens: int = 0
    interruptions: int = 0
    """Times that running answers were interrupted for new weights."""


@dataclass(slots=True, kw_only=True)
class RunPerformer:
    """Performs actions with real processes."""

    folder: RunFolder
    log: EventLog
    rollout: Rollout
    source: PromptSource
    trainer: TrainerProcess
    servers: ServerPool
    samples: int
    """Samples per group."""
    total_steps: int
    on_step: Callable[[StepReport], None]
    weights: dict[Version, Weights]
    tally: Tally = field(default_factory=Tally)
    began_s: float = field(default_factory=time.time)
    last_checkpoint: Version | None = None
    _kept: dict[GroupId, tuple[ScoredGroup, tuple[Trajectory, ...]]] = field(default_factory=dict)
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no version is on its way into the engines."""
    _tokens_at_last_step: int = 0
    _last_step_s: float = 0.0
    _span_cursor: dict[Server, int] = field(default_factory=dict)
    _logged_counts: dict[str, int] = field(default_factory=dict)
    _moves: dict[GroupId, asyncio.Queue[StartGroup]] = field(default_factory=dict)
    """Where each running group is told its next engine, if it needs one."""

    def begin(self) -> None:
        """Training begins now: step times and rates count from here."""
        self._loaded.set()
        self.began_s = time.time()
        self._last_step_s, self._tokens_at_last_step = 0.0, self.tally.generated_tokens

    async def generate_group(self, start: StartGroup) -> GroupFinished | GroupFiltered:
        """Draw and judge one group; keep it if it can be trained on."""
        start, scored = await self._generate_and_score(start)
        self.tally.generated_tokens += sum(
            len(part.tokens) for sample in scored.generated for part in sample.segments
        )
        self._log_group(start, scored)
        if (reason := scored.failure) is not None:
            return GroupFiltered(start.group, reason)
        trajectories = scored.trajectories(start.group)
        self._kept[start.group] = (scored, trajectories)
        return GroupFinished(
            start.group,
            head_version=min(t.head_version for t in trajectories),
            tail_version=max(t.tail_version for t in trajectories),
        )

    def move_group(self, start: StartGroup) -> None:
        """Tell the group its next engine; one that has all its tokens will not ask."""
        if (moves := self._moves.get(start.group)) is not None:
            moves.put_nowait(start)

    async def _generate_and_score(self, start: StartGroup) -> tuple[StartGroup, ScoredGroup]:
        """The group, from as many engines as it takes; and where it ended."""
        moves = self._moves[start.group] = asyncio.Queue()
        partial: PartialSamples = NO_SAMPLES
        try:
            while True:
                try:
                    return start, await self.rollout.training_group(
                        start, self.source, self.samples, partial
                    )
                except Unfinished as unfinished:
                    partial = unfinished.samples
                    start = await moves.get()
        finally:
            del self._moves[start.group]

    async def train(self, train: Train) -> Version:
        """One optimizer batch in the trainer's process."""
        kept = [self._kept.pop(group) for group in train.groups]
        trajectories = tuple(t for _, of_group in kept for t in of_group)
        texts = [(scored.problem.prompt, text) for scored, _ in kept for text in scored.completions]
        await asyncio.to_thread(
            self.folder.write_trajectories, train.version + 1, trajectories, texts
        )
        result = await self.trainer.train(
            TrainBatchRequest(version=train.version, trajectories=trajectories)
        )
        await self._export(result.version)
        for span in result.spans:
            self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)
        await self.collect_engine_spans()
        self._report(result.version, result.metrics)
        return result.version

    async def _export(self, version: Version) -> None:
        """Have the weights written for the engines, when they are done with those before.

        So shared memory holds one set of weights, and two while engines are still to end running
        answers before they load (a push that does not interrupt).
        """
        await self._loaded.wait()
        for superseded in sorted(self.weights)[:-1]:
            if not self._may_be_needed(superseded):
                await self._remove(superseded)
        exported = await self.trainer.export()
        self.weights[version] = exported.weights
        span = exported.span
        self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)

    def _may_be_needed(self, version: Version) -> bool:
        """Whether an engine may come back that is to have what the others hold."""
        return self.servers.restarts_possible and version >= self.servers.weights.version

    async def _remove(self, version: Version) -> None:
        weights = self.weights.pop(version)
        if isinstance(weights, WeightsFolder):  # else the trainer has it, and writes over it
            await asyncio.to_thread(shutil.rmtree, weights.path, ignore_errors=True)

    async def save(self, version: Version) -> None:
        """A Hugging Face folder of the trainer's weights."""
        saved = await self.trainer.save(SaveRequest(self.folder.checkpoint(version)))
        span = saved.span
        self.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)
        self.folder.point_model_to(saved.path)
        self.last_checkpoint = version

    def announce_push(self, version: Version) -> None:
        """From now on the weights of `version` are needed."""
        assert version in self.weights, f"version {version} was never exported"
        self._loaded.clear()

    async def interrupt(self) -> None:
        """Pause all engines at once."""
        self.tally.interruptions += 1
        await self.servers.pause()

    async def push_weights(self, version: Version) -> None:
        """Load one version into all engines; once all hold it, its folder and older ones go.

        Its own folder stays while an engine may come back that needs it.
        """
        await self.servers.load(self.weights[version])
        for old in [v for v in self.weights if v <= version]:
            if not self._may_be_needed(old):
                await self._remove(old)
        self._loaded.set()

    async def resume(self) -> None:
        """Let all engines go on."""
        await self.servers.resume()

    async def drop_group(self, group: GroupId) -> None:
        """Forget its samples, abort what still runs of it; the log has the reason."""
        if self._kept.pop(group, None) is None:
            ids = [request_id("train", group, index) for index in range(self.samples)]
            await self.servers.abort(ids)

    async def collect_engine_spans(self, *, final: bool = False) -> None:
        """Bring what the engines did since the last call into the log.

        The newest span of an engine may still grow, so it is left for the next call, unless this
        is the last one.
        """
        for engine, server in list(self.servers.alive.items()):
            try:
                spans, cursor = await server.spans(self._span_cursor.get(server, 0))
            except EngineError:
                continue  # it is lost, or attached and never tells
            self._span_cursor[server] = cursor
            for span in spans if final else spans[:-1]:
                times_s = span["start_s"], span["end_s"]
                self.log.span(engine_process(engine), span["name"], *times_s, span.get("counts"))

    def counts(self) -> dict[str, int]:
        """What losses and interruptions cost so far."""
        recomputed = self.rollout.recomputed
        counts = {
            **self.servers.counts,
            "resubmitted_samples": recomputed.resubmitted_samples,
            "kept_tokens": recomputed.kept_tokens,
            "discarded_tokens": recomputed.discarded_tokens,
            "recomputed_tokens": recomputed.tokens,
        }
        return {name: counts.get(name, 0) for name in COUNTED}

    def log_counts(self) -> None:
        """Note what losses and interruptions cost so far; the newest line counts."""
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
                    "reward": outcome.reward,
                    "finish_reason": sample.finish_reason,
                }
                for sample, outcome in zip(scored.generated, scored.outcomes, strict=True)
            ],
        )

    def _report(self, version: Version, metrics: Mapping[str, float]) -> None:
        self.log_counts()
        now_s = time.time() - self.began_s
        step_s = now_s - self._last_step_s
        tokens = self.tally.generated_tokens - self._tokens_at_last_step
        self._last_step_s, self._tokens_at_last_step = now_s, self.tally.generated_tokens
        report = StepReport(
            step=version,
            total_steps=self.total_steps,
            version=version,
            time_s=now_s,
            step_s=step_s,
            tokens_per_s=tokens / step_s if step_s > 0 else 0.0,
            reward_mean=metrics["reward_mean"],
            loss=metrics["loss"],
            lag_token_mean=metrics["lag_token_mean"],
            lag_token_max=metrics["lag_token_max"],
            metrics={
                **metrics,
                "generated_tokens": self.tally.generated_tokens,
                "interruptions": self.tally.interruptions,
                "kept_groups": len(self._kept),
            },
        )
        self.folder.append_metrics(
            {
                "step": report.step,
                "version": report.version,
                "time_s": report.time_s,
                "step_s": report.step_s,
                "tokens_per_s": report.tokens_per_s,
                **report.metrics,
            }
        )
        self.on_step(report)
