"""What a rollout controller asks of its workers, and what they reply. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_lab.cluster.shards.metadata import ShardMetadata
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import GroupId, Version
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
    agent: str
    """`ADDRESS:PORT` of its host's agent, which holds the tensors."""
    incarnation: str
    owner: str
    """Of the tensors."""
    log_folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateGroup:
    """Generate and score one group; the reply is a `GroupDone`."""

    group: GroupId
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """A group whose tensors are on its host."""

    group: GroupId
    shard: ShardMetadata | None
    """Rows are samples; None if the group cannot be trained on."""
    failure: str
    """Why not."""
    rewards: tuple[float, ...]
    tokens: int
    """Generated."""
    head_version: Version
    tail_version: Version
    tensor_bytes: int
    """Of the arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Interrupt generation, load a version and continue; the reply is `None`."""

    weights: WeightsFolder


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop decoding; the reply is `None`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue; the reply is `None`."""
