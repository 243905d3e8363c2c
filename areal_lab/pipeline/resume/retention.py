"""Which checkpoints stay: the newest ones, the best one, and one that is being measured.

step-00010   step-00020 (best)   step-00030   step-00040
 removed      model                model+state  model+state      keep=2

The best has the highest held-out reward (`control.evaluation`); the link `best` leads to it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.checkpoints import RESUMABLE
from areal_lab.control.evaluation import Score, best_checkpoint
from areal_lab.control.events import Version
from areal_lab.pipeline.resume.positions import step_of
from areal_lab.pipeline.resume.saved_run import GROUPS_FILE, RUN_FILE
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import Measured, read_held_out
from areal_lab.runlog.read_run import METRICS
from areal_lab.training.protocol import STATE_FOLDER


@dataclass(frozen=True, slots=True)
class Retention:
    """What to do with the checkpoints of a run."""

    remove: tuple[Version, ...]
    strip: tuple[Version, ...]
    """Keep the model alone."""
    best: Version | None
    """With the best held-out reward, the earliest of equal ones; None if none was measured."""


def retention(
    saved: Iterable[Version],
    scores: Mapping[Version, Score],
    *,
    keep: int,
    measuring: Collection[Version] = (),
    exact: bool = False,
) -> Retention:
    """Decide by versions and held-out rewards.

    Args:
        saved: versions of all checkpoints.
        scores: of each version that was measured.
        keep: newest checkpoints to keep, besides the best one and the best by exact scores; 0
            keeps all.
        measuring: versions whose measurement runs; they stay.
        exact: the best is the one with the highest exact score.
    """
    versions = sorted(saved)
    best = best_checkpoint(scores, versions, exact=exact)
    kept = {*versions[-keep:], best, best_checkpoint(scores, versions, exact=True), *measuring}
    return Retention(
        remove=tuple(version for version in versions if version not in kept),
        strip=tuple(version for version in versions[:-RESUMABLE] if version in kept),
        best=best,
    )


def apply_retention(
    folder: RunFolder, *, keep: int, measuring: Collection[Version] = (), exact: bool = False
) -> Retention:
    """Remove and strip checkpoints of a run folder, and point its link `best` to the best one.

    Raises:
        RunTaken: the folder is another process's; nothing was removed.
    """
    folder.check_claim()
    checkpoints = saved_checkpoints(folder)
    scores = {version: one.score for version, one in measurements(folder).items()}
    decided = retention(checkpoints, scores, keep=keep, measuring=measuring, exact=exact)
    for version in decided.remove:
        remove_checkpoint(checkpoints[version])
    for version in decided.strip:
        for name in (RUN_FILE, GROUPS_FILE):  # first: without them it is not resumable
            (checkpoints[version] / name).unlink(missing_ok=True)
        shutil.rmtree(checkpoints[version] / STATE_FOLDER, ignore_errors=True)
    if decided.best is not None:
        folder.point("best", checkpoints[decided.best])
    else:
        (folder.path / "best").unlink(missing_ok=True)
    return decided


def saved_checkpoints(folder: RunFolder) -> dict[Version, Path]:
    """The checkpoints of a run folder, by version."""
    return {step_of(path): path for path in (folder.path / "checkpoints").glob("step-*")}


def measurements(folder: RunFolder) -> dict[Version, Measured]:
    """The held-out rewards of a run folder, by version."""
    metrics = folder.path / METRICS
    lines = read_appended(metrics).lines if metrics.is_file() else ()
    return {one.version: one for one in read_held_out(folder.path, map(json.loads, lines))}


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, of which readers see all or nothing."""
    # Renamed first, so that no reader takes a half removed folder for a model.
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
