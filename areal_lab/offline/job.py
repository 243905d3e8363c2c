"""Description of a run for its processes, and the events that they send to the console.

Job --JSON--> worker of each rank;    worker of rank 0 --Phase, Note, Stepped ... Ended--> console
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from areal_lab.config.offline import KINDS, OfflineConfig
from areal_lab.config.problem import Problem
from areal_lab.offline.rows import RowSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked run, in the form that its processes receive."""

    config: OfflineConfig
    folder: Path = Path()
    """Run folder, set by `begin`."""
    model_path: Path
    """Folder from which the model is loaded."""
    reference_path: Path | None = None
    """Folder of a separate reference model; None takes the trained model before training."""
    checkpoint: Path | None = None
    """Checkpoint from which the run continues; None for a new run."""
    device: str = "cpu"
    """`cpu` or `cuda`; each process sees only its GPU."""
    threads: int = 1
    rendezvous: str = ""
    """File through which several processes find each other."""

    @property
    def kind(self) -> str:
        """Name of the command."""
        return kind_of(self.config)

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        config = {"kind": self.kind, "config": self.config.model_dump()}
        return json.dumps({**asdict(self), **config}, default=str)

    @staticmethod
    def from_json(text: str) -> Job:
        """Read the result of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        config = KINDS[fields.pop("kind")](**fields.pop("config"))
        return TypeAdapter(Job).validate_python({**fields, "config": config})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob(Job):
    """A checked run, in the process that starts the others."""

    rows: RowSet
    gpus: tuple[str, ...] = ()
    """GPU of each process, with `cuda`."""
    notes: tuple[str, ...] = ()
    """Notes about settings that may not do what the user expects, one line each."""


def kind_of(config: OfflineConfig) -> str:
    """Return the name of the command of a config."""
    return next(name for name, kind in KINDS.items() if isinstance(config, kind))


def total_steps(config: OfflineConfig, rows: int) -> int:
    """Return the optimizer steps of a run: as set, or enough to train on each row in each epoch."""
    if config.total_train_steps:
        return config.total_train_steps
    steps = math.ceil(config.total_train_epochs * rows / config.rows.batch_size)
    return max(1, steps)


@dataclass(frozen=True, slots=True)
class Phase:
    """Start of a phase of the run."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """End of a step whose line is in metrics.jsonl."""

    step: int
    total_steps: int
    metrics: dict[str, float]

    def __str__(self) -> str:
        """Return a line for the terminal."""
        found = self.metrics
        shown = [f"step {self.step:>3}/{self.total_steps}"] if self.step else ["before training"]
        for name, form in _SHOWN.items():
            if name in found:
                shown.append(f"{name.replace('_', ' ')} {found[name]:{form}}")
        if "tokens_per_s" in found:
            shown.append(f"{found['tokens_per_s']:.0f} tokens/s")
        return "  ".join(shown)


_SHOWN: Final = {
    "loss": ".4f",
    "accuracy": ".3f",
    "margin": "+.3f",
    "held_out_loss": ".4f",
    "held_out_accuracy": ".3f",
    "held_out_margin": "+.3f",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """End of the run, with the content of summary.json."""

    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """End of the run by an error."""

    message: str
    traceback: str
    problems: tuple[Problem, ...] = ()
    """Problems of settings or data, instead of a traceback."""


RunEvent: TypeAlias = Phase | Note | Stepped | Ended | Failed
Emit: TypeAlias = Callable[[RunEvent], object]
