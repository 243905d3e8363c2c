"""Generated tasks for small models: one token per character, and sums drawn as pictures.

Generated tasks for small models of one token per character, with verifiable answers.

    reversed_addition   123+456=  ->  9750       zero-padded; the least digit of the sum comes first
    sorting             39184=    ->  13489      the digits, ascending

With the least digit first, each digit of a sum follows from two digits and a carry, which a model
of 100,000 parameters learns in seconds. A response ends with the model's end token.

Sums drawn as pictures, for small vision-language models: `a b` in an image, `a + b` the answer.

    [ 7  5 ]=  ->  12          56 x 28 pixels; the answer has two digits, 3 + 4 is 07

Both numbers are below ten. Pictures differ in the size of their text and in two grays, so a
held-out picture was never seen, though its sum was. The text is in the middle: anywhere in the
picture, small models learn nothing from 50,000 examples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from areal_lab.data.arithmetic import MAX_PROBLEMS
from areal_lab.data.images import IMAGE_MARK, EncodedImage, image_of_picture
from areal_lab.data.problems import Problem, ProblemSet, held_out_size

_MOST_DIGITS = 18  # a 64-bit integer holds every operand
_MOST_ITEMS = 64


def reversed_sums(
    *, digits: Sequence[int] = (3, 3), eval_size: int = 0, seed: int = 1
) -> ProblemSet:
    """Sums of two zero-padded numbers, least digit first, one digit longer than the operands.

    `eval_size` 0 is the default of `held_out_size`; 3 + 4 and 4 + 3 stay together, so one more may
    be held out.
    """
    if len(digits) != 2 or not all(1 <= count <= _MOST_DIGITS for count in digits):
        raise ValueError(
            f"digits is {list(digits)}, but must be two numbers from 1 to {_MOST_DIGITS} "
            "(left and right operand)"
        )
    return _reversed_sums(tuple(digits), eval_size, seed)


# A sweep checks the problems of each of its cells, and most cells have the same.
@lru_cache(maxsize=8)
def _reversed_sums(digits: tuple[int, ...], eval_size: int, seed: int) -> ProblemSet:
    rng = random.Random(f"{seed}/reversed_addition")
    return _split((_sum(*pair, digits) for pair in _pairs(digits, rng)), eval_size, rng)


def sorted_digits(
    *, digits: Sequence[int] = (4, 8), eval_size: int = 0, seed: int = 1
) -> ProblemSet:
    """Random lists of digits to sort; no list occurs twice.

    `digits` are the shortest and the longest length; all lengths are equally likely. `eval_size` 0
    is the default of `held_out_size`.
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
    """All operand pairs if they are few, else distinct random ones."""
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


WIDTH: Final = 56
HEIGHT: Final = 28
_SIZES: Final = (18, 19, 20, 21, 22)
_DARKEST: Final = 90
_MOST_PICTURES: Final = 100_000


def rendered_sums(*, size: int = 4000, eval_size: int = 0, seed: int = 1) -> ProblemSet:
    """Pictures of two digits, with their sum as the answer; no picture occurs twice.

    `eval_size` 0 is the default of `held_out_size`.
    """
    if not 2 <= size <= _MOST_PICTURES:
        raise ValueError(f"size is {size}, but must be from 2 to {_MOST_PICTURES} pictures")
    return _rendered_sums(size, eval_size, seed)


# A sweep checks the problems of each of its cells, and most cells have the same.
@lru_cache(maxsize=2)
def _rendered_sums(size: int, eval_size: int, seed: int) -> ProblemSet:
    rng = random.Random(f"{seed}/rendered_sums")
    problems: dict[str, Problem] = {}
    while len(problems) < size:
        left, right = rng.randrange(10), rng.randrange(10)
        image = draw(f"{left} {right}", rng)
        problems[image.digest] = Problem(
            prompt=f"{IMAGE_MARK}=",
            answer=f"{left + right:02d}",
            key=image.digest,
            images=(image,),
            metadata={"left": left, "right": right},
        )
    held_out = held_out_size(size, eval_size)
    in_order = tuple(problems.values())
    return ProblemSet(train=in_order[held_out:], held_out=in_order[:held_out])


def draw(text: str, rng: random.Random) -> EncodedImage:
    """Draw a short text in the middle of a picture of `WIDTH` x `HEIGHT` pixels."""
    from PIL import Image, ImageDraw, ImageFont  # the import takes 0.1 s, wasted in other runs

    picture = Image.new("L", (WIDTH, HEIGHT), 255 - rng.randrange(_DARKEST))
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(rng.choice(_SIZES))
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    corner = (WIDTH - right - left) // 2, (HEIGHT - bottom - top) // 2
    pen.text(corner, text, fill=rng.randrange(_DARKEST), font=font)
    return image_of_picture(picture)
