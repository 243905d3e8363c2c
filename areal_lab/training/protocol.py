"""The messages between the pipeline and the trainer process, over two pipes, one at a time each.

    pipeline --(TrainBatchRequest | ExportRequest | SaveRequest | None)--> worker
    worker   --(TrainerReady | TrainStepResult | Exported | Saved | TrainerFailed)--> pipeline

    pipeline --PushRequest--> a thread of the worker --(Pushed | TrainerFailed)--> pipeline

The second pipe is for weights that engines get from the trainer's memory, while the next step runs.
Plain data without tensors, so that the pipeline's process never loads torch. `None` asks the
worker to end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.control.events import Version
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import EngineFailure, EngineTarget, WeightsInMemory


@dataclass(frozen=True, slots=True)
class Span:
    """What one process did from `start_s` to `end_s` (seconds since the epoch)."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """The model is loaded; `weights` is version 0 (or the recovered one), exported for engines."""

    weights: WeightsFolder
    """What engines are started with."""
    exported: WeightsFolder | WeightsInMemory
    """The same, as it gets into engines that run already: what every later version comes as."""
    parameters: int
    trained_parameters: int
    """Fewer with adapters."""
    compute_dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class TrainBatchRequest:
    """One optimizer batch. Advantages are computed by the trainer, over the whole batch."""

    version: Version
    """The trainer's version before this step."""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """The step is done; its weights are in the trainer only, until they are exported."""

    version: Version
    """The version after the step: the request's plus one."""
    metrics: dict[str, float]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Write the weights for the engines, or keep a copy of them in memory. Asked for apart from the
    step, so that the pipeline can first let go of the weights before: in float32 a set is as large
    as the model."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights of the trainer's version, ready to be loaded by engines."""

    weights: WeightsFolder | WeightsInMemory
    span: Span


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Bring the weights exported last, which are in the trainer's memory, into these engines."""

    version: Version
    """Which these are."""
    engines: tuple[EngineTarget, ...]
    flush_cache: bool
    """Whether the engines forget the keys and values of older weights."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Every engine but those that failed holds the version; each was compared."""

    failures: tuple[EngineFailure, ...]
    span: Span
    """With the seconds of each phase."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Write an ordinary Hugging Face folder (float32 master weights, tokenizer) to `path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class Saved:
    """The folder is complete; it was written aside and renamed."""

    path: Path
    version: Version
    span: Span


@dataclass(frozen=True, slots=True)
class TrainerFailed:
    """The worker's last message: what went wrong, with the traceback."""

    message: str
    traceback: str
