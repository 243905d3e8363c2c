"""The process group of the trainer's ranks, as the functions that a step asks for.

    RankPlace --join--> Ranks ... leave

A rank that waits for the others longer than the timeout raises, as does one whose peer is gone.
Only a clean end leaves the group: with a peer that failed, leaving would wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from areal_lab.training.parallel.shard import shard_policy
from areal_lab.training.ranks import Ranks

_START: Final = timedelta(minutes=5)
"""Longest wait for the other ranks to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One process of a trainer."""

    rank: int
    count: int
    shards: int
    """Ranks that share one copy of the parameters; divides `count`."""
    device: str
    """`cpu` or `cuda`, of which the process sees one."""
    rendezvous: str
    """File where the ranks meet; a new one for each group, on a disk that all of them have."""
    timeout_s: float
    """Longest wait of a collective."""


class PeersMissing(RuntimeError):
    """A rank waited for the others longer than it may; the message names the setting."""


@contextmanager
def waiting_at_most(timeout_s: float) -> Iterator[None]:
    """Name the setting where a collective ran into its timeout.

    Backends raise plain errors then, so it is told by the time that has passed.
    """
    start_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - start_s < timeout_s:
            raise
        raise PeersMissing(
            f"waited {timeout_s:g} s for the other trainer processes (actor.collective_timeout_s); "
            "one of them hangs, see its log trainer*.log, or needs longer: "
            f"{str(error).splitlines()[0]}"
        ) from error


def join(place: RankPlace) -> Ranks:
    """Meet the other ranks; returns when all are there.

    Raises:
        RuntimeError: if they are not there in time.
    """
    timeout = timedelta(seconds=place.timeout_s)
    if place.device == "cuda":
        torch.cuda.set_device(0)  # before anything is allocated
    dist.init_process_group(
        # Objects and counts travel over gloo also where tensors do not.
        "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo",
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.count,
        timeout=max(timeout, _START),
    )
    mesh = _mesh(place)
    for group in (dist.group.WORLD, *mesh.get_all_groups()):
        _set_pg_timeout(timeout, group)
    return Ranks(
        rank=place.rank,
        count=place.count,
        most=_most,
        total=_total,
        whole=_whole,
        collect=partial(_collect, place),
        announce=partial(_announce, place),
        shard=partial(shard_policy, mesh=mesh),
    )


def another_group(timeout_s: float) -> dist.ProcessGroup:
    """A second group of all ranks, on the CPU, for a thread that works beside the first one.

    Args:
        timeout_s: longest wait of a collective.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def leave() -> None:
    """Leave the group, together with the others."""
    dist.destroy_process_group()


def _mesh(place: RankPlace) -> DeviceMesh:
    """One axis of shards, or copies of shards."""
    copies = place.count // place.shards
    if copies == 1:
        return init_device_mesh(place.device, (place.count,), mesh_dim_names=("shards",))
    return init_device_mesh(
        place.device, (copies, place.shards), mesh_dim_names=("copies", "shards")
    )


def _most(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _total(tensor: Tensor) -> Tensor:
    summed = tensor.clone()
    dist.all_reduce(summed)
    return summed


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _collect(place: RankPlace, value: Any) -> list[Any]:
    if place.rank:
        dist.gather_object(value)
        return []
    values: list[Any] = [None] * place.count
    dist.gather_object(value, values)
    return values


def _announce(place: RankPlace, value: Any) -> Any:
    box = [value if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]
