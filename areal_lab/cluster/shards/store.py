"""The shards that one host holds, within limits of bytes.

    new(id, size, owner) --> Pending --write...--commit--> held --free(id) or free_owner--> gone
           |                    '----abort: nothing is held               |
      StoreFull                                      readers that still send it finish first

Room is reserved before the first byte arrives. What does not fit into memory goes into files of the
spill folder, if there is one; what fits into neither is refused. Nothing is dropped: a shard ends
by `free`, or with everything its owner left behind, which is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import xxhash

from areal_lab.cluster.shards.content import Bytes, Content, InFile, InMemory
from areal_lab.cluster.shards.errors import Damaged, NotHeld, Refused, StoreFull
from areal_lab.cluster.shards.layout import Layout, header_end, read_layout

Where: TypeAlias = Literal["memory", "file"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that a host holds at most."""

    memory_bytes: int
    spill_bytes: int = 0
    spill_folder: Path | None = None
    """For shards that do not fit into memory: on a local disk, or in /dev/shm."""

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or self.spill_bytes < 0:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes} and spill_bytes is {self.spill_bytes}, but "
                "both must be >= 0"
            )
        if bool(self.spill_bytes) != (self.spill_folder is not None):
            raise ValueError(
                f"spill_bytes is {self.spill_bytes} and spill_folder is {self.spill_folder}; set "
                "both or none"
            )


@dataclass(frozen=True, slots=True)
class HeldShard:
    """One line of a listing."""

    shard_id: str
    owner: str
    size_bytes: int
    batch_size: int
    age_s: float
    where: Where
    readers: int
    """Replies that are sending it now."""


@dataclass(slots=True)
class Counts:
    """What a store did since it was created."""

    put: int = 0
    put_bytes: int = 0
    refused: int = 0
    """Puts for which there was no room."""
    aborted: int = 0
    """Puts whose bytes did not arrive in full."""
    freed: int = 0
    freed_bytes: int = 0
    abandoned: int = 0
    """Shards among the freed ones that went with their owner."""
    abandoned_bytes: int = 0
    missing: int = 0
    """Shards to free that were not held."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What one call freed."""

    shards: int = 0
    size_bytes: int = 0
    missing: int = 0
    """Shards that were not held (any more)."""
    unreachable: tuple[str, ...] = ()
    """Addresses of hosts that could not be asked."""

    def __add__(self, other: Freed) -> Freed:
        return Freed(
            self.shards + other.shards,
            self.size_bytes + other.size_bytes,
            self.missing + other.missing,
            self.unreachable + other.unreachable,
        )


