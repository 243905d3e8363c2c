"""Sums that are drawn as pictures."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from areal_lab.data.rendered import HEIGHT, WIDTH, rendered_sums


def test_pictures_show_what_is_asked() -> None:
    problems = rendered_sums(size=60, eval_size=20, seed=3)
    everything = (*problems.train, *problems.held_out)
    assert (len(problems.train), len(problems.held_out)) == (40, 20)
    assert len({one.images[0].digest for one in everything}) == 60
    for one in everything:
        assert one.answer == f"{one.metadata['left'] + one.metadata['right']:02d}"
        (image,) = one.images
        assert (image.width, image.height) == (WIDTH, HEIGHT)
        darkest, lightest = Image.open(io.BytesIO(image.png)).convert("L").getextrema()
        assert darkest < 90
        assert lightest > 165


def test_a_seed_gives_the_same_pictures() -> None:
    assert rendered_sums(size=10, seed=3).digest() == rendered_sums(size=10, seed=3).digest()
    assert rendered_sums(size=10, seed=3).digest() != rendered_sums(size=10, seed=4).digest()
    with pytest.raises(ValueError, match="size is 1, but must be from 2"):
        rendered_sums(size=1)
