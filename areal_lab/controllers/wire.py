"""What a rollout controller asks of its workers, and what they reply. Plain data and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import GroupId, Version
from areal_lab.data.arrays import Fields
from areal_lab.data.problems import Problem
from areal_lab.engines.protocol import WeightsFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start engines and reward workers; the reply is `None` when they are ready."""

    config: TrainConfig
    """Of this worker: with its number of engines."""
    model: Path
    """On the worker's host."""
    reward: str
    """The reward function by its name, or the path of a pickled one."""
    log_folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateGroup:
    """Generate and score one group; the reply is a `GroupDone`."""

    group: GroupId
    problem: Problem
    engine: int
    """Of the worker's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroup:
    """End a group that runs: its reply then has a failure. The reply to this is `None`."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """A group that has ended."""

    group: GroupId
    packed: Fields | None
    """Its samples, as `data.arrays.pack_samples` packs them; None if it cannot be trained on."""
    failure: str
    """Why not."""
    rewards: tuple[float, ...]
    tokens: int
    """Generated."""
    head_version: Version
    tail_version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Load a version, in a pause or while nothing is generated; the reply is `None`."""

    weights: WeightsFolder


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop decoding; the reply is `None`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue; the reply is `None`."""


@dataclass(frozen=True, slots=True)
class AddEngine:
    """Start another engine; the reply is `None` when it has the weights of the others."""


@dataclass(frozen=True, slots=True)
class RetireEngine:
    """Let the newest engine leave; the reply is `None`."""
