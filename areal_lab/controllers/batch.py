"""Metadata of a batch, of which the controllers' program keeps the tensors; it carries none.

    BatchMetadata                        rows
      ShardMetadata s1 of n1             0 1 2 3      [0, 4) of s1
      ShardMetadata s2 of n2             4 5 6        [2, 5) of s2: a sub-shard
        TensorMetadata "tokens"          shape (3, -1): the second length varies by row
        TensorMetadata "reward"          shape (3,)

A row is one sample, and a shard has those of one group. `HeldShards` keeps the tensors until they
are freed; a batch can be divided and joined by its metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Final
from uuid import uuid4

from areal_lab.control.microbatch import consecutive_parts
from areal_lab.data.arrays import (
    Field,
    Fields,
    Jagged,
    concat_rows,
    field_bytes,
    row_count,
    slice_rows,
)
from areal_lab.host.memory import memory_bytes

_SHARE: Final = 0.25
"""Largest share of this machine's memory that tensors take."""
VARIES: Final = -1
"""In a shape: the length differs from row to row."""
_DTYPES: Final = frozenset(
    (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
)


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One field of a shard."""

    shape: Sequence[int]
    """Rows first. `VARIES` in second place if each row has a length of its own."""
    dtype: str
    """As in numpy and torch: `int32`, `float32`, ..."""

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        object.__setattr__(self, "shape", shape)
        fixed = shape[:1] + shape[2:] if shape[1:2] == (VARIES,) else shape
        if not shape or min(fixed) < 0:
            raise ValueError(
                f"shape is {shape}, but must have the rows first and no negative length, except "
                f"{VARIES} in second place for lengths that vary by row"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, but must be one of {sorted(_DTYPES)}")


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """Rows `[offset, offset + batch_size)` of a shard that one host generated."""

    node_id: str
    """Name of that host."""
    shard_id: str
    batch_size: int
    offset: int = 0
    fields: Mapping[str, TensorMetadata] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    """Tokens of each row, if known; what balances ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        name = f"shard {self.shard_id!r} of {self.node_id!r}"
        for what in ("node_id", "shard_id"):
            if not getattr(self, what):
                raise ValueError(f"{what} of {name} is empty")
        if self.batch_size < 1 or self.offset < 0:
            raise ValueError(
                f"{name} has batch_size {self.batch_size} and offset {self.offset}, but needs "
                "batch_size >= 1 and offset >= 0"
            )
        if self.lengths and len(self.lengths) != self.batch_size:
            raise ValueError(
                f"{name} has {len(self.lengths)} lengths for {self.batch_size} rows; give one for "
                "each row, or none"
            )
        if self.lengths and min(self.lengths) < 0:
            raise ValueError(f"{name} has a row of {min(self.lengths)} tokens")
        for field_name, tensor in self.fields.items():
            if tensor.shape[0] != self.batch_size:
                raise ValueError(
                    f"field {field_name!r} of {name} has {tensor.shape[0]} rows, but the shard has "
                    f"{self.batch_size}"
                )

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.offset + self.batch_size

    def rows(self, start: int, stop: int) -> ShardMetadata:
        """The sub-shard of rows `[start, stop)`, counted from this one's first.

        Raises:
            ValueError: there are no such rows.
        """
        if not 0 <= start < stop <= self.batch_size:
            raise ValueError(
                f"rows [{start}, {stop}) of shard {self.shard_id!r}: it has {self.batch_size} rows"
            )
        size = stop - start
        return replace(
            self,
            batch_size=size,
            offset=self.offset + start,
            fields={
                name: replace(tensor, shape=(size, *tensor.shape[1:]))
                for name, tensor in self.fields.items()
            },
            lengths=self.lengths[start:stop],
        )


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """One batch of training, in shards."""

    batch_id: str
    global_step: int
    """The training step that consumes it."""
    total_batch_size: int
    """Rows of all shards."""
    shards: Sequence[ShardMetadata] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        name = f"batch {self.batch_id!r}"
        if not self.batch_id:
            raise ValueError("batch_id is empty")
        if self.global_step < 0:
            raise ValueError(f"{name} has global_step {self.global_step}, but it must be >= 0")
        rows = sum(shard.batch_size for shard in self.shards)
        if self.total_batch_size < 1 or (self.shards and rows != self.total_batch_size):
            raise ValueError(
                f"{name} has total_batch_size {self.total_batch_size}, but its shards have {rows} "
                "rows and there must be at least one"
            )
        _check_same_fields(name, self.shards)
        _check_no_overlap(name, self.shards)


@dataclass(frozen=True, slots=True)
class DistributedBatch:
    """A batch that is divided and joined by its metadata, without its tensors."""

    metadata: BatchMetadata

    def __post_init__(self) -> None:
        if not self.metadata.shards:
            raise ValueError(f"batch {self.metadata.batch_id!r} has no shards")

    def __len__(self) -> int:
        return self.metadata.total_batch_size

    @property
    def shards(self) -> Sequence[ShardMetadata]:
        """Where the rows are, in their order."""
        return self.metadata.shards

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Tokens of each row; None if some shard does not say."""
        if not all(shard.lengths for shard in self.shards):
            return None
        return tuple(length for shard in self.shards for length in shard.lengths)

    def rows(self, start: int, stop: int) -> DistributedBatch:
        """Rows `[start, stop)`.

        Raises:
            ValueError: there are no such rows.
        """
        if not 0 <= start < stop <= len(self):
            raise ValueError(
                f"rows [{start}, {stop}) of batch {self.metadata.batch_id!r}: it has {len(self)}"
            )
        found = []
        first = 0
        for shard in self.shards:
            low, high = max(start - first, 0), min(stop - first, shard.batch_size)
            if low < high:
                found.append(shard.rows(low, high))
            first += shard.batch_size
        return DistributedBatch(
            replace(self.metadata, total_batch_size=stop - start, shards=tuple(found))
        )

    def chunk(self, dp_size: int) -> list[DistributedBatch]:
        """A part for each data-parallel rank, of equally many rows, or one more in the first ones.

        Raises:
            ValueError: there are fewer rows than ranks.
        """
        _check_ranks(dp_size, len(self), "rows")
        size, more = divmod(len(self), dp_size)
        return self._cut([size + (rank < more) for rank in range(dp_size)])

    def chunk_by_tokens(self, dp_size: int, *, group_size: int = 1) -> list[DistributedBatch]:
        """A part for each data-parallel rank, so that the largest one has the fewest tokens.

        Rows stay in order: a part is a few ranges of bytes, and exceeds the mean by less than one
        group.

        Args:
            dp_size: number of ranks.
            group_size: consecutive rows that stay together, such as the samples of one prompt.

        Raises:
            ValueError: a shard has no lengths, the number of rows is not a multiple of
                `group_size`, or there are fewer groups than ranks.
        """
        lengths = self.lengths
        if lengths is None:
            raise ValueError(
                f"batch {self.metadata.batch_id!r} has shards without lengths; put them with a "
                "field 'tokens', or use chunk()"
            )
        if group_size < 1 or len(lengths) % group_size:
            raise ValueError(
                f"group_size is {group_size}, but {len(lengths)} rows must be a multiple of it"
            )
        starts = range(0, len(lengths), group_size)
        groups = [max(1, sum(lengths[start : start + group_size])) for start in starts]
        _check_ranks(dp_size, len(groups), "groups" if group_size > 1 else "rows")
        return self._cut([group_size * size for size in consecutive_parts(groups, dp_size)])

    def _cut(self, sizes: Iterable[int]) -> list[DistributedBatch]:
        return [self.rows(*ends) for ends in pairwise(accumulate(sizes, initial=0))]

    @staticmethod
    def concat(batches: Sequence[DistributedBatch], *, batch_id: str = "") -> DistributedBatch:
        """The rows of several batches, one after the other; id and step are the first one's.

        Raises:
            ValueError: there is none, or they have other fields or the same rows.
        """
        if not batches:
            raise ValueError("there is no batch to concatenate")
        first = batches[0].metadata
        return DistributedBatch(
            BatchMetadata(
                batch_id or first.batch_id,
                first.global_step,
                sum(map(len, batches)),
                tuple(shard for batch in batches for shard in batch.shards),
            )
        )


@dataclass(slots=True)
class HeldShards:
    """The tensors of shards, in this process, until they are freed."""

    limit_bytes: int = field(default_factory=lambda: int(_SHARE * memory_bytes()))
    size_bytes: int = 0
    _fields: dict[str, Fields] = field(default_factory=dict)
    """By `shard_id`."""

    def put(self, fields: Fields, node_id: str) -> ShardMetadata:
        """Keep rows that a host has sent, and describe them; `tokens` has their lengths.

        Raises:
            StoreFull: there is no room.
        """
        size_bytes = _bytes(fields)
        if self.size_bytes + size_bytes > self.limit_bytes:
            raise StoreFull(
                f"no room for {size_bytes:,} bytes from {node_id}: {len(self)} groups that wait, "
                f"or are of batches that were not freed, have {self.size_bytes:,} of "
                f"{self.limit_bytes:,} bytes; free batches once they are trained on, or lower "
                "rollout.max_head_offpolicyness"
            )
        rows, tokens = row_count(fields), fields.get("tokens")
        shard = ShardMetadata(
            node_id=node_id,
            shard_id=uuid4().hex,
            batch_size=rows,
            fields={name: _described(one, rows) for name, one in fields.items()},
            lengths=tokens.lengths.tolist() if isinstance(tokens, Jagged) else (),
        )
        self._fields[shard.shard_id] = fields
        self.size_bytes += size_bytes
        return shard

    def get(self, shards: Iterable[ShardMetadata]) -> dict[str, Field]:
        """The rows of shards and sub-shards, one after the other.

        Raises:
            BatchMissing: a shard was freed.
        """
        found = []
        for shard in shards:
            if (fields := self._fields.get(shard.shard_id)) is None:
                raise BatchMissing(
                    f"there is no shard {shard.shard_id!r} of {shard.node_id} here: it was freed; "
                    f"{len(self._fields)} others are held"
                )
            found.append(slice_rows(fields, shard.offset, shard.end))
        return concat_rows(found)

    def free(self, shards: Iterable[ShardMetadata]) -> None:
        """Free shards, whole ones also for their sub-shards; freeing twice is harmless."""
        for shard in shards:
            if (fields := self._fields.pop(shard.shard_id, None)) is not None:
                self.size_bytes -= _bytes(fields)

    def __len__(self) -> int:
        return len(self._fields)


class StoreFull(RuntimeError):
    """There is no room for the tensors of another group."""


class BatchMissing(RuntimeError):
    """A batch cannot be trained on: some of it was freed."""


def _bytes(fields: Fields) -> int:
    return sum(map(field_bytes, fields.values()))


def _described(one: Field, rows: int) -> TensorMetadata:
    if isinstance(one, Jagged):
        return TensorMetadata((rows, VARIES, *one.values.shape[1:]), one.values.dtype.name)
    return TensorMetadata(one.shape, one.dtype.name)


def _check_ranks(dp_size: int, parts: int, what: str) -> None:
    if not 1 <= dp_size <= parts:
        raise ValueError(
            f"dp_size is {dp_size}, but must be from 1 to the number of {what}, {parts}"
        )


def _check_same_fields(name: str, shards: Sequence[ShardMetadata]) -> None:
    known: dict[str, tuple[str, tuple[int, ...]]] | None = None
    for shard in shards:
        found = {key: (one.dtype, tuple(one.shape[1:])) for key, one in shard.fields.items()}
        if known is None:
            known = found
        if found != known:
            wrong = sorted(key for key in found | known if found.get(key) != known.get(key))
            raise ValueError(
                f"{name}: shards {shards[0].shard_id!r} and {shard.shard_id!r} differ in field "
                f"{wrong[0]!r}: {known.get(wrong[0])} and {found.get(wrong[0])}"
            )


def _check_no_overlap(name: str, shards: Sequence[ShardMetadata]) -> None:
    placed = sorted((one.node_id, one.shard_id, one.offset, one.end) for one in shards)
    for before, after in pairwise(placed):
        if before[:2] == after[:2] and after[2] < before[3]:
            raise ValueError(
                f"{name} has row {after[2]} of shard {after[1]!r} of {after[0]!r} twice"
            )
