"""The tensor store of all hosts, over HTTP: puts to one host, gets from the one that holds a shard.

first request    bytes [0, 64 KiB)    the header and lengths; of small shards everything
then             a range per field, or of neighboring fields together, read into its array
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlencode

import numpy as np
import xxhash
from numpy.typing import NDArray

from areal_lab.cluster.shards.connections import Agent, Call, Connections
from areal_lab.cluster.shards.errors import Damaged, OtherIncarnation, Unreachable
from areal_lab.cluster.shards.layout import Layout, header_end, read_layout, write_shard
from areal_lab.cluster.shards.local import new_shard_id, wanted_fields
from areal_lab.cluster.shards.metadata import ShardMetadata, shard_from_json
from areal_lab.cluster.shards.replies import CHECKSUM
from areal_lab.cluster.shards.store import Freed, HeldShard
from areal_lab.data.arrays.jagged import Array, Field, Fields, Jagged

_FIRST_BYTES: Final = 1 << 16
_MOST_IDS: Final = 500
"""Shards in one request to free them: 16 kB of ids, within what servers take as a URL."""


class HttpStore:
    """A `TensorStore` of host agents."""

    def __init__(self, home: Agent, connections: Connections) -> None:
        """Create a store; nothing is sent yet.

        Args:
            home: the agent that `put`, `list` and `free(owner=...)` are meant for.
            connections: may be shared by several stores.
        """
        self.home = home
        self._connections = connections

    def put(self, fields: Fields, *, owner: str, shard_id: str = "") -> ShardMetadata:
        """Have these rows held by the home agent; see `TensorStore.put`."""
        shard_id = shard_id or new_shard_id()
        _, data = write_shard(fields)
        found = self._connections.call(
            Call(
                self.home,
                "PUT",
                f"/shards/{quote(shard_id, safe='')}?{urlencode({'owner': owner})}",
                f"shard {shard_id!r} ({len(data):,} bytes)",
                {CHECKSUM: xxhash.xxh3_128(data.data).hexdigest()},
                data.data,
            )
        )
        return _shard(found)

    def get(self, shard: ShardMetadata, names: Collection[str] | None = None) -> dict[str, Field]:
        """Fetch rows from the host that holds them; see `TensorStore.get`.

        A shard that is read as a whole is compared with its checksum.

        Raises:
            Unreachable: the host cannot be reached, or was lost meanwhile.
            Damaged: the bytes are not those that were put.
        """
        call = Call(
            Agent(shard.node_addr, shard.incarnation),
            "GET",
            f"/shards/{quote(shard.shard_id, safe='')}",
            f"shard {shard.shard_id!r} of {shard.node_id}",
        )
        start: Array = np.empty(_FIRST_BYTES, np.uint8)
        part = self._connections.read_start(call, start.data)
        start = start[: part.read_bytes]
        try:
            start = self._grown(call, start, min(header_end(start.data), part.size_bytes))
            layout = read_layout(start.data, part.size_bytes)
        except ValueError as error:
            raise Damaged(f"{call.what} at {shard.node_addr}: {error}") from error
        start = self._grown(call, start, layout.prefix_bytes)
        wanted = wanted_fields(layout, shard, names)
        arrays: dict[str, Field] = {}
        places: list[tuple[int, memoryview]] = []
        for name in wanted:
            at, values, lengths = _buffer(layout, name, start, shard)
            arrays[name] = values if lengths is None else Jagged(values, lengths)
            places.append((at, values.reshape(-1).view(np.uint8).data))
        for at, targets in _runs(_not_read(start, places)):
            self._connections.read(call, at, targets)
        whole = len(wanted) == len(layout.fields) and shard.batch_size == layout.batch_size
        if whole and part.checksum:
            _check(
                call, part.checksum, [start[: layout.prefix_bytes].data, *(t for _, t in places)]
            )
        return arrays

    def free(self, shards: Iterable[ShardMetadata] = (), *, owner: str = "") -> Freed:
        """Free shards at their hosts, and what an owner left at the home agent.

        A host that cannot be reached is reported in `Freed.unreachable`, and the others are asked.
        """
        by_agent: dict[Agent, set[str]] = defaultdict(set)
        for shard in shards:
            by_agent[Agent(shard.node_addr, shard.incarnation)].add(shard.shard_id)
        freed = Freed()
        for agent, ids in by_agent.items():
            ordered = sorted(ids)
            for first in range(0, len(ordered), _MOST_IDS):
                some = ordered[first : first + _MOST_IDS]
                freed += self._free(agent, {"id": some}, f"{len(some)} shards")
        if owner:
            freed += self._free(self.home, {"owner": [owner]}, f"shards of {owner!r}")
        return freed

    def list(self) -> Sequence[HeldShard]:
        """The shards that the home agent holds, oldest first."""
        found = self._connections.call(Call(self.home, "GET", "/shards", "the list of shards"))
        return tuple(HeldShard(**one) for one in found["shards"])

    def _free(self, agent: Agent, query: Mapping[str, Sequence[str]], what: str) -> Freed:
        path = f"/shards?{urlencode(query, doseq=True)}"
        try:
            return Freed(**self._connections.call(Call(agent, "DELETE", path, what)))
        except OtherIncarnation:
            return Freed(missing=len(query.get("id", ())))  # gone with the agent that held them
        except Unreachable:
            return Freed(unreachable=(agent.address,))

    def _grown(self, call: Call, start: Array, end: int) -> Array:
        """The bytes from 0 on, at least to `end`."""
        if end <= len(start):
            return start
        grown = np.empty(end, np.uint8)
        grown[: len(start)] = start
        self._connections.read(call, len(start), [grown[len(start) :].data])
        return grown


def _shard(found: object) -> ShardMetadata:
    try:
        return shard_from_json(found)
    except ValueError as error:
        raise Damaged(f"the reply to a put is no metadata: {error}") from error


def _buffer(
    layout: Layout, name: str, start: Array, shard: ShardMetadata
) -> tuple[int, Array, NDArray[np.int64] | None]:
    """Where the rows of a field begin, an array for them, and their lengths if these vary."""
    place = layout.places[name]
    first, end = shard.offset, shard.end
    lengths = layout.lengths(name, start.data)
    if lengths is not None:
        first = int(lengths[: shard.offset].sum())
        lengths = lengths[shard.offset : shard.end].copy()
        end = first + int(lengths.sum())
        if lengths.min() < 0 or end > place.shape[0]:
            raise Damaged(f"shard {shard.shard_id!r} of {shard.node_id}: {name!r} has bad lengths")
    values: Array = np.empty((end - first, *place.shape[1:]), place.dtype)
    return place.start + first * place.row_bytes, values, lengths


def _not_read(
    start: Array, places: Iterable[tuple[int, memoryview]]
) -> Iterable[tuple[int, memoryview]]:
    """What lies behind the bytes read so far; the rest is copied from these."""
    for at, target in places:
        known = min(max(len(start) - at, 0), len(target))
        target[:known] = start[at : at + known].data
        if known < len(target):
            yield at + known, target[known:]


def _runs(places: Iterable[tuple[int, memoryview]]) -> list[tuple[int, list[memoryview]]]:
    """Neighboring ranges joined."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for at, target in places:
        if at != end:
            runs.append((at, []))
        runs[-1][1].append(target)
        end = at + len(target)
    return runs


def _check(call: Call, checksum: str, pieces: Iterable[memoryview]) -> None:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    if digest.hexdigest() != checksum:
        raise Damaged(
            f"{call.what} at {call.agent.address}: checksum {digest.hexdigest()}, but it was put "
            f"with {checksum}; fetch it once more, and check that host's memory if this repeats"
        )