@dataclass(slots=True, eq=False)
class _Shard:
    shard_id: str
    owner: str
    content: Content
    size_bytes: int
    where: Where
    layout: Layout
    checksum: str
    since_s: float
    readers: int = 0
    freed: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A shard while it is read."""

    content: Content
    layout: Layout
    size_bytes: int
    checksum: str


class ShardStore:
    """Shards by id. Safe in several threads."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {}
        self._pending: set[str] = set()
        self._held: dict[Where, int] = {"memory": 0, "file": 0}
        self._counts = Counts()

    def new(self, shard_id: str, size_bytes: int, owner: str) -> Pending:
        """Reserve room for a shard.

        Args:
            shard_id: must be new.
            size_bytes: of the whole shard.
            owner: who frees it, or on whose death it is freed.

        Raises:
            StoreFull: there is no room.
            Refused: the id is in use, or there is no owner.
        """
        if not owner:
            raise Refused(f"shard {shard_id!r} has no owner; name who frees it")
        with self._lock:
            if shard_id in self._shards or shard_id in self._pending:
                raise Refused(f"there is a shard {shard_id!r} already; use a new id")
            where = self._room(shard_id, size_bytes)
            self._held[where] += size_bytes
            self._pending.add(shard_id)
        try:
            content: Content
            if where == "memory":
                content = InMemory(size_bytes)
            else:
                assert self.limits.spill_folder is not None
                content = InFile(self.limits.spill_folder, size_bytes)
        except (OSError, MemoryError) as error:
            self._settle(shard_id, where, size_bytes, None)
            with self._lock:
                self._counts.refused += 1
            raise StoreFull(
                f"no room for shard {shard_id!r} of {size_bytes:,} bytes in {where}: {error}; "
                "lower the store's limit to what there is, or free shards earlier"
            ) from error
        return Pending(shard_id, owner, size_bytes, content, where, self)

    def _room(self, shard_id: str, size_bytes: int) -> Where:
        limits = self.limits
        if self._held["memory"] + size_bytes <= limits.memory_bytes:
            return "memory"
        if self._held["file"] + size_bytes <= limits.spill_bytes:
            return "file"
        self._counts.refused += 1
        oldest = min(self._shards.values(), key=lambda shard: shard.since_s, default=None)
        hint = ""
        if oldest is not None:
            age_s = self._clock() - oldest.since_s
            hint = f" (the oldest of {len(self._shards)} is {age_s:.0f} s old, of {oldest.owner})"
        spill = f" and {self._held['file']:,} of {limits.spill_bytes:,} in files"
        raise StoreFull(
            f"no room for shard {shard_id!r} of {size_bytes:,} bytes: this host holds "
            f"{self._held['memory']:,} of {limits.memory_bytes:,} bytes in memory"
            f"{spill if limits.spill_bytes else ''}{hint}; free shards once they are trained on, "
            "or raise the limit"
        )

    def _settle(self, shard_id: str, where: Where, size_bytes: int, shard: _Shard | None) -> None:
        """End a pending put: with a shard, or without."""
        with self._lock:
            self._pending.discard(shard_id)
            if shard is None:
                self._held[where] -= size_bytes
            else:
                self._shards[shard_id] = shard
                self._counts.put += 1
                self._counts.put_bytes += size_bytes

    def holds(self, shard_id: str, size_bytes: int, checksum: str) -> bool:
        """Whether exactly these bytes are held already: a put that is repeated changes nothing."""
        with self._lock:
            shard = self._shards.get(shard_id)
            return shard is not None and (shard.size_bytes, shard.checksum) == (
                size_bytes,
                checksum,
            )

    @contextmanager
    def reading(self, shard_id: str) -> Iterator[Reading]:
        """A shard, whose bytes stay until the end of the block even if it is freed.

        Raises:
            NotHeld: there is no such shard.
        """
        with self._lock:
            shard = self._shards.get(shard_id)
            if shard is None:
                raise NotHeld(
                    f"there is no shard {shard_id!r} here: it was freed, or never put; "
                    f"{len(self._shards)} others are held"
                )
            shard.readers += 1
        try:
            yield Reading(shard.content, shard.layout, shard.size_bytes, shard.checksum)
        finally:
            with self._lock:
                shard.readers -= 1
                if shard.freed and not shard.readers:
                    self._release(shard)

    def _release(self, shard: _Shard) -> None:
        self._held[shard.where] -= shard.size_bytes
        if isinstance(shard.content, InFile):
            shard.content.close()

    def free(self, shard_ids: Iterable[str]) -> Freed:
        """Free shards; those that are not held are counted, not an error."""
        freed = Freed()
        with self._lock:
            for shard_id in shard_ids:
                freed += self._free(self._shards.pop(shard_id, None))
            self._counts.missing += freed.missing
        return freed

    def free_owner(self, owner: str) -> Freed:
        """Free what an owner left behind."""
        return self._abandon(lambda shard: shard.owner == owner)

    def free_all(self) -> Freed:
        """Free what a run left behind."""
        return self._abandon(lambda _: True)

    def _abandon(self, chosen: Callable[[_Shard], bool]) -> Freed:
        with self._lock:
            left = [shard for shard in self._shards.values() if chosen(shard)]
            freed = Freed()
            for shard in left:
                freed += self._free(self._shards.pop(shard.shard_id))
            self._counts.abandoned += freed.shards
            self._counts.abandoned_bytes += freed.size_bytes
        return freed

    def _free(self, shard: _Shard | None) -> Freed:
        if shard is None:
            return Freed(missing=1)
        shard.freed = True
        if not shard.readers:
            self._release(shard)
        self._counts.freed += 1
        self._counts.freed_bytes += shard.size_bytes
        return Freed(1, shard.size_bytes)

    def listed(self) -> tuple[HeldShard, ...]:
        """The shards that are held, oldest first."""
        with self._lock:
            now_s = self._clock()
            return tuple(
                HeldShard(
                    shard_id=shard.shard_id,
                    owner=shard.owner,
                    size_bytes=shard.size_bytes,
                    batch_size=shard.layout.batch_size,
                    age_s=now_s - shard.since_s,
                    where=shard.where,
                    readers=shard.readers,
                )
                for shard in sorted(self._shards.values(), key=lambda one: one.since_s)
            )

    def usage(self) -> dict[str, Any]:
        """Bytes now (those reserved and those being read after they were freed included), limits
        and counts."""
        with self._lock:
            return {
                "shards": len(self._shards),
                "memory_bytes": self._held["memory"],
                "spill_bytes": self._held["file"],
                "memory_limit_bytes": self.limits.memory_bytes,
                "spill_limit_bytes": self.limits.spill_bytes,
                **{name: getattr(self._counts, name) for name in Counts.__slots__},
            }

    @property
    def held_bytes(self) -> int:
        """Bytes in memory and in files."""
        with self._lock:
            return sum(self._held.values())


