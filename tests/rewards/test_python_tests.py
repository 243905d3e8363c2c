"""Rewards of generated code, on some problems of the benchmarks and, where they are, on all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.schema import BenchmarkName
from areal_lab.data.benchmarks import benchmark_problems
from areal_lab.data.problems import Problem
from areal_lab.rewards import python_tests
from areal_lab.rewards.sandbox import levels
from areal_lab.rewards.sandbox.run import Limits
from areal_lab.rewards.stdio_tests import stdio_tests

ADD = {
    "source": "from math import floor\n\n\ndef add(a, b):\n    '''Sum.'''\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == floor(3.5)\n",
}
ONE = {
    "test_setup_code": "",
    "test_list": ["assert one() == 1", "assert one() != 2"],
    "code": "def one(): return 1",
}
SCORED = dict.fromkeys(("reward", "unsupported", "timed_out", "crashed"), 0.0)
SAMPLE = Path(__file__).parent / "verdicts"
NAMES: tuple[BenchmarkName, ...] = ("humaneval", "mbpp")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("    return a + b\n", 1),
        ("    return a - b\n", 0),
        ("    return a + b\n\nprint(undefined_name)\n", 1),  # what follows is cut off
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1),
        ("```\ndef add(a, b):\n    return 0\n```", 0),
        ("    exit()\n", 0),
    ],
)
def test_completions_of_humaneval(completion: str, reward: float) -> None:
    assert python_tests.humaneval(completion, ADD) == {**SCORED, "reward": reward}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("def one(): return 1", 1),
        ("[BEGIN]\ndef one(): return 1\n[DONE]\nmore", 1),
        ("```python\ndef one():\n    return 1\n```", 1),
        ("def one(): return 2", 0),
        ("I cannot.", 0),
    ],
)
def test_completions_of_mbpp(completion: str, reward: float) -> None:
    assert python_tests.mbpp(completion, ONE) == {**SCORED, "reward": reward}


def test_what_cannot_be_judged_is_counted() -> None:
    equal = "class E:\n    __eq__ = lambda *_: True\ndef one(): return E()"
    assert python_tests.mbpp(equal, ONE) == {**SCORED, "unsupported": 1}


@pytest.mark.parametrize(
    ("body", "why"),
    [("while True: pass", "timed_out"), ("import os; os.abort()", "crashed")],
)
def test_code_that_does_not_end_is_told_apart(
    body: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_tests, "LIMITS", Limits(cpu_s=1, timeout_s=1.0))
    assert python_tests.mbpp(f"def one():\n    {body}", ONE) == {**SCORED, why: 1}


def test_without_a_sandbox_there_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "refusal", lambda _: "it is broken")
    with pytest.raises(levels.NoSandbox, match="it is broken"):
        python_tests.humaneval("    return a + b\n", ADD)
    assert python_tests.humaneval("    return a + b\n", ADD, sandbox="unsafe")["reward"] == 1


def mutated(problem: Problem, name: BenchmarkName) -> str:
    """A solution that returns something else than the gold one, whatever it is asked."""
    example = problem.as_example()
    entries = [str(example["entry_point"])] if name == "humaneval" else python_tests._defined(
        problem.answer
    )[0]  # fmt: skip
    code = problem.answer if name == "mbpp" else f"{example['source']}{problem.answer}"
    wrappers = [
        f"_{entry} = {entry}\ndef {entry}(*given, **named):\n"
        f"    return ('mutated', _{entry}(*given, **named), repr(given))\n"
        for entry in entries
    ]
    return "\n".join([code.replace("\r", ""), *wrappers])


def rewards(name: BenchmarkName, problems: list[Problem], answers: list[str]) -> list[Any]:
    score = getattr(python_tests, name)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = threads.map(score, answers, [one.as_example() for one in problems])
        return [one["reward"] for one in found]


@pytest.mark.parametrize("name", NAMES)
def test_canonical_solutions_pass_and_mutated_ones_fail(name: BenchmarkName) -> None:
    problems = benchmark_problems(name, SAMPLE / f"{name}.jsonl")
    assert rewards(name, problems, [one.answer for one in problems]) == [1.0] * 10
    assert rewards(name, problems, [mutated(one, name) for one in problems]) == [0.0] * 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in gold solutions
@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("humaneval", "humaneval/HumanEval.jsonl", 164), ("mbpp", "mbpp/mbpp.jsonl", 974)],
)
def test_all_canonical_solutions_pass_and_all_mutated_ones_fail(
    name: BenchmarkName, file: str, count: int
) -> None:
    folder = os.environ.get("AREAL_LAB_DATA", "")
    if not (path := Path(folder, file)).is_file():
        pytest.skip(f"AREAL_LAB_DATA={folder!r} has no {file}")
    problems = benchmark_problems(name, path)
    gold = zip(problems, rewards(name, problems, [one.answer for one in problems]), strict=True)
    assert [one.key for one, reward in gold if reward != 1.0] == []
    wrong = rewards(name, problems, [mutated(one, name) for one in problems])
    assert [one.key for one, reward in zip(problems, wrong, strict=True) if reward] == []
    assert len(problems) == count


ADD_LINES: dict[str, Any] = {"inputs": ["3 4\n", "-1 1\n"], "outputs": ["7\n", "0"]}
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
    assert stdio_tests(completion, ADD_LINES) == reward


def test_a_program_that_does_not_end_has_no_reward() -> None:
    assert stdio_tests("while True: pass", ADD_LINES, test_timeout_s=0.3) == 0


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
