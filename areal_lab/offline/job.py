"""One run as its processes are given it, and what they tell the process that started them.

Job --JSON--> worker of each rank;    worker of rank 0 --Phase, Note, Stepped ... Ended--> console
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.config.offline import KINDS, OfflineConfig
from areal_lab.config.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, checked: what its processes need to know."""

    config: OfflineConfig
    folder: Path
    """Of the run."""
    model_path: Path
    """Folder that the model is loaded from."""
    reference_path: Path | None = None
    """Folder of a reference model of its own."""
    checkpoint: Path | None = None
    """To continue from."""
    device: str = "cpu"
    """`cpu` or `cuda`, which is the only GPU that a process sees."""
    threads: int = 1
    rendezvous: str = ""
    """File where several processes meet."""

    @property
    def kind(self) -> str:
        """Name of the command."""
        return kind_of(self.config)

    def to_json(self) -> str:
        """One line of JSON."""
        paths = ("folder", "model_path", "reference_path", "checkpoint")
        texts = {name: str(getattr(self, name) or "") for name in paths}
        rest = {"device": self.device, "threads": self.threads, "rendezvous": self.rendezvous}
        return json.dumps({**texts, **rest, "kind": self.kind, "config": self.config.model_dump()})

    @staticmethod
    def from_json(text: str) -> Job:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        config = KINDS[fields.pop("kind")](**fields.pop("config"))
        for name in ("folder", "model_path", "reference_path", "checkpoint"):
            fields[name] = Path(fields[name]) if fields[name] else None
        return Job(config=config, **fields)


def kind_of(config: OfflineConfig) -> str:
    """Name of the command of a config."""
    return next(name for name, kind in KINDS.items() if isinstance(config, kind))


def total_steps(config: OfflineConfig, rows: int) -> int:
    """Optimizer steps of a run: as set, or so many that each row is trained on in each epoch."""
    if config.total_train_steps:
        return config.total_train_steps
    steps = math.ceil(config.total_train_epochs * rows / config.rows.batch_size)
    return max(1, steps)


@dataclass(frozen=True, slots=True)
class Phase:
    """What the run does from now on."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step is done; its line is in metrics.jsonl."""

    step: int
    total_steps: int
    metrics: dict[str, float]

    def __str__(self) -> str:
        """One line for people."""
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
    """The run has ended; its summary is written."""

    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ended by an error."""

    message: str
    traceback: str
    problems: tuple[Problem, ...] = ()
    """Where settings or data are wrong, instead of a traceback."""


Told: TypeAlias = Phase | Note | Stepped | Ended | Failed
Tell: TypeAlias = Callable[[Told], object]
