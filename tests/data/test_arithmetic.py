"""Held-out arithmetic is not trained on in any form, and every gold answer is correct."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.data.arithmetic import MAX_PROBLEMS, OPERATIONS, arithmetic_problems
from areal_lab.data.problems import Problem

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LINE = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
QUESTION = re.compile(r"(\d+) ([-+*]) (\d+) =")

operations = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3, unique=True)
seeds = st.integers(0, 2**32)


def forms(left: int, symbol: str, right: int) -> set[tuple[int, str, int]]:
    """A problem and its commuted form, if it has one."""
    return {(left, symbol, right)} | ({(right, symbol, left)} if symbol != "-" else set())


def question(problem: Problem) -> tuple[int, str, int]:
    match = QUESTION.fullmatch(problem.prompt.rsplit("\n", 1)[-1])
    assert match is not None, problem.prompt
    return int(match[1]), match[2], int(match[3])


def all_forms(problems: tuple[Problem, ...]) -> set[tuple[int, str, int]]:
    return set().union(*(forms(*question(problem)) for problem in problems))


@settings(max_examples=25)
@given(operations, st.integers(1, 2), st.integers(1, 2), st.integers(0, 6), seeds)
def test_train_held_out_and_few_shot_lines_are_disjoint_under_commutation(
    names: list[str], left: int, right: int, few_shot: int, seed: int
) -> None:
    split = arithmetic_problems(
        operations=names, digits=(left, right), few_shot=few_shot, seed=seed
    )
    shots = LINE.findall(split.train[0].prompt)
    shown = set().union(*(forms(int(a), symbol, int(b)) for a, symbol, b, _ in shots))
    assert len(shots) == few_shot
    assert not all_forms(split.train) & all_forms(split.held_out)
    assert not shown & (all_forms(split.train) | all_forms(split.held_out))


@settings(max_examples=15)
@given(operations, st.integers(1, 3), st.integers(1, 3), seeds)
def test_every_gold_answer_is_correct_and_no_operand_is_too_long(
    names: list[str], left: int, right: int, seed: int
) -> None:
    split = arithmetic_problems(operations=names, digits=(left, right), seed=seed)
    for problem in (*split.train[:200], *split.held_out):
        a, symbol, b = question(problem)
        assert int(problem.answer) == COMPUTE[symbol](a, b) >= 0
        assert a < 10**left
        assert b < 10**right
    for a, symbol, b, value in LINE.findall(split.train[0].prompt):
        assert int(value) == COMPUTE[symbol](int(a), int(b))


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


@settings(max_examples=15)
@given(operations, st.integers(1, 2), st.integers(1, 2), seeds)
def test_without_carry_exactly_the_lines_remain_whose_columns_are_independent(
    names: list[str], left: int, right: int, seed: int
) -> None:
    def lines(*, carry: bool) -> set[tuple[int, str, int]]:
        split = arithmetic_problems(
            operations=names, digits=(left, right), carry=carry, few_shot=0, seed=seed
        )
        return {question(problem) for problem in (*split.train, *split.held_out)}

    # A carry turns ten units of a column into one of the next: the digit sum falls by nine.
    independent = {
        (a, symbol, b)
        for a, symbol, b in lines(carry=True)
        if digit_sum(COMPUTE[symbol](a, b)) == COMPUTE[symbol](digit_sum(a), digit_sum(b))
    }
    assert lines(carry=False) == independent


@settings(max_examples=25)
@given(seeds)
def test_one_digit_addition_uses_all_100_ordered_pairs(seed: int) -> None:
    split = arithmetic_problems(few_shot=4, seed=seed)
    shots = {(int(a), op, int(b)) for a, op, b, _ in LINE.findall(split.train[0].prompt)}
    asked = [question(problem) for problem in (*split.train, *split.held_out)]
    shown = set().union(*(forms(*shot) for shot in shots))
    assert len(set(asked)) == len(asked)
    assert set(asked) | shown == {(a, "+", b) for a in range(10) for b in range(10)}
    assert 32 <= len(split.held_out) <= 33


def test_all_prompts_of_a_run_share_their_lines() -> None:
    split = arithmetic_problems(few_shot=4, seed=3)
    prefixes = {p.prompt.rsplit("\n", 1)[0] for p in (*split.train, *split.held_out)}
    assert len(prefixes) == 1
    assert len(prefixes.pop().split("\n")) == 4


def test_the_prompt_ends_after_the_equals_sign() -> None:
    # The tokenizer splits " 5" in two: a space here would be one the model has to repeat.
    split = arithmetic_problems(few_shot=2, seed=1)
    assert re.fullmatch(r"(\d \+ \d = \d+\n){2}\d \+ \d =", split.train[0].prompt)


def test_a_seed_decides_everything() -> None:
    assert arithmetic_problems(seed=1) == arithmetic_problems(seed=1)
    assert arithmetic_problems(seed=1) != arithmetic_problems(seed=2)


def test_many_problems_are_drawn_without_replacement() -> None:
    split = arithmetic_problems(digits=(9, 9), seed=1)
    asked = [question(problem) for problem in (*split.train, *split.held_out)]
    assert len(set(asked)) == len(asked)
    assert MAX_PROBLEMS - 10 < len(asked) <= MAX_PROBLEMS
    assert len(split.held_out) in (256, 257)


def test_a_long_right_operand_leaves_differences_to_ask_for() -> None:
    split = arithmetic_problems(operations=["subtract"], digits=(2, 6), seed=1)
    assert len(split.train) + len(split.held_out) + 4 == 100 * 101 // 2


def test_operations_take_turns_in_the_solved_lines() -> None:
    split = arithmetic_problems(operations=["add", "multiply"], few_shot=4, seed=1)
    assert [op for _, op, _, _ in LINE.findall(split.train[0].prompt)] == ["+", "*", "+", "*"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operations": []}, "operations is empty"),
        ({"operations": ["divide"]}, "operations has 'divide', but may have add"),
        ({"operations": ["add", "add"]}, "must name each operation once"),
        ({"digits": [1]}, r"digits is \[1\], but must be two numbers"),
        ({"digits": [0, 1]}, r"digits is \[0, 1\]"),
        ({"digits": [1, 19]}, r"from 1 to 18"),
        ({"few_shot": -1}, "few_shot is -1"),
        ({"few_shot": 55}, "few_shot is 55, which leaves 0 problems"),
        ({"few_shot": 56}, "few_shot is 56, but must be <= 55"),
        ({"eval_size": -1}, "eval_size is -1"),
        ({"eval_size": 100}, "eval_size is 100, but there are 9. problems"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arithmetic_problems(**wrong)
