"""Serve a gateway inside of somebody else's event loop.

listener = bind()
group.create_task(serve(Service(...), listener))   # agents use base_url(listener)
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from areal_lab.agents.gateway.app import create_app
from areal_lab.agents.gateway.service import Service
from areal_lab.host.asgi import guest_server

HOST: Final = "127.0.0.1"
_BACKLOG: Final = 4096
"""Connections that may wait to be accepted: a thousand agents connect at once."""
_DESCRIPTORS: Final = 8192
"""One connection takes one; 1,024, which is usual, are too few."""
_KEEP_ALIVE_S: Final = 3600
"""Longer than any client keeps an idle connection, so that none is closed just when a request is
sent on it."""
_SWEEP_S: Final = 5.0


def bind(port: int = 0, host: str = HOST) -> socket.socket:
    """A socket that listens on this port; 0 takes a free one.

    Args:
        port: to listen on.
        host: an address of this machine; an IPv6 address serves IPv6 only.

    Raises:
        ValueError: the port is not available, or the host is no address of this machine.
    """
    if not host:  # which would be every address
        raise _wrong_host(host, "it is empty")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        unknown = isinstance(error, socket.gaierror | UnicodeError)
        if unknown or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise _wrong_host(host, reason.lower()) from error
        raise ValueError(f"port {port} is not available for the gateway: {reason}") from error
    # asyncio turns Nagle's algorithm off for sockets that know they are TCP, which this one does
    # once it is read from its descriptor. Otherwise each reply waits 40 ms for an acknowledgment.
    return socket.socket(fileno=listener.detach())


def base_url(listener: socket.socket) -> str:
    """Where agents of this machine find a gateway that serves on this socket; `/v1` may follow."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@asynccontextmanager
async def served(service: Service, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve until the end of the block; the task ends before that only if serving fails."""
    serving = asyncio.create_task(serve(service, listener), name="gateway")
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def serve(service: Service, listener: socket.socket) -> None:
    """Serve until this is canceled; then cancel what samples, and close everything.

    Args:
        service: what is served.
        listener: a bound socket, as `bind` makes it. Clients may connect before this runs.
    """
    _allow_connections()
    listener.listen(_BACKLOG)
    server = guest_server(create_app(service), backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_S)
    sweeping = asyncio.create_task(_sweep(service))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        done, _ = await asyncio.wait((sweeping, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # neither ends by itself
    finally:
        sweeping.cancel()
        # First, so that calls are answered, if only with an error, before connections are closed.
        await service.close()
        server.should_exit = True
        await asyncio.wait((serving,))


def _wrong_host(host: str, reason: str) -> ValueError:
    return ValueError(
        f"host is {host!r}, but must be an address of this machine, such as {HOST}, or 0.0.0.0 for "
        f"all of them ({reason})"
    )


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        service.sweep()


def _allow_connections() -> None:
    """Raise this process's limit of open files as far as it may and needs to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
