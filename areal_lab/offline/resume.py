"""Continue a run in its folder: check changed settings, and remove what follows the checkpoint.

RUN --find_resumable--> Resumable --cut_back_to--> the folder as it was at the checkpoint
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_lab.config.given import Overrides
from areal_lab.config.load import read_yaml
from areal_lab.config.offline import OfflineConfig, load_offline
from areal_lab.config.problem import ConfigError, Kind, Problem, refusal
from areal_lab.control.events import Version
from areal_lab.live.presence import read_presence
from areal_lab.models.checkpoint_files import checkpoint_fault
from areal_lab.offline.job import total_steps
from areal_lab.offline.rows import RowSet
from areal_lab.pipeline.resume.changes import (
    changed_settings,
    check_complete,
    check_kind,
    check_whole,
    damaged_settings,
)
from areal_lab.pipeline.resume.checkpoints import newest_checkpoint, newest_file
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.runlog.folder import RunFolder

FIXED: Final = (
    *("seed", "dataset.", "train_on", "center_rewards_coefficient"),
    *("ref.", "loss", "beta", "label_smoothing", "length_normalized"),
    *("actor.path", "actor.use_lora", "actor.lora_", "actor.target_modules", "actor.optimizer."),
)
"""Names and prefixes of settings that cannot change when a run continues."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """A run that can continue, and its checkpoint."""

    config: OfflineConfig
    folder: RunFolder
    checkpoint: Path | None
    """None if the run has not trained: it starts over."""
    changes: tuple[str, ...]
    """A line for each changed setting, and for files in the folder that are ignored."""


def find_resumable(kind: str, path: Path, overrides: Overrides = ()) -> Resumable:
    """Find the checkpoint from which a run can continue, and check changed settings.

    Args:
        kind: name of the command.
        path: run folder.
        overrides: changed settings, such as `total_train_steps=60`.

    Raises:
        ConfigError: the run cannot continue; one line per reason.
    """
    from areal_lab.offline.checkpoints import (  # loads torch
        FILE,
        read_saved,
        saved_keys,
        saved_step,
    )

    file = path.expanduser() / "config.yaml"
    if not file.is_file():
        raise refusal("resume", f"{path} is not a run folder: it has no config.yaml")
    path = file.parent.resolve()
    saved_in = newest_file(path, FILE)
    check_whole(file, saved_in)
    keys = read_yaml(file).keys()
    if saved_in is not None and (gone := sorted(saved_keys(saved_in) - keys)):
        raise damaged_settings(file, f"it has no {gone[0]}", saved_in)
    check_kind(kind, file)
    before = load_offline(kind, file)
    config = load_offline(kind, file, overrides, files_are_given=False)
    _check_ended(path)
    changed = list(changed_settings(before, config))
    fixed = [one for one in changed if one[0].startswith(FIXED)]
    if fixed:
        raise ConfigError(
            *(
                Problem(
                    Kind.SETTINGS,
                    name,
                    f"{name} is {now!r}, but was {was!r}: it cannot change when a run "
                    "continues; start a new run to change it",
                )
                for name, was, now in fixed
            )
        )
    newest = newest_checkpoint(path, FILE, saved_step)
    if newest.checkpoint is not None:
        saved = read_saved(newest.checkpoint)
        check_complete(file, saved.config, before, newest.checkpoint / FILE)
        _check_steps(config, newest.checkpoint, path)
    return Resumable(
        config=config,
        folder=RunFolder(path),
        checkpoint=newest.checkpoint,
        changes=(
            *newest.notes,
            *(f"{name} is {now!r} from now on (was {was!r})" for name, was, now in changed),
        ),
    )


def _check_steps(config: OfflineConfig, checkpoint: Path, path: Path) -> None:
    """Refuse to continue a run that is complete."""
    from areal_lab.offline.checkpoints import read_saved  # loads torch

    saved = read_saved(checkpoint)
    if saved.step >= (steps := total_steps(config, saved.rows)):
        raise refusal(
            "total_train_steps",
            f"{path} has trained {saved.step} of {steps} steps; raise total_train_steps (or "
            f"total_train_epochs) to continue, such as total_train_steps={2 * saved.step}",
        )


def cut_back_to(resumable: Resumable, rows: RowSet) -> None:
    """Remove everything that the run wrote after its checkpoint.

    Raises:
        ConfigError: the rows are not those of the checkpoint, or the checkpoint has changed since
            `find_resumable`; nothing is removed.
    """
    from areal_lab.offline.checkpoints import read_saved  # loads torch

    folder, checkpoint = resumable.folder, resumable.checkpoint
    step: Version = 0
    where: dict[str, int] = {}
    if checkpoint is not None:
        if fault := checkpoint_fault(checkpoint):
            raise refusal("resume", fault)
        saved = read_saved(checkpoint)
        if saved.data != rows.digest():
            raise refusal(
                "dataset",
                f"the rows are not those that {folder.path} was trained on; restore its data, or "
                "start a new run with actor.path set to its model",
            )
        step, where = saved.step, saved.positions
    cut_back(folder.path, where, step)
    (folder.path / "summary.json").unlink(missing_ok=True)
    folder.write_config(resumable.config)
    if checkpoint is not None:
        folder.point("model", checkpoint)


def _check_ended(path: Path) -> None:
    found = read_presence(path)
    if found is not None and found.alive and found.process.pid != os.getpid():
        raise refusal(
            "resume",
            f"{path} is still running (process {found.process.pid}); stop it first: "
            f"kill -INT {found.process.pid}",
        )
