"""Products for a model that may call a calculator, with examples that do and that do not.

    Question: 34 * 27
    Tool: 34 * 27
    Result: 918
    Answer: 918
    Question: 12 * 15
    Answer: 180
    Question: 60 * 64
             <- the prompt ends here; `Tool: 60 * 64` calls the calculator

The order and the share of examples that call it set how often a small model does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from areal_lab.data.problems import Problem, ProblemSet, held_out_size

SMALLEST: Final = 11
LARGEST: Final = 99
_EXAMPLES: Final = ((34, 27), (12, 15), (61, 18), (25, 32))
"""Factors of the solved examples, which are in no problem."""


ExampleNotation: TypeAlias = Literal["lines", "python"]


def calculator_problems(
    *,
    examples: str = "TDTD",
    notation: ExampleNotation = "lines",
    eval_size: int = 0,
    seed: int = 1,
) -> ProblemSet:
    """Products of two factors from 11 to 99; the two orders of the factors stay together.

    Args:
        examples: one letter for each solved example: T calls the tool, D answers at once.
        notation: of the calls in them: a line `Tool: 34 * 27`, or a Python fence.
        eval_size: held-out problems, counting both orders. 0 uses the default of `held_out_size`.
        seed: for the split.

    Raises:
        ValueError: naming the setting and its bounds.
    """
    if not 1 <= len(examples) <= len(_EXAMPLES) or set(examples) - {"T", "D"}:
        raise ValueError(
            f"dataset.tool_examples is {examples!r}, but must be 1 to {len(_EXAMPLES)} letters T "
            "(with the tool) or D (without)"
        )
    prefix = "".join(
        _example(*factors, call=_CALLS[notation] if letter == "T" else _no_call)
        for factors, letter in zip(_EXAMPLES, examples, strict=False)
    )
    shown = {tuple(sorted(factors)) for factors in _EXAMPLES}
    pairs = [
        (left, right)
        for left in range(SMALLEST, LARGEST + 1)
        for right in range(left, LARGEST + 1)
        if (left, right) not in shown
    ]
    random.Random(f"{seed}/calculator").shuffle(pairs)
    wanted = held_out_size(len(pairs) * 2 - (LARGEST - SMALLEST + 1), eval_size)
    held_out: list[Problem] = []
    train: list[Problem] = []
    for left, right in pairs:
        orders = dict.fromkeys(((left, right), (right, left)))
        chosen = held_out if len(held_out) < wanted else train
        chosen.extend(_problem(prefix, *order) for order in orders)
    return ProblemSet(train=tuple(train), held_out=tuple(held_out))


def _problem(prefix: str, left: int, right: int) -> Problem:
    small, large = sorted((left, right))
    return Problem(
        prompt=f"{prefix}Question: {left} * {right}\n",
        answer=str(left * right),
        key=f"{small} * {large}",
        metadata={"question": f"{left} * {right}"},
    )


def _example(left: int, right: int, *, call: Callable[[int, int], str]) -> str:
    return f"Question: {left} * {right}\n{call(left, right)}Answer: {left * right}\n"


def _line(left: int, right: int) -> str:
    return f"Tool: {left} * {right}\nResult: {left * right}\n"


def _fence(left: int, right: int) -> str:
    return f"```python\nprint({left} * {right})\n```\n```output\n{left * right}\n```\n"


def _no_call(left: int, right: int) -> str:
    del left, right
    return ""


_CALLS: Final[dict[ExampleNotation, Callable[[int, int], str]]] = {
    "lines": _line,
    "python": _fence,
}
