"""The controller of a trainer on hosts, which sends it the tensors of a batch."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.controllers.batch import DistributedBatch
from areal_lab.controllers.calls import Traffic
from areal_lab.controllers.host_pool import HostPool
from areal_lab.data.arrays import field_bytes
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import Transfer
from areal_lab.resolve.limits import threads_of
from areal_lab.resolve.placement import place_parts
from areal_lab.training.protocol import RunningTrainer, SaveRequest, TrainBatchRequest
from areal_lab.training.settings import TrainerSettings


@dataclass(slots=True)
class AsyncTrainController:
    """A trainer whose processes are on hosts. Create it with `start`, and always `close` it."""

    pool: HostPool
    trainer: RunningTrainer
    version: Version = 0
    """Steps so far."""
    traffic: Traffic = field(default_factory=Traffic)
    """Of the messages of steps."""

    @staticmethod
    async def start(pool: HostPool, config: TrainConfig) -> AsyncTrainController:
        """Start the processes on the hosts that train; returns when the model is loaded.

        Raises:
            ValueError: weights are not transferred as folders.
            TrainingError: as a process says.
        """
        if Transfer(config.rollout.transfer) is not Transfer.FOLDER:
            raise ValueError(
                f"rollout.transfer is {config.rollout.transfer!r}, but controllers send folders "
                "from host to host; leave it at 'folder'"
            )
        placed = place_parts(config)
        place = placed.trainer
        there = pool.hosts.threads()
        threads = threads_of(placed).trainer if there is None else there.trainer
        settings = TrainerSettings(
            config=config,
            model_path=str(pool.model),
            weights_root="",
            threads=config.actor.threads or threads,
            ranks=place.ranks,
            tensor=place.sizes.tensor,
            context=place.sizes.context,
            device=place.device,
            engine_device=placed.engines.device,
            gpus=",".join(place.gpus),
        )
        trainer = await pool.hosts.start_trainer(settings, run_folder=pool.folder)
        return AsyncTrainController(pool, trainer)

    async def train(self, batch: DistributedBatch) -> dict[str, float]:
        """One step on a batch; returns its metrics.

        Raises:
            BatchMissing: some of it was freed; nothing was trained.
            TrainingError: the step failed.
            ChildDied: a process, or its host, is lost.
        """
        packed = await asyncio.to_thread(self.pool.shards.get, batch.shards)
        result = await self.trainer.train(TrainBatchRequest(self.version, packed=packed))
        self.version = self.pool.summary["steps"] = result.version
        self.traffic.sent_bytes += sum(map(field_bytes, packed.values()))
        self.traffic.received_bytes += len(pickle.dumps(result))
        return result.metrics

    async def export(self) -> WeightsFolder:
        """Write the weights on the trainer's host, for `AsyncRolloutController.update_weights`."""
        exported = (await self.trainer.export()).weights
        assert isinstance(exported, WeightsFolder), "the transfer is by folders"
        return exported

    async def save(self, path: Path) -> Path:
        """Write an ordinary Hugging Face folder on this machine."""
        return (await self.trainer.save(SaveRequest(path.absolute()))).path

    async def close(self) -> None:
        """End the processes."""
        await self.trainer.stop()
