"""The HTTP interface of the data plane, which a host agent mounts.

    GET    /shards                      what is held: bytes, owners, ages, counts
    PUT    /shards/{id}?owner=NAME      hold a shard; replies its metadata
    GET    /shards/{id}                 its bytes, or the range of them that was asked for
    DELETE /shards/{id}                 free it
    DELETE /shards?id=A&id=B&owner=N    free several, and what an owner left behind
    GET    /folders                     names of the served folders
    GET    /folders/{name}              its files: names, sizes, checksums
    GET    /folders/{name}/{file}       a file, or a range of it

Every request needs the key (`Authorization: Bearer KEY`). One that names an incarnation other than
this agent's is refused with 409; every reply names it, so that a client discards what a replaced
agent still sends.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lab.cluster.shards.content import read_range
from areal_lab.cluster.shards.errors import DataPlaneError, OtherIncarnation, Refused
from areal_lab.cluster.shards.folders import Folders
from areal_lab.cluster.shards.local import Host, held_metadata
from areal_lab.cluster.shards.replies import (
    CHECKSUM,
    INCARNATION,
    RangeReply,
    error_reply,
    on_error,
    on_unknown,
)
from areal_lab.cluster.shards.store import Freed, ShardStore
from areal_lab.engines.keys import KeyGuard

STALL_S: Final = 60.0
"""Longest time in which a receiver takes nothing, before its reply ends."""


@dataclass(slots=True)
class Traffic:
    """Bytes of shards and files, without headers."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def add_sent(self, count: int) -> None:
        """Count bytes of a reply."""
        self.sent_bytes += count


@dataclass(frozen=True, slots=True)
class DataPlane:
    """What a host agent serves to the others."""

    host: Host
    shards: ShardStore
    folders: Folders = field(default_factory=Folders)
    traffic: Traffic = field(default_factory=Traffic)
    stall_s: float = STALL_S

    def begin(self, incarnation: str) -> Freed:
        """Begin another incarnation: what was put under the last one is freed and counted.

        Call it in the event loop of the server.
        """
        self.host.incarnation = incarnation
        return self.shards.free_all()

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
            Route("/shards", self._list, methods=["GET"]),
            Route("/shards", self._free, methods=["DELETE"]),
            Route("/shards/{shard_id}", self._put, methods=["PUT"]),
            Route("/shards/{shard_id}", self._get, methods=["GET"]),
            Route("/shards/{shard_id}", self._free, methods=["DELETE"]),
            Route("/folders", self._list_folders, methods=["GET"]),
            Route("/folders/{name}", self._list_folder, methods=["GET"]),
            Route("/folders/{name}/{file:path}", self._get_file, methods=["GET"]),
        ]

    async def _list(self, _: Request) -> Response:
        shards = [asdict(shard) for shard in self.shards.listed()]
        usage = {**self.shards.usage(), **asdict(self.traffic)}
        return JSONResponse({"host": asdict(self.host), "shards": shards, "usage": usage})

    async def _put(self, request: Request) -> Response:
        shard_id: str = request.path_params["shard_id"]
        incarnation = self.host.incarnation
        checksum = request.headers.get(CHECKSUM, "")
        try:
            size_bytes = int(request.headers["content-length"])
        except (KeyError, ValueError):
            raise Refused(f"PUT of shard {shard_id!r} needs a content-length") from None
        if not self.shards.holds(shard_id, size_bytes, checksum):
            owner = request.query_params.get("owner", "")
            with self.shards.new(shard_id, size_bytes, owner) as pending:
                try:
                    async for chunk in request.stream():
                        if pending.content.blocking:
                            await asyncio.to_thread(pending.write, chunk)
                        else:
                            pending.write(chunk)
                        self.traffic.received_bytes += len(chunk)
                except ClientDisconnect:
                    return Response(status_code=400)  # nothing reads it
                if self.host.incarnation != incarnation:
                    raise OtherIncarnation(f"{self.host.node_id} left the run during the put")
                pending.commit(checksum)
        return JSONResponse(held_metadata(self.host, self.shards, shard_id).to_json())

    async def _get(self, request: Request) -> Response:
        with ExitStack() as stack:
            reading = stack.enter_context(self.shards.reading(request.path_params["shard_id"]))
            return RangeReply(
                reading.content.read,
                reading.size_bytes,
                blocking=reading.content.blocking,
                checksum=reading.checksum,
                kept=stack.pop_all(),
                sent=self.traffic.add_sent,
                stall_s=self.stall_s,
            )

    async def _free(self, request: Request) -> Response:
        query = request.query_params
        ids = {*query.getlist("id"), *request.path_params.values()}
        owner = query.get("owner", "")
        if not ids and not owner:
            raise Refused("DELETE /shards needs ?id=... or ?owner=...; it frees nothing unnamed")
        freed = self.shards.free(ids)
        if owner:
            freed += self.shards.free_owner(owner)
        return JSONResponse(freed_to_json(freed))

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
                blocking=True,
                checksum=listed.checksum,
                kept=stack.pop_all(),
                sent=self.traffic.add_sent,
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


def freed_to_json(freed: Freed) -> dict[str, int]:
    """What `freed_from_json` reads."""
    return {
        "shards": freed.shards,
        "size_bytes": freed.size_bytes,
        "missing": freed.missing,
    }
