"""The run folder: the files of a run, readable at any moment, even after a kill.

config.yaml env.json metrics.jsonl events.jsonl trajectories/ checkpoints/ logs/ summary.json
images/ of prompts, named by the SHA-256 of each file; profiles/ of training steps
process.json requests.jsonl replies.jsonl (`areal_lab.live`)
model -> the last checkpoint, a Hugging Face folder; best -> the one with the best held-out reward
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lab.config.offline import RunConfig
from areal_lab.control.events import Version
from areal_lab.data.images import EncodedImage
from areal_lab.data.trajectory import Segment, Trajectory, Turn
from areal_lab.host.claim import Claim
from areal_lab.host.durable import append_lines, expanded, replace_link, replace_text, replacing
from areal_lab.host.machine import processor_name

_REPORTED_PACKAGES = ("areal_lab", "torch", "transformers", "safetensors", "httpx2", "uvicorn")


@dataclass(frozen=True, slots=True)
class SampleText:
    """Texts of one row of a sample."""

    prompt: str
    completion: str
    characters: tuple[int, ...] | None
    """How many characters of the completion each response token adds; None if that is not known."""
    turns: tuple[Turn, ...] = ()
    """Of the sample; empty with one turn."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder, and the files that a run appends to.

    Every write raises `RunTaken` once another process has the folder.
    """

    path: Path
    claim: Claim | None = field(default=None, compare=False, repr=False)
    """Claim of the writing process; None for a reader, or before the folder is known to others."""

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Create `run_dir/experiment-YYYYmmdd-HHMMSS`, with the configuration and environment."""
        stem = f"{config.experiment_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        parent = expanded(config.run_dir, "run_dir")
        parent.mkdir(parents=True, exist_ok=True)
        folder = cls(_fresh_folder(parent, stem).resolve())
        for name in ("trajectories", "checkpoints", "logs"):
            (folder.path / name).mkdir()
        folder.write_config(config)
        folder.write_json("env.json", environment())
        return folder

    def check_claim(self) -> None:
        """Check that this process may write here."""
        if self.claim is not None:
            self.claim.check()

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
        """Write a small JSON file and rename it into place, so readers see all or nothing."""
        self.check_claim()
        replace_text(self.path / name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml."""
        text = OmegaConf.to_yaml(config.model_dump())
        replace_text(self.path / "config.yaml", text, flush=True)

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        self.check_claim()
        append_lines(self.path / "metrics.jsonl", json.dumps(dict(metrics)) + "\n")

    def write_trajectories(
        self,
        step: Version,
        trajectories: Sequence[Trajectory],
        texts: Sequence[SampleText],
        *,
        special: Mapping[int, str],
    ) -> None:
        """Write the samples of one training step, a line per group; `token_files` reads them.

        The file appears complete or not at all, and after the images of its prompts, each of which
        is written once per run.
        """
        self.check_claim()
        path = self.path / "trajectories" / f"step-{step:05d}.jsonl"
        self._write_images(one.image for t in trajectories for one in t.images)
        samples = zip(trajectories, texts, strict=True)
        with replacing(path) as file:
            for _, members in itertools.groupby(samples, key=lambda sample: sample[0].group):
                line = group_line(step, list(members), special)
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self.check_claim()

    def profile(self, step: Version) -> Path:
        """The trace of a training step by torch's profiler (`actor.profile_steps`)."""
        return self.path / "profiles" / f"trainer-step-{step:05d}.json.gz"

    def write_profile(self, step: Version, content: bytes) -> None:
        """Write the trace of a training step, which appears complete or not at all."""
        self.check_claim()
        path = self.profile(step)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            file.write(content)
            self.check_claim()

    def image(self, digest: str) -> Path:
        """The file of an image."""
        return self.path / "images" / f"{digest}.png"

    def _write_images(self, images: Iterable[EncodedImage]) -> None:
        for image in {image.digest: image for image in images}.values():
            path = self.image(image.digest)
            if path.exists():
                continue
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                file.write(image.png)

    def point(self, name: str, checkpoint: Path) -> None:
        """Set the link `name` to this checkpoint, atomically."""
        self.check_claim()
        replace_link(self.path / name, str(checkpoint.relative_to(self.path)))


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


def group_line(
    step: Version, samples: Sequence[tuple[Trajectory, SampleText]], special: Mapping[int, str]
) -> dict[str, object]:
    """Line of a group, for `trajectories/`; `step` is 0 if it was not trained on."""
    first, text = samples[0]
    occurring = {token for trajectory, _ in samples for token in trajectory.response_tokens}
    return {
        "step": step,
        "group": first.group,
        "prompt": text.prompt,
        "prompt_tokens": first.prompt_tokens,
        **_images_value(first),
        "special": {token: special[token] for token in sorted(occurring & special.keys())},
        "samples": [
            {
                **_prompt_value(trajectory, text, first),
                **_sample_value(trajectory, text),
            }
            for trajectory, text in samples
        ],
    }


def _prompt_value(trajectory: Trajectory, text: SampleText, first: Trajectory) -> dict[str, object]:
    """The prompt of a row that does not begin as the group does."""
    if trajectory.prompt_tokens == first.prompt_tokens:
        return {}
    return {
        "prompt": text.prompt,
        "prompt_tokens": trajectory.prompt_tokens,
        **_images_value(trajectory),
    }


def _images_value(trajectory: Trajectory) -> dict[str, object]:
    """The images of a prompt, whose files are named by their digests; nothing without any."""
    if not trajectory.images:
        return {}
    images = [
        {"sha256": one.image.digest, "start": one.start, "rows": one.rows, "columns": one.columns}
        for one in trajectory.images
    ]
    return {"images": images}


def _sample_value(trajectory: Trajectory, text: SampleText) -> dict[str, object]:
    known: dict[str, object] = {}
    if text.characters is not None:
        known["characters"] = text.characters
    if trajectory.row:
        known["row"] = trajectory.row
    if trajectory.turn_returns:
        known["turn_returns"] = trajectory.turn_returns
    if text.turns:
        known["turns"] = [_turn_value(turn) for turn in text.turns]
    return {
        "sample": trajectory.sample,
        "completion": text.completion,
        **known,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "finish_reason": trajectory.finish_reason,
        "parts": [
            {
                "version": part.version,
                "tokens": part.tokens,
                # Nine digits represent every float32 exactly, the type of training.
                "logprobs": [float(f"{value:.9g}") for value in part.logprobs],
            }
            if isinstance(part, Segment)
            else {"observation": part.tokens}
            for part in trajectory.parts
        ],
    }


def _turn_value(turn: Turn) -> dict[str, object]:
    value: dict[str, object] = {"tokens": turn.tokens}
    if turn.tool or turn.outcome:
        value |= {"tool": turn.tool, "outcome": turn.outcome}
    if turn.fork:
        value["fork"] = turn.fork
    if turn.reward is not None:  # a failed one is nan, which JSON does not have
        value["reward"] = turn.reward if math.isfinite(turn.reward) else None
    return value


def environment() -> dict[str, object]:
    """Environment of a run: machine, interpreter, and packages that affect its results."""
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
