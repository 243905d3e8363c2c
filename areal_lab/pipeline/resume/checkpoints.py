"""Checkpoints of a run: find and verify the newest one, and remove older ones.

A run continues from its newest checkpoint, which is verified before anything is removed.

step-00006  step-00007  step-00008         step-00008-copy, step-abc
                        newest: verified   ignored, with a note
                        damaged, or without a state: refused
no checkpoint: refused if the log has trained steps, otherwise the run starts over

The newest checkpoints stay, and so do the best one and one whose measurement runs.

step-00010   step-00020 (best)   step-00030   step-00040
 removed      model                model+state  model+state      keep=2

The best checkpoint has the highest held-out reward (`control.evaluation`); the link `best` points
to it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.problem import refusal
from areal_lab.config.sections import RESUMABLE
from areal_lab.control.evaluation import Score, best_checkpoint
from areal_lab.control.events import Version
from areal_lab.host.owned_folders import remove_tree
from areal_lab.models.checkpoint_files import (
    FILE,
    checkpoint_fault,
    checkpoints_of,
    foreign_names,
    forget_files,
    read_digests,
)
from areal_lab.pipeline.resume.positions import remove_entry, trained_steps
from areal_lab.pipeline.resume.saved_run import GROUPS_FILE, RUN_FILE, check_step, saved_version
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import Measured, read_held_out
from areal_lab.runlog.read_run import METRICS
from areal_lab.training.protocol import STATE_FOLDER

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The checkpoint from which a run continues."""

    checkpoint: Path | None
    """None if the run has not trained: it starts over."""
    notes: tuple[str, ...] = ()
    """A line for each file that is ignored or cannot be verified."""


def newest_checkpoint(run: Path, file: str, read_step: Callable[[Path], Version]) -> Newest:
    """Return the newest checkpoint of a run after verifying each of its files.

    Args:
        run: run folder.
        file: file of the run in a checkpoint, `run.json` or `offline.json`.
        read_step: reads the step from that file; raises ValueError if it cannot be read.

    Raises:
        ConfigError: the newest checkpoint is damaged, or the run has trained and has no checkpoint
            with a state.
    """
    if not os.access(run, os.W_OK | os.X_OK):
        raise refusal(
            "resume",
            f"{run} is not writable: its disk is mounted read-only, or the folder is somebody "
            "else's; copy it (cp -a keeps its links) and continue the copy",
        )
    there = checkpoints_of(run)
    notes = [ignored] if (ignored := ignored_in(run)) else []
    also = f". {ignored}" if ignored else ""
    copies = copies_in(there)
    there = {step: path for step, path in there.items() if path not in copies}
    older = [path for path in there.values() if is_resumable(path, file)]
    if not there:
        if steps := trained_steps(run):
            raise refusal("resume", _lost(run, steps) + also)
        return Newest(checkpoint=None, notes=tuple(notes))
    step, path = max(there.items())
    fault = fault_of(path, step, file, read_step)
    if fault:
        before = [one for one in older if one != path]
        fix = f"to continue from {before[-1].name}" if before else "and start a new run"
        raise refusal("resume", f"{fault}; nothing was changed. Remove or rename {path} {fix}")
    if not is_resumable(path, file):
        if not older:
            raise refusal(
                "checkpoint.resumable",
                f"{run} has no checkpoint to continue from, only models: it was trained with "
                "checkpoint.resumable=false, or by an older version; start a run with "
                f"actor.path={path}{also}",
            )
        raise refusal(
            "resume",
            f"{path} has a model and no state to continue from; start a run with actor.path={path}"
            f", or remove or rename it to continue from {older[-1].name}",
        )
    if not (path / FILE).is_file():
        notes.append(
            f"{path.name} was saved by an older version and has no {FILE}: its files cannot "
            "be verified"
        )
    return Newest(checkpoint=path, notes=tuple(notes))


def newest_file(run: Path, file: str) -> Path | None:
    """Return the path of `file` in the newest checkpoint that has it, damaged or not."""
    found = [path / file for path in checkpoints_of(run).values() if (path / file).is_file()]
    return found[-1] if found else None


def is_resumable(checkpoint: Path, file: str) -> bool:
    """Return whether a run can continue from the checkpoint; others have only the model."""
    try:
        found = read_digests(checkpoint)
    except ValueError:
        found = None
    listed = found is None or file in found.files
    return listed and (checkpoint / file).is_file() and (checkpoint / STATE_FOLDER).is_dir()


def fault_of(
    checkpoint: Path, step: Version, file: str, read_step: Callable[[Path], Version]
) -> str:
    """Describe the damage of a checkpoint in one line; empty if it is intact."""
    if fault := checkpoint_fault(checkpoint, step):
        return fault
    before = {} if (checkpoint / FILE).is_file() else checkpoints_of(checkpoint.parent.parent)
    if any(earlier < step and (path / FILE).is_file() for earlier, path in before.items()):
        return (
            f"{checkpoint} is damaged or of another run: it has no {FILE}, but the checkpoints "
            "before it do"
        )
    try:
        if (checkpoint / file).is_file() and is_resumable(checkpoint, file):
            check_step(read_step(checkpoint), checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def copies_in(checkpoints: dict[Version, Path]) -> list[Path]:
    """List checkpoint folders that the run did not write: empty ones, and ones of another step."""
    return [path for step, path in checkpoints.items() if _is_foreign(path, step)]


def _is_foreign(path: Path, step: Version) -> bool:
    try:
        found = read_digests(path)
    except ValueError:
        return False  # a damaged checkpoint, which is reported elsewhere
    if found is not None:
        return found.step != step
    return not (path / "config.json").exists() and not (path / STATE_FOLDER).exists()


def ignored_in(run: Path) -> str:
    """Return a line about files in a run folder that the run did not write; empty without any."""
    copies = (str(path.relative_to(run)) for path in copies_in(checkpoints_of(run)))
    names = [*foreign_names(run), *copies]
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown}{more} was not written by the run and is ignored"


