"""Hosts of a run that Slurm brings up, for tests; run as a module: a run inside an allocation."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from areal_lab.cluster.hosts import Hosts
from areal_lab.cluster.slurm.scheduler import SlurmScheduler
from areal_lab.config.sections import ClusterConfig, SchedulerConfig
from tests.cluster.host_lab import DEADLINE_S, start_sleeper, until
from tests.ended import gone


@dataclass(slots=True)
class Joined:
    """Hosts that are brought up by Slurm."""

    hosts: Hosts
    scheduler: SlurmScheduler
    said: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    """What was shown while hosts were waited for."""


def new_hosts(
    folder: Path, count: int, *, start_timeout_s: float = DEADLINE_S, **settings: object
) -> Joined:
    """Hosts that are not started.

    Args:
        folder: of the run.
        count: of hosts.
        settings: those of `scheduler` that begin with `slurm_`, the others of `cluster`.
    """
    slurm = {name: value for name, value in settings.items() if name.startswith("slurm_")}
    other = {name: value for name, value in settings.items() if name not in slurm}
    config = ClusterConfig.model_validate({"n_nodes": count, **other})
    said, waited = list[str](), list[str]()
    scheduler = SlurmScheduler(
        SchedulerConfig.model_validate({"type": "slurm", **slurm}),
        config,
        folder / "logs",
        say=said.append,
    )
    hosts = Hosts(
        config=config,
        scheduler=scheduler,
        address="127.0.0.1",
        start_timeout_s=start_timeout_s,
        say=said.append,
        waiting=waited.append,
    )
    return Joined(hosts, scheduler, said, waited)


@asynccontextmanager
async def joined(folder: Path, count: int, **settings: object) -> AsyncIterator[Joined]:
    """Hosts that have joined; arguments as `new_hosts`."""
    made = new_hosts(folder, count, **settings)  # type: ignore[arg-type]
    try:
        await made.hosts.start()
        yield made
    finally:
        await made.hosts.close()


async def run_in_allocation(folder: Path, count: int) -> None:
    """Bring up hosts, replace one that is lost, and write what was seen."""
    async with joined(folder, count, lease_s=1000.0) as made:
        names = [host.name for host in made.hosts.working]
        sleepers = [await start_sleeper(host) for host in made.hosts.working]
        gpus = [psutil.Process(one.pid).environ()["CUDA_VISIBLE_DEVICES"] for one in sleepers]
        first, sleeper = made.hosts.working[0], sleepers[0]
        first.liveness.lost = "the test says so"
        made.hosts._lose(first)
        after = await made.hosts.host_in(first.name)
        again = await start_sleeper(after)
        await until(lambda: gone(sleeper.pid), "what the lost host ran is ended without its lease")
        seen = {
            "names": names,
            "gpus": gpus,
            "replaced_by": after.name,
            "running": [sleeper.running, again.running],
            "state": await made.scheduler.state(),
            "said": made.said,
        }
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(run_in_allocation(Path(sys.argv[1]), int(sys.argv[2])))
