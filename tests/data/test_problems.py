"""Splits are disjoint, and a prompt number always names the same problem."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.problems import Problem, ProblemSet, PromptSource, held_out_size


def problems(count: int, first: int = 0) -> tuple[Problem, ...]:
    numbers = range(first, first + count)
    return tuple(Problem(prompt=f"{n} =", answer=str(n), key=str(n)) for n in numbers)


@given(st.integers(1, 40), st.integers(0, 2**32), st.lists(st.integers(0, 500), max_size=30))
def test_random_access_equals_iteration(count: int, seed: int, numbers: list[int]) -> None:
    in_order = PromptSource(problems(count), seed=seed)
    expected = [in_order[n] for n in range(max(numbers, default=0) + 1)]
    at_random = PromptSource(problems(count), seed=seed)
    assert [at_random[n] for n in numbers] == [expected[n] for n in numbers]


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 2**32))
def test_every_epoch_holds_each_problem_once(count: int, epoch: int, seed: int) -> None:
    source = PromptSource(problems(count), seed=seed)
    drawn = Counter(source[epoch * count + position].key for position in range(count))
    assert drawn == Counter(problem.key for problem in problems(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = PromptSource(problems(30), seed=1)
    other = PromptSource(problems(30), seed=2)
    first = [source[n].key for n in range(30)]
    assert first != [source[n].key for n in range(30, 60)]
    assert first != [other[n].key for n in range(30)]
    assert first != [problem.key for problem in problems(30)]


def test_the_order_does_not_change_between_releases() -> None:
    # A recovered run must meet the prompts it would have met.
    source = PromptSource(problems(5), seed=1)
    assert "".join(source[n].key for n in range(10)) == "2304123041"


def test_prompt_numbers_are_not_negative() -> None:
    with pytest.raises(IndexError, match="prompt number is -1"):
        PromptSource(problems(3), seed=1)[-1]


def test_a_source_needs_problems() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptSource((), seed=1)


def test_a_problem_set_refuses_a_problem_on_both_sides() -> None:
    with pytest.raises(ValueError, match=re.escape("1 problems are both trained on and held out")):
        ProblemSet(train=problems(3), held_out=problems(2, first=2))


@pytest.mark.parametrize(("train", "held_out"), [(0, 2), (2, 0)])
def test_a_problem_set_refuses_an_empty_part(train: int, held_out: int) -> None:
    with pytest.raises(ValueError, match="there are no"):
        ProblemSet(train=problems(train), held_out=problems(held_out, first=10))


def test_a_problem_has_a_prompt() -> None:
    with pytest.raises(ValueError, match="'k' has an empty prompt"):
        Problem(prompt="", answer="1", key="k")


def test_an_example_has_the_prompt_that_was_given_to_the_model() -> None:
    problem = Problem(prompt="Q: 1?", answer="1", key="1?", metadata={"prompt": "1?", "level": 3})
    assert problem.as_example() == {"prompt": "Q: 1?", "answer": "1", "level": 3}


@pytest.mark.parametrize(
    ("problems", "asked", "size"),
    [(100, 0, 32), (1000, 0, 200), (5000, 0, 256), (40, 0, 20), (2, 0, 1), (100, 7, 7)],
)
def test_held_out_size(problems: int, asked: int, size: int) -> None:
    assert held_out_size(problems, asked) == size


@pytest.mark.parametrize("asked", [-1, 10, 11])
def test_held_out_size_leaves_something_to_train_on(asked: int) -> None:
    with pytest.raises(ValueError, match=f"eval_size is {asked}"):
        held_out_size(10, asked)
