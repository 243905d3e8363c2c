"""Generated tasks for small models of one token per character, with verifiable answers.

    reversed_addition   123+456=  ->  9750       zero-padded; the least digit of the sum comes first
    sorting             39184=    ->  13489      the digits, ascending

With the least digit first, each digit of a sum follows from two digits and a carry, which a model
of 100,000 parameters learns in seconds. A response ends with the model's end token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from areal_lab.data.arithmetic import MAX_PROBLEMS
from areal_lab.data.problems import Problem, ProblemSet, held_out_size

_MOST_DIGITS = 18  # a 64-bit integer holds every operand
_MOST_ITEMS = 64


def reversed_sums(
    *, digits: Sequence[int] = (3, 3), eval_size: int = 0, seed: int = 1
) -> ProblemSet:
    """Sums of two zero-padded numbers, least digit first, one digit longer than the operands.

    Args:
        digits: of the left and the right operand.
        eval_size: held-out problems; 3 + 4 and 4 + 3 stay together, so one more may be held out. 0
            uses the default of `held_out_size`.
        seed: for the split, and the choice among too many problems.

    Raises:
        ValueError: naming the setting and its bounds.
    """
    if len(digits) != 2 or not all(1 <= count <= _MOST_DIGITS for count in digits):
        raise ValueError(
            f"digits is {list(digits)}, but must be two numbers from 1 to {_MOST_DIGITS} "
            "(left and right operand)"
        )
    return _reversed_sums(tuple(digits), eval_size, seed)


# A sweep checks the problems of each of its cells, and most of them have the same.
@lru_cache(maxsize=8)
def _reversed_sums(digits: tuple[int, ...], eval_size: int, seed: int) -> ProblemSet:
    rng = random.Random(f"{seed}/reversed_addition")
    return _split((_sum(*pair, digits) for pair in _pairs(digits, rng)), eval_size, rng)


def sorted_digits(
    *, digits: Sequence[int] = (4, 8), eval_size: int = 0, seed: int = 1
) -> ProblemSet:
    """Lists of digits to sort, drawn at random; no list occurs twice.

    Args:
        digits: of the shortest and the longest list; all lengths are as likely.
        eval_size: held-out problems; 0 uses the default of `held_out_size`.
        seed: for the lists and the split.

    Raises:
        ValueError: naming the setting and its bounds.
    """
    if len(digits) != 2 or not 2 <= digits[0] <= digits[1] <= _MOST_ITEMS:
        raise ValueError(
            f"digits is {list(digits)}, but must be two ascending numbers from 2 to "
            f"{_MOST_ITEMS} (shortest and longest list)"
        )
    return _sorted_digits(tuple(digits), eval_size, seed)


@lru_cache(maxsize=8)
def _sorted_digits(digits: tuple[int, ...], eval_size: int, seed: int) -> ProblemSet:
    rng = random.Random(f"{seed}/sorting")
    return _split(map(_list, _lists(digits, rng)), eval_size, rng)


def _pairs(digits: Sequence[int], rng: random.Random) -> Iterator[tuple[int, int]]:
    """All operand pairs if they are few, else distinct ones drawn at random."""
    left_end, right_end = 10 ** digits[0], 10 ** digits[1]
    pairs = range(left_end * right_end)
    if len(pairs) <= MAX_PROBLEMS:
        return (divmod(number, right_end) for number in pairs)
    drawn = dict.fromkeys(rng.randrange(len(pairs)) for _ in range(MAX_PROBLEMS))
    return (divmod(number, right_end) for number in drawn)


def _sum(left: int, right: int, digits: Sequence[int]) -> Problem:
    width = max(digits) + 1
    return Problem(
        prompt=f"{left:0{digits[0]}}+{right:0{digits[1]}}=",
        answer=f"{left + right:0{width}}"[::-1],
        key=f"{min(left, right)}+{max(left, right)}",
        metadata={"left": left, "right": right},
    )


def _lists(digits: Sequence[int], rng: random.Random) -> Iterator[str]:
    lengths = range(digits[0], digits[1] + 1)
    drawn = ("".join(rng.choices("0123456789", k=rng.choice(lengths))) for _ in range(MAX_PROBLEMS))
    return iter(dict.fromkeys(drawn))


def _list(items: str) -> Problem:
    return Problem(prompt=f"{items}=", answer="".join(sorted(items)), key=items)


def _split(problems: Iterator[Problem], eval_size: int, rng: random.Random) -> ProblemSet:
    """Hold out whole classes of problems with one key."""
    classes: dict[str, list[Problem]] = {}
    for problem in problems:
        classes.setdefault(problem.key, []).append(problem)
    keys = sorted(classes)
    rng.shuffle(keys)
    size = held_out_size(sum(map(len, classes.values())), eval_size)
    train: list[Problem] = []
    held_out: list[Problem] = []
    for key in keys:
        side = held_out if len(held_out) < size else train
        side += classes[key]
    if not train:
        raise ValueError(
            f"eval_size is {eval_size}, but there are {len(held_out)} problems: none is left to "
            "train on"
        )
    return ProblemSet(train=tuple(train), held_out=tuple(held_out))
