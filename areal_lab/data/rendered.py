"""Sums drawn as pictures, for small vision-language models: `a b` in an image, `a + b` the answer.

    [ 7  5 ]=  ->  12          56 x 28 pixels; the answer has two digits, 3 + 4 is 07

Both numbers are below ten. Pictures differ in the size of their text and in two grays, so a
held-out picture was never seen, though its sum was. The text is in the middle: anywhere in the
picture, small models learn nothing from 50,000 examples.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

from areal_lab.data.images import IMAGE_MARK, EncodedImage, image_of_picture
from areal_lab.data.problems import Problem, ProblemSet, held_out_size

WIDTH: Final = 56
HEIGHT: Final = 28
_SIZES: Final = (18, 19, 20, 21, 22)
_DARKEST: Final = 90
_MOST_PICTURES: Final = 100_000


def rendered_sums(*, size: int = 4000, eval_size: int = 0, seed: int = 1) -> ProblemSet:
    """Pictures of two digits, with their sum as the answer; no picture occurs twice.

    Args:
        size: pictures, held-out ones included.
        eval_size: held-out pictures; 0 uses the default of `held_out_size`.
        seed: for the digits and how they are drawn.

    Raises:
        ValueError: naming the setting and its bounds.
    """
    if not 2 <= size <= _MOST_PICTURES:
        raise ValueError(f"size is {size}, but must be from 2 to {_MOST_PICTURES} pictures")
    return _rendered_sums(size, eval_size, seed)


# A sweep checks the problems of each of its cells, and most of them have the same.
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
    """Draw a short text in the middle of a picture of `WIDTH` x `HEIGHT` pixels.

    Args:
        text: to draw, in PIL's own font.
        rng: for its size and the grays.
    """
    from PIL import Image, ImageDraw, ImageFont  # takes 0.1 s, which other runs can spare

    picture = Image.new("L", (WIDTH, HEIGHT), 255 - rng.randrange(_DARKEST))
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(rng.choice(_SIZES))
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    corner = (WIDTH - right - left) // 2, (HEIGHT - bottom - top) // 2
    pen.text(corner, text, fill=rng.randrange(_DARKEST), font=font)
    return image_of_picture(picture)
