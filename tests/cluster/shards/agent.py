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

from areal_lab.cluster.shards.connections import Agent

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
            [sys.executable, "-m", "tests.cluster.shards.agent", json.dumps(options)],
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
    memory_bytes: int = 64 << 20,
    spill_bytes: int = 0,
    spill_folder: str | None = None,
    folders: dict[str, str] | None = None,
    stall_s: float = 60.0,
) -> None:
    """Serve until the end of the process."""
    import uvicorn

    from areal_lab.cluster.shards.local import Host
    from areal_lab.cluster.shards.server import DataPlane
    from areal_lab.cluster.shards.store import Limits, ShardStore

    folder = None if spill_folder is None else Path(spill_folder)
    shards = ShardStore(Limits(memory_bytes, spill_bytes, folder))
    plane = DataPlane(Host("n1", address, incarnation), shards, stall_s=stall_s)
    for name, path in (folders or {}).items():
        plane.folders.register(name, Path(path))
    config = uvicorn.Config(plane.app(KEY), log_level="critical", lifespan="off", access_log=False)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    serve(**json.loads(sys.argv[1]))
