"""Products for a model that may call a calculator."""

from __future__ import annotations

import pytest

from areal_lab.data.arithmetic import calculator_problems


def test_both_orders_stay_together_and_no_example_is_a_problem() -> None:
    problems = calculator_problems(eval_size=64)
    assert 64 <= len(problems.held_out) <= 65
    assert len(problems.train) + len(problems.held_out) == 89 * 89 - 2 * 4
    for one in (*problems.train, *problems.held_out):
        left, right = map(int, one.metadata["question"].split(" * "))
        assert int(one.answer) == left * right
        assert one.prompt.endswith(f"\nQuestion: {left} * {right}\n")
        assert one.prompt.count(one.metadata["question"]) == 1


def test_examples_say_whether_they_call_the_tool() -> None:
    (first, *_) = calculator_problems(examples="TD").train
    assert first.prompt.startswith(
        "Question: 34 * 27\nTool: 34 * 27\nResult: 918\nAnswer: 918\n"
        "Question: 12 * 15\nAnswer: 180\nQuestion: "
    )
    with pytest.raises(ValueError, match=r"'TX'.*1 to 4 letters T"):
        calculator_problems(examples="TX")
    with pytest.raises(ValueError, match="1 to 4 letters"):
        calculator_problems(examples="")


def test_examples_may_call_it_in_python() -> None:
    (first, *_) = calculator_problems(examples="TD", notation="python").train
    assert first.prompt.startswith(
        "Question: 34 * 27\n```python\nprint(34 * 27)\n```\n```output\n918\n```\nAnswer: 918\n"
        "Question: 12 * 15\nAnswer: 180\nQuestion: "
    )


def test_the_split_depends_on_the_seed_alone() -> None:
    assert calculator_problems(seed=3).digest() == calculator_problems(seed=3).digest()
    assert calculator_problems(seed=3).digest() != calculator_problems(seed=4).digest()