@dataclass(slots=True, eq=False)
class Pending:
    """A shard whose bytes are arriving, in order. Left without `commit`, it is aborted."""

    shard_id: str
    owner: str
    size_bytes: int
    content: Content
    _where: Where
    _store: ShardStore
    _at: int = 0
    _digest: Any = field(default_factory=xxhash.xxh3_128)
    _ended: bool = False

    def write(self, data: Bytes) -> None:
        """The next bytes.

        Raises:
            Damaged: there are more than were announced.
        """
        if self._at + len(data) > self.size_bytes:
            raise Damaged(f"shard {self.shard_id!r} has more than {self.size_bytes:,} bytes")
        self.content.write(self._at, data)
        self._digest.update(data)
        self._at += len(data)

    def commit(self, checksum: str = "") -> Layout:
        """Hold the shard from now on.

        Args:
            checksum: of all bytes, by the sender; empty if it did not say.

        Raises:
            Damaged: the bytes are incomplete, differ from the checksum, or are no shard.
        """
        name = f"shard {self.shard_id!r}"
        if self._at < self.size_bytes:
            raise Damaged(f"{name} has {self._at:,} bytes instead of {self.size_bytes:,}")
        found = self._digest.hexdigest()
        if checksum and checksum != found:
            raise Damaged(f"{name} arrived with checksum {found}, but was sent with {checksum}")
        try:
            end = min(header_end(self.content.read(0, min(8, self.size_bytes))), self.size_bytes)
            layout = read_layout(self.content.read(0, end), self.size_bytes)
        except ValueError as error:
            raise Damaged(f"{name}: {error}") from error
        self._ended = True
        self._store._settle(
            self.shard_id,
            self._where,
            self.size_bytes,
            _Shard(
                shard_id=self.shard_id,
                owner=self.owner,
                content=self.content,
                size_bytes=self.size_bytes,
                where=self._where,
                layout=layout,
                checksum=found,
                since_s=self._store._clock(),
            ),
        )
        return layout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._ended = True
            if isinstance(self.content, InFile):
                self.content.close()
            self._store._settle(self.shard_id, self._where, self.size_bytes, None)
            with self._store._lock:
                self._store._counts.aborted += 1
