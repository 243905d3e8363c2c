"""Rows of the table: the linear recurrence, forward and reverse, and what lies beyond."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.advantages.recurrence import linear_recurrence, next_in_sequence
from tests.functional.case import Case, Ragged


def steps(seed: int) -> tuple[Tensor, ...]:
    """Factors, inputs, what lies beyond, mask; six tokens."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(6, generator=generator, dtype=torch.double) + 0.1
    inputs = torch.randn(6, generator=generator, dtype=torch.double)
    beyond = torch.randn((), generator=generator, dtype=torch.double)
    mask = torch.tensor([True, True, False, True, True, seed % 2 == 0])
    return factors, inputs, beyond, mask


def reverse(factors, inputs, beyond, mask, sequences=None):
    return linear_recurrence(factors, inputs, mask, beyond=beyond, sequences=sequences)


def forward(factors, inputs, beyond, mask, sequences=None):
    return linear_recurrence(
        factors, inputs, mask, beyond=beyond, sequences=sequences, reverse=False
    )


def constant(inputs, mask, sequences=None):
    return linear_recurrence(0.9, inputs, mask, sequences=sequences)


def following(values, beyond, sequences=None):
    return next_in_sequence(values, beyond=beyond, sequences=sequences)


BEYOND = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.double)
"""One value for each of the four sequences of the ragged batch."""


def both_layouts(recurrence):
    def layouts(batch: Ragged):
        factors, inputs = batch.draw(0).abs(), batch.draw(1)
        padded = recurrence(factors, inputs, BEYOND, batch.mask)
        pack = batch.pack
        packed = recurrence(pack(factors), pack(inputs), BEYOND, pack(batch.mask), batch.sequences)
        return pack(padded), packed

    return layouts


def constant_layouts(batch: Ragged):
    inputs = batch.draw(1)
    padded = constant(inputs, batch.mask)
    return batch.pack(padded), constant(batch.pack(inputs), batch.pack(batch.mask), batch.sequences)


CASES = [
    Case(
        name=f"linear_recurrence ({name})",
        function=function,
        sample=steps,
        differentiable=(0, 1, 2),
        layouts=both_layouts(function),
    )
    for name, function in [("reverse", reverse), ("forward", forward)]
] + [
    Case(
        name="linear_recurrence (constant factor)",
        function=constant,
        sample=lambda seed: (steps(seed)[1], steps(seed)[3]),
        differentiable=(0,),
        layouts=constant_layouts,
    ),
    Case(
        name="next_in_sequence",
        function=following,
        sample=lambda seed: steps(seed)[1:3],
        differentiable=(0, 1),
        reasons={"packed = padded": "the next position of a padded row may be padding"},
    ),
]
