"""The HTTP interface of the data plane, which a host agent mounts.

    GET /folders                     names of the served folders
    GET /folders/{name}              its files: names, sizes, checksums
    GET /folders/{name}/{file}       a file, or a range of it

Every request needs the key (`Authorization: Bearer KEY`). One that names an incarnation other than
this agent's is refused with 409; every reply names it, so that a client discards what a replaced
agent still sends.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lab.cluster.folders.replies import (
    INCARNATION,
    DataPlaneError,
    OtherIncarnation,
    RangeReply,
    error_reply,
    on_error,
    on_unknown,
)
from areal_lab.cluster.folders.served import Folders, read_range
from areal_lab.engines.keys import KeyGuard

STALL_S: Final = 60.0
"""Longest time in which a receiver takes nothing, before its reply ends."""


@dataclass(slots=True)
class Host:
    """The host that serves folders, as the others know it."""

    node_id: str
    node_addr: str
    """`HOST:PORT` at which the others reach its agent."""
    incarnation: str
    """Another one each time that its agent starts, or joins a run; empty between runs."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """What a host agent serves to the others."""

    host: Host
    folders: Folders = field(default_factory=Folders)
    stall_s: float = STALL_S

    def app(self, key: str) -> ASGIApp:
        """The guarded application, to mount at the root of an agent's.

        Args:
            key: all requests must have it; not empty.

        Raises:
            ValueError: there is no key.
        """
        if not key:
            raise ValueError(
                "a data plane needs a key, or it would serve anyone; make one with new_key()"
            )
        inner = Starlette(
            routes=self.routes(),
            exception_handlers={DataPlaneError: on_error, HTTPException: on_unknown},
        )
        return KeyGuard(IncarnationGuard(inner, self.host), key)

    def routes(self) -> list[Route]:
        """The routes, unguarded."""
        return [
            Route("/folders", self._list_folders, methods=["GET"]),
            Route("/folders/{name}", self._list_folder, methods=["GET"]),
            Route("/folders/{name}/{file:path}", self._get_file, methods=["GET"]),
        ]

    async def _list_folders(self, _: Request) -> Response:
        return JSONResponse({"folders": list(self.folders.names())})

    async def _list_folder(self, request: Request) -> Response:
        listing = await asyncio.to_thread(self.folders.listing, request.path_params["name"])
        return JSONResponse(listing.to_json())

    async def _get_file(self, request: Request) -> Response:
        name, file = request.path_params["name"], request.path_params["file"]
        with ExitStack() as stack:
            reading = self.folders.reading(name, file)
            descriptor, listed = await asyncio.to_thread(stack.enter_context, reading)
            return RangeReply(
                partial(read_range, descriptor),
                listed.size_bytes,
                checksum=listed.checksum,
                kept=stack.pop_all(),
                stall_s=self.stall_s,
            )


class IncarnationGuard:
    """An ASGI application that refuses requests meant for another incarnation of the host, and
    names its own in every reply."""

    def __init__(self, app: ASGIApp, host: Host) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[INCARNATION] = self._host.incarnation
            await send(message)

        meant = dict(scope["headers"]).get(INCARNATION.encode(), b"").decode("latin-1")
        if meant in ("", self._host.incarnation):
            await self._app(scope, receive, named)
        else:
            own = f"incarnation {self._host.incarnation}" if self._host.incarnation else "in no run"
            await error_reply(
                OtherIncarnation(
                    f"{self._host.node_id} at {self._host.node_addr} is {own}, not incarnation "
                    f"{meant}: it was restarted, and what it held is gone"
                )
            )(scope, receive, named)
