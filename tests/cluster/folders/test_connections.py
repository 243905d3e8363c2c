"""Requests to a real agent and its replies: exact, fenced, bounded, and read by anyone's rules."""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from areal_lab.cluster.folders.connections import Agent, Call, Connections
from areal_lab.cluster.folders.replies import (
    INCARNATION,
    Damaged,
    OtherIncarnation,
    Refused,
    Unreachable,
)
from areal_lab.cluster.folders.server import DataPlane, Host
from areal_lab.engines.keys import authorization
from tests.cluster.folders.agent import KEY, Running, running_agent
from tests.cluster.folders.proxy import altered
from tests.fuzz import damaged_bytes, mutations

DEADLINE_S = 60.0
FILE = "/folders/f/small"
SMALL = bytes(range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    (made / "small").write_bytes(SMALL)
    (made / "large").write_bytes(np.zeros(30 << 20, np.uint8).data)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    """One agent for the tests that leave it as it was."""
    with running_agent(folders={"f": str(folder)}) as running:
        yield running


def read(agent: Agent, connections: Connections, start: int = 0, count: int = 200) -> bytes:
    """A range of the small file."""
    target = bytearray(count)
    connections.read(Call(agent, "GET", FILE, "file f/small"), start, memoryview(target))
    return bytes(target)


def test_ranges_are_read_exactly(shared: Running, connections: Connections) -> None:
    assert read(shared.agent, connections) == SMALL
    assert read(shared.agent, connections, 7, 20) == SMALL[7:27]
    call = Call(shared.agent, "GET", FILE, "file f/small")
    assert connections.read(call, 0, memoryview(bytearray())) == ""
    assert len(connections.read(call, 3, memoryview(bytearray(1)))) == 32
    with pytest.raises(Damaged, match="100 bytes instead of 200"):
        read(shared.agent, connections, 100, 200)


def test_a_wrong_key_opens_nothing(shared: Running, connections: Connections) -> None:
    for key in ("", "another"):
        made = Connections(key)
        with pytest.raises(Refused, match="no key or a wrong one"):
            read(shared.agent, made)
        for path in ("/folders", "/folders/f"):
            with pytest.raises(Refused, match="no key or a wrong one"):
                made.call(Call(shared.agent, "GET", path, "a folder"))
        made.close()
    assert read(shared.agent, connections) == SMALL


def test_a_restarted_host_refuses_what_was_meant_for_its_predecessor(
    folder: Path, connections: Connections
) -> None:
    folders = {"f": str(folder)}
    with running_agent(incarnation="1", folders=folders) as first:
        assert read(first.agent, connections) == SMALL
        first.kill()
        with pytest.raises(Unreachable, match="check that the agent runs"):
            read(first.agent, connections)
    with running_agent(incarnation="2", address=first.agent.address, folders=folders) as second:
        with pytest.raises(
            OtherIncarnation, match="is incarnation 2, not incarnation 1: it was restarted"
        ):
            read(first.agent, connections)
        assert read(second.agent, connections) == SMALL


Alteration = Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]


@pytest.mark.parametrize(
    ("alter", "error", "message"),
    [
        (
            lambda headers, body: ({**headers, "x-areal-lab-incarnation": "0"}, body),
            OtherIncarnation,
            "incarnation 0 replied instead of 1; its bytes are discarded",
        ),
        (
            lambda headers, body: (headers, body[:-5]),
            Unreachable,
            "the connection closed after .* bytes",
        ),
        (
            lambda headers, body: ({**headers, "content-range": "bytes 5-9/20"}, body),
            Damaged,
            "not the range that was asked for",
        ),
    ],
    ids=["incarnation", "cut off", "other range"],
)
def test_replies_that_are_not_what_was_asked_for_are_discarded(
    shared: Running,
    connections: Connections,
    alter: Alteration,
    error: type[Exception],
    message: str,
) -> None:
    with (
        altered(shared.agent, lambda _path, headers, body: alter(headers, body)) as behind,
        pytest.raises(error, match=message),
    ):
        read(behind, connections)
    assert read(shared.agent, connections) == SMALL


def test_a_silent_host_is_named() -> None:
    made = Connections(KEY, silence_s=0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"f/small at {address}: silent for 0.05 s"):
            read(Agent(address, "1"), made)
    made.close()


