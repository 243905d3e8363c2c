"""Rows of the table: statistics of per-sample gradients."""

from __future__ import annotations

import torch

from areal_lab.functional.staleness.gradient_spread import (
    gradient_alignment_by_lag,
    gradient_spread_by_lag,
)
from tests.functional.case import NO_GRADIENT, Case


def sample(seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(6, 3, generator=generator, dtype=torch.double)
    return gradients, torch.randint(3, (6,), generator=generator)


def sample_with_reference(seed):
    gradients, lag = sample(seed)
    return gradients, lag, gradients.flip(1).mean(0)


CASES = [
    Case(
        name="gradient_spread_by_lag",
        function=lambda gradients, lag: gradient_spread_by_lag(gradients, lag, bins=3),
        sample=sample,
        reasons=NO_GRADIENT | {"packed = padded": "one gradient per sample: no token layout"},
    ),
    Case(
        name="gradient_alignment_by_lag",
        function=lambda gradients, lag, reference: gradient_alignment_by_lag(
            gradients, lag, reference, bins=3
        ),
        sample=sample_with_reference,
        reasons=NO_GRADIENT | {"packed = padded": "one gradient per sample: no token layout"},
    ),
]
