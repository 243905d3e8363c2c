"""Rows of the table: entropy bonus, its coefficient, the tokens of highest entropy."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.aggregate import sequence_mean
from areal_lab.functional.divergences.entropy import (
    adaptive_entropy_coefficient,
    entropy_bonus,
    top_entropy_mask,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

A_MASK = dict.fromkeys(NO_GRADIENT, "a mask has no gradient")
A_CONSTANT = dict.fromkeys(NO_GRADIENT, "a number that the loss takes as a constant: no gradient")


def tokens(seed: int) -> tuple[Tensor, ...]:
    """Entropy and mask of six tokens."""
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(6, generator=generator, dtype=torch.double)
    return entropy, torch.tensor([True, True, False, True, True, True])


def scalars(seed: int) -> tuple[Tensor, ...]:
    """A coefficient and an entropy."""
    return torch.tensor(0.01, dtype=torch.double), torch.tensor(0.1 * seed, dtype=torch.double)


bonus = partial(entropy_bonus, coefficient=0.1)
bonus_by_sequence = partial(bonus, aggregate=sequence_mean)


def bonus_in_both_layouts(function):
    def layouts(batch: Ragged):
        entropy = batch.draw(0)
        packed = function(batch.pack(entropy), batch.pack(batch.mask), batch.sequences)
        return function(entropy, batch.mask, batch.rows), packed

    return layouts


def mask_in_both_layouts(batch: Ragged):
    entropy = batch.draw(0)
    kept = top_entropy_mask(entropy, batch.mask)
    return batch.pack(kept), top_entropy_mask(batch.pack(entropy), batch.pack(batch.mask))


CASES = [
    Case(
        name=name,
        function=function,
        sample=tokens,
        differentiable=(0,),
        layouts=bonus_in_both_layouts(function),
    )
    for name, function in [
        ("entropy_bonus", bonus),
        ("entropy_bonus (sequence_mean)", bonus_by_sequence),
    ]
]
CASES += [
    Case(
        name="adaptive_entropy_coefficient",
        function=adaptive_entropy_coefficient,
        sample=scalars,
        reasons=A_CONSTANT | {"packed = padded": "a function of two scalars"},
    ),
    Case(
        name="top_entropy_mask",
        function=top_entropy_mask,
        sample=tokens,
        layouts=mask_in_both_layouts,
        reasons=A_MASK,
    ),
]