def test_idle_connections_are_used_again_unless_the_host_closed_them(
    shared: Running, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    connect = http.client.HTTPConnection.connect

    def counted(connection: http.client.HTTPConnection) -> None:
        opened.append(connection.host)
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", counted)
    for _ in range(5):
        read(shared.agent, connections)
    assert len(opened) == 1
    for idle in connections._idle.values():  # as if the host had closed it meanwhile
        for _, connection in idle:
            connection.sock.shutdown(socket.SHUT_RDWR)
    assert read(shared.agent, connections) == SMALL
    assert len(opened) == 2


def test_many_threads_share_connections(shared: Running, connections: Connections) -> None:
    def work(number: int) -> None:
        for start in range(5):
            assert read(shared.agent, connections, start, number) == SMALL[start : start + number]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 17)))


def test_a_receiver_that_takes_nothing_does_not_keep_a_file_open(folder: Path) -> None:
    with running_agent(stall_s=0.05, folders={"f": str(folder)}) as running:
        host, port = running.agent.address.split(":")
        descriptors = Path(f"/proc/{running.process.pid}/fd")

        def is_open() -> bool:
            with suppress(FileNotFoundError):  # another one was closed meanwhile
                return any(one.resolve().name == "large" for one in descriptors.iterdir())
            return True

        with socket.create_connection((host, int(port))) as raw:
            head = "GET /folders/f/large HTTP/1.1\r\nhost: a\r\n"
            raw.sendall(f"{head}authorization: Bearer {KEY}\r\n\r\n".encode())
            assert raw.recv(12) == b"HTTP/1.1 200"
            while is_open():  # until the agent gives up
                pass


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        ("bytes=2-4", 206, slice(2, 5)),
        ("bytes=5-", 206, slice(5, None)),
        ("bytes=-3", 206, slice(-3, None)),
        ("bytes=0-999999", 206, slice(0, None)),
        ("bytes=0-1,3-4", 200, slice(0, None)),
        ("lines=0-1", 200, slice(0, None)),
        ("bytes=999999-", 416, None),
    ],
)
def test_ranges_are_those_of_the_standard(
    shared: Running, header: str, status: int, expected: slice | None
) -> None:
    connection = http.client.HTTPConnection(shared.agent.address)
    connection.request("GET", FILE, headers={**authorization(KEY), "range": header})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert reply.status == status
    if expected is not None:
        assert body == SMALL[expected]


@pytest.mark.parametrize("address", ["", "host", "host:x", "http://host:1", "u@host:1", "h:1/x"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="but is HOST:PORT"):
        Agent(address)


@pytest.mark.parametrize("end", [Connections.close, lambda one: one.drop(one.silent)])
def test_a_read_ends_when_its_agent_is_lost_or_the_connections_are_closed(end: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        made: Any = Connections(KEY, silence_s=3600.0)
        made.silent = address
        reading = thread.submit(made.call, Call(Agent(address), "GET", "/", "nothing"))
        silent, _ = listener.accept()
        with silent:
            assert silent.recv(1), "it has asked, and waits"
            end(made)
            with pytest.raises(Unreachable):
                reading.result(DEADLINE_S)
        made.close()


@mutations
def test_no_bytes_stop_an_agent_or_change_what_it_serves(
    shared: Running, connections: Connections, count: int
) -> None:
    head = f"HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
    valid = [
        f"{line} {head}connection: close\r\n{more}".encode()
        for line, more in (
            ("GET /folders", "\r\n"),
            ("GET /folders/x", "range: bytes=0-99\r\n\r\n"),
            (f"GET {FILE}", "range: bytes=3-9\r\n\r\n"),
            ("PUT /folders/f/other", "content-length: 5\r\n\r\nhello"),
            (f"DELETE {FILE}", "\r\n"),
            ("GET /folders/f/..%2f..%2fetc/passwd", "\r\n"),
        )
    ]
    rng = random.Random(0)
    host, port = shared.agent.address.rsplit(":", 1)
    for _ in range(count):
        content = damaged_bytes(rng, rng.choice(valid))
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                reply = connection.makefile("rb").read()
                assert not reply or reply.startswith(b"HTTP/1.1 "), content
                assert not reply.startswith(b"HTTP/1.1 50"), (content, reply)
    assert read(shared.agent, connections) == SMALL


def test_an_agent_in_no_run_refuses_what_was_meant_for_one() -> None:
    async def scenario() -> None:
        plane = DataPlane(Host("n1", "127.0.0.1:1", ""))
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(plane.app("key")),
            base_url="http://n1",
            headers=authorization("key"),
        ) as http:
            reply = await http.get(FILE, headers={INCARNATION: "first"})
            assert reply.status_code == 409
            assert "n1 at 127.0.0.1:1 is in no run, not incarnation first" in reply.text
            assert reply.headers[INCARNATION] == ""

    asyncio.run(scenario())


def test_a_data_plane_needs_a_key() -> None:
    with pytest.raises(ValueError, match="a data plane needs a key"):
        DataPlane(Host("n1", "127.0.0.1:1", "")).app("")
