"""Shards are safetensors files whose lengths come first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from areal_lab.cluster.shards.layout import LENGTHS, read_layout, write_shard
from areal_lab.cluster.shards.metadata import TensorMetadata
from areal_lab.data.arrays.jagged import Field, Jagged, row_count
from tests.cluster.shards.fields import some_fields


@settings(max_examples=30)
@given(some_fields())
def test_the_safetensors_library_reads_a_shard(fields: dict[str, Field]) -> None:
    layout, data = write_shard(fields)
    tensors = load(data.tobytes())
    for name, one in fields.items():
        values = one.values if isinstance(one, Jagged) else one
        np.testing.assert_array_equal(tensors[name], values)
        if isinstance(one, Jagged):
            np.testing.assert_array_equal(tensors[name + LENGTHS], one.lengths)
    assert read_layout(data.data, len(data)) == layout
    assert layout.batch_size == row_count(fields)


@settings(max_examples=30)
@given(some_fields())
def test_lengths_come_first_and_tensors_are_aligned(fields: dict[str, Field]) -> None:
    layout, data = write_shard(fields)
    for name, place in layout.places.items():
        assert (place.end <= layout.prefix_bytes) == name.endswith(
            LENGTHS
        ) or place.end == place.start
        assert place.start % np.dtype(place.dtype).itemsize == 0
    # A reader with nothing but the prefix finds all lengths.
    for name, one in fields.items():
        found = layout.lengths(name, data[: layout.prefix_bytes].data)
        assert (found is not None) == isinstance(one, Jagged)
        if isinstance(one, Jagged):
            np.testing.assert_array_equal(found, one.lengths)


def test_metadata_says_what_varies() -> None:
    fields: dict[str, Field] = {
        "tokens": Jagged.of_rows([[1, 2], [3]], "int32"),
        "pixels": np.zeros((2, 4, 4), np.float32),
    }
    assert write_shard(fields)[0].metadata() == {
        "tokens": TensorMetadata((2, -1), "int32"),
        "pixels": TensorMetadata((2, 4, 4), "float32"),
    }


@settings(max_examples=100)
@given(some_fields(), st.data())
def test_a_damaged_header_is_refused_or_harmless(
    fields: dict[str, Field], data: st.DataObject
) -> None:
    layout, shard = write_shard(fields)
    at = data.draw(st.integers(0, min(place.start for place in layout.places.values()) - 1))
    shard[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read_layout(shard.data, len(shard))
    except ValueError:
        return
    for place in found.places.values():  # a name changed, but no reader leaves the shard
        assert 0 <= place.start <= place.end <= len(shard)


def test_files_that_are_no_shards_are_refused() -> None:
    _, shard = write_shard({"a": np.zeros(2)})
    with pytest.raises(ValueError, match="has 3 bytes, but must begin with 8"):
        read_layout(b"abc", 3)
    with pytest.raises(ValueError, match="it is no safetensors file"):
        read_layout(b"\xff" * 16, 16)
    with pytest.raises(ValueError, match="end at byte"):
        read_layout(shard.data, len(shard) + 1)
    overlapping = write_shard({"a": np.zeros(2), "b": np.zeros(2)})[1].tobytes()
    overlapping = overlapping.replace(b"[16,32]", b"[ 8,24]")[:-8]
    with pytest.raises(ValueError, match=r"tensor 'b' of a shard begins at \d+, not at"):
        read_layout(overlapping, len(overlapping))
    other = save({"a": np.zeros(2)})
    with pytest.raises(ValueError, match="__metadata__"):
        read_layout(other, len(other))


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        (np.zeros(2), "a.lengths", "that name has another meaning"),
        (np.zeros(2), "", "that name has another meaning"),
        (np.zeros(2), "__metadata__", "that name has another meaning"),
        (np.zeros(2, np.complex64), "a", "type complex64, but a shard holds .* view of uint16"),
        (np.array(["x", "y"]), "a", "type <U1"),
    ],
)
def test_fields_that_cannot_be_held_are_refused(field: Field, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard({name: field})
