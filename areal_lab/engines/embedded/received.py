"""Weights received over HTTP or by broadcast: SGLang's requests, in the embedded engine.

    begin_weight_update  update_weights_from_tensor | _from_distributed ...  end_weight_update

Received tensors are kept until the request that names their version, or the end of the update; then
all of them are loaded, or none. SGLang loads each request when it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from areal_lab.engines.embedded.batcher import Refused
from areal_lab.engines.embedded.scheduler import Scheduler
from areal_lab.engines.weights import group as process_group
from areal_lab.engines.weights.folder import CorruptWeights
from areal_lab.engines.weights.serialize import UnsafePayload, decode

GROUP_TIMEOUT_S = 60.0
"""Longest wait for other members of a process group. The trainer, which makes the group, gives up
sooner, and its leaving ends this engine's wait."""


@dataclass(slots=True)
class OpenUpdate:
    """The state of the weight update, and the process groups of this engine."""

    open: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)
    flush: bool = True
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)


def add_transfer_routes(
    app: FastAPI, scheduler: Scheduler, read: Callable[[Request], Awaitable[dict[str, Any]]]
) -> None:
    """Add the routes of weight updates to an engine's interface.

    Args:
        read: returns the JSON object of a request.
    """
    update = OpenUpdate()

    @app.post("/begin_weight_update")
    async def begin_weight_update() -> Response:
        if update.open:
            raise Refused("an update is already open; end it first")
        update.open = True
        return _done("the update is open")

    @app.post("/end_weight_update")
    async def end_weight_update() -> Response:
        _require_open(update)
        update.open = False
        return await _load(scheduler, update, None) if update.kept else _done("no weights")

    @app.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(request: Request) -> Response:
        body = await read(request)
        _require_open(update)
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or len(payloads) != 1:
            raise Refused(
                "serialized_named_tensors must be a list of one item: this engine has one rank"
            )
        try:
            tensors = await asyncio.to_thread(decode, str(payloads[0]))
        except UnsafePayload as error:
            raise Refused(str(error)) from error
        return await _receive_tensors(scheduler, update, tensors, body)

    @app.post("/init_weights_update_group")
    async def init_weights_update_group(request: Request) -> Response:
        body = await read(request)
        name = str(body["group_name"])
        if name in update.groups:
            raise Refused(f"this engine is already in a group {name!r}")
        try:
            update.groups[name] = await asyncio.to_thread(_join, name, body)
        except RuntimeError as error:
            raise Refused(f"the group was not formed: {str(error).splitlines()[0]}") from error
        return _done("the group is formed")

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(request: Request) -> Response:
        name = str((await read(request)).get("group_name"))
        process_group.leave(_group(update.groups, name))
        del update.groups[name]
        return _done("the group is left")

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(request: Request) -> Response:
        body = await read(request)
        _require_open(update)
        group = _group(update.groups, str(body.get("group_name")))
        try:
            tensors = await asyncio.to_thread(_receive, body, group)
        except RuntimeError as error:
            raise Refused(f"the broadcast failed: {str(error).splitlines()[0]}") from error
        return await _receive_tensors(scheduler, update, tensors, body)


async def _receive_tensors(
    scheduler: Scheduler, update: OpenUpdate, tensors: dict[str, Tensor], body: Mapping[str, Any]
) -> Response:
    update.kept.update(tensors)
    update.flush = bool(body.get("flush_cache", True))
    version = body.get("weight_version")
    if version is None:
        return _done(f"{len(tensors)} tensors were received")
    return await _load(scheduler, update, str(version))


async def _load(scheduler: Scheduler, update: OpenUpdate, version: str | None) -> Response:
    tensors, update.kept = update.kept, {}
    try:
        message = await asyncio.wrap_future(
            scheduler.load_tensors(tensors, version, flush=update.flush)
        )
    except (Refused, CorruptWeights) as error:
        return JSONResponse({"success": False, "message": str(error)}, status_code=400)
    return _done(message)


def _join(name: str, body: Mapping[str, Any]) -> dist.ProcessGroup:
    store = process_group.connect(
        str(body["master_address"]), int(body["master_port"]), timeout_s=GROUP_TIMEOUT_S
    )
    return process_group.join(
        store,
        name=name,
        rank=int(body["rank_offset"]),
        size=int(body["world_size"]),
        backend=str(body.get("backend", "nccl")),
        timeout_s=GROUP_TIMEOUT_S,
    )


def _receive(body: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, Tensor]:
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
    }
    process_group.broadcast(tensors.values(), group)
    return tensors


def _group(groups: Mapping[str, dist.ProcessGroup], name: str) -> dist.ProcessGroup:
    if name not in groups:
        raise Refused(f"this engine is not in a group {name!r}")
    return groups[name]


def _require_open(update: OpenUpdate) -> None:
    if not update.open:
        raise Refused("no update is open; send begin_weight_update first")


def _done(message: str) -> Response:
    return JSONResponse({"success": True, "message": message})
