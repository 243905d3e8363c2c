"""Write the checkpoints of a run: collect the pipeline's state, and have the trainer write all.

Save --prepare: copy of the state--> SavedRun --write--> trainer --> checkpoints/step-00012/
                                                                 --> links model, best
                             |--start--> trainer: copy ... --finish--> the same, during training
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.control.frontier import Frontier
from areal_lab.pipeline.resume.checkpoints import Retention, apply_retention, ignored_in
from areal_lab.pipeline.resume.positions import flush_growing, positions
from areal_lab.pipeline.resume.saved_run import (
    GROUPS_FILE,
    RUN_FILE,
    OpenTokens,
    SavedRun,
    open_tokens_to_bytes,
)
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward
from areal_lab.training.protocol import Saved, SaveRequest, Span, Trainer


@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Writer of the checkpoints of one run."""

    folder: RunFolder
    config: TrainConfig
    trainer: Trainer
    data: str
    """Digest of the problems."""
    given: tuple[str, ...] = ()
    """See `SavedRun.given`."""
    before: HeldOutReward | None = None
    """Held-out rewards before training."""
    last: Version | None = None
    """Version of the newest checkpoint."""
    measuring: set[Version] = field(default_factory=set)
    """Versions whose held-out measurement runs: their checkpoints stay."""
    note: Callable[[str], None] = lambda _: None
    """Shows a message to the user."""
    noted: set[str] = field(default_factory=set)
    """Messages that were shown; none is shown twice."""
    _retaining: asyncio.Lock = field(default_factory=asyncio.Lock)
    _prepared: tuple[SavedRun, OpenTokens] | None = None

    def prepare(
        self,
        frontier: Frontier,
        tokens: OpenTokens,
        *,
        counts: Mapping[str, int],
        training_s: float,
    ) -> None:
        """Copy the state of the run for the next checkpoint, at the time of its decision.

        Args:
            frontier: state of the coordinator.
            tokens: tokens of open groups; some groups may have ended after the frontier.
            counts: counts of the run so far.
            training_s: seconds of training so far.
        """
        if not self.config.checkpoint.resumable:
            return
        kept = _of_open_groups(frontier, tokens)
        saved = SavedRun(
            frontier=frontier,
            positions=positions(self.folder.path),
            training_s=training_s,
            counts=dict(counts),
            data=self.data,
            config=self.config.model_dump(),
            finished_groups=tuple(sorted(kept.finished)),
            running_groups=tuple(sorted(kept.running)),
            running_tokens=kept.running_tokens,
            held_out_before=self.before.problem_means if self.before else (),
            unscored_before=self.before.unscored if self.before else 0,
            given=self.given,
        )
        self._prepared = saved, kept

    async def write(self, version: Version) -> Span:
        """Write the prepared checkpoint; returns the trainer's time span of the write."""
        request = await asyncio.to_thread(self._request, version)
        return await self._appeared(await self.trainer.save(request))

    async def start(self, version: Version) -> Span:
        """Have the trainer copy the state to write; returns the time span of the copy.

        `finish` has to follow before the next checkpoint.
        """
        request = await asyncio.to_thread(self._request, version)
        return (await self.trainer.start_save(request)).span

    async def finish(self) -> Span:
        """Wait until the started checkpoint is complete; returns the time span of the write."""
        return await self._appeared(await self.trainer.saved())

    async def _appeared(self, saved: Saved) -> Span:
        self.folder.point("model", saved.path)
        self.last = saved.version
        if ignored := await asyncio.to_thread(ignored_in, self.folder.path):
            self._note_once(f"note: {ignored}")
        await self.retain()
        return saved.span

    async def retain(self, *, exact: bool = False) -> Retention:
        """Update the retained checkpoints, after a checkpoint was written or measured.

        Args:
            exact: select the best by exact scores only.
        """
        async with self._retaining:
            return await asyncio.to_thread(
                apply_retention,
                self.folder,
                keep=self.config.checkpoint.keep,
                measuring=frozenset(self.measuring),
                exact=exact,
                note=lambda text: self._note_once(f"note: {text}"),
            )

    def _note_once(self, text: str) -> None:
        if text not in self.noted:
            self.noted.add(text)
            self.note(text)

    def _request(self, version: Version) -> SaveRequest:
        path = self.folder.checkpoint(version)
        if self._prepared is None:
            return SaveRequest(path)
        saved, kept = self._prepared
        self._prepared = None
        assert saved.frontier.version == version, "prepared for the checkpoint that is written"
        flush_growing(self.folder.path)
        files = {RUN_FILE: saved.to_json()}
        if kept:
            files[GROUPS_FILE] = open_tokens_to_bytes(kept)
        return SaveRequest(path, state=True, files=files)


def _of_open_groups(frontier: Frontier, tokens: OpenTokens) -> OpenTokens:
    """Return the tokens of the groups that are open in the frontier."""
    finished = {
        one.group: tokens.finished[one.group]
        for one in frontier.open
        if one.finished and one.group in tokens.finished
    }
    running = {
        one.group: samples
        for one in frontier.open
        if not one.finished
        and (samples := tokens.running.get(one.group))
        # Tokens of an earlier attempt do not count if the group started over.
        and all(s.version >= one.version for sample in samples.values() for s in sample.segments)
    }
    return OpenTokens(finished, running)
