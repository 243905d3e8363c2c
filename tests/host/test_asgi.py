"""What every HTTP port reads: heads of bounded size, in bounded time, whatever bytes come."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lab.host import asgi
from areal_lab.host.certificates import certificates_for
from tests.fuzz import damaged_bytes, mutations

HEAD: Final = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED: Final = HEAD + b"transfer-encoding: chunked\r\n\r\n"
KIB64: Final = b"a" * 65_536
ENDLESS_MB: Final = 200
FLOOD: Final = """
import socket, sys
opened = []
for index in range(int(sys.argv[2])):
    opened.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    if index % 2:
        opened[-1].send(b"GET /x HTTP/1.1\\r\\n\\r\\n")
print("connected", flush=True)
sys.stdin.read()
"""
MOST_TAKEN_BYTES: Final = 16 * 2**20
"""What the two kernels buffer, and what the limits allow, are less."""


async def _count(request: Request) -> Response:
    try:
        return Response(str(len(await request.body())))
    except ClientDisconnect:
        return Response(status_code=400)


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    """A server that replies with the bytes of a body; its port."""
    app = Starlette(routes=[Route("/x", _count, methods=["GET", "POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asgi.served(app, listener):
            yield listener.getsockname()[1]


async def sent(port: int, parts: Iterable[bytes]) -> tuple[int, bytes]:
    """Bytes that were taken of a connection, and its reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken, reply = 0, b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            taken += len(part)
        writer.write_eof()
        reply = await reader.read()
    except ConnectionError:
        pass  # it was cut off
    finally:
        writer.close()
    return taken, reply


async def serves(port: int) -> bool:
    _, reply = await sent(port, [HEAD, b"connection: close\r\ncontent-length: 5\r\n\r\nhello"])
    return reply.endswith(b"\r\n\r\n5")


@pytest.mark.parametrize(
    "begin",
    [
        HEAD + b"x: ",
        HEAD,
        b"GET /",
        b"",
        b"POST /x HTTP/1.1\r\n" + b"\r\n",
        CHUNKED + b"5;",
        CHUNKED + b"5\r\nhello\r\n0\r\nx: ",
    ],
    ids=["field", "name of a field", "path", "method", "next method", "chunk extension", "trailer"],
)
def test_an_endless_part_of_a_request_is_cut_early(begin: bytes) -> None:
    async def scenario() -> None:
        async with server() as port:
            taken, _ = await sent(port, [begin, *repeat(KIB64, ENDLESS_MB * 16)])
            assert taken < MOST_TAKEN_BYTES
            assert await serves(port)

    asyncio.run(scenario())


def test_a_request_has_a_limited_number_of_fields_and_any_size_of_body() -> None:
    async def scenario() -> None:
        async with server() as port:
            most = asgi.MOST_FIELDS - 2
            fields = HEAD + b"connection: close\r\n" + b"a: b\r\n" * most
            assert (await sent(port, [fields, b"\r\n"]))[1].endswith(b"\r\n\r\n0")
            _, refused = await sent(port, [fields, b"a: b\r\n\r\n"])
            assert refused.startswith(b"HTTP/1.1 400 ")
            body = b"content-length: %d\r\nconnection: close\r\n\r\n" % (100 * len(KIB64))
            _, whole = await sent(port, [HEAD, body, *repeat(KIB64, 100)])
            assert whole.endswith(b"\r\n\r\n%d" % (100 * len(KIB64)))
            small = [CHUNKED, *repeat(b"1\r\na\r\n" * 1000, 20), b"0\r\n\r\n"]
            assert b"\r\n\r\n20000" in (await sent(port, small))[1]

    asyncio.run(scenario())


def test_a_large_field_is_refused_with_a_reply_and_a_slow_head_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "HEAD_S", 0.1)

    async def scenario() -> None:
        async with server() as port:
            _, refused = await sent(port, [HEAD, b"x: " + b"a" * (asgi.MOST_HEAD_BYTES + 1)])
            assert refused.startswith(b"HTTP/1.1 431 ")
            head = HEAD + b"content-length: 0\r\n\r\n"
            for begin in (b"", HEAD, head + HEAD):  # also of the second request of a connection
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begin)
                reply = await reader.read()
                assert reply.count(b"HTTP/1.1 200") == begin.count(head)
                writer.close()
            # A connection that is used keeps open between two requests.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(head)
                await reader.readuntil(b"\r\n\r\n0")
                await asyncio.sleep(0.2)
            writer.close()

    asyncio.run(scenario())


def test_idle_connections_make_room_and_busy_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    files = 300

    async def scenario() -> None:
        async with server() as port:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            busy, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"content-length: 5\r\n\r\nhel")
            # Of another process, since these files count here; half have been used.
            flood = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FLOOD, str(port), str(4 * files)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert flood.stdout is not None
            await flood.stdout.readline()
            for _ in range(3):
                assert await serves(port)
            writer.write(b"lo")
            assert (await busy.readuntil(b"\r\n\r\n5")).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await flood.communicate(b"")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        asyncio.run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not caplog.records


@mutations
def test_no_bytes_stop_a_server(count: int) -> None:
    valid = (
        HEAD + b"content-length: 5\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n",
        b"GET /x?a=%ff HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        * 2,
        HEAD + b"expect: 100-continue\r\nauthorization: Bearer x\r\ncontent-length: 2\r\n\r\n{}",
    )
    rng = random.Random(0)

    async def scenario() -> None:
        async with server() as port:
            for _ in range(count):
                content = damaged_bytes(rng, rng.choice(valid))
                _, reply = await sent(port, [content])
                assert not reply or reply.startswith(b"HTTP/1.1 "), content
                assert not reply.startswith(b"HTTP/1.1 5"), content
            assert await serves(port)

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["https://engine:30000", "HTTPS://engine"])
def test_an_https_address_is_checked_with_certificates_that_are_read_once(url: str) -> None:
    context = certificates_for(url)
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert certificates_for(url) is context


def test_an_http_address_needs_none() -> None:
    assert certificates_for("http://127.0.0.1:30000") is False
