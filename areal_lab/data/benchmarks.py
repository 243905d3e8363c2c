"""GSM8K, MATH-500, HumanEval and MBPP, from the files of their releases (JSON lines).

benchmark   fields of a line                                        reward function
gsm8k       question, answer (the number follows ####)              math_answer, exact:gsm8k
math500     problem, answer (LaTeX)                                 math_answer
humaneval   task_id, prompt, entry_point, canonical_solution, test  python_tests:humaneval
mbpp        task_id, text, code, test_list, test_setup_code         python_tests:mbpp
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from areal_lab.config.schema import BenchmarkName
from areal_lab.data.jsonl import gold_answer
from areal_lab.data.problems import Problem
from areal_lab.data.rows import read_rows, text_of

PLAIN: Final = "{prompt}"
"""Placeholder for the benchmark's own template."""

TEMPLATES: Final[Mapping[BenchmarkName, str]] = MappingProxyType(
    {
        "gsm8k": "Question: {prompt}\nThink step by step, then write #### and the number.\nAnswer:",
        "math500": "Problem: {prompt}\nThink step by step, then write the answer in \\boxed{}.\n"
        "Solution:",
        "humaneval": PLAIN,
        # Austin et al. (arXiv:2108.07732), section 3.1, without their few-shot examples.
        "mbpp": "You are an expert Python programmer, and here is your task: {prompt}\n",
    }
)

REWARDS: Final[Mapping[BenchmarkName, str]] = MappingProxyType(
    {
        "gsm8k": "areal_lab.rewards.exact:gsm8k",
        "math500": "areal_lab.rewards.math_answer:math_answer",
        "humaneval": "areal_lab.rewards.python_tests:humaneval",
        "mbpp": "areal_lab.rewards.python_tests:mbpp",
    }
)
"""Default reward function of each benchmark."""

_MBPP_TESTS: Final = range(11, 511)
"""Task ids of MBPP's test split; 1 to 10 are for few-shot prompts."""


def benchmark_problems(
    name: BenchmarkName, path: str | Path, template: str = PLAIN
) -> list[Problem]:
    """Read all problems of a file, in order.

    `template` is the text around each problem; `{prompt}` alone takes the benchmark's own.
    """
    if PLAIN not in template:
        raise ValueError(f"prompt_template is {template!r}, but must contain {PLAIN}")
    template = TEMPLATES[name] if template == PLAIN else template
    problems = [_problem(name, row, where, template) for where, row in read_rows(Path(path))]
    if not problems:
        raise ValueError(f"{path} has no problems, but needs at least one")
    return problems


def benchmark_named(name: str) -> BenchmarkName | None:
    """The benchmark of this name; None without one."""
    return next((known for known in REWARDS if known == name), None)


def is_test(name: BenchmarkName, problem: Problem) -> bool:
    """Return whether a problem belongs to the test split; except for MBPP, a file is one split."""
    return name != "mbpp" or int(problem.metadata["task_id"]) in _MBPP_TESTS


def _problem(name: BenchmarkName, row: Mapping[str, Any], where: str, template: str) -> Problem:
    match name:
        case "gsm8k":
            text, answer = text_of(row, where, "question"), text_of(row, where, "answer")
            if "####" not in answer:
                raise ValueError(f"{where} has no '####' in 'answer', which precedes the number")
            key, answer = text.strip(), gold_answer(answer)
        case "math500":
            text, answer = text_of(row, where, "problem"), text_of(row, where, "answer")
            key = text.strip()
        case "humaneval":
            text, answer = text_of(row, where, "prompt"), text_of(row, where, "canonical_solution")
            key = text_of(row, where, "task_id")
            for field in ("entry_point", "test"):
                text_of(row, where, field)
        case _:
            tests = "\n".join(_tests(row, where))
            text = f"{text_of(row, where, 'text')} Your code should pass these tests:\n\n{tests}\n"
            answer, key = text_of(row, where, "code"), f"mbpp/{_number(row, where)}"
            text_of(row, where, "test_setup_code")
    metadata = {**row, "source": text}
    return Problem(prompt=template.replace(PLAIN, text), answer=answer, key=key, metadata=metadata)


def _tests(row: Mapping[str, Any], where: str) -> list[str]:
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError(f"{where} has {tests!r:.60} in 'test_list', but must have a list of texts")
    return tests


def _number(row: Mapping[str, Any], where: str) -> int:
    text = text_of(row, where, "task_id")
    if not text.isdecimal():
        raise ValueError(f"{where} has {text!r:.60} in 'task_id', but must have a whole number")
    return int(text)
