"""Checkpoints of a run on fixed data: the model, and the state to continue the run.

checkpoints/step-00012/   model.safetensors, config.json, tokenizer   the model (Hugging Face)
                          reward_model.json                           rule of a reward model
                          trainer/, offline.json                      state, in the newest two

The link `model` points to the last checkpoint, `best` to the one with the lowest held-out loss. A
folder is renamed into place once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge
from pydantic import AllowInfNan, TypeAdapter

from areal_lab.control.evaluation import Score
from areal_lab.data.wrapping import Wrapping
from areal_lab.host.durable import replace_text
from areal_lab.offline.trainee import Trainee
from areal_lab.pipeline.resume.checkpoints import carry_out, retention
from areal_lab.pipeline.resume.positions import flush_growing, positions
from areal_lab.pipeline.resume.saved_run import check_positions
from areal_lab.pipeline.resume.saved_run import read_saved as read_record
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.checkpoint import read_state, set_state, state_of, write_state
from areal_lab.training.process.output import save_folder
from areal_lab.training.protocol import STATE_FOLDER

FILE: Final = "offline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """State of a run at a checkpoint."""

    step: Annotated[int, Ge(1)]
    config: dict[str, Any]
    data: str
    """Digest of the rows."""
    rows: Annotated[int, Ge(1)]
    """Number of training rows."""
    training_s: Annotated[float, Ge(0), AllowInfNan(False)]
    """Seconds of training so far, including evaluations but not the time between processes."""
    trained_tokens: Annotated[int, Ge(0)]
    held_out: dict[str, dict[str, float]]
    """Held-out metrics by step; `0` is before training."""
    positions: dict[str, Annotated[int, Ge(0)]] = field(default_factory=dict[str, int])
    """Sizes of the growing files of the run folder, in bytes."""


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
        trainee: the model.
        folder: run folder.
        source: model folder with the tokenizer.
        saved: state of the run; this function sets its positions.
        resumable: add the state to continue the run.
        wrapping: rule of a reward model; None for other models.
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
            replace_text(aside / FILE, json.dumps(values, indent=1) + "\n")
        if ranks.first and wrapping is not None:
            wrapping.write(aside)

    save_folder(model, source, path, add, ranks=ranks)
    if ranks.first:
        folder.point("model", path)


def prune(
    folder: RunFolder,
    losses: Mapping[int, float],
    *,
    keep: int,
    note: Callable[[str], None] = lambda _: None,
) -> int | None:
    """Remove and strip older checkpoints, and update the link `best`.

    Args:
        folder: run folder.
        losses: held-out losses of the evaluated steps.
        keep: number of newest checkpoints to keep; 0 keeps all.
        note: called for each damaged checkpoint, which stays as it is.

    Returns:
        The step of the best checkpoint.
    """
    scores = {step: Score(-loss) for step, loss in losses.items()}
    return carry_out(
        folder,
        lambda steps: retention(steps, scores, keep=keep),
        files=(FILE,),
        read_step=saved_step,
        note=note,
    ).best


def restore(trainee: Trainee, checkpoint: Path) -> None:
    """Load the state of a checkpoint into a new trainee; all ranks call this.

    Raises:
        UnusableState: the state is incomplete or belongs to another model.
    """
    network = trainee.network
    state = state_of(network.model, trainee.optimizer)
    read_state(state, checkpoint / STATE_FOLDER, network.ranks)
    set_state(network.model, trainee.optimizer, state)


def saved_step(checkpoint: Path) -> int:
    """Read the step in the file of a checkpoint; raises as `read_saved`."""
    return read_saved(checkpoint).step


def saved_keys(file: Path) -> frozenset[str]:
    """Return the names of the settings in the file of a checkpoint; none if it is unreadable."""
    try:
        return frozenset(read_saved(file.parent).config)
    except ValueError:
        return frozenset()


def read_saved(checkpoint: Path) -> SavedStep:
    """Read the state of the run at a checkpoint.

    Raises:
        ValueError: the file cannot be read; in one line.
    """
    return read_record(checkpoint / FILE, TypeAdapter(SavedStep), _checked)


def _checked(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    check_positions(value.get("positions"))
