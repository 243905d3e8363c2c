"""Rewards of programs that read standard input and write standard output: 1 if all outputs match.

Problems are lines of a JSONL file (`dataset.type=jsonl`) with two lists of texts of equal length:

    {"question": "Add the numbers.", "answer": "", "inputs": ["3 4\\n"], "outputs": ["7\\n"]}

The expected output never enters the sandbox. `reward.timeout_s` is for all runs of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.python_tests import fenced
from areal_lab.rewards.sandbox.levels import choose
from areal_lab.rewards.sandbox.run import Limits

OUTPUT_BYTES = 1 << 20


def stdio_tests(
    completion: str,
    example: Mapping[str, Any],
    *,
    sandbox: LevelSetting = "auto",
    test_timeout_s: float = 5.0,
) -> float:
    """Return 1 if the program, optionally in a Markdown fence, writes every expected output, else
    0.

    Spaces at the ends of lines, and empty lines at the end, are ignored. A program that fails later
    (exit code, limits) gets 0 even if the output is right.

    Args:
        test_timeout_s: CPU time for each input, rounded up to seconds; wall time is twice as much.
    """
    inputs, outputs = _texts(example, "inputs"), _texts(example, "outputs")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"the problem has {len(inputs)} inputs and {len(outputs)} outputs, but needs as many "
            "of both, and at least one"
        )
    program, chosen = fenced(completion), choose(sandbox)
    limits = Limits(cpu_s=test_timeout_s, timeout_s=2 * test_timeout_s, output_bytes=OUTPUT_BYTES)
    for given, expected in zip(inputs, outputs, strict=True):
        found = chosen.run(program, stdin=given, limits=limits)
        if not found.passed or _lines(found.stdout) != _lines(expected):
            return 0.0
    return 1.0


def _texts(example: Mapping[str, Any], field: str) -> list[str]:
    texts = example.get(field)
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f"the problem's {field!r} is {texts!r:.60}, but must be a list of texts")
    return texts


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
