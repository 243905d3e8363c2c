"""An emulated Ray cluster, and a run's hosts on it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from areal_lab.cluster.hosts import Hosts
from areal_lab.cluster.ray.scheduler import RayScheduler
from areal_lab.config.sections import ClusterConfig, SchedulerConfig

GONE_S = 60.0
"""Longest wait for processes to end."""
START_S = 120.0


@dataclass
class Lab:
    """Ray nodes of this machine."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    address: str = ""
    raylets: dict[str, psutil.Process] = field(default_factory=dict)
    """By the address of the node, of those that were not killed."""

    def add(self, address: str, **settings: Any) -> None:
        """Start a node, unless it is there."""
        if address not in self.raylets:
            reply = self._ask({"address": address, **settings})
            self.address = reply["cluster"]
            self.raylets[address] = psutil.Process(reply["raylet"])

    def pretend_versions(self, **versions: str) -> None:
        """Have the cluster say that it was started with these versions, from now on."""
        self._ask({f"{name}_version": version for name, version in versions.items()})

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def processes(self, address: str) -> list[psutil.Process]:
        """All processes of a node, with the agent and what it has started."""
        raylet = self.raylets[address]
        return [raylet, *raylet.children(recursive=True)]

    def kill(self, address: str) -> list[psutil.Process]:
        """End all processes of a node, as a loss of power does."""
        processes = self.processes(address)
        del self.raylets[address]
        for process in processes:
            process.kill()
        return processes

    def actor(self, address: str) -> psutil.Process:
        """Ray's worker that runs the agent of a node."""
        return next(p for p in self.processes(address) if "HostActor" in " ".join(p.cmdline()))

    def agent(self, address: str) -> psutil.Process:
        """The agent of a node."""
        return next(p for p in self.processes(address) if is_agent(p))


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """A head at 127.0.0.5 without work, and no other node yet."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SCHEDULER_EVENTS": "0",
        # Not /tmp/ray: what a test leaves there, another one would join.
        "RAY_TMPDIR": str(folder),
    }
    # Set by the tests for their own process.
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with (folder / "emulate.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray.emulate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=inherited | environment,
        )
    started = Lab(process, environment)
    try:
        started.add("127.0.0.5", num_cpus=0)
        yield started
    finally:
        everything = psutil.Process(process.pid).children(recursive=True)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(GONE_S)
        assert process.stdout is not None
        process.stdout.close()
        left = [process for process in everything if is_alive(process)]
        for process in left:
            process.kill()
        assert not left


def is_agent(process: psutil.Process) -> bool:
    return _runs(process, "areal_lab.cluster.agent.run")


def is_driver(process: psutil.Process) -> bool:
    return _runs(process, "areal_lab.cluster.ray.driver")


def joins(agent: psutil.Process, run: Run) -> bool:
    return _runs(agent, f"127.0.0.1:{run.hosts.port}")


def _runs(process: psutil.Process, argument: str) -> bool:
    try:
        return argument in process.cmdline()
    except psutil.Error:
        return False


@dataclass
class Run:
    """The hosts of a run."""

    hosts: Hosts
    scheduler: RayScheduler
    said: list[str]
    waited: list[str]

    def address_of(self, seat: str) -> str:
        """Of the host in a seat."""
        host = self.hosts.seats[seat]
        assert host is not None
        return host.facts.address

    def addresses(self) -> set[str]:
        """Of all hosts."""
        return {host.facts.address for host in self.hosts.working}


def new_run(
    address: str,
    folder: Path,
    n_nodes: int,
    *,
    start_timeout_s: float = START_S,
    **resources: float,
) -> Run:
    said: list[str] = []
    waited: list[str] = []
    cluster = ClusterConfig(n_nodes=n_nodes)
    config = SchedulerConfig(type="ray", ray_address=address, ray_resources=resources)
    scheduler = RayScheduler(config, cluster, folder)
    hosts = Hosts(
        config=cluster,
        scheduler=scheduler,
        address="127.0.0.1",
        start_timeout_s=start_timeout_s,
        say=said.append,
        waiting=waited.append,
    )
    return Run(hosts, scheduler, said, waited)


@asynccontextmanager
async def started(run: Run) -> AsyncIterator[Run]:
    """Hosts that have joined. At the end, none of their agents is left."""
    try:
        await run.hosts.start()
        yield run
    finally:
        await run.hosts.close()
        await gone(*(p for p in psutil.process_iter() if is_agent(p) and joins(p, run)))


async def gone(*processes: psutil.Process) -> None:
    """Wait until processes have ended."""
    async with asyncio.timeout(GONE_S):
        while any(is_alive(process) for process in processes):
            await asyncio.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
