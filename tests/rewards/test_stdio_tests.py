"""Rewards of programs that read standard input and write standard output."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lab.rewards.stdio_tests import stdio_tests

ADD: dict[str, Any] = {"inputs": ["3 4\n", "-1 1\n"], "outputs": ["7\n", "0"]}
GOOD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (GOOD, 1),
        (f"Sure:\n```python\n{GOOD}\n```", 1),
        (f"if __name__ == '__main__':\n    {GOOD.replace(chr(10), chr(10) + '    ')}  ", 1),
        (f"{GOOD}\nprint(' ')", 1),  # empty at the end
        ("print(7)", 0),
        (f"{GOOD}\nraise SystemExit(1)", 0),
        (f"{GOOD}\nimport sys\nprint('noise', file=sys.stderr)", 1),
        ("print(' 7')", 0),
        ("I cannot.", 0),
        ("print(open('/etc/passwd').read())", 0),
    ],
)
def test_outputs_are_compared(completion: str, reward: float) -> None:
    assert stdio_tests(completion, ADD) == reward


def test_a_program_that_does_not_end_has_no_reward() -> None:
    assert stdio_tests("while True: pass", ADD, test_timeout_s=0.3) == 0


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({}, "the problem's 'inputs' is None, but must be a list of texts"),
        ({"inputs": ["1"], "outputs": "1"}, "'outputs' is '1', but must be a list of texts"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
    ],
)
def test_a_problem_without_tests_is_an_error(example: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stdio_tests(GOOD, example)
