"""Sequences are joined to trees where sharing a prefix is less work, and only there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.prefix_tree import ForwardCost, common_prefix, grow_trees

SHARE = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=0.0)
ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=12
)


def distinct_prefixes(rows: list[tuple[int, ...]]) -> int:
    return len({row[:end] for row in rows for end in range(1, len(row) + 1)})


@given(ROWS, st.integers(1, 30), st.floats(0, 2))
def test_trees_partition_the_rows_and_count_distinct_prefixes(
    rows: list[tuple[int, ...]], max_tokens: int, attention: float
) -> None:
    cost = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=attention)
    trees = grow_trees(rows, cost, max_tokens=max_tokens)
    assert sorted(m for tree in trees for m in tree.members) == list(range(len(rows)))
    for tree in trees:
        members = [rows[member] for member in tree.members]
        assert members == sorted(members)
        assert tree.tokens == distinct_prefixes(members)
        assert tree.longest == max(len(row) for row in members)
        assert tree.tokens <= max(max_tokens, tree.longest)
        assert tree.branching == (tree.tokens > tree.longest)


@given(ROWS)
def test_free_attention_shares_every_prefix(rows: list[tuple[int, ...]]) -> None:
    trees = grow_trees(rows, SHARE, max_tokens=10**6)
    assert sum(tree.tokens for tree in trees) == distinct_prefixes(rows)
    assert len(trees) == len({row[0] for row in rows})


@given(ROWS, st.floats(0, 2))
def test_trees_never_cost_more_than_rows_alone(
    rows: list[tuple[int, ...]], attention: float
) -> None:
    cost = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=attention)
    trees = grow_trees(rows, cost, max_tokens=10**6)
    grown = sum(cost.tree_flops(tree.tokens, branching=tree.branching) for tree in trees)
    alone = sum(cost.tree_flops(len(row), branching=False) for row in rows)
    assert grown <= alone + 1e-9


def test_long_responses_are_not_worth_sharing_a_short_prompt() -> None:
    # 10 shared tokens save 10 * 100; the dense mask costs (210^2 - 2 * 110 * 111 / 2) * 1 more.
    cost = ForwardCost(linear_flops_per_token=100.0, attention_flops_per_pair=1.0)
    prompt = tuple(range(10))
    long = [prompt + (mark,) * 100 for mark in (50, 51)]
    short = [(*prompt, mark) for mark in (50, 51)]
    assert len(grow_trees(long, cost, max_tokens=10**6)) == 2
    assert len(grow_trees(short, cost, max_tokens=10**6)) == 1


def test_groups_stay_together_when_the_batch_does_not_fit() -> None:
    few_shot = (1, 2, 3)
    rows = [(*few_shot, 10 + group, 20 + sample) for sample in range(3) for group in range(2)]
    # All: 3 + 2 * (1 + 3) = 11 tokens; one group: 3 + 1 + 3 = 7.
    assert [tree.members for tree in grow_trees(rows, SHARE, max_tokens=11)] == [(0, 2, 4, 1, 3, 5)]
    assert [t.members for t in grow_trees(rows, SHARE, max_tokens=10)] == [(0, 2, 4), (1, 3, 5)]


def test_equal_rows_are_a_chain_however_long() -> None:
    (tree,) = grow_trees([(1,) * 50] * 4 + [(1,) * 20], SHARE, max_tokens=8)
    assert (tree.tokens, tree.branching) == (50, False)


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence has no tokens"):
        grow_trees([(1,), ()], SHARE, max_tokens=8)


@given(st.lists(st.integers(0, 1)).map(tuple), st.lists(st.integers(0, 1)).map(tuple))
def test_common_prefix_counts_equal_leading_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b) == expected
