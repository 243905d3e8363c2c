"""The controller of a trainer: batches as metadata, which its processes read from other hosts."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.cluster.shards.metadata import DistributedBatch, packed_batch
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.controllers.calls import Traffic
from areal_lab.controllers.host_pool import HostPool
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import Transfer
from areal_lab.preflight.limits import threads_of
from areal_lab.preflight.placement import machine_of, place_engines, place_trainer
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
        machine = machine_of(config)
        place = place_trainer(config, machine)
        there = pool.hosts.threads()
        threads = threads_of(config, machine.cores).trainer if there is None else there.trainer
        settings = TrainerSettings(
            config=config,
            model_path=str(pool.model),
            weights_root="",
            threads=config.actor.threads or threads,
            ranks=place.ranks,
            tensor=place.tensor,
            context=place.context,
            device=place.device,
            engine_device=place_engines(config, machine).device,
            gpus=",".join(place.gpus),
        )
        trainer = await pool.hosts.start_trainer(settings, run_folder=pool.folder)
        return AsyncTrainController(pool, trainer)

    async def train(self, batch: DistributedBatch) -> dict[str, float]:
        """One step on a batch; returns its metrics.

        Raises:
            BatchMissing: a host that held some of it is lost; nothing was trained.
            TrainingError: the step failed.
            ChildDied: a process, or its host, is lost.
        """
        request = TrainBatchRequest(version=self.version, batch=packed_batch(batch.metadata))
        result = await self.trainer.train(request)
        self.version = result.version
        self.traffic.sent_bytes += len(pickle.dumps(request)) * len(self.trainer.children)
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
