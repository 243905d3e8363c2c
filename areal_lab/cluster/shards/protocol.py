"""What is asked of a store of tensors: put, get, free and list.

    put     tensors of some rows       --> metadata, which goes through the controller
    get     metadata of rows, fields   --> the tensors
    free    metadata, or an owner      --> what was freed, counted
    list                               --> the shards that are held, with bytes and ages

Two stores ship: `local.LocalStore` (this process) and `client.HttpStore` (hosts, over HTTP). Ray's
object store, TransferQueue and Mooncake fit behind the same four verbs; `check_kind` says why each
of them is not offered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from areal_lab.cluster.shards.metadata import ShardMetadata
from areal_lab.cluster.shards.store import Freed, HeldShard
from areal_lab.data.arrays.jagged import Field, Fields

KINDS: Final = ("local", "http")
"""Stores that ship."""
_NOT_OFFERED: Final = {
    "ray": (
        "an object in Ray's store is lost with the actor that put it, and Ray copies torch tensors"
    ),
    "transferqueue": "TransferQueue needs Ray, hydra, tensordict and three actors of 380 MB",
    "mooncake": (
        "Mooncake over TCP was no faster than HTTP, and its RDMA needs hardware that nothing here "
        "was tested on"
    ),
    "nixl": "NIXL needs CUDA or UCX, which nothing here was tested on",
}


class TensorStore(Protocol):
    """A store of tensors by shards. Calls block; `AsyncStore` has the same ones to await."""

    def put(self, fields: Fields, *, owner: str, shard_id: str = "") -> ShardMetadata:
        """Hold these rows as one shard until it is freed.

        Args:
            fields: tensors by name, with the same number of rows.
            owner: who frees it, or on whose death it is freed.
            shard_id: must be new; made up if empty.

        Raises:
            StoreFull: there is no room.
            ValueError: a field cannot be held.
        """
        ...

    def get(self, shard: ShardMetadata, names: Collection[str] | None = None) -> dict[str, Field]:
        """The rows of a shard or sub-shard.

        Args:
            shard: which rows of which shard.
            names: of the fields; all of them if None.

        Raises:
            NotHeld: the shard was freed, or has no such field or row.
            OtherIncarnation: its host was restarted.
        """
        ...

    def free(self, shards: Iterable[ShardMetadata] = (), *, owner: str = "") -> Freed:
        """Free shards, whole ones also for their sub-shards, and what an owner left behind.

        Those that are not held are counted and no error: freeing twice is harmless.
        """
        ...

    def list(self) -> Sequence[HeldShard]:
        """The shards that are held, oldest first."""
        ...


class AsyncStore:
    """The same verbs to await, each in a thread.

    A cancelled call ends at once for the caller; its thread ends with the request.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store = store

    async def put(self, fields: Fields, *, owner: str, shard_id: str = "") -> ShardMetadata:
        """As `TensorStore.put`."""
        return await asyncio.to_thread(self.store.put, fields, owner=owner, shard_id=shard_id)

    async def get(
        self, shard: ShardMetadata, names: Collection[str] | None = None
    ) -> dict[str, Field]:
        """As `TensorStore.get`."""
        return await asyncio.to_thread(self.store.get, shard, names)

    async def free(self, shards: Iterable[ShardMetadata] = (), *, owner: str = "") -> Freed:
        """As `TensorStore.free`."""
        return await asyncio.to_thread(self.store.free, shards, owner=owner)

    async def list(self) -> Sequence[HeldShard]:
        """As `TensorStore.list`."""
        return await asyncio.to_thread(self.store.list)


def check_kind(kind: str) -> None:
    """Refuse a store that does not ship, with the reason.

    Raises:
        ValueError: it is not one of `KINDS`.
    """
    if kind in KINDS:
        return
    reason = _NOT_OFFERED.get(kind.lower().replace("_", "").replace("-", ""))
    because = f" ({reason})" if reason else ""
    raise ValueError(f"no store of tensors is named {kind!r}{because}; use one of {list(KINDS)}")
