"""Rows of the table: reward shaping, and which samples are trained on."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.advantages.filters import (
    difficulty_band,
    keep_samples,
    overlong_mask,
    zero_variance_groups,
)
from areal_lab.functional.advantages.reward_shaping import (
    clip_advantages,
    normalize_rewards,
    overlong_penalty,
    shape_rewards,
)
from areal_lab.functional.advantages.whitening import Moments
from tests.functional.case import Case, Ragged

PER_SAMPLE = {"packed = padded": "one number per sample: no token layout"}
WHICH = dict.fromkeys(("grad", "jacrev", "double backward"), "a selection of samples: no gradient")
OF_LENGTHS = dict.fromkeys(
    ("grad", "jacrev", "double backward"), "a function of integers: no gradient"
)


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape or (6,), generator=generator, dtype=torch.double)


def with_groups(seed: int) -> tuple[Tensor, ...]:
    return numbers(seed).round(decimals=1), torch.tensor([0, 0, 0, 1, 1, 2])


def lengths(seed: int) -> tuple[Tensor, ...]:
    return ((numbers(seed) * 120).long(),)


def with_state(values: Tensor, count: Tensor, total: Tensor, squares: Tensor):
    return normalize_rewards(values, Moments(count, total, squares), decay=0.9)


def state(seed: int) -> tuple[Tensor, ...]:
    past = numbers(seed + 50, 9)
    return numbers(seed), torch.tensor(9.0).double(), past.sum(), past.square().sum()


def kept_layouts(batch: Ragged):
    keep = torch.tensor([True, False, True, True])
    packed = keep_samples(batch.pack(batch.mask), keep, sequences=batch.sequences)
    return batch.pack(keep_samples(batch.mask, keep)), packed


CASES = [
    Case(
        name="shape_rewards",
        function=partial(shape_rewards, bias=-0.5, scale=10.0, clip=4.0),
        sample=lambda seed: (numbers(seed),),
        differentiable=(0,),
        reasons=PER_SAMPLE,
    ),
    Case(
        name="normalize_rewards",
        function=with_state,
        sample=state,
        differentiable=(0,),
        reasons=PER_SAMPLE,
    ),
    Case(
        name="clip_advantages",
        function=partial(clip_advantages, bound=0.8),
        sample=lambda seed: (2 * numbers(seed) - 1,),
        differentiable=(0,),
        layouts=lambda b: (
            b.pack(clip_advantages(b.draw(0), bound=0.8)),
            clip_advantages(b.pack(b.draw(0)), bound=0.8),
        ),
    ),
    Case(
        name="overlong_penalty",
        function=partial(overlong_penalty, max_length_tokens=100, buffer_tokens=40),
        sample=lengths,
        reasons={**PER_SAMPLE, **OF_LENGTHS},
    ),
    Case(
        name="zero_variance_groups",
        function=zero_variance_groups,
        sample=with_groups,
        reasons={**PER_SAMPLE, **WHICH},
    ),
    Case(
        name="difficulty_band",
        function=partial(difficulty_band, low=0.3, high=0.6),
        sample=with_groups,
        reasons={**PER_SAMPLE, **WHICH},
    ),
    Case(
        name="overlong_mask",
        function=partial(overlong_mask, max_length_tokens=90),
        sample=lengths,
        reasons={**PER_SAMPLE, **WHICH},
    ),
    Case(
        name="keep_samples",
        function=keep_samples,
        sample=lambda seed: (numbers(seed, 4, 3) < 0.7, numbers(seed + 1, 4) < 0.5),
        layouts=kept_layouts,
        reasons=WHICH,
    ),
]
