"""Rows of the table: divergences from samples, and the summaries made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.divergences.sampled import (
    binary_kl,
    chi_square,
    jensen_shannon,
    kl_from_sampler,
    kl_to_sampler,
    log_ratio_histogram,
    total_variation,
)
from areal_lab.functional.staleness.diagnostics import divergence_by_lag, off_policy_diagnostics
from tests.functional.case import NO_GRADIENT, Case, Ragged
from tests.functional.cases.losses import tokens


def log_ratio(seed: int) -> tuple[Tensor, ...]:
    _, proximal, behavior, _, mask = tokens(seed)
    return proximal - behavior, mask


def two_policies(seed: int) -> tuple[Tensor, ...]:
    _, proximal, behavior, _, mask = tokens(seed)
    return proximal, behavior, mask


def with_lag(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return *two_policies(seed), torch.randint(0, 5, (6,), generator=generator)


def summary(proximal, behavior, mask, sequences=None):
    return off_policy_diagnostics(proximal, behavior, mask, sequences=sequences)


def by_lag(proximal, behavior, mask, lag):
    return divergence_by_lag(proximal, behavior, mask, lag, bins=4)


def histogram(logs, mask):
    return log_ratio_histogram(logs, mask, low=-1.0, high=1.0, bins=8)


def in_both(function):
    def layouts(batch: Ragged):
        logs = batch.draw(0, scale=0.3)
        return function(logs, batch.mask), function(batch.pack(logs), batch.pack(batch.mask))

    return layouts


def summary_in_both(batch: Ragged):
    padded = [batch.draw(0, scale=0.3), batch.draw(1, scale=0.3), batch.mask]
    return summary(*padded), summary(*map(batch.pack, padded), batch.sequences)


def by_lag_in_both(batch: Ragged):
    lag = torch.arange(20).reshape(4, 5) % 5
    padded = [batch.draw(0, scale=0.3), batch.draw(1, scale=0.3), batch.mask, lag]
    return by_lag(*padded), by_lag(*map(batch.pack, padded))


def binary(proximal, behavior, mask):
    return binary_kl(*(torch.where(mask, -x.abs(), -1.0) for x in (proximal, behavior)))


def binary_in_both(batch: Ragged):
    padded = [batch.draw(0, scale=0.3), batch.draw(1, scale=0.3), batch.mask]
    return batch.pack(binary(*padded)), binary(*map(batch.pack, padded))


CASES = [
    Case(
        name="binary_kl",
        function=binary,
        sample=two_policies,
        layouts=binary_in_both,
        reasons=NO_GRADIENT,
    ),
    *(
        Case(
            name=name,
            function=function,
            sample=log_ratio,
            layouts=in_both(function),
            reasons=NO_GRADIENT,
        )
        for name, function in [
            ("kl_from_sampler", kl_from_sampler),
            ("kl_to_sampler", kl_to_sampler),
            ("chi_square", chi_square),
            ("total_variation", total_variation),
            ("jensen_shannon", jensen_shannon),
            ("log_ratio_histogram", histogram),
        ]
    ),
    Case(
        name="off_policy_diagnostics",
        function=summary,
        sample=two_policies,
        layouts=summary_in_both,
        reasons=NO_GRADIENT,
    ),
    Case(
        name="divergence_by_lag",
        function=by_lag,
        sample=with_lag,
        layouts=by_lag_in_both,
        reasons=NO_GRADIENT,
    ),
]
