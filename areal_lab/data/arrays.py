"""Trajectories as flat arrays, packed where they are generated and unpacked where they train.

A row of the arrays is one sample: all rows of its conversation, which are adjacent.

| field | type | values of one sample |
| --- | --- | --- |
| `tokens` | int32 | prompt and response of each trajectory |
| `logprobs` | float32 | log pi_behav of each generated token |
| `spans` | int32 (2) | tokens and version of each segment; `PROMPT_VERSION` for observations |
| `rows` | int32 (6) | of each trajectory: `Column` |
| `placed` | int32 (4) | of each image of each trajectory: start, rows, columns, bytes |
| `images` | uint8 | the PNG files of these images, concatenated |
| `reward` | float64 | of each trajectory |
| `turn_returns` | float64 | of each turn, where turns are compared |
| `rewards` | uint8 | named components as JSON, a record per trajectory; empty if there are none |
| `group`, `sample` | int64 | one each |

A generated token takes 8 bytes, a token of the prompt 4, a segment 8. Log-probs are rounded to
float32, in which engines compute and trainers read them; everything else is exact.

Fields of a batch as numpy arrays: a value per row, or rows of unequal length in one array.

dense     reward    [0.5, 1.0]                   shape (rows, ...)
jagged    tokens    [7 8 9 | 7 8 9 4 2]          values, shape (total, ...)
          lengths   [3, 5]                       rows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain, groupby
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.data.images import EncodedImage, PlacedImage, image_of_bytes
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Trajectory

_ENDS: Final[tuple[SampleEnd, ...]] = get_args(SampleEnd)


class Column(IntEnum):
    """Columns of `rows`."""

    ROW = 0
    PROMPT_TOKENS = 1
    SPANS = 2
    TURN_RETURNS = 3
    FINISH_REASON = 4
    IMAGES = 5


_JAGGED: Final = {
    "tokens": ("int32", 0),
    "logprobs": ("float32", 0),
    "spans": ("int32", 2),
    "rows": ("int32", len(Column)),
    "placed": ("int32", 4),
    "images": ("uint8", 0),
    "reward": ("float64", 0),
    "turn_returns": ("float64", 0),
    "rewards": ("uint8", 0),
}
"""Type and width of each field; a width of 0 has no second axis."""
_FLAT: Final = ("tokens", "logprobs", "spans", "turn_returns", "placed")
"""Fields whose values are distributed over the trajectories of a sample in order."""


def pack_samples(trajectories: Sequence[Trajectory]) -> dict[str, Field]:
    """Arrays of these samples."""
    samples = [
        list(rows) for _, rows in groupby(trajectories, lambda each: (each.group, each.sample))
    ]
    if not samples:
        raise ValueError("there are no trajectories to pack")
    values: dict[str, list[list[Any]]] = {name: [] for name in _JAGGED}
    for rows in samples:
        for name, one in _of_sample(rows).items():
            values[name].append(one)
    fields: dict[str, Field] = {}
    for name, (dtype, width) in _JAGGED.items():
        fields[name] = _jagged(name, values[name], dtype, width)
    fields["group"] = np.array([rows[0].group for rows in samples], np.int64)
    fields["sample"] = np.array([rows[0].sample for rows in samples], np.int64)
    return fields


def unpack_samples(fields: Mapping[str, Field]) -> list[Trajectory]:
    """Inverse of `pack_samples`, also for a part of its rows."""
    found = {name: _checked(fields, name) for name in _JAGGED}
    groups, samples = (np.asarray(_field(fields, name)).tolist() for name in ("group", "sample"))
    count = row_count(fields)
    split = {name: one.split() for name, one in found.items()}
    trajectories: list[Trajectory] = []
    for index in range(count):
        sample = {name: pieces[index] for name, pieces in split.items()}
        try:
            trajectories += _unpacked(groups[index], samples[index], sample)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the arrays of sample {index} are damaged: {error}") from error
    return trajectories


def _of_sample(rows: Sequence[Trajectory]) -> dict[str, list[Any]]:
    parts = [part for row in rows for part in row.parts]
    return {
        "tokens": list(
            chain.from_iterable(
                chain(row.prompt_tokens, *(part.tokens for part in row.parts)) for row in rows
            )
        ),
        "logprobs": list(
            chain.from_iterable(part.logprobs for part in parts if isinstance(part, Segment))
        ),
        "spans": [
            (len(part.tokens), part.version if isinstance(part, Segment) else PROMPT_VERSION)
            for part in parts
        ],
        "rows": [
            (
                row.row,
                len(row.prompt_tokens),
                len(row.parts),
                len(row.turn_returns),
                _ENDS.index(row.finish_reason),
                len(row.images),
            )
            for row in rows
        ],
        "placed": [
            (one.start, one.rows, one.columns, len(one.image.png))
            for row in rows
            for one in row.images
        ],
        "images": list(b"".join(one.image.png for row in rows for one in row.images)),
        "reward": [row.reward for row in rows],
        "turn_returns": [value for row in rows for value in row.turn_returns],
        "rewards": (
            list(json.dumps([row.rewards for row in rows], separators=(",", ":")).encode())
            if any(row.rewards for row in rows)
            else []
        ),
    }


def _jagged(name: str, rows: Sequence[Sequence[Any]], dtype: str, width: int) -> Jagged:
    lengths = np.array([len(row) for row in rows], np.int64)
    flat: Iterable[Any] = chain.from_iterable(rows)
    if width:
        flat = chain.from_iterable(flat)
    try:
        with np.errstate(over="ignore"):  # refused below
            values: Array = np.fromiter(flat, dtype, int(lengths.sum()) * max(1, width))
    except OverflowError as error:
        raise ValueError(f"a value of {name} does not fit into {dtype}: {error}") from error
    if name == "logprobs" and not np.isfinite(values).all():
        least = min(min(row, default=0.0) for row in rows)
        raise ValueError(f"log-prob {least} does not fit into float32, which a trainer reads")
    return Jagged(values.reshape(-1, width) if width else values, lengths)


def _unpacked(group: int, sample: int, values: Mapping[str, Array]) -> Iterable[Trajectory]:
    taken = {name: _Taken(values[name].tolist()) for name in _FLAT}
    tokens, logprobs, spans, returns, placed = taken.values()
    files = _Files(values["images"].tobytes())
    rows, rewards = values["rows"].tolist(), values["reward"].tolist()
    named = json.loads(values["rewards"].tobytes()) if len(values["rewards"]) else [{}] * len(rows)
    found = []
    for row, reward, components in zip(rows, rewards, named, strict=True):
        prompt = tokens.take(row[Column.PROMPT_TOKENS])
        parts: list[Segment | Observation] = []
        for length, version in spans.take(row[Column.SPANS]):
            if version == PROMPT_VERSION:
                parts.append(Observation(tokens.take(length)))
            else:
                parts.append(Segment(tokens.take(length), logprobs.take(length), version))
        found.append(
            Trajectory(
                group=group,
                sample=sample,
                row=row[Column.ROW],
                prompt_tokens=prompt,
                parts=tuple(parts),
                finish_reason=_ENDS[row[Column.FINISH_REASON]],
                reward=reward,
                rewards=dict(components),
                turn_returns=returns.take(row[Column.TURN_RETURNS]),
                images=tuple(
                    PlacedImage(files.take(size), start, height, width)
                    for start, height, width, size in placed.take(row[Column.IMAGES])
                ),
            )
        )
    if files.left:
        raise ValueError(f"{files.left} bytes of sample {group}/{sample} are of no image")
    for name, one in taken.items():
        if one.left:
            raise ValueError(f"{one.left} {name} of sample {group}/{sample} are in no trajectory")
    return found


class _Files:
    """Image files, consumed in order; equal ones are one object."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._known: dict[bytes, EncodedImage] = {}

    def take(self, size: int) -> EncodedImage:
        data = self._data[self._at : self._at + size]
        if len(data) < size or size < 1:
            raise IndexError(f"an image of {size} bytes, of which {len(data)} are there")
        self._at += size
        if data not in self._known:
            self._known[data] = image_of_bytes(data)
        return self._known[data]

    @property
    def left(self) -> int:
        return len(self._data) - self._at


