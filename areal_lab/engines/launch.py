"""Starting embedded engines as child processes.

    parent: bind port --> start child with the bound socket --> poll /ready --> EngineProcess

The port is bound before the child exists and handed over open, so nobody can take it in between,
and a port in use is an error before anything has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

from areal_lab.engines.client import EngineClient
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.processes import Child, ChildDied, last_lines, start_child

HOST = "127.0.0.1"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A running engine and the connection to it."""

    child: Child
    client: EngineClient
    base_url: str

    async def stop(self) -> None:
        """Close the connection and end the process. Idempotent."""
        await self.client.close()
        await self.child.stop()


async def launch_embedded(
    *,
    index: int,
    weights: WeightsFolder,
    port: int,
    threads: int,
    dtype: str,
    max_running_requests: int,
    context_length: int | None,
    log_path: Path,
    ready_timeout_s: float = 120.0,
    request_timeout_s: float | None = None,
) -> EngineProcess:
    """Start engine `index` with these weights and wait until it is ready.

    Args:
        port: 0 takes a free one.
        dtype: `float32`, `bfloat16` or `auto`.
        context_length: at most the model's, which `None` takes.
        request_timeout_s: longest wait of one `generate` call.

    Raises:
        ValueError: if the port is in use.
        ChildDied: if the process ended before it was ready, with the last lines of its log.
        TimeoutError: if it is not ready in time.
    """
    name = f"engine {index}"
    with bind(port) as listener:
        arguments = [
            *("--model-path", str(weights.path)),
            *("--weight-version", str(weights.version)),
            *("--socket-fd", str(listener.fileno())),
            *("--threads", str(threads)),
            *("--dtype", dtype),
            *("--max-running-requests", str(max_running_requests)),
            *(() if context_length is None else ("--context-length", str(context_length))),
        ]
        base_url = f"http://{HOST}:{listener.getsockname()[1]}"
        child = await start_child(
            name,
            "areal_lab.engines.embedded.server",
            arguments,
            log_path=log_path,
            environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            pass_fds=(listener.fileno(),),
        )
    client = EngineClient(base_url, request_timeout_s=request_timeout_s)
    engine = EngineProcess(child=child, client=client, base_url=base_url)
    try:
        async with asyncio.timeout(ready_timeout_s):
            await _until_ready(engine)
    except BaseException as error:
        await engine.stop()
        if isinstance(error, TimeoutError):
            raise TimeoutError(
                f"{name} was not ready within {ready_timeout_s:g} s; the last lines of "
                f"{log_path}:\n{last_lines(log_path)}"
            ) from error
        raise
    return engine


def bind(port: int) -> socket.socket:
    """A TCP socket bound to this port of the local host, not listening yet; 0 takes a free port.

    Raises:
        ValueError: naming the port, if it is not available.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A port that a stopped run used a moment ago counts as free, one that is served does not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"port {port} is not available for an engine: {reason}") from error
    return listener


async def _until_ready(engine: EngineProcess) -> None:
    died = asyncio.ensure_future(engine.child.died())
    try:
        while not died.done():
            if await engine.client.ready():
                return
            await asyncio.wait({died}, timeout=_POLL_S)
        raise died.result()
    finally:
        died.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildDied):
            await died
