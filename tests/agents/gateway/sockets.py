"""A gateway on a real socket, and connections on which a test sends and reads what it likes."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import httpx2

from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Limits
from tests.agents.gateway.scripted import ADMIN, MODEL, Agent, Lab, Scripted

P = ParamSpec("P")
SMALL_BUFFER_BYTES = 4096


def really(scenario: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """A test in real time; one that hangs fails."""

    @functools.wraps(scenario)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await scenario(*args, **kwargs)

        asyncio.run(bounded())

    return run


@asynccontextmanager
async def served(
    conversation: Callable[[], Any] = Scripted, *, send_buffer_bytes: int = 0, **limits: Any
) -> AsyncIterator[Lab]:
    """A gateway on a free port.

    Args:
        conversation: of each session.
        send_buffer_bytes: what the kernel takes of a reply that is not read; 0 leaves it to it.
        limits: of the gateway.
    """
    conversations: list[Any] = []

    def opened(_task_id: str) -> Any:
        conversations.append(conversation())
        return conversations[-1]

    service = Service(opened, admin_key=ADMIN, model=MODEL, limits=Limits(**limits))
    listener = bind()
    if send_buffer_bytes:
        # Connections have the buffers of the socket that accepts them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    url = base_url(listener)
    serving = asyncio.create_task(serve(service, listener))
    pool = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=pool, timeout=60, trust_env=False) as http:
        yield Lab(service, http, conversations)
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()


async def until(true: Callable[[], bool]) -> None:
    """Let other tasks run until something is so."""
    while not true():
        await asyncio.sleep(0.001)


async def connect(lab: Lab) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that takes no more than is read."""
    port = lab.http.base_url.port
    assert port is not None
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=plain, limit=1024)


def raw_request(agent: Agent, text: str = "hello", **fields: Any) -> bytes:
    """The bytes of a chat completion, with the body that `Agent.chat` sends."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "gpt-x", "messages": messages, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {agent.key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def raw_call(
    lab: Lab, agent: Agent, text: str = "hello", **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat completion on a connection of its own, and read nothing."""
    reader, writer = await connect(lab)
    writer.write(raw_request(agent, text, **fields))
    await writer.drain()
    return reader, writer
