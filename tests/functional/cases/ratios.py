"""Rows of the table: what a policy's ratio to its anchor is taken of."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.ratios import (
    segment_ratio,
    sequence_product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from tests.functional.case import Case, Ragged


def tokens(seed: int) -> tuple[Tensor, ...]:
    """log-probs under theta and anchor, mask; six tokens in two runs."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(6, generator=generator, dtype=torch.double)
    anchor = logprobs + 0.3 * torch.randn(6, generator=generator, dtype=torch.double)
    return logprobs, anchor, torch.tensor([True, True, False, True, True, seed == 0])


def of(ratio):
    """Log ratio and anchor: the log-probs themselves are only selected."""
    return lambda logprobs, anchor, mask: ratio(logprobs, anchor, mask)[0]


def both_layouts(ratio):
    def layouts(batch: Ragged):
        logprobs, anchor = batch.draw(0), batch.draw(1)
        padded = ratio(logprobs, anchor, batch.mask, batch.rows)
        packed = ratio(*map(batch.pack, (logprobs, anchor, batch.mask)), batch.sequences)
        return batch.pack(padded.log_ratio), packed.log_ratio

    return layouts


STOPPED = "stop-gradient: the value is the sequence's, the gradient the token's"

CASES = [
    Case(
        name=ratio.__name__,
        function=of(ratio),
        sample=tokens,
        differentiable=(0,),
        layouts=both_layouts(ratio),
        reasons={"grad": STOPPED} if ratio is sequence_token_ratio else {},
    )
    for ratio in (
        token_ratio,
        sequence_ratio,
        sequence_token_ratio,
        segment_ratio,
        sequence_product_ratio,
    )
]
