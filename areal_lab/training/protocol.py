"""Interface of a trainer, and the messages between a run and its trainer process, over three
pipes.

    pipeline --(TrainBatchRequest | ExportRequest | SaveRequest | None)--> worker
    worker   --(TrainerReady | TrainStepResult | Exported | Copied | Saved | TrainerFailed)-->

    pipeline --PushRequest--> a thread of the worker --(Pushed | TrainerFailed)--> pipeline
                              a thread of the worker --(Saved | TrainerFailed)--> pipeline

Each pipe carries one request at a time. The second one is for pushes from the trainer's memory into
engines, while the next step runs; the third one reports the end of checkpoints that are written
meanwhile. Messages are plain data without tensors, so that the pipeline's
process does not load torch. `None` tells the worker to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from areal_lab.control.events import Version
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import EngineFailure, EngineTarget, WeightsInMemory
from areal_lab.host.processes import RunningProcess

if TYPE_CHECKING:
    from areal_lab.data.arrays import Fields  # loads numpy

STATE_FOLDER: Final = "trainer"
"""Subfolder of a checkpoint with the trainer's state."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a process from `start_s` to `end_s` (seconds since the epoch)."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """The model is loaded, and its first version (0, or a recovered one) is exported."""

    weights: WeightsFolder
    """The model folder that engines are started with."""
    exported: WeightsFolder | WeightsInMemory
    """Same version in the form that running engines receive, as every later version."""
    parameters: int
    trained_parameters: int
    """Fewer than `parameters` with adapters."""
    compute_dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class TrainBatchRequest:
    """One optimizer batch. The trainer computes advantages over the whole batch."""

    version: Version
    """The trainer's version before this step."""
    trajectories: tuple[Trajectory, ...] = ()
    packed: Fields | None = None
    """The trajectories as arrays (`data.arrays.pack_samples`), if they are not tuples."""


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """The step is done; its weights stay in the trainer until they are exported."""

    version: Version
    """The version after the step: the request's plus one."""
    metrics: dict[str, float]
    spans: tuple[Span, ...]
    profile: bytes = field(default=b"", repr=False)
    """Trace of the step by torch's profiler (Chrome's format, gzip) of the first process; empty
    without `actor.profile_steps`."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Write the weights for the engines, or keep a copy of them in memory. Separate from the step,
    so that the pipeline can first remove the previous version: in float32 it is as large as the
    model. A trainer that takes turns with engines then leaves the device to them."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights of the trainer's version, ready to be loaded by engines."""

    weights: WeightsFolder | WeightsInMemory
    spans: tuple[Span, ...]
    """Spans of the export, and of the offload after it."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Push an exported version from the trainer's memory into these engines."""

    version: Version
    """The version to push."""
    engines: tuple[EngineTarget, ...]
    flush_cache: bool
    """True if the engines drop the keys and values of older weights."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Every engine except the failed ones was verified to have the version."""

    failures: tuple[EngineFailure, ...]
    span: Span
    """Its `args` are the seconds of each phase."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Write a checkpoint to `path`: an ordinary Hugging Face folder (float32 master weights,
    tokenizer), and what a run needs to continue from it."""

    path: Path
    state: bool = False
    """True if to add the trainer's state, as folder `STATE_FOLDER`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the pipeline to add, by name."""
    asynchronous: bool = False
    """True if to reply `Copied` as soon as what is saved is a copy, and `Saved` on another pipe."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of what is saved is in main memory; steps may follow, and `Saved` will."""

    version: Version
    span: Span


@dataclass(frozen=True, slots=True)
class Saved:
    """The folder is complete; it was renamed from a temporary one."""

    path: Path
    version: Version
    span: Span


@dataclass(frozen=True, slots=True)
class RankDone:
    """Reply of every rank but the first, which replies for all."""


@dataclass(frozen=True, slots=True)
class TrainerFailed:
    """The worker's last message: its error, with the traceback."""

    message: str
    traceback: str


class Trainer(Protocol):
    """Learns from batches, and hands out weights and checkpoints."""

    async def train(self, request: TrainBatchRequest) -> TrainStepResult:
        """Train on one batch."""
        ...

    async def export(self) -> Exported:
        """Write the weights for the engines, or keep them in its memory."""
        ...

    async def push(self, request: PushRequest) -> Pushed:
        """Push a version from its memory into engines; steps continue, and failures of engines are
        part of the reply."""
        ...

    async def remove(self, weights: WeightsFolder) -> None:
        """Remove exported weights that no engine needs any more."""
        ...

    async def save(self, request: SaveRequest) -> Saved:
        """Write a checkpoint."""
        ...

    async def start_save(self, request: SaveRequest) -> Copied:
        """Start to write a checkpoint; `saved` must be awaited before the next one."""
        ...

    async def saved(self) -> Saved:
        """Wait for the end of `start_save`'s checkpoint."""
        ...


class RunningTrainer(Trainer, Protocol):
    """Trainer with processes that this program has started."""

    @property
    def children(self) -> tuple[RunningProcess, ...]:
        """The processes, by rank."""
        ...

    @property
    def ready(self) -> TrainerReady:
        """Its message that its model is loaded."""
        ...

    async def stop(self) -> None:
        """End the processes. Idempotent."""
        ...
