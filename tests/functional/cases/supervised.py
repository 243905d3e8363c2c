"""Rows of the table: likelihood of demonstrations, value losses."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from areal_lab.functional import sequence_mean
from areal_lab.functional.losses.supervised import huber_error, sft_loss, squared_error, value_loss
from tests.functional.case import Case, Ragged


def values(seed: int) -> tuple[Tensor, ...]:
    """Values, old values, returns and mask of six tokens, off the bounds of the clip by 0.05."""
    generator = torch.Generator().manual_seed(seed)
    old, returns = torch.randn(2, 6, generator=generator, dtype=torch.double)
    moves = torch.tensor([0.1, 0.4, -0.3, -0.1, 0.25, -0.5], dtype=torch.double)
    moves = moves[torch.randperm(6, generator=generator)]
    mask = torch.tensor([True, True, False, True, True, True]).roll(seed)
    return old + moves, old, returns, mask


def demonstrations(seed: int) -> tuple[Tensor, ...]:
    logprobs, weights, _, mask = values(seed)
    return logprobs, weights, mask


def sft(logprobs, _, mask, *, sequences=None):
    return sft_loss(logprobs, mask, sequences=sequences)


def weighted_sft(logprobs, weights, mask, *, sequences=None):
    return sft_loss(logprobs, mask, weights=weights, aggregate=sequence_mean, sequences=sequences)


def clipped(values, old_values, returns, mask, **keywords):
    return value_loss(values, returns, mask, old_values=old_values, **keywords)


def unclipped(values, _, returns, mask, *, sequences=None):
    return value_loss(
        values, returns, mask, clip_epsilon=math.inf, error=squared_error, sequences=sequences
    )


by_sequence = partial(clipped, clip_epsilon=0.2, error=huber_error(0.9), aggregate=sequence_mean)


def layouts_of(loss, inputs: int):
    """Loss and the diagnostics of each token."""

    def layouts(batch: Ragged):
        padded = [batch.draw(seed) for seed in range(inputs)]
        ours = loss(*padded, batch.mask)
        packed = loss(*map(batch.pack, padded), batch.pack(batch.mask), sequences=batch.sequences)
        return [ours[0], *map(batch.pack, ours[1:])], list(packed)

    return layouts


CASES = [
    *(
        Case(
            name=name,
            function=loss,
            sample=demonstrations,
            differentiable=(0,),
            layouts=layouts_of(loss, 2),
        )
        for name, loss in [("sft_loss", sft), ("sft_loss (weights, sequence mean)", weighted_sft)]
    ),
    *(
        Case(
            name=name,
            function=loss,
            sample=values,
            differentiable=(0,),
            layouts=layouts_of(loss, 3),
        )
        for name, loss in [
            ("value_loss", clipped),
            ("value_loss (no clip, squared_error)", unclipped),
            ("value_loss (huber_error, sequence mean)", by_sequence),
        ]
    ),
]
