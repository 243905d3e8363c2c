"""Generated arithmetic with verifiable answers: few-shot prompts, and products for a calculator.

Products for a model that may call a calculator, with examples that do and that do not.

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

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Final, Literal, TypeAlias

from areal_lab.data.problems import Problem, ProblemSet, held_out_size


@dataclass(frozen=True, slots=True)
class _Operation:
    symbol: str
    compute: Callable[[int, int], int]
    commutes: bool


OPERATIONS = {
    "add": _Operation("+", operator.add, commutes=True),
    "subtract": _Operation("-", operator.sub, commutes=False),
    "multiply": _Operation("*", operator.mul, commutes=True),
}
"""Operations by their names in `dataset.operations`. Differences are never negative."""

MAX_PROBLEMS = 20_000
"""Maximum number of problems; of more operand pairs, this many are drawn at random."""

_MAX_DIGITS = 18  # a 64-bit integer holds every operand


@dataclass(frozen=True, slots=True)
class _Line:
    """`left symbol right = value`."""

    name: str
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left} {OPERATIONS[self.name].symbol} {self.right} ="

    @property
    def value(self) -> int:
        return OPERATIONS[self.name].compute(self.left, self.right)

    @property
    def key(self) -> str:
        """Equal for both orders of the operands of a commutative operation."""
        left, right = self.left, self.right
        if OPERATIONS[self.name].commutes and right < left:
            left, right = right, left
        return f"{left} {OPERATIONS[self.name].symbol} {right}"

    @property
    def carries(self) -> bool:
        """True if a column of the written calculation leaves 0 to 9 and so changes the next one."""
        left = [int(digit) for digit in reversed(str(self.left))]
        right = [int(digit) for digit in reversed(str(self.right))]
        if self.name == "multiply":
            columns = [0] * (len(left) + len(right))
            for (i, a), (j, b) in product(enumerate(left), enumerate(right)):
                columns[i + j] += a * b
        else:
            compute = OPERATIONS[self.name].compute
            columns = [compute(a, b) for a, b in zip_longest(left, right, fillvalue=0)]
        return not all(0 <= column <= 9 for column in columns)


def arithmetic_problems(
    *,
    operations: Sequence[str] = ("add",),
    digits: Sequence[int] = (1, 1),
    carry: bool = True,
    few_shot: int = 4,
    eval_size: int = 0,
    seed: int = 1,
) -> ProblemSet:
    """Arithmetic problems, split so that no held-out problem is trained on in either order.

    The few-shot lines, including their commuted forms, are in neither part. `digits` are the
    maximum digits of the left and the right operand. Without `carry` there are no carries and
    borrows, so each digit of the answer follows from its own column. `eval_size` counts 3 + 4 and 4
    + 3 as two; such pairs stay together, so one more may be held out; 0 is the default of
    `held_out_size`.
    """
    _check(operations, digits, few_shot)
    rng = random.Random(f"{seed}/arithmetic")
    classes: dict[str, list[_Line]] = {}
    for line in _lines(operations, digits, rng):
        if line.carries and not carry:
            continue
        classes.setdefault(line.key, []).append(line)
    keys = sorted(classes)
    rng.shuffle(keys)

    shots = _few_shot_lines(keys, classes, operations, few_shot, rng)
    prefix = "".join(f"{line.question} {line.value}\n" for line in shots)
    shown = {line.key for line in shots}
    keys = [key for key in keys if key not in shown]

    problems = sum(len(classes[key]) for key in keys)
    if problems < 2:
        raise ValueError(
            f"few_shot is {few_shot}, which leaves {problems} problems, but at least 2 are needed; "
            "use fewer lines or more digits"
        )
    size = held_out_size(problems, eval_size)
    train: list[Problem] = []
    held_out: list[Problem] = []
    for key in keys:
        side = held_out if len(held_out) < size else train
        side += [_problem(line, prefix) for line in classes[key]]
    if not train:
        raise ValueError(
            f"eval_size is {eval_size}, but there are {problems} problems: none is left to train on"
        )
    return ProblemSet(train=tuple(train), held_out=tuple(held_out))


def _check(operations: Sequence[str], digits: Sequence[int], few_shot: int) -> None:
    if not operations:
        raise ValueError(f"operations is empty, but needs at least one of {', '.join(OPERATIONS)}")
    for name in operations:
        if name not in OPERATIONS:
            raise ValueError(f"operations has {name!r}, but may have {', '.join(OPERATIONS)}")
    if len(set(operations)) < len(operations):
        raise ValueError(f"operations is {list(operations)}, but must name each operation once")
    if len(digits) != 2 or not all(1 <= count <= _MAX_DIGITS for count in digits):
        raise ValueError(
            f"digits is {list(digits)}, but must be two numbers from 1 to {_MAX_DIGITS} "
            "(left and right operand)"
        )
    if few_shot < 0:
        raise ValueError(f"few_shot is {few_shot}, but must be >= 0")


def _lines(operations: Sequence[str], digits: Sequence[int], rng: random.Random) -> Iterator[_Line]:
    """All operand pairs if they are few, else distinct random ones; in any order."""
    per_operation = MAX_PROBLEMS // len(operations)
    for name in operations:
        left_end, right_end = 10 ** digits[0], 10 ** digits[1]
        if name == "subtract":  # a longer right operand would make differences negative
            right_end = min(left_end, right_end)
        pairs = left_end * right_end
        numbers: Iterable[int] = range(pairs)
        if pairs > per_operation:
            numbers = dict.fromkeys(rng.randrange(pairs) for _ in range(per_operation))
        for number in numbers:
            left, right = divmod(number, right_end)
            if name != "subtract" or left >= right:
                yield _Line(name, left, right)


def _few_shot_lines(
    keys: Sequence[str],
    classes: dict[str, list[_Line]],
    operations: Sequence[str],
    few_shot: int,
    rng: random.Random,
) -> list[_Line]:
    """Solved lines, with the operations in turn."""
    by_operation = {name: [k for k in keys if classes[k][0].name == name] for name in operations}
    lines = []
    for index in range(few_shot):
        name = operations[index % len(operations)]
        if not by_operation[name]:
            raise ValueError(
                f"few_shot is {few_shot}, but must be <= {index}, the number of different lines"
            )
        lines.append(rng.choice(classes[by_operation[name].pop()]))
    return lines


def _problem(line: _Line, prefix: str) -> Problem:
    return Problem(
        prompt=prefix + line.question,
        answer=str(line.value),
        key=line.key,
        metadata={"operation": line.name, "left": line.left, "right": line.right},
    )


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

    `examples` has one letter for each solved example: T calls the tool, D responds directly.
    `notation` is that of their calls: a line `Tool: 34 * 27`, or a Python fence. `eval_size` counts
    both orders; 0 is the default of `held_out_size`.
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
        chosen.extend(_product(prefix, *order) for order in orders)
    return ProblemSet(train=tuple(train), held_out=tuple(held_out))


def _product(prefix: str, left: int, right: int) -> Problem:
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
