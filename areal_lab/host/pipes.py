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
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final, TypeVar

KEY_VARIABLE: Final = "AREAL_LAB_PIPE_KEY"
"""Environment variable of a process that connects: the listener's key."""
HANDSHAKE_S: Final = 10
"""Timeout of each message of a process that has connected, until it has given its name."""
MOST_HANDSHAKES: Final = 256
"""Maximum processes that have connected and not given their name yet; one more is cut off."""
_AGAIN_S: Final = 0.1
_KEY_BYTES: Final = 32
_NAME_BYTES: Final = 64


def socket_pair() -> tuple[Connection, socket.socket]:
    """Return our end as a connection, and the socket for a child process."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), theirs


def open_pipe(where: str) -> Connection:
    """Open the end of this process.

    Args:
        where: `fd:N`, an inherited socket, or `tcp:ADDRESS:PORT:NAME`, with the key in the
            environment (`KEY_VARIABLE`).
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
    """Listener for processes on other hosts. Create it in an event loop, and `close` it."""

    address: str
    """Address of this host for other hosts."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)
    _expected: dict[str, asyncio.Future[Connection]] = field(default_factory=dict)
    _listener: socket.socket = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.address, 0))
        self._listener.setblocking(False)
        self._spawn(self._accept())

    def expect(self) -> tuple[str, asyncio.Future[Connection]]:
        """Return the address for one process, and its connection once it has connected."""
        name = secrets.token_hex(8)
        future: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._expected[name] = future
        return f"tcp:{self.address}:{self._listener.getsockname()[1]}:{name}", future

    async def close(self) -> None:
        """Stop listening; connections stay."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left, or the other end has gone again
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._tasks) > MOST_HANDSHAKES:
                accepted.close()
            else:
                self._spawn(self._welcome(accepted))

    async def _welcome(self, accepted: socket.socket) -> None:
        pipe = _connection(accepted)
        try:
            # A separate thread: silent connections would block a shared one.
            name = await in_own_thread(partial(_name_of, pipe, self.key))
        except Exception:  # what the library raises over the bytes of a stranger
            pipe.close()
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
    """Read the name of a process, after both sides have shown that they know the key."""
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
    """Set a timeout of each read; 0 is no timeout. A socket's own timeout would make reads fail
    immediately.
    """
    with socket.socket(fileno=os.dup(pipe.fileno())) as doubled:
        doubled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises.

    The threads of `asyncio.to_thread` are few: waits of hours, one for each process, would leave
    none for what is quick. If the caller is cancelled, the thread continues, and keeps no program
    from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # of `work`

    def run() -> None:
        try:
            told: tuple[Result | None, BaseException | None] = work(), None
        except BaseException as raised:  # the caller's
            told = None, raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="wait", daemon=True).start()
    return await future
