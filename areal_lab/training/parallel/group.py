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
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from areal_lab.engines.weights.group import connect, gloo_on_loopback, open_store
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.parallel.sequence import sequence_part
from areal_lab.training.parallel.shard import TENSOR, shard_policy
from areal_lab.training.ranks import Ranks

_TCP: Final = "tcp://"
_START: Final = timedelta(minutes=5)
"""Longest wait for the other ranks to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One process of a trainer."""

    rank: int
    count: int
    shards: int
    """Ranks that share one copy of the parameters, or of the part of each that is theirs; divides
    `count / tensor`."""
    tensor: int = 1
    """Ranks that divide every layer among them (tensor parallel); neighbors."""
    context: int = 1
    """Ranks that divide every sequence among them (Ulysses); neighbors."""
    device: str
    """`cpu` or `cuda`, of which the process sees one."""
    rendezvous: str
    """Where the ranks meet: a file on a disk that all of them have, a new one for each group, or
    `tcp://ADDRESS:PORT`, of rank 0's host."""
    timeout_s: float
    """Longest wait of a collective."""

    @property
    def together(self) -> int:
        """Ranks that compute the same groups: one data rank."""
        return self.tensor * self.context


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
    with gloo_on_loopback():  # unless the ranks are on several hosts
        dist.init_process_group(
            # Objects and counts travel over gloo also where tensors do not.
            "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo",
            store=_store(place),
            rank=place.rank,
            world_size=place.count,
            timeout=max(timeout, _START),
        )
        mesh = _mesh(place)
        ranks = torch.arange(place.count).view(-1, place.together)
        data = _one_of(ranks.T) if place.together > 1 else _everyone()
        sequence = _one_of(ranks) if place.context > 1 else None
    for group in (dist.group.WORLD, data, sequence, *mesh.get_all_groups()):
        if group is not None:
            _set_pg_timeout(timeout, group)
    return Ranks(
        rank=place.rank,
        count=place.count,
        data_rank=place.rank // place.together,
        data_count=place.count // place.together,
        most=_most,
        total=partial(_total, data),
        whole=_whole,
        collect=partial(_collect, place, data),
        announce=partial(_announce, place),
        shard=partial(_shard, mesh, sequence),
    )


def _store(place: RankPlace) -> Store:
    """The store where the ranks meet."""
    if not place.rendezvous.startswith(_TCP):
        return FileStore(place.rendezvous, place.count)
    address, _, port = place.rendezvous.removeprefix(_TCP).rpartition(":")
    seconds = _START.total_seconds()
    if place.rank == 0:
        return open_store(address, int(port), timeout_s=seconds)
    return connect(address, int(port), timeout_s=seconds)


def another_group(timeout_s: float) -> dist.ProcessGroup:
    """A second group of all ranks, on the CPU, for a thread that works beside the first one.

    Args:
        timeout_s: longest wait of a collective.
    """
    with gloo_on_loopback():
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_s)
        )
    return group


def leave() -> None:
    """Leave the group, together with the others."""
    dist.destroy_process_group()


def _mesh(place: RankPlace) -> DeviceMesh:
    """The axes of the parameters: copies of shards of parts of layers, each where there are any."""
    sizes = {
        "copies": place.count // (place.shards * place.tensor),
        "shards": place.shards,
        TENSOR: place.tensor,
    }
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    return init_device_mesh(place.device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _one_of(rows: Tensor) -> dist.ProcessGroup:
    """Make a group of each of these rows of ranks; the one with this rank."""
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    return mine


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "initialized before"
    return dist.group.WORLD


def _shard(
    mesh: DeviceMesh,
    sequence: dist.ProcessGroup | None,
    policy: PackedPolicy | PackedValues,
    *,
    offload: bool = False,
) -> None:
    shard_policy(policy, mesh=mesh, offload=offload)
    if sequence is not None:
        policy.sequence = sequence_part(sequence)


def _most(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _total(data: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    summed = tensor.clone()
    dist.all_reduce(summed, group=data)
    return summed


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _collect(place: RankPlace, data: dist.ProcessGroup, value: Any) -> list[Any]:
    first = place.rank % place.together  # of this group
    values: list[Any] = [None] * dist.get_world_size(data)
    dist.gather_object(value, values if place.rank == first else None, dst=first, group=data)
    return [] if place.rank else values


def _announce(place: RankPlace, value: Any) -> Any:
    box = [value if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]
