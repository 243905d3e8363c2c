"""Generated arithmetic with verifiable answers, as raw few-shot prompts.

    2 + 3 = 5
    7 + 1 = 8
    6 + 9 =          <- the prompt ends here; the correct completion starts with " 15\\n"

The solved lines are the same for every prompt of a run, so their cache is shared. With a raw prompt
a 135M model starts at a reward of about 0.5; with its chat template it starts at 0.05.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

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
"""All operand pairs are used up to this number; of more, this many are drawn at random."""

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
        """The same for both orders of the operands where the order does not matter."""
        left, right = self.left, self.right
        if OPERATIONS[self.name].commutes and right < left:
            left, right = right, left
        return f"{left} {OPERATIONS[self.name].symbol} {right}"

    @property
    def carries(self) -> bool:
        """Whether a column of the written calculation leaves 0 to 9 and so changes the next one."""
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

    The few-shot lines, including their commuted forms, are in neither part.

    Args:
        operations: of `add`, `subtract`, `multiply`.
        digits: maximum digits of the left and the right operand; operands start at 0.
        carry: False leaves out sums and products that carry, and differences that borrow: each
            digit of the answer then follows from the digits of its own column.
        few_shot: solved lines before each problem.
        eval_size: held-out problems, counting 3 + 4 and 4 + 3 as two. Such pairs stay together, so
            one more may be held out. 0 uses the default of `held_out_size`.
        seed: for the few-shot lines, the split, and the choice among too many problems.

    Raises:
        ValueError: naming the setting and its bounds.
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
    """All operand pairs if they are few, else distinct ones drawn at random; in any order."""
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
