"""Training loops on controllers, on hosts of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.controllers.host_pool import HostPool, host_pool
from areal_lab.controllers.rollout import AsyncRolloutController
from areal_lab.controllers.train import AsyncTrainController
from areal_lab.resolve.resolved import resolve
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.records import Log
from areal_lab.runlog.replay import check_replay
from tests.pipeline.rewards import even_digits


@asynccontextmanager
async def controllers(
    folder: Path, config: TrainConfig, reward_fn: RewardFunction = even_digits
) -> AsyncIterator[tuple[HostPool, AsyncRolloutController, AsyncTrainController]]:
    """Controllers on hosts that have joined."""
    problems = resolve(config).problems
    async with host_pool(config, folder=folder) as pool:
        trainer = await AsyncTrainController.start(pool, config)
        try:
            rollouts = await AsyncRolloutController.start(
                pool, config, problems.train, reward_fn=reward_fn
            )
            try:
                yield pool, rollouts, trainer
            finally:
                await rollouts.close()
            assert len(pool.shards) == 0, "nothing is kept that no batch and no waiting group has"
        finally:
            await trainer.close()


async def one_step(rollouts: AsyncRolloutController, trainer: AsyncTrainController) -> None:
    """A batch, a step on it, and its weights in all engines."""
    batch = await rollouts.prepare_batch()
    await trainer.train(batch)
    await rollouts.update_weights(await trainer.export())
    await rollouts.free(batch)


def replayed(rollouts: AsyncRolloutController) -> Log:
    """The event log, whose actions follow from its events."""
    log = read_log_file(rollouts.events)
    assert (replay := check_replay(log)).agrees, replay.difference
    return log
