"""Hosts that join, are lost and come back: real agents on this machine."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil
import pytest

from areal_lab.cluster.agent.run import group_environment
from areal_lab.cluster.folders.replies import INCARNATION
from areal_lab.cluster.host import HostLost, HostRefused
from areal_lab.cluster.hosts import Hosts, TooFewHosts
from areal_lab.cluster.records import (
    RECEIVED,
    HostHealth,
    Refused,
    from_json,
    to_json,
)
from areal_lab.cluster.scheduler import LocalScheduler
from areal_lab.config.sections import ClusterConfig
from areal_lab.engines.keys import authorization
from tests.asynchronous import in_loop
from tests.cluster.host_lab import DEADLINE_S, host_lab, start_sleeper, until
from tests.ended import gone

pytestmark = pytest.mark.cluster

QUICK = {"heartbeat_s": 0.2, "lost_after": 5}


@in_loop
async def test_processes_run_on_hosts_and_their_end_is_told_with_its_log(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 3, **QUICK) as lab:
        assert [host.name for host in lab.hosts.working] == ["h1", "h2", "h3"]
        sleeper = await start_sleeper(lab.host("h1"))
        failing = await lab.host("h2").start_module(
            "failing", "tests.cluster.no_such_module", [], log="failing.log", environment={}
        )
        text = str(await failing.died())
        assert text.startswith("on host h2: failing (process ")
        assert "exited with 1" in text
        assert "no_such_module" in text
        assert sleeper.running
        assert await sleeper.peak_memory_bytes() > 1 << 20
        async with asyncio.timeout(DEADLINE_S):
            while "sleeping" not in await lab.host("h1").last_lines("sleeper.log"):
                pass
        await sleeper.stop()
        assert gone(sleeper.pid)
        await sleeper.stop()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@in_loop
async def test_a_host_that_is_killed_or_hangs_is_lost_and_replaced(
    tmp_path: Path, fault: signal.Signals
) -> None:
    async with host_lab(tmp_path, 2, **QUICK) as lab:
        before = lab.host("h2")
        sleeper = await start_sleeper(before)
        lab.signal_agent("h2", fault)
        error = await sleeper.died()
        assert isinstance(error, HostLost)
        assert "sleeper is lost with its host: host h2 " in str(error)
        after = await lab.hosts.host_in("h2")
        assert after.facts.incarnation != before.facts.incarnation
        assert lab.hosts.losses == 1
        await until(lambda: gone(sleeper.pid), "the process of the lost host has ended")
        with pytest.raises(HostLost):
            await start_sleeper(before)
        assert (await start_sleeper(after)).running


@in_loop
async def test_a_host_that_is_not_asked_ends_its_processes_and_joins_again(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 1, lease_s=1.0) as lab:
        before = lab.host("h1")
        sleeper = await start_sleeper(before)
        for task in list(lab.hosts._tasks):  # the run hangs
            task.cancel()
        await until(lambda: gone(sleeper.pid), "the lease has ended")
        await until(lambda: lab.hosts.seats["h1"] not in (None, before), "it has joined again")
        assert before.lost.is_set()
        assert "has started again" in str(before.error)
        late = replace(before.facts, port=lab.host("h1").facts.port)
        headers = {**authorization(lab.hosts.token), INCARNATION: late.incarnation}
        async with httpx2.AsyncClient(base_url=late.url, headers=headers) as http:
            reply = await http.post("/modules/1", content=b"{}")
        assert reply.status_code == 409
        assert "the request is late" in from_json(Refused, reply.content).reason


@in_loop
async def test_a_run_that_is_silent_for_less_than_the_lease_finds_its_processes_as_they_were(
    tmp_path: Path,
) -> None:
    async with host_lab(tmp_path, 1, **QUICK, lease_s=DEADLINE_S) as lab:
        host, log = lab.host("h1"), tmp_path / "host-h1.log"
        sleeper = await start_sleeper(host)
        for task in list(lab.hosts._tasks):  # the run hangs
            task.cancel()
        await until(lambda: "has heard nothing" in log.read_text(), "the host notices")
        assert re.search(
            r"host h1 has heard nothing from the run for \d\.\d s; it ends its processes in "
            r"\d+\.\d s, unless the run asks again",
            log.read_text(),
        )
        async with httpx2.AsyncClient(
            base_url=host.facts.url, headers=authorization(lab.hosts.token)
        ) as http:

            async def health(**heartbeat: str) -> HostHealth:
                return from_json(HostHealth, (await http.get("/health", headers=heartbeat)).content)

            before = await health()
            assert before.incarnation == host.facts.incarnation
            assert before.silent_s > 1.0
            starting = asyncio.create_task(start_sleeper(host, "another"))
            late = {INCARNATION: host.facts.incarnation, RECEIVED: str(before.number)}
            for number in range(1, 6):
                after = await health(**late)
                assert after.number == before.number + number
                assert after.silent_s > before.silent_s
            assert not starting.done(), "it may be late, too"
            assert not (Path(host.facts.folder) / "logs" / "another.log").exists()
            for _ in range(2):  # the run continues
                await host.heartbeat(DEADLINE_S)
            assert (await health()).silent_s == 0.0
        assert (await starting).running
        assert sleeper.running
        assert lab.host("h1") is host
        await until(lambda: "hears the run again, after" in log.read_text(), "it says so")
        assert log.read_text().count("has heard nothing") == 1


@in_loop
async def test_hosts_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 1) as lab:
        facts, url = lab.host("h1").facts, f"http://127.0.0.1:{lab.hosts.port}"
        async with httpx2.AsyncClient(base_url=url) as http:
            assert (await http.post("/join", content=to_json(facts))).status_code == 401
            for wrong, said in (
                (replace(facts, name="old", python="3.9.1"), "old .* has Python 3.9, but the run"),
                (replace(facts, areal_lab="0.0.1"), "areal_lab 0.0.1, but the run has"),
            ):
                reply = await http.post(
                    "/join", content=to_json(wrong), headers=authorization(lab.hosts.token)
                )
                assert reply.status_code == 403
                reason = from_json(Refused, reply.content).reason
                assert "\n" not in reason
                assert re.search(said, reason), reason
        assert len(lab.hosts.working) == 1


@in_loop
async def test_a_host_more_is_a_spare_and_takes_a_vacant_seat(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 2, **QUICK) as lab:
        lab.hosts.leave_vacant(["h2"])
        spare = lab.hosts.spares[0]
        lab.signal_agent("h1", signal.SIGKILL)
        await until(lambda: lab.hosts.seats["h1"] is spare, "the spare works")


@in_loop
async def test_too_few_hosts_are_told_with_what_there_is(tmp_path: Path) -> None:
    class Fewer(LocalScheduler):
        async def start(self, hosts: int, invitation: object) -> None:
            await LocalScheduler.start(self, hosts - 1, invitation)  # type: ignore[arg-type]

    hosts = Hosts(
        config=ClusterConfig(n_nodes=2),
        scheduler=Fewer(tmp_path),
        address="127.0.0.1",
        start_timeout_s=5.0,
        say=lambda _: None,
        waiting=lambda _: None,
    )
    try:
        with pytest.raises(TooFewHosts, match=r"n_nodes is 2, but 1 of 2 .*there are h1.*lower"):
            await hosts.start()
    finally:
        await hosts.close()


@in_loop
async def test_an_agent_refuses_what_it_cannot_start(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 1) as lab:
        with pytest.raises(HostRefused, match="host h1: there is no process 7"):
            await lab.host("h1").end_of(7)
        with pytest.raises(HostRefused, match="is not a folder of the host agent"):
            await lab.host("h1").remove(tmp_path)
        assert tmp_path.is_dir()


def test_process_groups_use_the_interface_of_the_hosts_address() -> None:
    assert group_environment("127.0.0.3") == {}
    own = [
        (name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    for interface, address in own:
        assert group_environment(address)["GLOO_SOCKET_IFNAME"] == interface


@in_loop
async def test_a_call_to_a_host_that_was_killed_waits_until_it_is_lost(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 2, **QUICK) as lab:
        before = lab.host("h1")
        lab.signal_agent("h1", signal.SIGKILL)
        await until(lambda: not lab.scheduler.agents["h1"].running, "it was killed")
        with pytest.raises(HostLost):  # no sooner: another attempt would meet the same host
            await before.free_port()
        assert await (await lab.hosts.host_in("h1")).free_port() > 0


@in_loop
async def test_a_host_that_asks_again_is_welcome_and_its_namesake_is_refused(
    tmp_path: Path,
) -> None:
    async with host_lab(tmp_path, 2, **QUICK) as lab:
        host = lab.host("h1")
        sleeper = await start_sleeper(host)
        url, headers = f"http://127.0.0.1:{lab.hosts.port}", authorization(lab.hosts.token)
        async with httpx2.AsyncClient(base_url=url, headers=headers) as http:
            again = await http.post("/join", content=to_json(host.facts))
            other = replace(host.facts, incarnation="other", port=1)
            namesake = await http.post("/join", content=to_json(other))
            unknown = await http.post("/join", content=b'{"name": "h9"}')
        assert again.status_code == 200
        assert namesake.status_code == unknown.status_code == 403
        said = from_json(Refused, namesake.content).reason
        assert f"replies at {host.facts.address}:{host.facts.port}; start its agent with" in said
        assert "install areal_lab" in from_json(Refused, unknown.content).reason
        assert lab.host("h1") is host
        assert sleeper.running
        assert lab.hosts.losses == 0


@pytest.mark.parametrize("address", ["::1", "198.51.100.7"])
@in_loop
async def test_an_address_at_which_nothing_can_listen_is_told_in_one_sentence(
    tmp_path: Path, address: str
) -> None:
    hosts = Hosts(
        config=ClusterConfig(n_nodes=2),
        scheduler=LocalScheduler(tmp_path),
        address=address,
        start_timeout_s=5.0,
        say=lambda _: None,
        waiting=lambda _: None,
    )
    with pytest.raises(ValueError, match=r"hosts cannot join at .*; set cluster.address"):
        await hosts.start()
