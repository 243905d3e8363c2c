"""The run folder: the files of a run, readable at any moment, also after a kill.

config.yaml env.json metrics.jsonl events.jsonl trajectories/ checkpoints/ logs/ summary.json
images/ of prompts, named by the SHA-256 of each file
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
from typing import Any, Protocol

from omegaconf import OmegaConf

from areal_lab.config.offline import RunConfig
from areal_lab.control.events import Version
from areal_lab.data.images import EncodedImage, PlacedImage
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.host.claim import Claim
from areal_lab.host.cpu import processor_name
from areal_lab.host.home import expanded

_REPORTED_PACKAGES = ("areal_lab", "torch", "transformers", "safetensors", "httpx2", "uvicorn")


class SampleTurn(Protocol):
    """What one turn of a sample did."""

    @property
    def tokens(self) -> int:
        """That the model chose."""
        ...

    @property
    def tool(self) -> str:
        """Called in this turn; empty if none was."""
        ...

    @property
    def outcome(self) -> str:
        """Of the call."""
        ...

    @property
    def reward(self) -> float | None:
        """Of this turn alone."""
        ...

    @property
    def fork(self) -> str:
        """Why its prompt does not continue the turn before it; empty if it does."""
        ...


class WrittenRow(Protocol):
    """A row of a sample, as it is written: a `Trajectory`, or one without a reward."""

    @property
    def group(self) -> int:
        """Number of its group."""
        ...

    @property
    def sample(self) -> int:
        """Index of the sample inside its group."""
        ...

    @property
    def row(self) -> int:
        """Index of the row inside its sample."""
        ...

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Before the first part."""
        ...

    @property
    def parts(self) -> tuple[Segment | Observation, ...]:
        """Generated and observed tokens."""
        ...

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        ...

    @property
    def reward(self) -> float | None:
        """Of the sample; None if it has none."""
        ...

    @property
    def rewards(self) -> Mapping[str, float]:
        """Named components."""
        ...

    @property
    def turn_returns(self) -> Sequence[float | None]:
        """Return of each turn of this row, if turns are compared; None if none reaches it."""
        ...

    @property
    def response_tokens(self) -> tuple[int, ...]:
        """Tokens of all parts."""
        ...

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Of its prompt."""
        ...


@dataclass(frozen=True, slots=True)
class SampleText:
    """The texts of one row of a sample."""

    prompt: str
    completion: str
    characters: tuple[int, ...] | None
    """How many characters of the completion each response token adds; None if that is not known."""
    turns: tuple[SampleTurn, ...] = ()
    """Of the sample; empty with one turn."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder, and the files a run appends to.

    Everything that writes raises `RunTaken` once the folder is another process's.
    """

    path: Path
    claim: Claim | None = field(default=None, compare=False, repr=False)
    """Of the process that writes; None for one that reads, or while nobody else may know of it."""

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
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

    def check_claim(self) -> None:
        """Return if this process may write here.

        Raises:
            RunTaken: it may not any more.
        """
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
        """Write a small JSON file and rename it into place, so that readers see all or nothing."""
        self.check_claim()
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, self.path / name)

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        self.check_claim()
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(metrics)) + "\n")

    def write_trajectories(
        self,
        step: Version,
        trajectories: Sequence[Trajectory],
        texts: Sequence[SampleText],
        *,
        special: Mapping[int, str],
    ) -> None:
        """Write the samples of one training step, a line per group; `tokens.files` reads them.

        The file appears complete or not at all, and after the images of its prompts, each of which
        is written once per run.

        Args:
            step: number of the step, from 1.
            trajectories: in the order of training.
            texts: of each trajectory.
            special: names of special tokens by id; those that occur are written.
        """
        self.check_claim()
        path = self.path / "trajectories" / f"step-{step:05d}.jsonl"
        temporary = path.with_name(f".{path.name}.tmp")
        self._write_images(one.image for t in trajectories for one in t.images)
        samples = zip(trajectories, texts, strict=True)
        with temporary.open("w", encoding="utf-8") as file:
            for _, members in itertools.groupby(samples, key=lambda sample: sample[0].group):
                line = group_line(step, list(members), special)
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.check_claim()
        os.replace(temporary, path)

    def image(self, digest: str) -> Path:
        """The file of an image."""
        return self.path / "images" / f"{digest}.png"

    def _write_images(self, images: Iterable[EncodedImage]) -> None:
        for image in {image.digest: image for image in images}.values():
            path = self.image(image.digest)
            if path.exists():
                continue
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(image.png)
            os.replace(temporary, path)

    def point(self, name: str, checkpoint: Path) -> None:
        """Make the link `name` point to this checkpoint, in one step."""
        self.check_claim()
        link = self.path / name
        temporary = self.path / f".{name}.tmp"
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


def group_line(
    step: Version, samples: Sequence[tuple[WrittenRow, SampleText]], special: Mapping[int, str]
) -> dict[str, object]:
    """The line of a group, for `trajectories/`.

    Args:
        step: number of the training step; 0 if it was not trained on.
        samples: its rows with their texts, at least one.
        special: names of special tokens by id; those that occur are written.
    """
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


def _prompt_value(trajectory: WrittenRow, text: SampleText, first: WrittenRow) -> dict[str, object]:
    """The prompt of a row that does not begin as the group does."""
    if trajectory.prompt_tokens == first.prompt_tokens:
        return {}
    return {
        "prompt": text.prompt,
        "prompt_tokens": trajectory.prompt_tokens,
        **_images_value(trajectory),
    }


def _images_value(trajectory: WrittenRow) -> dict[str, object]:
    """The images of a prompt, whose files are named by their digests; nothing without any."""
    if not trajectory.images:
        return {}
    images = [
        {"sha256": one.image.digest, "start": one.start, "rows": one.rows, "columns": one.columns}
        for one in trajectory.images
    ]
    return {"images": images}


def _sample_value(trajectory: WrittenRow, text: SampleText) -> dict[str, object]:
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
                # Nine digits are every float32 exactly, which is what training takes.
                "logprobs": [float(f"{value:.9g}") for value in part.logprobs],
            }
            if isinstance(part, Segment)
            else {"observation": part.tokens}
            for part in trajectory.parts
        ],
    }


def _turn_value(turn: SampleTurn) -> dict[str, object]:
    value: dict[str, object] = {"tokens": turn.tokens}
    if turn.tool or turn.outcome:
        value |= {"tool": turn.tool, "outcome": turn.outcome}
    if turn.fork:
        value["fork"] = turn.fork
    if turn.reward is not None:  # a failed one is nan, which JSON does not have
        value["reward"] = turn.reward if math.isfinite(turn.reward) else None
    return value


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
