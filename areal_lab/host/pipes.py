"""Connections that carry pickled messages between processes, on one host or on two.

    socket_pair() --> our end, and a socket that a child inherits          `fd:5`
    PipeListener.expect() --> where a process on another host connects to  `tcp:10.0.0.1:4711:NAME`
    open_pipe(where)                                                       the other end

Both ends of a TCP connection prove that they know the listener's key before anything is unpickled.
The key and the messages are not encrypted: hosts are on a network that is trusted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final

KEY_VARIABLE: Final = "AREAL_LAB_PIPE_KEY"
"""Environment variable of a process that connects: the listener's key."""
HANDSHAKE_S: Final = 10
"""Longest wait for each message of a process that has connected, until it has given its name."""
_KEY_BYTES: Final = 32
_NAME_BYTES: Final = 64


def socket_pair() -> tuple[Connection, socket.socket]:
    """Our end as a connection, and the socket for a child process."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs


def open_pipe(where: str) -> Connection:
    """Open the end of this process.

    Args:
        where: `fd:N`, an inherited socket, or `tcp:ADDRESS:PORT:NAME`, with the key in the
            environment (`KEY_VARIABLE`).

    Raises:
        OSError: nothing listens there.
        AuthenticationError: the other end has another key.
    """
    kind, _, rest = where.partition(":")
    if kind == "fd":
        os.set_inheritable(int(rest), False)
        return Connection(int(rest))
    address, port, name = rest.rsplit(":", 2)
    opened = socket.create_connection((address, int(port)), timeout=HANDSHAKE_S)
    pipe = _connection(opened)
    key = bytes.fromhex(os.environ.get(KEY_VARIABLE, ""))
    answer_challenge(pipe, key)
    deliver_challenge(pipe, key)
    pipe.send_bytes(name.encode())
    return pipe


def shut(pipe: Connection) -> None:
    """Close a connection, also one from which another thread reads: its read then ends."""
    if pipe.closed:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as doubled:
        doubled.shutdown(socket.SHUT_RDWR)
    pipe.close()


@dataclass(slots=True)
class PipeListener:
    """Listens for processes on other hosts. Make it in an event loop, and `close` it."""

    address: str
    """Of this host, as the others reach it."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)
    _expected: dict[str, asyncio.Future[Connection]] = field(default_factory=dict)
    _listener: socket.socket = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.address, 0))
        self._listener.setblocking(False)
        self._spawn(self._accept())

    def expect(self) -> tuple[str, asyncio.Future[Connection]]:
        """Where one process is to connect to, and its connection once it has."""
        name = secrets.token_hex(8)
        future: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._expected[name] = future
        return f"tcp:{self.address}:{self._listener.getsockname()[1]}:{name}", future

    async def close(self) -> None:
        """Listen no longer; connections stay."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(self._listener)
            self._spawn(self._welcome(accepted))

    async def _welcome(self, accepted: socket.socket) -> None:
        pipe = _connection(accepted)
        try:
            name = await asyncio.to_thread(_name_of, pipe, self.key)
        except (OSError, EOFError, AuthenticationError):
            pipe.close()  # no process of ours
            return
        future = self._expected.pop(name, None)
        if future is None or future.done():
            pipe.close()
        else:
            future.set_result(pipe)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="listen for pipes")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name_of(pipe: Connection, key: bytes) -> str:
    """What a process gives as its name, after both have shown that they know the key."""
    _limit(pipe, HANDSHAKE_S)
    deliver_challenge(pipe, key)
    answer_challenge(pipe, key)
    name = pipe.recv_bytes(_NAME_BYTES).decode(errors="replace")
    _limit(pipe, 0)
    return name


def _connection(opened: socket.socket) -> Connection:
    opened.setblocking(True)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(opened.detach())


def _limit(pipe: Connection, seconds: int) -> None:
    """Bound each read; 0 is no bound. A socket's own timeout would make reads fail at once."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as doubled:
        doubled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
