"""A process group of the trainer (rank 0) and engines (ranks 1 to n), apart from other groups.

    trainer: store = open_store(); ask engines to join; group = join(store, rank=0)
    engine:  group = join(connect(address, port), rank=k)
    broadcast from rank 0, tensor by tensor, in one order everywhere; then leave()

Neither the store nor gloo has a key, so they listen only on the loopback address if all engines are
on this machine, else on the address that the engines see.

Nothing here needs or creates torch's default group. The key prefix in the store and the helper that
creates the group are those of SGLang (`init_custom_process_group`), because its engines are the
other members. `TCPStore` and the helper are part of torch; the helper has no public name.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from areal_lab.host.ports import address_towards

LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_store(address: str, port: int = 0, *, timeout_s: float) -> TCPStore:
    """Open the store where members meet; port 0 takes a free one (`store.port`)."""
    # By default it would listen on all addresses. It closes the socket at its end.
    listener = socket.create_server((address, port))
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect an engine to the trainer's store."""
    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join(
    store: TCPStore, *, name: str, rank: int, size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join as member `rank` of `size`; returns when all have joined."""
    if backend == "nccl":
        # Otherwise a broken group ends this process instead of raising in it.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    with gloo_on_loopback() if store.host == LOOPBACK else nullcontext():
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(backend),
            PrefixStore(name, store),
            group_name=cast(Any, name),
            timeout=timedelta(seconds=timeout_s),
        )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make gloo groups of this process listen on the loopback address, unless the user has named
    an interface. By default, gloo listens on the address of the machine's name.
    """
    if _INTERFACE in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast every tensor from rank 0, all concurrently; returns when all are done."""
    works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def leave(group: dist.ProcessGroup) -> None:
    """Close the connections; members that wait for this one then fail."""
    dist.destroy_process_group(group)


def own_address(engine_urls: Iterable[str]) -> str:
    """Address of this machine as the engines see it."""
    hosts = [urlsplit(url).hostname or LOOPBACK for url in engine_urls]
    remote = [host for host in hosts if host not in (LOOPBACK, "localhost")]
    return address_towards(remote[0]) if remote else LOOPBACK