def _lost(run: Path, steps: int) -> str:
    return (
        f"{run} has trained {steps} step{'s' * (steps > 1)}, but has no checkpoint to continue "
        "from: checkpoints/ was emptied, or the run ended before its first one. Starting over "
        "would remove its metrics, events and samples, so nothing was changed; start a new run "
        f"with its settings, {run / 'config.yaml'}"
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """Checkpoints of a run to remove, to strip and to link as the best."""

    remove: tuple[Version, ...]
    strip: tuple[Version, ...]
    """Versions that keep only the model."""
    best: Version | None
    """Version with the highest held-out reward, the earliest of equal ones; None without any."""


def retention(
    saved: Iterable[Version],
    scores: Mapping[Version, Score],
    *,
    keep: int,
    measuring: Collection[Version] = (),
    exact: bool = False,
) -> Retention:
    """Decide which checkpoints stay.

    Args:
        saved: versions of all checkpoints.
        scores: score of each measured version.
        keep: number of newest checkpoints to keep, in addition to the best one and the best one by
            exact scores; 0 keeps all.
        measuring: versions whose measurement runs; they stay.
        exact: select the best by exact scores only.
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
    folder: RunFolder,
    *,
    keep: int,
    measuring: Collection[Version] = (),
    exact: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Retention:
    """Remove and strip checkpoints of a run folder, and point its link `best` to the best one.

    Args:
        keep: see `retention`.
        measuring: see `retention`.
        exact: see `retention`.
        note: called for each damaged checkpoint, which stays and does not count.

    Raises:
        RunTaken: another process has continued the run; nothing was removed.
    """
    folder.check_claim()
    scores = {version: one.score for version, one in measurements(folder).items()}
    return carry_out(
        folder,
        lambda versions: retention(versions, scores, keep=keep, measuring=measuring, exact=exact),
        files=(RUN_FILE, GROUPS_FILE),
        read_step=saved_version,
        note=note,
    )


def carry_out(
    folder: RunFolder,
    decide: Callable[[Collection[Version]], Retention],
    *,
    files: tuple[str, ...],
    read_step: Callable[[Path], Version],
    note: Callable[[str], None],
) -> Retention:
    """Verify the checkpoints that stay, remove and strip the others, and update the link `best`.

    Args:
        folder: run folder.
        decide: returns the retention for the versions of all undamaged checkpoints.
        files: files of the run in a checkpoint; the first one makes it resumable.
        read_step: see `newest_checkpoint`.
        note: see `apply_retention`.
    """
    checkpoints = saved_checkpoints(folder)
    while True:
        decided = decide(checkpoints)
        damaged = _damaged(checkpoints, decided, files[0], read_step)
        if not damaged:
            break
        for version, fault in damaged.items():
            note(f"{fault}; it stays and does not count as a checkpoint")
            del checkpoints[version]
    for version in decided.remove:
        remove_checkpoint(checkpoints[version])
    for version in decided.strip:
        _strip(checkpoints[version], files)
    if decided.best is not None:
        folder.point("best", checkpoints[decided.best])
    elif (folder.path / "best").is_symlink():
        (folder.path / "best").unlink()
    return decided


def _damaged(
    checkpoints: Mapping[Version, Path],
    decided: Retention,
    file: str,
    read_step: Callable[[Path], Version],
) -> dict[Version, str]:
    """Return the damage of the checkpoints that must be intact before others are removed."""
    if not decided.remove and not any(
        is_resumable(checkpoints[one], file) for one in decided.strip
    ):
        return {}
    stay = [version for version in checkpoints if version not in decided.remove]
    needed = {*stay[-RESUMABLE:], *([] if decided.best is None else [decided.best])}
    faults = {one: fault_of(checkpoints[one], one, file, read_step) for one in sorted(needed)}
    return {version: fault for version, fault in faults.items() if fault}


def _strip(checkpoint: Path, files: Iterable[str]) -> None:
    """Remove everything but the model."""
    try:
        forget_files(checkpoint, [*files, STATE_FOLDER])
    except ValueError:
        return  # a damaged checkpoint is left as it is
    for name in files:  # before the state, since a checkpoint without them is not resumable
        (checkpoint / name).unlink(missing_ok=True)
    remove_tree(checkpoint / STATE_FOLDER)


def saved_checkpoints(folder: RunFolder) -> dict[Version, Path]:
    """Return the checkpoints of a run folder by version, in ascending order."""
    there = checkpoints_of(folder.path)
    copies = copies_in(there)
    return {version: path for version, path in there.items() if path not in copies}


def measurements(folder: RunFolder) -> dict[Version, Measured]:
    """Return the held-out rewards of a run folder by version."""
    metrics = folder.path / METRICS
    lines = read_appended(metrics).lines if metrics.is_file() else ()
    return {one.version: one for one in read_held_out(folder.path, map(json.loads, lines))}


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint atomically: readers see all of it or nothing."""
    # Rename first, so that no reader takes a half-removed folder for a model.
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed-{secrets.token_hex(8)}")
    os.replace(checkpoint, hidden)
    with suppress(OSError):  # the next resume removes what is left
        remove_entry(hidden)
