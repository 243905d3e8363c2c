"""Rows of the table: interpolated and averaged proximal policies."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.corrections.proximal import (
    EMAWeights,
    a3po_proximal_logprobs,
    ema_update,
    ema_weights,
    linear_proximal_logprobs,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

DETACHED = dict.fromkeys(NO_GRADIENT, "the proximal policy is a constant of the loss: no gradient")
NO_TOKENS = {"packed = padded": "a function of weights, not of tokens"}


def tokens(seed: int) -> tuple[Tensor, ...]:
    """log-probs under theta and behavior, versions, mask."""
    generator = torch.Generator().manual_seed(seed)
    theta, behavior = -torch.rand(2, 6, generator=generator, dtype=torch.double)
    versions = torch.randint(-1, 5, (6,), generator=generator)
    return theta, behavior, versions, torch.tensor([True, True, False, True, True, True])


def weights(seed: int) -> tuple[Tensor, ...]:
    """Average, its total, newest weights."""
    generator = torch.Generator().manual_seed(seed)
    average, newest = torch.randn(2, 3, generator=generator, dtype=torch.double)
    return average, torch.tensor(1.0 + seed, dtype=torch.double), newest


def interpolated(function):
    return lambda theta, behavior, versions, mask: function(
        theta, behavior, versions, mask, trainer_version=5
    )


def in_both_layouts(function):
    def layouts(batch: Ragged):
        theta, behavior = batch.draw(0), batch.draw(1)
        versions = torch.arange(20).reshape(4, 5) % 7 - 1
        inputs = (theta, behavior, versions, batch.mask)
        return batch.pack(function(*inputs)), function(*map(batch.pack, inputs))

    return layouts


def started(average, _, __):
    return ema_weights({"w": average})


def updated(average, total, newest):
    return ema_update(EMAWeights({"w": average}, total), {"w": newest}, decay=0.9)


CASES = [
    Case(
        name=name,
        function=interpolated(function),
        sample=tokens,
        layouts=in_both_layouts(interpolated(function)),
        reasons=DETACHED,
    )
    for name, function in [
        ("a3po_proximal_logprobs", a3po_proximal_logprobs),
        ("linear_proximal_logprobs", linear_proximal_logprobs),
    ]
]
CASES += [
    Case(name=name, function=function, sample=weights, reasons=DETACHED | NO_TOKENS)
    for name, function in [("ema_weights", started), ("ema_update", updated)]
]
