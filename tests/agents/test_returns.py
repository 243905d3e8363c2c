"""Returns of turns, against the definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.turns import linear_returns, tree_returns

REWARDS = st.lists(st.none() | st.integers(-4, 4).map(float), max_size=9)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int | None], list[float | None]]:
    rewards = draw(REWARDS)
    parents = [
        draw(st.none() | st.integers(0, turn - 1)) if turn else None for turn in range(len(rewards))
    ]
    return parents, rewards


def reference_tree(
    turn: int, parents: Sequence[int | None], rewards: Sequence[float | None], discount: float
) -> float | None:
    below = [
        reference_tree(child, parents, rewards, discount)
        for child in range(len(parents))
        if parents[child] == turn
    ]
    given = [value for value in below if value is not None]
    if rewards[turn] is None and not given:
        return None
    return (rewards[turn] or 0.0) + (discount * sum(given) / len(given) if given else 0.0)


def reference_linear(turn: int, rewards: Sequence[float | None], discount: float) -> float | None:
    later = [
        discount ** (other - turn) * reward
        for other, reward in enumerate(rewards)
        if other >= turn and reward is not None
    ]
    return sum(later) if later else None


@given(trees(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_returns_are_as_defined(
    tree: tuple[list[int | None], list[float | None]], discount: float
) -> None:
    parents, rewards = tree
    turns = range(len(rewards))
    assert tree_returns(parents, rewards, discount) == pytest.approx(
        tuple(reference_tree(turn, parents, rewards, discount) for turn in turns)
    )
    assert linear_returns(parents, rewards, discount) == pytest.approx(
        tuple(reference_linear(turn, rewards, discount) for turn in turns)
    )


@given(REWARDS, st.sampled_from([0.0, 0.5, 1.0]))
def test_without_branches_both_are_the_same(rewards: list[float | None], discount: float) -> None:
    chain = [None, *range(len(rewards) - 1)][: len(rewards)]
    assert tree_returns(chain, rewards, discount) == linear_returns(chain, rewards, discount)


def test_sub_agents_keep_their_rewards_in_a_tree_and_leak_them_in_a_line() -> None:
    # Two conversations, a turn of each in turn; only the second one ends well.
    parents = [None, None, 0, 1]
    rewards = [None, None, 0.0, 1.0]
    assert tree_returns(parents, rewards, 0.5) == (0.0, 0.5, 0.0, 1.0)
    assert linear_returns(parents, rewards, 0.5) == (0.125, 0.25, 0.5, 1.0)


def test_more_branches_are_not_more_reward() -> None:
    assert tree_returns([None, 0, 0, 0], [None, 1.0, 1.0, 1.0], 1.0)[0] == 1.0
    assert tree_returns([None, 0, 0], [None, 1.0, None], 1.0) == (1.0, 1.0, None)


def test_a_missing_reward_is_none_and_a_reward_of_zero_is_not() -> None:
    parents = [None, 0, 1]
    for returns in (tree_returns, linear_returns):
        assert returns(parents, [None, None, None], 0.9) == (None, None, None)
        assert returns(parents, [None, 0.0, None], 0.9) == (0.0, 0.0, None)
        assert returns([], [], 0.9) == ()


@pytest.mark.parametrize(
    ("parents", "rewards", "discount", "message"),
    [
        ([None], [], 1.0, "1 parents for 0 rewards"),
        ([None, 1], [None, None], 1.0, "turn 1 follows turn 1, but must follow an earlier one"),
        ([-1], [None], 1.0, "turn 0 follows turn -1"),
        ([None], [float("nan")], 1.0, "the reward of turn 0 is nan"),
        ([None], [1.0], 1.5, r"discount is 1.5, but must be in \[0, 1\]"),
    ],
)
def test_what_is_no_tree_is_refused(
    parents: list[int | None], rewards: list[float | None], discount: float, message: str
) -> None:
    for returns in (tree_returns, linear_returns):
        with pytest.raises(ValueError, match=message):
            returns(parents, rewards, discount)
