"""The run folder: the files of a run, readable at any moment, also after a kill.

config.yaml env.json metrics.jsonl events.jsonl trajectories/ checkpoints/ logs/ summary.json
model -> the last checkpoint, a Hugging Face folder
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.host.cpu import processor_name
from areal_lab.host.home import expanded

_REPORTED_PACKAGES = ("areal_lab", "torch", "transformers", "safetensors", "httpx", "uvicorn")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder, and the files a run appends to."""

    path: Path

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """Make `run_dir/experiment-YYYYmmdd-HHMMSS`, with the configuration and environment."""
        stem = f"{config.experiment_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        parent = expanded(config.run_dir, "run_dir")
        parent.mkdir(parents=True, exist_ok=True)
        folder = cls(_fresh_folder(parent, stem).resolve())
        for name in ("trajectories", "checkpoints", "logs"):
            (folder.path / name).mkdir()
        (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(config.model_dump()))
        folder.write_json("env.json", environment())
        return folder

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / "events.jsonl"

    def log(self, process: str) -> Path:
        """The log file of a child process."""
        return self.path / "logs" / f"{process}.log"

    def checkpoint(self, step: Version) -> Path:
        """The Hugging Face folder of one version."""
        return self.path / "checkpoints" / f"step-{step:05d}"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file and rename it into place, so that readers see all or nothing."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, self.path / name)

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(metrics)) + "\n")

    def write_trajectories(
        self,
        step: Version,
        trajectories: Sequence[Trajectory],
        texts: Sequence[tuple[str, str]],
    ) -> None:
        """Write the samples of one training step; `texts` are their prompts and completions."""
        with (self.path / "trajectories" / f"step-{step:05d}.jsonl").open("w") as file:
            for trajectory, (prompt, completion) in zip(trajectories, texts, strict=True):
                line = _as_line(trajectory, step, prompt, completion)
                file.write(json.dumps(line) + "\n")

    def point_model_to(self, checkpoint: Path) -> None:
        """Make the link `model` point to this checkpoint."""
        link = self.path / "model"
        temporary = self.path / ".model.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.relative_to(self.path), target_is_directory=True)
        os.replace(temporary, link)


def _fresh_folder(parent: Path, stem: str) -> Path:
    """Create a new folder; runs that start within one second get a number."""
    for attempt in itertools.count():
        path = parent / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count does not end")


def _as_line(
    trajectory: Trajectory, step: Version, prompt: str, completion: str
) -> dict[str, object]:
    return {
        "step": step,
        "group": trajectory.group,
        "sample": trajectory.sample,
        "prompt": prompt,
        "completion": completion,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "finish_reason": trajectory.finish_reason,
        "prompt_tokens": trajectory.prompt_tokens,
        "parts": [
            {"version": part.version, "tokens": part.tokens, "logprobs": part.logprobs}
            if isinstance(part, Segment)
            else {"observation": part.tokens}
            for part in trajectory.parts
        ],
    }


def environment() -> dict[str, object]:
    """The environment of a run: machine, interpreter, and packages that affect its results."""
    packages = {}
    for name in _REPORTED_PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": packages,
        "command": sys.argv,
    }
