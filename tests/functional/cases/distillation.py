"""Rows of the table: distillation from tokens, from distributions, from a teacher's top k."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional import sequence_mean
from areal_lab.functional.divergences.vocabulary import forward_kl, generalized_jsd, reverse_kl
from areal_lab.functional.losses.distillation import (
    distillation_advantages,
    distillation_loss,
    drop_tail,
    lump_tail,
    on_policy_distillation_loss,
    renormalize_tail,
    topk_distillation_loss,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

VOCAB, TOP = 5, 2
BY_DESIGN = dict.fromkeys(
    ("grad", "double backward"), "by design not the derivative of its value; tested separately"
)


def mask(seed: int) -> Tensor:
    return torch.tensor([True, True, False, True, True, True]).roll(seed)


def tokens(seed: int) -> tuple[Tensor, ...]:
    """Three log-probs (or advantages) of six tokens, and mask."""
    generator = torch.Generator().manual_seed(seed)
    return (*(0.5 * torch.randn(3, 6, generator=generator, dtype=torch.double)), mask(seed))


def logits(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (*torch.randn(2, 6, VOCAB, generator=generator, dtype=torch.double), mask(seed))


def top(seed: int) -> tuple[Tensor, ...]:
    student, teacher, chosen = logits(seed)
    logprobs, picked = teacher.log_softmax(-1).topk(TOP)
    return student, picked, logprobs, chosen


def token_layouts(function):
    """Everything but the loss is per token."""

    def layouts(batch: Ragged):
        padded = [batch.draw(seed, scale=0.5) for seed in range(3)]
        ours = function(*padded, batch.mask)
        packed = function(
            *map(batch.pack, padded), batch.pack(batch.mask), sequences=batch.sequences
        )
        if isinstance(ours, Tensor):
            return batch.pack(ours), packed
        return [ours[0], batch.pack(ours[1])], list(packed)

    return layouts


def vocabulary_layouts(function, *, only_top: bool):
    def layouts(batch: Ragged):
        student, teacher = (
            torch.stack([batch.draw(10 * which + token) for token in range(VOCAB)], -1)
            for which in range(2)
        )
        inputs = [student, teacher]
        if only_top:
            logprobs, picked = teacher.log_softmax(-1).topk(TOP)
            inputs = [student, picked, logprobs]
        ours = function(*inputs, batch.mask)
        packed = function(
            *map(batch.pack, inputs), batch.pack(batch.mask), sequences=batch.sequences
        )
        return [ours[0], batch.pack(ours[1])], list(packed)

    return layouts


advantages = partial(distillation_advantages, coefficient=0.5, baseline=sequence_mean)
on_policy = partial(on_policy_distillation_loss, aggregate=sequence_mean)

WHOLE = {
    "forward_kl": partial(distillation_loss, divergence=forward_kl, temperature=0.7),
    "reverse_kl, sequence mean": partial(
        distillation_loss, divergence=reverse_kl, aggregate=sequence_mean
    ),
    "generalized_jsd": partial(distillation_loss, divergence=partial(generalized_jsd, beta=0.2)),
}
TAILS = {
    "lump_tail": partial(topk_distillation_loss, tail=lump_tail),
    "renormalize_tail, reverse_kl": partial(
        topk_distillation_loss, tail=renormalize_tail, divergence=reverse_kl
    ),
    "drop_tail": partial(topk_distillation_loss, tail=drop_tail),
}

CASES = [
    Case(
        name="distillation_advantages (baseline)",
        function=advantages,
        sample=tokens,
        layouts=token_layouts(advantages),
        reasons=dict.fromkeys(NO_GRADIENT, "an advantage: no gradient"),
    ),
    Case(
        name="on_policy_distillation_loss",
        function=on_policy,
        sample=tokens,
        differentiable=(0,),
        layouts=token_layouts(on_policy),
        reasons=BY_DESIGN,
    ),
    *(
        Case(
            name=f"distillation_loss ({name})",
            function=loss,
            sample=logits,
            differentiable=(0,),
            layouts=vocabulary_layouts(loss, only_top=False),
        )
        for name, loss in WHOLE.items()
    ),
    *(
        Case(
            name=f"topk_distillation_loss ({name})",
            function=loss,
            sample=top,
            differentiable=(0,),
            layouts=vocabulary_layouts(loss, only_top=True),
        )
        for name, loss in TAILS.items()
    ),
]
