"""Rewards of generated code; with the data sets' files, their canonical solutions."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_lab.config.schema import BenchmarkName
from areal_lab.data.benchmarks import benchmark_problems
from areal_lab.rewards import python_tests

ADD = {
    "source": "from math import floor\n\n\ndef add(a, b):\n    '''Sum.'''\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == floor(3.5)\n",
}
ONE = {"test_setup_code": "", "test_list": ["assert one() == 1", "assert one() != 2"]}


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
    assert python_tests.humaneval(completion, ADD) == reward


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
    assert python_tests.mbpp(completion, ONE) == reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("humaneval", "humaneval/HumanEval.jsonl", 164), ("mbpp", "mbpp/mbpp.jsonl", 974)],
)
def test_all_canonical_solutions_pass(name: BenchmarkName, file: str, count: int) -> None:
    folder = os.environ.get("AREAL_LAB_DATA", "")
    if not (path := Path(folder, file)).is_file():
        pytest.skip(f"AREAL_LAB_DATA={folder!r} has no {file}")
    score = getattr(python_tests, name)
    problems = benchmark_problems(name, path)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rewards = list(threads.map(lambda one: score(one.answer, one.as_example()), problems))
    assert rewards == [1.0] * count
