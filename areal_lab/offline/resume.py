"""Continue a run in its folder: what it keeps, what may change, what is removed first.

RUN --find_resumable--> Resumable --cut_back_to--> the folder as it was at the checkpoint
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omegaconf import OmegaConf

from areal_lab.config.load import Overrides, read_yaml
from areal_lab.config.offline import KINDS, OfflineConfig, load_offline
from areal_lab.config.problem import ConfigError, Kind, Problem, refusal
from areal_lab.control.events import Version
from areal_lab.live.presence import read_presence
from areal_lab.offline.job import total_steps
from areal_lab.offline.rows import RowSet
from areal_lab.pipeline.resume.changes import changed_settings
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.runlog.folder import RunFolder

FIXED: Final = (
    *("seed", "dataset.", "train_on", "center_rewards_coefficient"),
    *("ref.", "loss", "beta", "label_smoothing", "length_normalized"),
    *("actor.path", "actor.use_lora", "actor.lora_", "actor.target_modules", "actor.optimizer."),
)
"""Settings, and beginnings of names, that a run keeps."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """A run that can continue."""

    config: OfflineConfig
    folder: RunFolder
    checkpoint: Path | None
    """None starts over: the run ended before its first checkpoint."""
    changes: tuple[str, ...]
    """A line per changed setting."""


def find_resumable(kind: str, path: Path, overrides: Overrides = ()) -> Resumable:
    """Read how a run can continue.

    Args:
        kind: name of the command.
        path: of the run folder.
        overrides: changed settings, as `total_train_steps=60`.

    Raises:
        ConfigError: a line per reason why it cannot.
    """
    from areal_lab.offline.checkpoints import newest_saved  # loads torch

    file = path.expanduser() / "config.yaml"
    if not file.is_file():
        raise refusal("resume", f"{path} is not a run folder: it has no config.yaml")
    path = file.parent.resolve()
    keys = read_yaml(file).keys()
    theirs = next((name for name, one in KINDS.items() if set(one.model_fields) <= keys), "train")
    if theirs != kind:
        raise refusal(
            "resume",
            f"{path} is a run of areal-lab {theirs}; continue it by areal-lab {theirs} --resume",
        )
    before = load_offline(kind, file)
    config = load_offline(kind, file, overrides)
    _check_ended(path)
    changed = list(changed_settings(before, config))
    fixed = [one for one in changed if one[0].startswith(FIXED)]
    if fixed:
        raise ConfigError(
            *(
                Problem(
                    Kind.SETTINGS,
                    name,
                    f"{name} is {now!r}, but was {was!r}: a run keeps it; start a new run to "
                    "change it",
                )
                for name, was, now in fixed
            )
        )
    checkpoint = newest_saved(path)
    models = sorted(path.glob("checkpoints/step-*"))
    if checkpoint is None and models:
        raise refusal(
            "checkpoint.resumable",
            f"{path} has no checkpoint to continue from, only models: it was trained with "
            f"checkpoint.resumable=false; start a run with actor.path={models[-1]}",
        )
    if checkpoint is not None:
        _check_steps(config, checkpoint, path)
    return Resumable(
        config=config,
        folder=RunFolder(path),
        checkpoint=checkpoint,
        changes=tuple(f"{name} is {now!r} from now on (was {was!r})" for name, was, now in changed),
    )


def _check_steps(config: OfflineConfig, checkpoint: Path, path: Path) -> None:
    """Refuse to continue a run that is complete."""
    from areal_lab.offline.checkpoints import read_saved  # loads torch

    saved = read_saved(checkpoint)
    if saved.step >= (steps := total_steps(config, saved.rows)):
        raise refusal(
            "total_train_steps",
            f"{path} has trained {saved.step} of {steps} steps; raise total_train_steps (or "
            f"total_train_epochs) to continue, as total_train_steps={2 * saved.step}",
        )


def cut_back_to(resumable: Resumable, rows: RowSet) -> None:
    """Remove what the run wrote after its checkpoint.

    Raises:
        ConfigError: the rows are not those of the checkpoint; nothing is removed.
    """
    from areal_lab.offline.checkpoints import read_saved  # loads torch

    folder, checkpoint = resumable.folder, resumable.checkpoint
    step: Version = 0
    where: dict[str, int] = {}
    if checkpoint is not None:
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
    text = OmegaConf.to_yaml(resumable.config.model_dump())
    (folder.path / "config.yaml").write_text(text)
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
