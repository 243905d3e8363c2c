"""Rows of the table: aggregates."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.aggregate import (
    fixed_length_mean,
    prompt_mean,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
    token_sum,
)
from areal_lab.functional.segments import Segments
from tests.functional.case import Case, Ragged


def sample(seed: int) -> tuple[Tensor, ...]:
    """Values, mask and prompt of six tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, generator=generator, dtype=torch.double)
    mask = torch.tensor([True, True, False, True, True, True])
    return values, mask, torch.tensor([0, 0, 0, 1, 1, 2])


def of_values(aggregate):
    return lambda values, mask, _: aggregate(values, mask)


def of_prompts(values, mask, ids):
    return prompt_mean(values, mask, groups=Segments(ids, 4))


def both_layouts(aggregate):
    def layouts(batch: Ragged):
        values = batch.draw(0)
        packed = aggregate(batch.pack(values), batch.pack(batch.mask), batch.sequences)
        return aggregate(values, batch.mask, batch.rows), packed

    return layouts


def prompts_in_both_layouts(batch: Ragged):
    values, ids = batch.draw(0), batch.rows.ids // 2
    packed = of_prompts(batch.pack(values), batch.pack(batch.mask), batch.pack(ids))
    return of_prompts(values, batch.mask, ids), packed


CASES = [
    Case(
        name=name,
        function=of_values(aggregate),
        sample=sample,
        differentiable=(0,),
        layouts=both_layouts(aggregate),
    )
    for name, aggregate in [
        ("token_mean", token_mean),
        ("token_sum", token_sum),
        ("sequence_mean", sequence_mean),
        ("sequence_sum_mean", sequence_sum_mean),
        ("fixed_length_mean", partial(fixed_length_mean, max_tokens=8)),
    ]
]
CASES += [
    Case(
        name="prompt_mean",
        function=of_prompts,
        sample=sample,
        differentiable=(0,),
        layouts=prompts_in_both_layouts,
    )
]
