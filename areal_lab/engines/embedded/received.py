"""Weights received over HTTP or by broadcast: SGLang's requests, in the embedded engine.

    begin_weight_update  update_weights_from_tensor | _from_distributed ...  end_weight_update

Received tensors are kept until the request that names their version, or the end of the update; then
all of them are loaded, or none. SGLang loads each request when it arrives. What comes over HTTP or
gloo is received into main memory and copied to the model's device; NCCL writes to a GPU. Handles
(`update_weights_from_handles`, not one of SGLang's) are opened for the copy only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from fastapi import Body, FastAPI
from fastapi.responses import Response
from torch import Tensor

from areal_lab.engines.embedded.batcher import Refused
from areal_lab.engines.embedded.scheduler import Scheduler
from areal_lab.engines.weights import group as process_group
from areal_lab.engines.weights.folder import CorruptWeights
from areal_lab.engines.weights.handles import PATH, open_handles
from areal_lab.engines.weights.tensor import UnsafePayload, decode
from areal_lab.host.asgi import JsonReply

GROUP_TIMEOUT_S = 60.0
"""Longest wait for other members of a process group. The trainer, which creates the group, gives
up sooner and leaves, which ends this engine's wait."""


@dataclass(frozen=True, slots=True)
class Member:
    """This engine's place in a process group."""

    group: dist.ProcessGroup
    receives_on: torch.device


@dataclass(slots=True)
class OpenUpdate:
    """The state of the weight update, and the process groups of this engine."""

    open: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)
    flush: bool = True
    groups: dict[str, Member] = field(default_factory=dict)


def add_transfer_routes(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the routes of weight updates to an engine's interface."""
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
    async def update_weights_from_tensor(
        # one item, because this engine has one rank
        serialized_named_tensors: Annotated[list[str], Body(min_length=1, max_length=1)],
        weight_version: Annotated[str | None, Body()] = None,
        flush_cache: Annotated[bool, Body()] = True,
    ) -> Response:
        _require_open(update)
        try:
            tensors = await asyncio.to_thread(decode, serialized_named_tensors[0])
        except UnsafePayload as error:
            raise Refused(str(error)) from error
        return await _receive_tensors(scheduler, update, tensors, weight_version, flush_cache)

    @app.post(PATH)
    async def update_weights_from_handles(
        handles: Annotated[str, Body()],
        weight_version: Annotated[str, Body()],
        flush_cache: Annotated[bool, Body()] = True,
    ) -> Response:
        _require_open(update)
        try:
            # The tensors are in the trainer's memory; nothing here keeps them after the copy.
            update.kept.update(await asyncio.to_thread(open_handles, handles))
        except UnsafePayload as error:
            raise Refused(str(error)) from error
        update.flush = flush_cache
        return await _load(scheduler, update, weight_version)

    @app.post("/init_weights_update_group")
    async def init_weights_update_group(
        *,
        group_name: Annotated[str, Body()],
        master_address: Annotated[str, Body()],
        master_port: Annotated[int, Body()],
        rank_offset: Annotated[int, Body()],
        world_size: Annotated[int, Body()],
        backend: Annotated[str, Body()] = "nccl",
    ) -> Response:
        if group_name in update.groups:
            raise Refused(f"this engine is already in a group {group_name!r}")
        receives_on = receiving_device(backend, scheduler.device)

        def join() -> dist.ProcessGroup:
            store = process_group.connect(master_address, master_port, timeout_s=GROUP_TIMEOUT_S)
            return process_group.join(
                store,
                name=group_name,
                rank=rank_offset,
                size=world_size,
                backend=backend,
                timeout_s=GROUP_TIMEOUT_S,
            )

        try:
            update.groups[group_name] = Member(await asyncio.to_thread(join), receives_on)
        except RuntimeError as error:
            raise Refused(f"the group was not formed: {str(error).splitlines()[0]}") from error
        return _done("the group is formed")

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(
        group_name: Annotated[str, Body(embed=True)],
    ) -> Response:
        process_group.leave(_member(update.groups, group_name).group)
        del update.groups[group_name]
        return _done("the group is left")

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(
        *,
        group_name: Annotated[str, Body()],
        names: Annotated[list[str], Body()],
        dtypes: Annotated[list[str], Body()],
        shapes: Annotated[list[list[int]], Body()],
        weight_version: Annotated[str | None, Body()] = None,
        flush_cache: Annotated[bool, Body()] = True,
    ) -> Response:
        _require_open(update)
        member = _member(update.groups, group_name)

        def receive() -> dict[str, Tensor]:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=member.receives_on)
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            }
            process_group.broadcast(tensors.values(), member.group)
            return tensors

        try:
            tensors = await asyncio.to_thread(receive)
        except RuntimeError as error:
            raise Refused(f"the broadcast failed: {str(error).splitlines()[0]}") from error
        return await _receive_tensors(scheduler, update, tensors, weight_version, flush_cache)


def receiving_device(backend: str, device: torch.device) -> torch.device:
    """Where an engine on `device` receives the tensors of a group with this backend."""
    if backend != "nccl":
        return torch.device("cpu")
    if device.type != "cuda":
        raise Refused(
            f"the group's backend is nccl, but this engine computes on the {device.type}; "
            "take gloo, or start the engine with --device cuda"
        )
    return device


async def _receive_tensors(
    scheduler: Scheduler,
    update: OpenUpdate,
    tensors: dict[str, Tensor],
    version: str | None,
    flush: bool,
) -> Response:
    update.kept.update(tensors)
    update.flush = flush
    if version is None:
        return _done(f"{len(tensors)} tensors were received")
    return await _load(scheduler, update, version)


async def _load(scheduler: Scheduler, update: OpenUpdate, version: str | None) -> Response:
    tensors, update.kept = update.kept, {}
    try:
        message = await asyncio.wrap_future(
            scheduler.load_tensors(tensors, version, flush=update.flush)
        )
    except (Refused, CorruptWeights) as error:
        return JsonReply({"success": False, "message": str(error)}, status_code=400)
    return _done(message)


def _member(groups: Mapping[str, Member], name: str) -> Member:
    if name not in groups:
        raise Refused(f"this engine is not in a group {name!r}")
    return groups[name]


def _require_open(update: OpenUpdate) -> None:
    if not update.open:
        raise Refused("no update is open; send begin_weight_update first")


def _done(message: str) -> Response:
    return JsonReply({"success": True, "message": message})
