"""Rows of the table: lag, effective sample size, quantiles."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.masked import masked_quantiles
from areal_lab.functional.segments import Segments
from areal_lab.functional.staleness.control import (
    age_weights,
    aligned_part,
    learning_rate_scale,
    weight_deviation,
)
from areal_lab.functional.staleness.lag import (
    effective_sample_share,
    effective_sample_size,
    effective_sample_size_by_lag,
    effective_sample_size_of_logs,
    lag_histogram,
    mean_by_lag,
    token_lag,
    trajectory_lag,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

TURNS = Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2)


def aged(seed: int) -> tuple[Tensor, ...]:
    """A value, the version and the mask of six tokens; version -1 is no token of the policy."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, generator=generator, dtype=torch.double)
    versions = torch.randint(0, 5, (6,), generator=generator)
    mask = torch.tensor([False, True, True, True, False, True])
    return values, torch.where(mask, versions, -1), mask


def lag_of(values, versions, mask):  # noqa: ARG001 - one signature for all rows
    return token_lag(versions, mask, 5)


def histogram(values, versions, mask):
    return lag_histogram(lag_of(values, versions, mask), mask, bins=4)


def trajectories(values, versions, mask, sequences=TURNS):
    return trajectory_lag(lag_of(values, versions, mask), mask, sequences=sequences)


def mean(values, versions, mask):
    return mean_by_lag(values, lag_of(values, versions, mask), mask, bins=4)


def size(values, versions, mask):  # noqa: ARG001
    return effective_sample_size(values.exp(), mask)


def size_by_lag(values, versions, mask):
    lag = lag_of(values, versions, mask)
    return effective_sample_size_by_lag(values.exp(), lag, mask, bins=4)


def share(values, versions, mask):  # noqa: ARG001
    return effective_sample_share(values.exp(), mask)


def size_of_logs(values, versions, mask):  # noqa: ARG001
    return effective_sample_size_of_logs(1000 * values, mask)


def ages(values, versions, mask):  # noqa: ARG001
    return age_weights(values.abs(), half_life=3.0)


def ages_in_both(batch: Ragged):
    padded = batch_of(batch)
    return batch.pack(ages(*padded)), ages(*map(batch.pack, padded))


def scale(values, versions, mask):  # noqa: ARG001
    return learning_rate_scale(values, mask, on_policy_share=0.9)


def scale_in_both(batch: Ragged):
    values, versions, mask = map(batch.pack, batch_of(batch))
    return scale(values[None][0], versions, mask), scale(values, versions, mask)


def deviation(values, versions, mask):  # noqa: ARG001
    return weight_deviation(values, mask)


def aligned(values, versions, mask):  # noqa: ARG001
    first, second = torch.where(mask, values, 0.0), torch.where(mask, values.abs(), 0.0)
    return aligned_part((first * second).sum(), first.norm(), second.norm(), threshold=0.1)


def quantiles(values, versions, mask):  # noqa: ARG001
    return masked_quantiles(values, mask, torch.tensor([0.1, 0.5, 0.99]))


def batch_of(batch: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    versions = torch.randint(0, 5, batch.mask.shape, generator=generator)
    return batch.draw(0), torch.where(batch.mask, versions, -1), batch.mask


def in_both(function):
    def layouts(batch: Ragged):
        padded = batch_of(batch)
        return function(*padded), function(*map(batch.pack, padded))

    return layouts


def tokens_in_both(batch: Ragged):
    padded = batch_of(batch)
    return batch.pack(lag_of(*padded)), lag_of(*map(batch.pack, padded))


def trajectories_in_both(batch: Ragged):
    padded = batch_of(batch)
    ours = trajectories(*padded, batch.rows)
    return ours, trajectories(*map(batch.pack, padded), batch.sequences)


CASES = [
    Case(
        name=name,
        function=function,
        sample=aged,
        layouts=layouts or in_both(function),
        reasons=NO_GRADIENT,
    )
    for name, function, layouts in [
        ("token_lag", lag_of, tokens_in_both),
        ("trajectory_lag", trajectories, trajectories_in_both),
        ("lag_histogram", histogram, None),
        ("mean_by_lag", mean, None),
        ("effective_sample_size", size, None),
        ("effective_sample_size_by_lag", size_by_lag, None),
        ("effective_sample_share", share, None),
        ("effective_sample_size_of_logs", size_of_logs, None),
        ("age_weights", ages, ages_in_both),
        ("learning_rate_scale", scale, scale_in_both),
        ("weight_deviation", deviation, None),
        ("aligned_part", aligned, None),
    ]
] + [
    Case(
        name="masked_quantiles",
        function=quantiles,
        sample=aged,
        differentiable=(0,),
        layouts=in_both(quantiles),
    )
]
