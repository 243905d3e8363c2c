"""Rows of the table: losses of pairs, log-probs of whole answers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    preference_loss,
    sequence_logprob_means,
    sequence_logprob_sums,
)
from tests.functional.case import Case, Ragged


def pairs(seed: int) -> tuple[Tensor, ...]:
    """l_c, l_r, f_c, f_r of four pairs, and which of them count."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(4, 4, generator=generator, dtype=torch.double)
    return (*logprobs, torch.tensor([True, False, True, True]).roll(seed))


def masked(loss):
    return lambda *inputs: loss(*inputs[:-1], mask=inputs[-1])


def scores(chosen, rejected, margin, mask):
    return bradley_terry_loss(chosen, rejected, margin=margin, mask=mask)


def answers(seed: int) -> tuple[Tensor, ...]:
    """Log-probs and mask of one answer."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(6, generator=generator, dtype=torch.double)
    return logprobs, torch.tensor([True, True, False, True, True, True]).roll(seed)


def through_answers(loss, summary, inputs: int):
    """The even sequences were chosen, the odd ones rejected."""

    def layouts(batch: Ragged):
        padded = [batch.draw(seed, scale=0.3) for seed in range(inputs)]
        results = []
        for values, mask, sequences in (
            (padded, batch.mask, None),
            ([batch.pack(x) for x in padded], batch.pack(batch.mask), batch.sequences),
        ):
            each = [summary(x, mask, sequences) for x in values]
            sides = [side for x in each for side in (x[0::2], x[1::2])]
            results.append(list(loss(*sides)))
        return tuple(results)

    return layouts


def summary_layouts(summary):
    def layouts(batch: Ragged):
        logprobs = batch.draw(0)
        packed = summary(batch.pack(logprobs), batch.pack(batch.mask), batch.sequences)
        return summary(logprobs, batch.mask, batch.rows), packed

    return layouts


LOSSES = {
    "dpo_loss": partial(dpo_loss, beta=0.5),
    "dpo_loss (label smoothing)": partial(dpo_loss, beta=0.5, label_smoothing=0.1),
    "ipo_loss": partial(ipo_loss, beta=0.5),
    "preference_loss (own objective)": partial(preference_loss, objective=torch.exp),
}

CASES = [
    *(
        Case(
            name=name,
            function=masked(loss),
            sample=pairs,
            differentiable=(0, 1),
            layouts=through_answers(
                loss,
                sequence_logprob_means if loss is LOSSES["ipo_loss"] else sequence_logprob_sums,
                2,
            ),
        )
        for name, loss in LOSSES.items()
    ),
    Case(
        name="bradley_terry_loss (margin)",
        function=scores,
        sample=lambda seed: (*pairs(seed)[:3], pairs(seed)[4]),
        differentiable=(0, 1),
        layouts=through_answers(bradley_terry_loss, sequence_logprob_sums, 1),
    ),
    *(
        Case(
            name=summary.__name__,
            function=summary,
            sample=answers,
            differentiable=(0,),
            layouts=summary_layouts(summary),
        )
        for summary in (sequence_logprob_sums, sequence_logprob_means)
    ),
]
