"""A host agent with nothing but a data plane, as a process of its own, for tests and benchmarks.

It ends when its standard input is closed, as with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lab.cluster.folders.connections import Agent

KEY = "a-key"


@dataclass(frozen=True, slots=True)
class Running:
    """An agent's process and how to reach it."""

    agent: Agent
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_agent(
    incarnation: str = "1", address: str = "127.0.0.1:0", **options: Any
) -> Iterator[Running]:
    """Start an agent; connections are accepted from the beginning.

    Args:
        incarnation: of this start.
        address: at which it listens.
        options: of `serve`.
    """
    host, port = address.rsplit(":", 1)
    with socket.create_server((host, int(port))) as listener:
        bound = f"{host}:{listener.getsockname()[1]}"
        options |= {"fd": listener.fileno(), "incarnation": incarnation, "address": bound}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.folders.agent", json.dumps(options)],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    try:
        yield Running(Agent(bound, incarnation), process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def serve(
    *,
    fd: int,
    incarnation: str,
    address: str,
    folders: dict[str, str] | None = None,
    stall_s: float = 60.0,
) -> None:
    """Serve until the end of the process."""
    import uvicorn

    from areal_lab.cluster.folders.server import DataPlane, Host

    plane = DataPlane(Host("n1", address, incarnation), stall_s=stall_s)
    for name, path in (folders or {}).items():
        plane.folders.register(name, Path(path))
    app = Counted(plane.app(KEY))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", access_log=False)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


@dataclass(slots=True)
class Counted:
    """An application that counts the bytes of files that it sends; `/sent` replies how many."""

    app: ASGIApp
    sent_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def counted(message: Message) -> None:
            self.sent_bytes += len(message.get("body", b""))
            await send(message)

        if scope["path"] == "/sent":
            await PlainTextResponse(str(self.sent_bytes))(scope, receive, send)
        elif scope["path"].count("/") > 2:
            await self.app(scope, receive, counted)
        else:
            await self.app(scope, receive, send)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    serve(**json.loads(sys.argv[1]))
