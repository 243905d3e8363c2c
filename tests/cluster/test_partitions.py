"""Hosts in network namespaces: cut off, found lost, healed, and what arrives late."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.cluster.host import Host, HostLost, HostRefused, RemoteProcess
from areal_lab.cluster.hosts import Hosts
from areal_lab.config.sections import ClusterConfig
from areal_lab.control.liveness import HostLiveness
from tests.cluster.host_lab import DEADLINE_S, start_sleeper, until
from tests.cluster.namespaces import (
    FIN_WAIT1,
    NamespaceScheduler,
    Network,
    connections,
    network_of_hosts,
    processes_with,
    why_not,
)
from tests.ended import gone

pytestmark = pytest.mark.cluster
MARK = "AREAL_LAB_TEST_MARK"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if why := why_not():
        pytest.skip(why)
    with network_of_hosts(tmp_path) as made:
        yield made


@asynccontextmanager
async def joined(
    network: Network, folder: Path, count: int = 2, lease_s: float = 2.0
) -> AsyncIterator[tuple[Hosts, NamespaceScheduler]]:
    scheduler = NamespaceScheduler(network, folder / "logs")
    hosts = Hosts(
        config=ClusterConfig(n_nodes=count, heartbeat_s=0.2, lost_after=5, lease_s=lease_s),
        scheduler=scheduler,
        address=network.address,
        start_timeout_s=DEADLINE_S,
        say=lambda _: None,
        waiting=lambda _: None,
    )
    try:
        await hosts.start()
        yield hosts, scheduler
    finally:
        await hosts.close()


def start_marked(host: Host, mark: str) -> asyncio.Task[RemoteProcess]:
    """Ask a host for a process that the test finds by its environment."""
    return asyncio.create_task(
        host.start_module(
            "marked", "tests.cluster.sleeper", [], log="marked.log", environment={MARK: mark}
        )
    )


def test_agents_join_over_the_network_each_with_its_own_folder(
    network: Network, tmp_path: Path
) -> None:
    async def run() -> None:
        async with joined(network, tmp_path, 3) as (hosts, _):
            facts = [host.facts for host in hosts.working]
            assert [one.address for one in facts] == [
                host.address for host in network.hosts.values()
            ]
            for one in facts:
                assert Path(one.folder).parent == network.hosts[one.name].folder
            sleeper = await start_sleeper(hosts.working[2])
            there = os.readlink(f"/proc/{sleeper.pid}/ns/net")
            assert there != os.readlink("/proc/self/ns/net")
        assert gone(sleeper.pid)

    asyncio.run(run())


def test_a_host_that_is_cut_off_is_lost_ends_its_processes_and_comes_back_as_another_one(
    network: Network, tmp_path: Path
) -> None:
    async def run() -> None:
        async with joined(network, tmp_path) as (hosts, _):
            before, other = hosts.working
            sleeper, elsewhere = await start_sleeper(before), await start_sleeper(other)
            network.cut(before.name)
            error = await sleeper.died()
            assert isinstance(error, HostLost)
            assert "did not reply to 5 heartbeats" in str(error)
            await until(lambda: gone(sleeper.pid), "its processes end with its lease")
            assert hosts.seats[before.name] is None
            assert elsewhere.running
            network.heal(before.name)
            after = await hosts.host_in(before.name)
            assert after.name == before.name
            assert after.facts.incarnation != before.facts.incarnation
            assert (await start_sleeper(after)).running
            assert hosts.losses == 1
            # What still takes it for the earlier incarnation is refused.
            late = Host(
                facts=replace(before.facts, port=after.facts.port),
                liveness=HostLiveness(before.facts.incarnation, 5),
                token=hosts.token,
            )
            with pytest.raises(HostRefused, match="has started again since: the request is late"):
                await start_sleeper(late)
            await late.heartbeat(DEADLINE_S)
            assert "has started again" in late.liveness.lost
            late.mark_lost()
            await late.dismiss()

    asyncio.run(run())


@pytest.mark.parametrize("over", [True, False])
def test_a_request_that_arrives_after_its_host_was_lost_starts_nothing(
    network: Network, tmp_path: Path, over: bool
) -> None:
    """Once the lease is over, which the agent knows then, and before that: late heartbeats arrive
    with the request."""

    async def run() -> None:
        async with joined(network, tmp_path, lease_s=2.0 if over else 8.0) as (hosts, _):
            before, _ = hosts.working
            await start_sleeper(before)  # the connection that the next request uses
            port = before.facts.port

            def late() -> bool:
                """Whether a request is on its way on a connection that was given up."""
                return any(
                    one.remote_port == port and one.state == FIN_WAIT1 and one.unsent_bytes > 1
                    for one in connections(os.getpid())
                )

            network.cut(before.name)
            mark = secrets.token_hex(8)
            with pytest.raises(HostLost, match="did not reply"):
                await start_marked(before, mark)
            assert late(), "bytes are in flight"
            if over:
                await until(
                    lambda: all(map(_ended, before.processes.values())),
                    "its processes end with its lease",
                )
            network.heal(before.name)
            if not over:
                await until(lambda: not late(), "the bytes have arrived")
                assert not any(map(_ended, before.processes.values())), "the lease is not over"
            after = await hosts.host_in(before.name)
            await until(lambda: not late(), "the bytes have arrived")
            await start_sleeper(after)  # the agent has read them before
            assert not processes_with(MARK, mark)
            assert not (Path(before.facts.folder) / "logs" / "marked.log").exists()

    asyncio.run(run())


def test_a_reply_that_arrives_after_its_host_was_lost_is_not_used(
    network: Network, tmp_path: Path
) -> None:
    async def run() -> None:
        async with joined(network, tmp_path, lease_s=10.0) as (hosts, scheduler):
            before, _ = hosts.working
            await start_sleeper(before)
            agent, port = scheduler.agents[before.name].pid, before.facts.port

            def waiting(what: str) -> bool:
                """Whether the agent has bytes unread, or a reply without an acknowledgment."""
                return any(
                    getattr(one, what) > 1
                    for one in connections(agent)
                    if one.local_port == port and one.remote_port
                )

            os.kill(agent, signal.SIGSTOP)
            mark = secrets.token_hex(8)
            asking = start_marked(before, mark)
            await until(lambda: waiting("unread_bytes"), "the request has arrived")
            network.cut(before.name)
            os.kill(agent, signal.SIGCONT)
            await until(lambda: bool(processes_with(MARK, mark)), "the agent does as it was asked")
            await until(lambda: waiting("unsent_bytes"), "the reply is in flight")
            with pytest.raises(HostLost):
                await asking
            assert "marked" not in {process.name for process in before.processes.values()}
            await until(lambda: not processes_with(MARK, mark), "it ends with the lease")
            network.heal(before.name)
            after = await hosts.host_in(before.name)
            await until(lambda: not waiting("unsent_bytes"), "the reply has arrived")
            assert not after.processes
            assert (await start_sleeper(after)).running

    asyncio.run(run())


def _ended(process: RemoteProcess) -> bool:
    return gone(process.pid)
