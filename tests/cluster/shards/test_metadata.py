"""Batches are divided, joined and sent as metadata, without losing or repeating a row."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.cluster.shards.metadata import (
    BatchMetadata,
    DistributedBatch,
    ShardMetadata,
    TensorMetadata,
    batch_from_json,
    packed_batch,
    shard_from_json,
    unpacked_batch,
)


def shard(number: int, tokens: list[int], /, **changes: Any) -> ShardMetadata:
    known: dict[str, Any] = {
        "node_id": f"n{number % 2}",
        "node_addr": "127.0.0.1:1",
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
def test_metadata_returns_from_json_and_pickle(one: DistributedBatch) -> None:
    text = json.dumps(one.metadata.to_json())
    assert batch_from_json(json.loads(text)) == one.metadata
    assert unpacked_batch(packed_batch(one.metadata)) == one.metadata
    with pytest.raises(ValueError, match="no metadata of a batch"):
        unpacked_batch(text.encode())
    assert shard_from_json(json.loads(json.dumps(one.shards[0].to_json()))) == one.shards[0]
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
        ({"node_addr": ""}, "node_addr of shard 's0' of 'n0' is empty"),
        ({"lengths": [1]}, "1 lengths for 2 rows"),
        ({"lengths": [1, -1]}, "a row of -1 tokens"),
        ({"fields": {"a": TensorMetadata((3,), "int8")}}, "field 'a' .* has 3 rows"),
    ],
)
def test_a_malformed_shard_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(0, [1, 1], **changes)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "message"),
    [
        ((), "int8", "cpu", "rows first"),
        ((2, -2), "int8", "cpu", "no negative length"),
        ((-1, 2), "int8", "cpu", "no negative length"),
        ((2,), "float8", "cpu", "dtype is 'float8', but must be one of"),
        ((2,), "int8", "", "device is empty"),
    ],
)
def test_a_malformed_tensor_is_refused(
    shape: tuple[int, ...], dtype: str, device: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TensorMetadata(shape, dtype, device)


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"batch_id": "b"}, "global_step: Field required"),
        ({"batch_id": "b", "global_step": 0, "total_batch_size": 1, "x": 1}, "x: Unexpected"),
        ({"batch_id": "b", "global_step": 0, "total_batch_size": 0}, "total_batch_size 0"),
        ([], "it: "),
    ],
)
def test_json_that_is_no_metadata_is_refused_in_one_line(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        batch_from_json(value)
    assert "\n" not in str(caught.value)
