"""Replies that are lost between a run and a host that both live: nothing is left running.

run --> relay --> agent          the relay cuts the connection when it has read the reply of a
                                 request with one of these beginnings
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2
import psutil
import pytest

from areal_lab.cluster.folders.replies import INCARNATION
from areal_lab.cluster.host import Host, HostRefused, RemoteProcess
from areal_lab.cluster.records import StartEngine, StartModule, to_json
from areal_lab.control.liveness import HostLiveness
from areal_lab.engines.keys import authorization
from areal_lab.engines.launch.backends import ServerOptions
from benchmarks.tiny_model import write_tiny_model
from tests.asynchronous import in_loop
from tests.cluster.host_lab import DEADLINE_S, HostLab, host_lab, until
from tests.cluster.namespaces import processes_with

pytestmark = pytest.mark.cluster

MARK = "AREAL_LAB_TEST_MARK"


@dataclass(slots=True)
class Relay:
    """Between the run and an agent."""

    port: int
    """Of the agent's host."""
    address: str
    cuts: list[bytes] = field(default_factory=list)
    """Beginnings of requests of which one each loses its reply."""
    withholds: list[bytes] = field(default_factory=list)
    """The same, whose replies do not come, and whose connections stay."""
    requests: list[bytes] = field(default_factory=list)
    """First line of each request."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        upstream, to_agent = await asyncio.open_connection(self.address, self.port)
        cut = withhold = False

        async def there() -> None:
            nonlocal cut, withhold
            while chunk := await reader.read(1 << 16):
                self.requests.append(chunk.partition(b"\r\n")[0])
                cut = cut or self._takes(self.cuts, chunk)
                withhold = withhold or self._takes(self.withholds, chunk)
                to_agent.write(chunk)

        async def back() -> None:
            while (chunk := await upstream.read(1 << 16)) and not cut:
                if not withhold:
                    writer.write(chunk)

        ways = [asyncio.create_task(there()), asyncio.create_task(back())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_agent.close()
            writer.close()

    @staticmethod
    def _takes(beginnings: list[bytes], chunk: bytes) -> bool:
        found = next((one for one in beginnings if chunk.startswith(one)), None)
        if found is not None:
            beginnings.remove(found)
        return found is not None


@asynccontextmanager
async def relayed(lab: HostLab) -> AsyncIterator[tuple[Host, Relay]]:
    """The first host of a lab behind a relay, with heartbeats."""
    facts = lab.host("h1").facts
    relay = Relay(facts.port, facts.address)
    listener = socket.create_server((facts.address, 0))
    server = await asyncio.start_server(relay.serve, sock=listener)
    host = Host(
        facts=replace(facts, port=listener.getsockname()[1]),
        liveness=HostLiveness(facts.incarnation, 1_000),
        token=lab.hosts.token,
    )

    async def beat() -> None:
        while True:
            await host.heartbeat(DEADLINE_S)
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    try:
        yield host, relay
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await host.close()
        server.close()


async def start_marked(host: Host, mark: str) -> RemoteProcess:
    """Start a process that the test finds by its environment."""
    return await host.start_module(
        "marked", "tests.cluster.sleeper", [], log="marked.log", environment={MARK: mark}
    )


@in_loop
async def test_a_process_whose_start_has_no_reply_is_ended(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    async with host_lab(tmp_path, 1) as lab, relayed(lab) as (host, relay):
        relay.cuts += [b"POST /modules/1 "]
        with pytest.raises(HostRefused, match="did not reply to /modules/1"):
            await start_marked(host, mark)
        assert not processes_with(MARK, mark), "it has ended when its start has failed"
        assert (Path(host.facts.folder) / "logs" / "marked.log").exists(), "it had started"
        with pytest.raises(HostRefused, match="there is no process 1"):
            await host.end_of(1)
        assert (await start_marked(host, mark)).running
        assert len(processes_with(MARK, mark)) == 1


@in_loop
async def test_a_process_whose_start_is_given_up_is_ended(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    async with host_lab(tmp_path, 1) as lab, relayed(lab) as (host, relay):
        relay.withholds += [b"POST /modules/1 "]
        starting = asyncio.create_task(start_marked(host, mark))
        await until(lambda: bool(processes_with(MARK, mark)), "it has started")
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        assert starting.cancelled()
        assert not processes_with(MARK, mark)


@in_loop
async def test_the_end_of_a_process_is_asked_for_until_there_is_a_reply(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    async with host_lab(tmp_path, 1) as lab, relayed(lab) as (host, relay):
        relay.cuts += [b"POST /modules/1 ", *2 * [b"POST /processes/1/stop"]]
        with pytest.raises(HostRefused, match="did not reply"):
            await start_marked(host, mark)
        stops = [line for line in relay.requests if line.startswith(b"POST /processes/1/stop")]
        assert len(stops) == 3
        assert not processes_with(MARK, mark)


@in_loop
async def test_a_start_that_arrives_after_its_end_starts_nothing(tmp_path: Path) -> None:
    async with host_lab(tmp_path, 1) as lab:
        facts = lab.host("h1").facts
        request = StartModule(
            name="late", module="tests.cluster.sleeper", arguments=(), log="late.log"
        )
        headers = {**authorization(lab.hosts.token), INCARNATION: facts.incarnation}
        async with httpx2.AsyncClient(base_url=facts.url, headers=headers) as http:
            assert (await http.post("/processes/7/stop")).status_code == 200
            reply = await http.post("/modules/7", content=to_json(request))
        assert reply.status_code == 422
        assert "process 7 was stopped while it started" in reply.text
        assert not (Path(facts.folder) / "logs" / "late.log").exists()


@in_loop
async def test_an_engine_is_ended_while_it_starts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    async with host_lab(tmp_path, 1, **{"heartbeat_s": 0.2, "lost_after": 100}) as lab:
        host, agent = lab.host("h1"), psutil.Process(lab.scheduler.agents["h1"].pid)
        request = StartEngine(
            backend="embedded",
            options=ServerOptions(model=tmp_path / "model", host=host.facts.address),
            index=0,
            place=0,
            ready_timeout_s=DEADLINE_S,
            request_timeout_s=None,
        )

        def servers() -> list[psutil.Process]:
            found = []
            for child in agent.children():
                with suppress(ProcessLookupError):
                    if os.getsid(child.pid) == child.pid:  # the warm interpreter leads none
                        found.append(child)
            return found

        starting = asyncio.create_task(host.start_engine(request))
        await until(lambda: bool(servers()), "its process is there")
        servers()[0].suspend()  # so that it never becomes ready
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        assert starting.cancelled()
        assert not servers()
