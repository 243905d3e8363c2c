"""A run's hosts on a real Ray cluster of several emulated nodes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from areal_lab.cluster.host import Host
from areal_lab.cluster.hosts import TooFewHosts
from areal_lab.control.placement import Demand, HostSlots, place
from tests.cluster.ray.lab import GONE_S, Lab, Run, gone, is_driver, lab, new_run, started

pytestmark = pytest.mark.cluster

WORKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.6")
"""Nodes: one more than the runs below ask for."""
LATE = "127.0.0.7"


@pytest.fixture(scope="module")
def emulated() -> Iterator[Lab]:
    # A short name: Ray's sockets are files in it.
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder, lab(Path(folder)) as made:
        yield made


@pytest.fixture
def nodes(emulated: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Four nodes that work."""
    for name, value in emulated.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for address in WORKERS:
        emulated.add(address, num_cpus=1, num_gpus=4, resources={"engine": 1})
    return emulated


def test_each_node_has_one_agent_at_its_address(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            assert list(run.hosts.seats) == ["h1", "h2", "h3"]
            used = run.addresses()
            assert len(used) == 3
            assert used < set(WORKERS)
            for address in used:
                agent = nodes.agent(address)
                assert run.hosts.token not in " ".join(agent.cmdline())
                environment = agent.environ()
                assert "RAY_AUTH_TOKEN" not in environment
                assert "OMP_NUM_THREADS" not in environment
                # The whole node is the run's, also without `cluster.n_gpus_per_node`.
                assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
            assert "ray" not in sys.modules
        assert "was dismissed" in (tmp_path / "host-h1.log").read_text()

    asyncio.run(scenario())


def test_too_few_nodes_are_named_with_what_is_asked(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = new_run(nodes.address, tmp_path, 5, start_timeout_s=6, engine=1)
        with pytest.raises(TooFewHosts) as raised:
            async with started(run):
                pass
        assert "asked for 5 x (1 CPU, 1 engine), each on a node of its own" in str(raised.value)
        assert "there are 127.0.0.2 (1 CPU, 1 engine), 127.0.0.3" in str(raised.value)

    asyncio.run(scenario())


def test_a_node_that_comes_late_completes_four_that_generate_and_one_that_trains(
    nodes: Lab, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = new_run(nodes.address, tmp_path, 5)
        starting = asyncio.create_task(run.hosts.start())
        try:
            while "asked for 5" not in await run.scheduler.state():
                await asyncio.sleep(0.1)
            await asyncio.to_thread(nodes.add, LATE, num_cpus=1, num_gpus=4)
            hosts = await starting
            placed = place(
                [HostSlots(name=host.name, gpus=4) for host in hosts],
                Demand(engines=16, gpus_per_engine=1, trainer_ranks=4, gpus_per_rank=1),
            )
            assert placed.trainer == ("h5",) * 4
            assert set(placed.engines) == {"h1", "h2", "h3", "h4"}
        finally:
            starting.cancel()
            await run.hosts.close()
        nodes.kill(LATE)

    asyncio.run(scenario())


def test_another_node_takes_the_place_of_one_that_was_killed(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            (spare,) = set(WORKERS) - run.addresses()
            host = await lose(run, "h2", nodes.kill)
            assert host.liveness.missed == run.hosts.config.lost_after
            other = await run.hosts.host_in("h2")
            assert (other.name, other.facts.address) == ("h4", spare)

    asyncio.run(scenario())


def test_a_node_that_hangs_is_replaced_before_ray_knows_and_its_agent_ends_when_it_wakes_up(
    nodes: Lab, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            (spare,) = set(WORKERS) - run.addresses()
            hung: list[psutil.Process] = []

            def hang(address: str) -> None:
                hung.extend(nodes.processes(address))
                for process in hung:
                    process.suspend()

            agent = nodes.agent(run.address_of("h1"))
            try:
                host = await lose(run, "h1", hang)
                assert host.liveness.missed == run.hosts.config.lost_after
                other = await run.hosts.host_in("h1")
                assert other.facts.address == spare
            finally:
                for process in hung:
                    process.resume()
            await gone(agent)
            assert run.hosts.seats["h1"] is other
            assert len(run.hosts.working) == 3

    asyncio.run(scenario())


def test_an_agent_ends_with_the_raylet_of_its_node(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            left = nodes.processes(run.address_of("h2"))
            await lose(run, "h2", lambda address: nodes.raylets.pop(address).kill())
            await gone(*left)

    asyncio.run(scenario())


def test_an_agent_ends_with_its_actor_and_another_one_comes(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            agent = nodes.agent(run.address_of("h3"))
            # In a session of its own, so that Ray does not end it.
            assert os.getsid(agent.pid) == agent.pid
            await lose(run, "h3", lambda address: nodes.actor(address).kill())
            await gone(agent)
            assert (await run.hosts.host_in("h3")).name == "h4"

    asyncio.run(scenario())


def test_an_agent_that_has_ended_alone_is_started_again(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            await lose(run, "h1", lambda address: nodes.agent(address).kill())
            assert (await run.hosts.host_in("h1")).name == "h4"

    asyncio.run(scenario())


def test_all_hosts_come_back_after_the_driver_was_killed(nodes: Lab, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(new_run(nodes.address, tmp_path, 3)) as run:
            hosts = run.hosts.working
            agents = [nodes.agent(address) for address in run.addresses()]
            next(p for p in psutil.Process().children() if is_driver(p)).kill()
            await gone(*agents)
            for host in hosts:
                await host.lost.wait()
            others = [await run.hosts.host_in(seat) for seat in ("h1", "h2", "h3")]
            assert {host.name for host in others} == {"h4", "h5", "h6"}

    asyncio.run(scenario())


async def lose(run: Run, seat: str, how: Callable[[str], object]) -> Host:
    """Do this to the node of a host, and wait until the run has lost the host."""
    host = run.hosts.seats[seat]
    assert host is not None
    how(run.address_of(seat))
    async with asyncio.timeout(GONE_S):
        await host.lost.wait()
    return host


def test_a_cluster_of_another_token_or_version_is_refused_in_one_sentence(
    nodes: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusal() -> str:
        run = new_run(nodes.address, tmp_path, 1)
        with pytest.raises(ValueError, match="Ray cluster") as raised:
            async with started(run):
                pass
        return str(raised.value)

    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    said = asyncio.run(refusal())
    assert "does not accept this machine's token" in said
    assert "set RAY_AUTH_TOKEN" in said
    monkeypatch.setenv("RAY_AUTH_TOKEN", nodes.environment["RAY_AUTH_TOKEN"])
    nodes.pretend_versions(ray="2.1.0", python="3.8.20")
    said = asyncio.run(refusal())
    assert said.startswith("the Ray cluster has Ray 2.1.0 and Python 3.8.20, but this machine has")


def test_a_private_cluster_has_all_hosts_on_this_machine_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short name, as above.
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)

        async def scenario() -> None:
            async with started(new_run("local", tmp_path, 2)) as run:
                assert list(run.hosts.seats) == ["h1", "h2"]
                driver = next(p for p in psutil.Process().children() if is_driver(p))
                below = driver.children(recursive=True)
                ray = [process for process in below if process.name() in ("gcs_server", "raylet")]
                assert len(ray) == 2
            await gone(*ray)

        asyncio.run(scenario())
        assert not list(Path(folder).iterdir())
