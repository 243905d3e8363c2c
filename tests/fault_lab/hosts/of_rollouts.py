"""Faults of hosts of rollout workers, in a training loop on controllers."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.schema import TrainConfig
from areal_lab.controllers.host_pool import host_pool
from areal_lab.controllers.rollout import AsyncRolloutController
from areal_lab.controllers.train import AsyncTrainController
from areal_lab.resolve.resolved import resolve
from tests.cluster.namespaces import Network
from tests.fault_lab.hosts.faults import (
    ROLLOUT_FAULTS,
    Blow,
    HostFault,
)
from tests.fault_lab.hosts.held_rewards import RELEASED, WANTED, who_scores
from tests.fault_lab.hosts.machines import (
    STANDING,
    Departures,
    Machine,
)
from tests.fault_lab.hosts.runs import (
    GROUPS,
    ROLLOUT_COUNTS,
    Heard,
    Measured,
    Seen,
    end_of_all,
    fault_config,
    machines_of,
    meeting_point,
    strike,
    until,
)


def faults_of_rollout_hosts(network: Network, folder: Path, patch: pytest.MonkeyPatch) -> Measured:
    """Hosts of rollout workers, struck while a reward worker scores there."""
    machines = machines_of(network)
    join, settings = meeting_point(network, patch, hosts=len(machines))
    config = fault_config(
        folder,
        *settings,
        f"rollout.engines={len(machines) - 1}",
        "reward.fn=tests.fault_lab.hosts.held_rewards:held",
        f"reward.kwargs={{folder: '{folder}'}}",
    )
    faults = RolloutFaults(machines, folder, join)
    measured = asyncio.run(faults.run(config))
    faults.departures.wait()
    end_of_all(machines)
    return {
        fault: Seen(seen_s, faults.departures.gone_s[fault.name], counts)
        for fault, (seen_s, counts) in measured.items()
    }


@dataclass(slots=True)
class RolloutFaults:
    """A training loop on controllers; before each batch a host is struck."""

    machines: dict[str, Machine]
    folder: Path
    join: str
    departures: Departures = field(default_factory=Departures)
    heard: Heard = field(default_factory=Heard)

    async def run(self, config: TrainConfig) -> dict[HostFault, tuple[float, dict[str, int]]]:
        """One step for each fault."""
        self.heard.on_waiting = self._boot_all
        measured, trained = {}, Counter[int]()
        problems = resolve(config).problems.train
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(
                host_pool(
                    config,
                    folder=self.folder / "controllers",
                    say=self.heard.note,
                    waiting=self.heard.phase,
                )
            )
            trainer = await AsyncTrainController.start(pool, config)
            stack.push_async_callback(trainer.close)
            rollouts = await AsyncRolloutController.start(pool, config, problems)
            stack.push_async_callback(rollouts.close)
            (self.folder / WANTED).touch()
            for fault in ROLLOUT_FAULTS:
                preparing = asyncio.create_task(rollouts.prepare_batch())
                scores = await self._scores()
                await until(lambda: len(rollouts.workers.alive) > 1, "another worker is there")
                before = Counter({**rollouts.counts, "host_losses": pool.hosts.hosts.losses})
                seen_s = await self._strike(fault, scores)
                batch = await preparing
                trained.update(rollouts._given[batch.metadata.batch_id][0].groups)
                await trainer.train(batch)
                if fault is not ROLLOUT_FAULTS[-1]:
                    (self.folder / WANTED).touch()
                await rollouts.update_weights(await trainer.export())
                await rollouts.free(batch)
                after = Counter({**rollouts.counts, "host_losses": pool.hosts.hosts.losses})
                measured[fault] = seen_s, {n: after[n] - before[n] for n in ROLLOUT_COUNTS}
                assert measured[fault][1]["worker_losses"] == 1
            assert trainer.version == len(ROLLOUT_FAULTS)
            assert trained == Counter(dict.fromkeys(range(GROUPS * len(ROLLOUT_FAULTS)), 1))
        return measured

    async def _boot_all(self) -> None:
        token = os.environ[TOKEN_VARIABLE]
        await asyncio.gather(*(one.boot(self.join, token) for one in self.machines.values()))

    async def _scores(self) -> int:
        await until(lambda: who_scores(self.folder) is not None, "a completion is scored")
        return who_scores(self.folder) or 0

    async def _strike(self, fault: HostFault, scores: int) -> float:
        """Strike the host of the process that scores; returns when that is seen."""
        machine = next(one for one in self.machines.values() if scores in one.processes())
        began_s = time.monotonic()
        struck = strike(machine, fault.blow)
        if fault.blow is Blow.KILLED:
            self.departures.expect(fault.name, struck, began_s)
        else:
            self.departures.expect(fault.name, struck[STANDING:], began_s)
        seen_s = await self.heard.until(f"host {machine.name} ", "is lost") - began_s
        (self.folder / RELEASED).touch()
        match fault.blow:
            case Blow.KILLED:
                await until(lambda: fault.name in self.departures.gone_s, "all of it is dead")
                await machine.end()
                joined = machine.log.count("is part of the run")
                await machine.boot(self.join, os.environ[TOKEN_VARIABLE])
                # The training loop may end before that: the agent would wait for another one.
                await until(
                    lambda: machine.log.count("is part of the run") > joined, "it has joined"
                )
            case Blow.CUT:
                await until(lambda: machine.late_bytes() > 0, "a scored group is on its way")
                machine.heal()
            case Blow.HUNG:
                machine.wake(struck)
        (self.folder / f"scores-{scores}").unlink()
        (self.folder / RELEASED).unlink()
        return seen_s
