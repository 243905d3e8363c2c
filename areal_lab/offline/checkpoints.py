"""Checkpoints of a run on fixed data: the model, and what the run needs to continue.

checkpoints/step-00012/   model.safetensors, config.json, tokenizer   the model (Hugging Face)
                          reward_model.json                           of a reward model: its rule
                          trainer/, offline.json                      state, in the newest two

`model` points to the last one, `best` to the one with the lowest held-out loss. A folder appears by
one rename, complete or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_lab.control.evaluation import Score
from areal_lab.data.wrapping import Wrapping
from areal_lab.offline.trainee import Trainee
from areal_lab.pipeline.resume.positions import flush_growing, positions, step_of
from areal_lab.pipeline.resume.retention import remove_checkpoint, retention
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.checkpoint import read_state, set_state, state_of, write_state
from areal_lab.training.process.output import save_folder
from areal_lab.training.protocol import STATE_FOLDER

FILE: Final = "offline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """What a run knows at a checkpoint."""

    step: int
    config: dict[str, Any]
    data: str
    """Digest of the rows."""
    rows: int
    """Rows that are trained on."""
    training_s: float
    """Since training began, evaluations included; without the time in which it did not run."""
    trained_tokens: int
    held_out: dict[str, dict[str, float]]
    """Held-out metrics by step; `0` is before training."""
    positions: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of the growing files of the run folder."""


def save_checkpoint(
    trainee: Trainee,
    folder: RunFolder,
    source: Path,
    saved: SavedStep,
    *,
    resumable: bool,
    wrapping: Wrapping | None,
) -> None:
    """Write the checkpoint of a step; all ranks call this.

    Args:
        source: model folder with the tokenizer.
        saved: what the run knows; positions are filled in.
        resumable: whether to add the state.
        wrapping: of a reward model.
    """
    ranks, model = trainee.network.ranks, trainee.network.model
    path = folder.checkpoint(saved.step)

    def add(aside: Path) -> None:
        if resumable:
            state = state_of(model, trainee.optimizer)
            write_state(state, aside / STATE_FOLDER, ranks)
        if ranks.first and resumable:
            flush_growing(folder.path)
            values = {**asdict(saved), "positions": positions(folder.path)}
            (aside / FILE).write_text(json.dumps(values, indent=1) + "\n")
        if ranks.first and wrapping is not None:
            wrapping.write(aside)

    save_folder(model, source, path, add, ranks=ranks)
    if ranks.first:
        folder.point("model", path)


def prune(folder: RunFolder, losses: Mapping[int, float], *, keep: int) -> int | None:
    """Remove and strip older checkpoints, and point `best` to the best one.

    Args:
        losses: held-out loss of the steps that were evaluated.
        keep: newest checkpoints to keep; 0 keeps all.

    Returns:
        The step of the best one.
    """
    there = {step_of(path): path for path in (folder.path / "checkpoints").glob("step-*")}
    decided = retention(there, {step: Score(-loss) for step, loss in losses.items()}, keep=keep)
    if decided.best is not None:
        folder.point("best", there[decided.best])
    for step in decided.remove:
        remove_checkpoint(there[step])
    for step in decided.strip:
        (there[step] / FILE).unlink(missing_ok=True)  # first: without it, it is not resumable
        shutil.rmtree(there[step] / STATE_FOLDER, ignore_errors=True)
    return decided.best


def restore(trainee: Trainee, checkpoint: Path) -> None:
    """Give a new trainee the state of a checkpoint; all ranks call this.

    Raises:
        UnusableState: the state is incomplete, or of another model.
    """
    network = trainee.network
    state = state_of(network.model, trainee.optimizer)
    read_state(state, checkpoint / STATE_FOLDER, network.ranks)
    set_state(network.model, trainee.optimizer, state)


def newest_saved(run: Path) -> Path | None:
    """The newest checkpoint that a run can continue from."""
    found = sorted(file.parent for file in run.glob(f"checkpoints/step-*/{FILE}"))
    usable = [path for path in found if (path / STATE_FOLDER).is_dir()]
    return usable[-1] if usable else None


def read_saved(checkpoint: Path) -> SavedStep:
    """What the run knew at a checkpoint.

    Raises:
        ValueError: in one line, if the file cannot be read.
    """
    file = checkpoint / FILE
    try:
        return SavedStep(**json.loads(file.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
