"""Tasks of characters: answers are right, and nothing held out is trained on."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.config.schema import DatasetConfig
from areal_lab.data.problems import ProblemSet
from areal_lab.data.small_tasks import reversed_sums, sorted_digits
from areal_lab.data.sources import load_problems

DIGITS = st.lists(st.integers(1, 4), min_size=2, max_size=2)


def disjoint(problems: ProblemSet) -> bool:
    return not {p.key for p in problems.train} & {p.key for p in problems.held_out}


@settings(max_examples=15)
@given(DIGITS, st.integers(0, 2**32))
def test_a_sum_has_its_least_digit_first_and_one_digit_more(digits: list[int], seed: int) -> None:
    problems = reversed_sums(digits=digits, seed=seed)
    assert disjoint(problems)
    for problem in (*problems.train[:50], *problems.held_out[:50]):
        left, right = problem.prompt[:-1].split("+")
        assert problem.prompt[-1] == "="
        assert [len(left), len(right)] == digits
        assert len(problem.answer) == max(digits) + 1
        assert int(problem.answer[::-1]) == int(left) + int(right)


def test_both_orders_of_a_sum_are_on_the_same_side() -> None:
    problems = reversed_sums(digits=(2, 2))
    assert len(problems.train) + len(problems.held_out) == 10_000
    held_out = {problem.prompt for problem in problems.held_out}
    for prompt in held_out:
        left, right = prompt[:-1].split("+")
        assert f"{right}+{left}=" in held_out


@settings(max_examples=15)
@given(st.integers(2, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_a_list_is_sorted(shortest: int, more: int, seed: int) -> None:
    problems = sorted_digits(digits=(shortest, shortest + more), seed=seed)
    assert disjoint(problems)
    prompts = [problem.prompt for problem in (*problems.train, *problems.held_out)]
    assert len(prompts) == len(set(prompts))
    assert {len(prompt) - 1 for prompt in prompts} == {*range(shortest, shortest + more + 1)}
    for problem in problems.train[:50]:
        assert list(problem.answer) == sorted(problem.prompt[:-1])


def test_a_dataset_names_them() -> None:
    sums = load_problems(DatasetConfig(type="reversed_addition", digits=[3, 3]), seed=4)
    assert re.fullmatch(r"\d{3}\+\d{3}=", sums.train[0].prompt)
    assert sums == reversed_sums(digits=(3, 3), seed=4)
    lists = load_problems(DatasetConfig(type="sorting", digits=[4, 8], eval_size=100), seed=4)
    assert len(lists.held_out) == 100
    assert sums != reversed_sums(digits=(3, 3), seed=5)


@pytest.mark.parametrize(
    ("make", "digits"),
    [
        *[(reversed_sums, digits) for digits in ([3], [0, 3], [3, 19])],
        *[(sorted_digits, digits) for digits in ([4], [8, 4], [1, 4], [4, 65])],
    ],
)
def test_impossible_digits_are_named(make: object, digits: list[int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"digits is {digits}, but must be two")):
        make(digits=digits)  # type: ignore[operator]


def test_all_problems_cannot_be_held_out() -> None:
    with pytest.raises(ValueError, match="none is left to train on"):
        reversed_sums(digits=(1, 1), eval_size=100)
    with pytest.raises(ValueError, match="eval_size is 99, but there are 100 problems"):
        reversed_sums(digits=(1, 1), eval_size=99)