class _Taken:
    """A list, consumed in pieces from the front."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._at = 0

    def take(self, count: int) -> tuple[Any, ...]:
        end = self._at + count
        if count < 0 or end > len(self._values):
            raise IndexError(f"{end} values of {len(self._values)}")
        taken = tuple(self._values[self._at : end])
        self._at = end
        return taken

    @property
    def left(self) -> int:
        return len(self._values) - self._at


def _field(fields: Mapping[str, Field], name: str) -> Field:
    if name not in fields:
        raise ValueError(f"packed samples have no field {name!r}, only {sorted(fields)}")
    return fields[name]


def _checked(fields: Mapping[str, Field], name: str) -> Jagged:
    field = _field(fields, name)
    dtype, width = _JAGGED[name]
    shape = (width,) if width else ()
    if (
        isinstance(field, Jagged)
        and field.values.dtype == dtype
        and field.values.shape[1:] == shape
    ):
        return field
    raise ValueError(f"field {name!r} of packed samples must have rows of {dtype}")


Array: TypeAlias = NDArray[Any]


class Jagged(NamedTuple):
    """Rows of unequal length."""

    values: Array
    """Concatenated values of all rows."""
    lengths: NDArray[np.int64]
    """Number of values of each row."""

    @staticmethod
    def of_rows(rows: Sequence[Sequence[Any]], dtype: str) -> Jagged:
        """Create from the values of each row."""
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.array([value for row in rows for value in row], dtype)
        return Jagged(values, lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Start of each row, and the end: one more than there are rows."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def split(self) -> list[Array]:
        """Values of each row, as views."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])

    def rows(self, start: int, stop: int) -> Jagged:
        """Rows `[start, stop)`, as views."""
        first, end = self.offsets[[start, stop]]
        return Jagged(self.values[first:end], self.lengths[start:stop])


