"""The tensor store of this process: what a host agent itself puts and reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from areal_lab.cluster.shards.errors import NotHeld, OtherIncarnation
from areal_lab.cluster.shards.layout import LENGTHS, Layout, write_shard
from areal_lab.cluster.shards.metadata import ShardMetadata
from areal_lab.cluster.shards.store import Freed, HeldShard, Reading, ShardStore
from areal_lab.data.arrays.jagged import Array, Field, Fields, Jagged

TOKENS = "tokens"
"""The jagged field whose lengths are put into the metadata."""


@dataclass(slots=True)
class Host:
    """The host that holds shards, as the others know it."""

    node_id: str
    node_addr: str
    """`HOST:PORT` at which the others reach its agent."""
    incarnation: str
    """Another one each time that its agent starts, or joins a run; empty between runs."""


class LocalStore:
    """A `TensorStore` in this process."""

    def __init__(self, host: Host, shards: ShardStore) -> None:
        self.host = host
        self.shards = shards

    def put(self, fields: Fields, *, owner: str, shard_id: str = "") -> ShardMetadata:
        """Hold these rows as one shard; see `TensorStore.put`."""
        shard_id = shard_id or new_shard_id()
        _, data = write_shard(fields)
        with self.shards.new(shard_id, len(data), owner) as pending:
            pending.write(data.data)
            pending.commit()
        return held_metadata(self.host, self.shards, shard_id)

    def get(self, shard: ShardMetadata, names: Collection[str] | None = None) -> dict[str, Field]:
        """Copies of the rows; see `TensorStore.get`."""
        if shard.incarnation != self.host.incarnation:
            raise OtherIncarnation(
                f"shard {shard.shard_id!r} was put under incarnation {shard.incarnation} of "
                f"{self.host.node_id}, which is now {self.host.incarnation}: it is gone"
            )
        with self.shards.reading(shard.shard_id) as reading:
            wanted = wanted_fields(reading.layout, shard, names)
            return {name: _rows(reading, name, shard.offset, shard.end) for name in wanted}

    def free(self, shards: Iterable[ShardMetadata] = (), *, owner: str = "") -> Freed:
        """See `TensorStore.free`."""
        freed = self.shards.free({shard.shard_id for shard in shards})
        return freed + self.shards.free_owner(owner) if owner else freed

    def list(self) -> Sequence[HeldShard]:
        """The shards that are held, oldest first."""
        return self.shards.listed()


def new_shard_id() -> str:
    """A name that no other shard has."""
    return uuid4().hex


def held_metadata(host: Host, shards: ShardStore, shard_id: str) -> ShardMetadata:
    """Metadata of a whole shard that a host holds.

    Raises:
        NotHeld: it does not.
    """
    with shards.reading(shard_id) as reading:
        layout = reading.layout
        prefix = memoryview(reading.content.read(0, layout.prefix_bytes))
        lengths = layout.lengths(TOKENS, prefix)
        return ShardMetadata(
            node_id=host.node_id,
            node_addr=host.node_addr,
            shard_id=shard_id,
            batch_size=layout.batch_size,
            fields=layout.metadata(),
            incarnation=host.incarnation,
            lengths=() if lengths is None else lengths.tolist(),
        )


def wanted_fields(
    layout: Layout, shard: ShardMetadata, names: Collection[str] | None
) -> tuple[str, ...]:
    """The fields to read, in order of bytes.

    Raises:
        NotHeld: the shard has no such field, or no such rows.
    """
    where = f"shard {shard.shard_id!r} of {shard.node_id} at {shard.node_addr}"
    missing = set(names or ()) - set(layout.fields)
    if missing:
        raise NotHeld(f"{where} has no field {min(missing)!r}; it has {list(layout.fields)}")
    if shard.end > layout.batch_size:
        raise NotHeld(
            f"{where} has {layout.batch_size} rows, not those of [{shard.offset}, {shard.end})"
        )
    return tuple(name for name in layout.fields if names is None or name in names)


def _rows(reading: Reading, name: str, start: int, stop: int) -> Field:
    layout = reading.layout
    place = layout.places[name]
    first, end = start, stop
    jagged = layout.places.get(name + LENGTHS)
    lengths = None
    if jagged is not None:
        raw = reading.content.read(jagged.start, jagged.end)
        whole = np.frombuffer(raw, np.int64)
        lengths = whole[start:stop].copy()
        first = int(whole[:start].sum())
        end = first + int(lengths.sum())
    at = place.start
    data = reading.content.read(at + first * place.row_bytes, at + end * place.row_bytes)
    values: Array = np.empty((end - first, *place.shape[1:]), place.dtype)
    values.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return values if lengths is None else Jagged(values, lengths)
