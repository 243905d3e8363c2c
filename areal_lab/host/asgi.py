"""Serve an ASGI application in an event loop that is somebody else's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn


class GuestServer(uvicorn.Server):
    """Leaves signals to the program that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def guest_server(app: Any, **settings: Any) -> GuestServer:
    """A server of this application that logs only warnings, where the program logs.

    Args:
        app: an ASGI application.
        settings: more of `uvicorn.Config`.
    """
    return GuestServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=1,
            **settings,
        )
    )


@asynccontextmanager
async def served(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve until the end of the block.

    Args:
        app: an ASGI application.
        listener: a socket that listens.
    """
    server = guest_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
