"""Write the checkpoints of a run: collect the pipeline's part, have the trainer write all of it.

Save --prepare: at that moment--> SavedRun --write--> trainer --> checkpoints/step-00012/
                                                              --> model, best: links
                          |--start--> trainer: a copy ... --finish--> the same, steps meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.control.frontier import Frontier
from areal_lab.pipeline.evaluate import HeldOutReward
from areal_lab.pipeline.resume.positions import flush_growing, positions
from areal_lab.pipeline.resume.retention import Retention, apply_retention
from areal_lab.pipeline.resume.saved_run import (
    GROUPS_FILE,
    RUN_FILE,
    OpenTokens,
    SavedRun,
    open_tokens_to_bytes,
)
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.protocol import Saved, SaveRequest, Span, Trainer


@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Writes the checkpoints of one run."""

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
        """Note what the next checkpoint says of the run; called when it is decided.

        Args:
            tokens: to save, of groups that are open; some may have ended after the frontier.
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
        """Write the checkpoint that was prepared; returns the time that the trainer took."""
        request = await asyncio.to_thread(self._request, version)
        return await self._appeared(await self.trainer.save(request))

    async def start(self, version: Version) -> Span:
        """Have the trainer copy what was prepared; returns the time that it took. `finish` follows,
        before the next one."""
        request = await asyncio.to_thread(self._request, version)
        return (await self.trainer.start_save(request)).span

    async def finish(self) -> Span:
        """Wait until the checkpoint that was started is complete; returns the time of writing."""
        return await self._appeared(await self.trainer.saved())

    async def _appeared(self, saved: Saved) -> Span:
        self.folder.point("model", saved.path)
        self.last = saved.version
        await self.retain()
        return saved.span

    async def retain(self, *, exact: bool = False) -> Retention:
        """Decide again which checkpoints stay: one was written, or a version was measured.

        Args:
            exact: the best is the one with the highest exact score.
        """
        async with self._retaining:
            return await asyncio.to_thread(
                apply_retention,
                self.folder,
                keep=self.config.checkpoint.keep,
                measuring=frozenset(self.measuring),
                exact=exact,
            )

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
    """The tokens of the groups that the frontier has open."""
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
        # Of a group that started over, tokens of an earlier attempt do not count.
        and all(s.version >= one.version for sample in samples.values() for s in sample.segments)
    }
    return OpenTokens(finished, running)
