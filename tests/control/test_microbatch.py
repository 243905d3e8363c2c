"""Algorithm 1 equals its slow form; balanced parts are balanced."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.microbatch import balanced_parts, consecutive_parts, dynamic_batches
from tests.reference.microbatch import dynamic_batches as algorithm_1
from tests.reference.microbatch import parts_of_equal_size

LENGTHS = st.one_of(
    st.lists(st.integers(1, 12), max_size=60),
    st.lists(st.integers(1, 1000), max_size=40),
    st.lists(st.sampled_from([1, 2, 500, 501, 999, 1000]), max_size=50),
)


@given(LENGTHS, st.integers(0, 600), st.integers(1, 12))
@settings(max_examples=500)
def test_dynamic_batches_are_those_of_algorithm_1(
    lengths: list[int], spare: int, min_batches: int
) -> None:
    max_tokens = max(lengths, default=1) + spare
    expected = algorithm_1(lengths, max_tokens=max_tokens, min_batches=min_batches)
    assert dynamic_batches(lengths, max_tokens=max_tokens, min_batches=min_batches) == expected


@pytest.mark.parametrize("min_batches", [1, 300])
def test_dynamic_batches_are_those_of_algorithm_1_on_long_tails(min_batches: int) -> None:
    random = Random(0)
    lengths = [min(2048, int(random.lognormvariate(5.5, 1)) + 1) for _ in range(1500)]
    batches = dynamic_batches(lengths, max_tokens=2048, min_batches=min_batches)
    assert batches == algorithm_1(lengths, max_tokens=2048, min_batches=min_batches)
    assert all(sum(lengths[item] for item in batch) <= 2048 for batch in batches)
    assert sorted(item for batch in batches for item in batch) == list(range(1500))


def test_a_batch_small_enough_to_follow() -> None:
    # 9 opens; 6 opens; 4 joins 6, now full; 3 opens; 2 joins 3; 1 joins 9, which has one sequence.
    assert dynamic_batches([1, 2, 3, 4, 6, 9], max_tokens=10) == [[5, 0], [4, 3], [2, 1]]
    # 9, 6, 4 and 3 open; 2 joins 6, the earliest with room; 1 joins 9, the same.
    four = dynamic_batches([1, 2, 3, 4, 6, 9], max_tokens=10, min_batches=4)
    assert four == [[5, 0], [4, 1], [3], [2]]


def test_fewer_sequences_than_batches_give_one_each() -> None:
    assert dynamic_batches([5, 7], max_tokens=100, min_batches=4) == [[1], [0]]
    assert dynamic_batches([], max_tokens=100, min_batches=4) == []


def test_an_impossible_cut_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="120 tokens exceeds max_tokens = 100; raise max_tokens"):
        dynamic_batches([3, 120], max_tokens=100)
    with pytest.raises(ValueError, match="min_batches is 0"):
        dynamic_batches([3], max_tokens=100, min_batches=0)
    with pytest.raises(ValueError, match="0 tokens"):
        dynamic_batches([3, 0], max_tokens=100)
    with pytest.raises(ValueError, match="parts is 2, but must be from 1 to the number"):
        balanced_parts([3], 2)
    with pytest.raises(ValueError, match="parts is 0, but must be from 1"):
        balanced_parts([3], 0)
    with pytest.raises(ValueError, match="-1 tokens"):
        balanced_parts([3, -1], 2)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.data())
def test_parts_are_complete_and_differ_by_one_sequence_at_most(
    lengths: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    parts = balanced_parts(lengths, count)
    assert len(parts) == count
    assert all(parts)
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    tokens = [sum(lengths[item] for item in part) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert max(tokens) <= sum(lengths) / count + max(lengths) * (1 - 1 / count)


def test_many_long_tailed_sequences_balance_to_a_thousandth() -> None:
    random = Random(0)
    lengths = [int(random.lognormvariate(8, 1)) + 1 for _ in range(100_000)]
    tokens = [sum(lengths[item] for item in part) for part in balanced_parts(lengths, 64)]
    assert max(tokens) / (sum(tokens) / 64) <= 1.001


@given(st.lists(st.integers(1, 500), min_size=8, max_size=80), st.integers(1, 8))
def test_parts_of_equal_size_equal_the_reference(lengths: list[int], count: int) -> None:
    lengths = lengths[: len(lengths) // count * count]
    parts = balanced_parts(lengths, count, equal_size=True)
    assert parts == parts_of_equal_size(lengths, count)
    assert {len(part) for part in parts} == {len(lengths) // count}
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))


def test_parts_of_equal_size_small_enough_to_follow() -> None:
    # 9, 5 and 4 open; 3 joins 4, 2 joins 5, and 1 the part of 9, the only one with room.
    lengths = [1, 3, 4, 5, 9, 2]
    assert balanced_parts(lengths, 3, equal_size=True) == [[4, 0], [3, 5], [2, 1]]
    # Without it the 9 stays alone.
    assert balanced_parts(lengths, 3) == [[4], [3, 5, 0], [2, 1]]


def test_many_long_tailed_sequences_in_parts_of_equal_size_balance_too() -> None:
    random = Random(0)
    lengths = [int(random.lognormvariate(8, 1)) + 1 for _ in range(64 * 64)]
    parts = balanced_parts(lengths, 64, equal_size=True)
    tokens = [sum(lengths[item] for item in part) for part in parts]
    assert max(tokens) / (sum(tokens) / 64) <= 1.01


def test_what_has_no_parts_of_equal_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot cut 5 .* 2 parts of equal size.*leave out 1"):
        balanced_parts([3, 4, 5, 6, 7], 2, equal_size=True)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.data())
def test_consecutive_parts_are_the_best_ones(lengths: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(lengths)))
    sizes = consecutive_parts(lengths, parts)
    assert len(sizes) == parts
    assert min(sizes) >= 1
    assert sum(sizes) == len(lengths)
    ends = [0, *accumulate(sizes)]
    best = min(
        max(sum(lengths[a:b]) for a, b in pairwise((0, *inner, len(lengths))))
        for inner in combinations(range(1, len(lengths)), parts - 1)
    )
    assert max(sum(lengths[a:b]) for a, b in pairwise(ends)) == best


def test_consecutive_parts_need_a_sequence_each() -> None:
    with pytest.raises(ValueError, match="parts is 3, but must be from 1 to the number of"):
        consecutive_parts([5, 7], 3)
    with pytest.raises(ValueError, match="0 tokens"):
        consecutive_parts([5, 0], 1)
