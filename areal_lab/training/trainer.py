"""What a run uses of a trainer, wherever that is. Its form with processes is `process.client`."""

from __future__ import annotations

from typing import Protocol

from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.processes import RunningProcess
from areal_lab.training.protocol import (
    Copied,
    Exported,
    Pushed,
    PushRequest,
    Saved,
    SaveRequest,
    TrainBatchRequest,
    TrainerReady,
    TrainStepResult,
)


class Trainer(Protocol):
    """Learns from batches, and hands out weights and checkpoints."""

    async def train(self, request: TrainBatchRequest) -> TrainStepResult:
        """Train on one batch.

        Raises:
            BatchMissing: a batch that is not in the request cannot be read; nothing was trained.
        """
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
        """Begin to write a checkpoint; `saved` has to be awaited before the next one."""
        ...

    async def saved(self) -> Saved:
        """Wait for the end of `start_save`'s checkpoint."""
        ...


class RunningTrainer(Trainer, Protocol):
    """A trainer with processes, which this program has started."""

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
