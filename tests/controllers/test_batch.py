"""Batches are divided and joined as metadata, and lose or repeat no row; tensors are kept."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.controllers.batch import (
    BatchMetadata,
    BatchMissing,
    DistributedBatch,
    HeldShards,
    ShardMetadata,
    StoreFull,
    TensorMetadata,
)
from areal_lab.data.arrays import Field, Jagged, slice_rows
from tests.controllers.fields import assert_equal, some_fields


def shard(number: int, tokens: list[int], /, **changes: Any) -> ShardMetadata:
    known: dict[str, Any] = {
        "node_id": f"n{number % 2}",
        "shard_id": f"s{number}",
        "batch_size": len(tokens),
        "fields": {"tokens": TensorMetadata((len(tokens), -1), "int32")},
        "lengths": tokens,
    }
    return ShardMetadata(**{**known, **changes})


def batch(lengths_of_shards: list[list[int]]) -> DistributedBatch:
    shards = [shard(number, lengths) for number, lengths in enumerate(lengths_of_shards)]
    return DistributedBatch(BatchMetadata("b", 3, sum(map(len, lengths_of_shards)), shards))


def rows(one: DistributedBatch) -> list[tuple[str, int]]:
    """Shard and row of each row."""
    return [(each.shard_id, row) for each in one.shards for row in range(each.offset, each.end)]


BATCHES = st.lists(
    st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=5
).map(batch)


@given(BATCHES)
def test_metadata_returns_from_pickle(one: DistributedBatch) -> None:
    assert pickle.loads(pickle.dumps(one)) == one


@given(BATCHES, st.data())
def test_chunks_have_every_row_once_in_order(one: DistributedBatch, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, len(one)))
    for parts in (one.chunk(ranks), one.chunk_by_tokens(ranks)):
        assert len(parts) == ranks
        assert [row for part in parts for row in rows(part)] == rows(one)
        assert DistributedBatch.concat(parts).lengths == one.lengths
        assert all(part.metadata.batch_id == "b" for part in parts)
        assert all(part.metadata.global_step == 3 for part in parts)
    sizes = [len(part) for part in one.chunk(ranks)]
    assert max(sizes) - min(sizes) <= 1


@given(BATCHES, st.data())
def test_chunks_of_chunks_are_sub_shards_of_the_same_shards(
    one: DistributedBatch, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(one) - 1))
    stop = data.draw(st.integers(start + 1, len(one)))
    some = one.rows(start, stop)
    assert rows(some) == rows(one)[start:stop]
    again = data.draw(st.integers(0, len(some) - 1))
    assert rows(some.rows(again, len(some))) == rows(one)[start + again : stop]


def test_tokens_balance_the_ranks() -> None:
    one = batch([[9, 1, 1], [1, 1, 1, 1, 1]])
    parts = one.chunk_by_tokens(2)
    assert [sum(part.lengths or ()) for part in parts] == [9, 7]
    assert [len(part) for part in parts] == [1, 7]
    assert [(each.shard_id, each.offset, each.batch_size) for each in parts[1].shards] == [
        ("s0", 1, 2),
        ("s1", 0, 5),
    ]


def test_groups_stay_together() -> None:
    parts = batch([[9, 1, 1, 1], [1, 1]]).chunk_by_tokens(2, group_size=2)
    assert [len(part) for part in parts] == [2, 4]
    with pytest.raises(ValueError, match="group_size is 4, but 6 rows must be a multiple of it"):
        batch([[9, 1, 1, 1], [1, 1]]).chunk_by_tokens(2, group_size=4)
    with pytest.raises(ValueError, match="from 1 to the number of groups, 3"):
        batch([[9, 1, 1, 1], [1, 1]]).chunk_by_tokens(4, group_size=2)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(
        ValueError, match="dp_size is 4, but must be from 1 to the number of rows, 3"
    ):
        batch([[1, 1, 1]]).chunk(4)
    without = DistributedBatch(BatchMetadata("b", 0, 2, [shard(0, [1, 1], lengths=())]))
    assert without.lengths is None
    with pytest.raises(ValueError, match="shards without lengths; put them with a field 'tokens'"):
        without.chunk_by_tokens(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0, "lengths": (), "fields": {}}, "batch_size 0 and offset 0"),
        ({"offset": -1}, "offset -1"),
        ({"node_id": ""}, "node_id of shard 's0' of '' is empty"),
        ({"lengths": [1]}, "1 lengths for 2 rows"),
        ({"lengths": [1, -1]}, "a row of -1 tokens"),
        ({"fields": {"a": TensorMetadata((3,), "int8")}}, "field 'a' .* has 3 rows"),
    ],
)
def test_a_malformed_shard_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(0, [1, 1], **changes)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((), "int8", "rows first"),
        ((2, -2), "int8", "no negative length"),
        ((-1, 2), "int8", "no negative length"),
        ((2,), "float8", "dtype is 'float8', but must be one of"),
    ],
)
def test_a_malformed_tensor_is_refused(shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorMetadata(shape, dtype)


def test_a_malformed_batch_is_refused() -> None:
    first = shard(0, [1, 1])
    with pytest.raises(ValueError, match="total_batch_size 3, but its shards have 2 rows"):
        BatchMetadata("b", 0, 3, [first])
    with pytest.raises(ValueError, match="has row 1 of shard 's0' of 'n0' twice"):
        BatchMetadata("b", 0, 3, [first, first.rows(1, 2)])
    other = shard(1, [1], fields={"tokens": TensorMetadata((1, -1), "int64")})
    with pytest.raises(ValueError, match="'s0' and 's1' differ in field 'tokens'"):
        BatchMetadata("b", 0, 3, [first, other])
    with pytest.raises(ValueError, match="global_step -1"):
        BatchMetadata("b", -1, 2, [first])
    with pytest.raises(ValueError, match="has no shards"):
        DistributedBatch(BatchMetadata("b", 0, 2))
    with pytest.raises(ValueError, match="there is no batch"):
        DistributedBatch.concat([])


@settings(max_examples=30)
@given(some_fields(), st.data())
def test_kept_tensors_return_exactly(fields: dict[str, Field], data: st.DataObject) -> None:
    held = HeldShards()
    found = held.put(fields, "n1")
    assert found.node_id == "n1"
    ends = st.integers(0, found.batch_size)
    start, stop = sorted(data.draw(st.lists(ends, min_size=2, max_size=2, unique=True)))
    assert_equal(held.get([found]), fields)
    assert_equal(held.get([found.rows(start, stop)]), slice_rows(fields, start, stop))
    each = [found.rows(row, row + 1) for row in range(found.batch_size)]
    assert_equal(held.get(each), fields)


def test_metadata_says_what_varies() -> None:
    ragged = Jagged.of_rows([[1], [], [2, 3]], "int32")
    wide = Jagged(np.zeros((3, 2), np.float32), np.array([1, 1, 1]))
    fields = {"tokens": ragged, "wide": wide, "reward": np.zeros((3, 4))}
    found = HeldShards().put(fields, "n1")
    assert found.lengths == (1, 0, 2)
    assert {name: (one.shape, one.dtype) for name, one in found.fields.items()} == {
        "tokens": ((3, -1), "int32"),
        "wide": ((3, -1, 2), "float32"),
        "reward": ((3, 4), "float64"),
    }


def test_freed_tensors_are_gone_and_two_hundred_steps_leave_nothing() -> None:
    held, fields = HeldShards(), {"a": np.arange(3)}
    for step in range(200):
        shards = [held.put(fields, "n1") for _ in range(2)]
        parts = DistributedBatch(BatchMetadata("b", step, 6, shards)).chunk(3)
        assert [len(held.get(part.shards)["a"]) for part in parts] == [2, 2, 2]
        for _ in range(2):  # freeing twice is harmless
            held.free([shards[0].rows(1, 2)])
        with pytest.raises(BatchMissing, match="of n1 here: it was freed; 1 others are held"):
            held.get(shards)
        held.free(shards)
        assert len(held) == held.size_bytes == 0


def test_what_has_no_room_is_refused_with_what_takes_it() -> None:
    held = HeldShards(limit_bytes=100)
    first = held.put({"a": np.zeros(60, np.uint8)}, "n1")
    with pytest.raises(StoreFull, match=r"no room for 41 bytes .*: 1 groups .* 60 of 100"):
        held.put({"a": np.zeros(41, np.uint8)}, "n1")
    held.put({"a": np.zeros(40, np.uint8)}, "n1")
    held.free([first])
    held.put({"a": np.zeros(60, np.uint8)}, "n1")
    assert held.size_bytes == 100
