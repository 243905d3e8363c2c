"""Where the rows of each field are in the bytes of a shard, a safetensors file.

    8 bytes | header (JSON) | NAME.lengths ... | 8-byte types | 4-byte types | 2 | 1
    '------------- prefix --------------------'
                                                 tokens: r0 r1 [r2 r3] r4   rows [2, 4): one range

A field with rows of unequal length is two tensors, `NAME` and `NAME.lengths` (int64). All lengths
come first, so a reader of some rows fetches the prefix and then one range per field. Written here
and not by the safetensors library, which copies all tensors and orders them by name.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.cluster.shards.metadata import VARIES, TensorMetadata
from areal_lab.data.arrays.jagged import Array, Fields, Jagged, row_count

LENGTHS: Final = ".lengths"
"""Ends the name of the tensor with a jagged field's lengths."""
_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""Types in numpy and in safetensors."""
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_SIZE_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100 << 20
"""Of the safetensors library."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in a shard."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the shard."""

    @property
    def row_bytes(self) -> int:
        """Of one row, or of one value of a jagged field."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.shape[0] * self.row_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a shard."""

    batch_size: int
    """Rows."""
    places: Mapping[str, Place]
    """By name of the tensor, in order of bytes."""
    prefix_bytes: int
    """Size of the header and all lengths."""
    size_bytes: int

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(name for name in self.places if not name.endswith(LENGTHS))

    def metadata(self) -> dict[str, TensorMetadata]:
        """Of each field."""
        found = {}
        for name in self.fields:
            place = self.places[name]
            shape = place.shape
            if name + LENGTHS in self.places:
                shape = (self.batch_size, VARIES, *shape[1:])
            found[name] = TensorMetadata(shape, place.dtype)
        return found

    def lengths(self, field: str, shard: memoryview) -> NDArray[np.int64] | None:
        """Lengths of a jagged field, as a view; None if it is dense.

        Args:
            shard: its bytes, at least the prefix.
        """
        place = self.places.get(field + LENGTHS)
        if place is None:
            return None
        return np.frombuffer(shard, np.int64, self.batch_size, place.start)


def write_shard(fields: Fields) -> tuple[Layout, Array]:
    """The bytes of a shard (uint8), and where its tensors are in them.

    Raises:
        ValueError: naming the field that cannot be written.
    """
    rows = row_count(fields)
    tensors = _tensors(fields)
    layout, header = _planned(rows, tensors)
    shard = np.empty(layout.size_bytes, np.uint8)
    shard[: len(header)] = np.frombuffer(header, np.uint8)
    for name, place in layout.places.items():
        target = shard[place.start : place.end].view(place.dtype).reshape(place.shape)
        target[...] = tensors[name]
    return layout, shard


def header_end(start: bytes | memoryview) -> int:
    """Where the header ends, from the first 8 bytes of a shard.

    Raises:
        ValueError: they do not begin a safetensors file.
    """
    if len(start) < _SIZE_BYTES:
        raise ValueError(f"a shard has {len(start)} bytes, but must begin with 8 for its header")
    (size,) = struct.unpack("<Q", start[:_SIZE_BYTES])
    if size > _MOST_HEADER_BYTES:
        raise ValueError(f"the header of a shard has {size} bytes: it is no safetensors file")
    return _SIZE_BYTES + int(size)


def read_layout(start: bytes | memoryview, size_bytes: int) -> Layout:
    """Where the tensors of a shard are.

    Args:
        start: the bytes of the shard, at least its header.
        size_bytes: of the whole shard.

    Raises:
        ValueError: naming what is wrong with the shard.
    """
    end = header_end(start)
    if len(start) < end:
        raise ValueError(f"the header of a shard ends at byte {end}, but it has {len(start)}")
    try:
        header: dict[str, Any] = json.loads(bytes(start[_SIZE_BYTES:end]))
        rows = int(header.pop("__metadata__")["rows"])
        places = {
            name: _place(end, about)
            for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the header of a shard cannot be read: {error!r}") from error
    at = end
    for name, place in places.items():
        if place.start != at:
            raise ValueError(f"tensor {name!r} of a shard begins at {place.start}, not at {at}")
        at = place.end
    if at != size_bytes:
        raise ValueError(f"the tensors of a shard end at byte {at}, but it has {size_bytes}")
    layout = Layout(rows, places, _prefix(end, places), size_bytes)
    _check_rows(layout)
    return layout


def _check_rows(layout: Layout) -> None:
    for name, place in layout.places.items():
        jagged = name + LENGTHS in layout.places
        lengths = name.endswith(LENGTHS)
        if lengths and (place.dtype != "int64" or len(place.shape) != 1):
            raise ValueError(f"tensor {name!r} of a shard has {place.dtype} {place.shape}")
        if lengths and name.removesuffix(LENGTHS) not in layout.places:
            raise ValueError(f"tensor {name!r} of a shard has no values")
        if not jagged and place.shape[0] != layout.batch_size:
            raise ValueError(
                f"tensor {name!r} of a shard has {place.shape[0]} rows, not {layout.batch_size}"
            )
        if lengths and place.end > layout.prefix_bytes:
            raise ValueError(f"tensor {name!r} of a shard must be before all values")
    if layout.batch_size < 1 or not layout.fields:
        raise ValueError(f"a shard has {layout.batch_size} rows of {len(layout.fields)} fields")


def _tensors(fields: Fields) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for name, one in fields.items():
        if not name or name.endswith(LENGTHS) or name == "__metadata__":
            raise ValueError(f"a field is named {name!r}; that name has another meaning in a shard")
        if isinstance(one, Jagged):
            tensors[name + LENGTHS] = one.lengths.astype(np.int64, copy=False)
        tensors[name] = one.values if isinstance(one, Jagged) else one
        dtype = tensors[name].dtype
        if dtype.name not in _NAMES:
            raise ValueError(
                f"field {name!r} has type {dtype}, but a shard holds {', '.join(_NAMES)} only; "
                "send bfloat16 as a view of uint16"
            )
    return tensors


def _planned(rows: int, tensors: Mapping[str, Array]) -> tuple[Layout, bytes]:
    """The layout and the header, padded so that every tensor is aligned to its type."""
    names = sorted(
        tensors, key=lambda name: (not name.endswith(LENGTHS), -tensors[name].itemsize, name)
    )
    about: dict[str, Any] = {"__metadata__": {"rows": str(rows)}}
    at = 0
    for name in names:
        end = at + tensors[name].nbytes
        about[name] = {
            "dtype": _NAMES[tensors[name].dtype.name],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _SIZE_BYTES)
    header = struct.pack("<Q", len(text)) + text
    places = {name: _place(len(header), about[name]) for name in names}
    return Layout(rows, places, _prefix(len(header), places), len(header) + at), header


def _place(header_bytes: int, about: Mapping[str, Any]) -> Place:
    first, end = about["data_offsets"]
    place = Place(_DTYPES[about["dtype"]], tuple(about["shape"]), header_bytes + int(first))
    if not place.shape or min(place.shape) < 0 or place.end != header_bytes + end:
        raise ValueError(f"{about['dtype']} {about['shape']} is not bytes {first} to {end}")
    return place


def _prefix(header_bytes: int, places: Mapping[str, Place]) -> int:
    lengths = [place.end for name, place in places.items() if name.endswith(LENGTHS)]
    return max([header_bytes, *lengths])