Field: TypeAlias = "Array | Jagged"
Fields: TypeAlias = Mapping[str, Field]


def field_bytes(field: Field) -> int:
    """Bytes of the values of a field, without the lengths of its rows."""
    return int((field.values if isinstance(field, Jagged) else field).nbytes)


def row_count(fields: Fields) -> int:
    """Number of rows of all fields."""
    rows: dict[str, int] = {}
    for name, one in fields.items():
        if isinstance(one, Jagged):
            if one.lengths.ndim != 1 or (len(one.lengths) and one.lengths.min() < 0):
                raise ValueError(f"field {name!r} has lengths {one.lengths}, but they must be >= 0")
            if one.values.ndim < 1 or one.lengths.sum() != len(one.values):
                raise ValueError(
                    f"field {name!r} has values of shape {one.values.shape}, but lengths that add "
                    f"up to {one.lengths.sum()}"
                )
            rows[name] = len(one.lengths)
        elif one.ndim < 1:
            raise ValueError(f"field {name!r} is a scalar, but the first axis must be the rows")
        else:
            rows[name] = len(one)
    if not rows or not all(rows.values()) or len(set(rows.values())) > 1:
        raise ValueError(
            f"fields must have the same number of rows, at least one, but have {rows or 'none'}"
        )
    return next(iter(rows.values()))


def slice_rows(fields: Fields, start: int, stop: int) -> dict[str, Field]:
    """Rows `[start, stop)` of all fields, as views."""
    return {
        name: one.rows(start, stop) if isinstance(one, Jagged) else one[start:stop]
        for name, one in fields.items()
    }


def concat_rows(parts: Sequence[Fields]) -> dict[str, Field]:
    """Concatenate the rows of several batches with the same fields."""
    if not parts:
        raise ValueError("there are no rows to concatenate")
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _concat(name, [part[name] for part in parts]) for name in parts[0]}


def _concat(name: str, parts: Sequence[Field]) -> Field:
    jagged = [part for part in parts if isinstance(part, Jagged)]
    if len(jagged) == len(parts):
        return Jagged(
            np.concatenate([part.values for part in jagged]),
            np.concatenate([part.lengths for part in jagged]),
        )
    dense = [part for part in parts if not isinstance(part, Jagged)]
    if len(dense) != len(parts):
        raise ValueError(f"field {name!r} has rows of unequal length in some batches only")
    return np.concatenate(dense)
