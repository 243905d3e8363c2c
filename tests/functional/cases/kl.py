"""Rows of the table: KL estimators, in the loss and in the reward, and KL over the vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional import sequence_mean
from areal_lab.functional.advantages.kl_rewards import adaptive_kl_coefficient, kl_shaped_rewards
from areal_lab.functional.divergences.kl import (
    absolute,
    clamped,
    full_kl,
    k1,
    k2,
    k3,
    kl_loss,
    kl_penalty,
    straight_through,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

VOCAB = 4
BY_DESIGN = dict.fromkeys(
    ("grad", "double backward"), "by design not the derivative of its value; tested separately"
)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.double)


def mask(seed: int) -> Tensor:
    return torch.tensor([True, True, False, True, True, True]).roll(seed)


def tokens(seed: int) -> tuple[Tensor, ...]:
    """log pi_theta, log pi_ref, log pi_s and mask of six tokens, away from x = 0."""
    logprobs = -normal(seed, 6).abs() - 0.1
    shift = normal(seed + 100, 6, scale=0.4)
    return (
        logprobs,
        logprobs + shift + 0.2 * shift.sign(),
        logprobs + normal(seed + 200, 6, scale=0.2),
        mask(seed),
    )


def penalty(logprobs, reference, _, mask, *, estimator):
    return kl_penalty(logprobs, reference, mask, estimator=estimator)


def weighted(logprobs, reference, sampling, mask):
    return kl_penalty(logprobs, reference, mask, sampling_logprobs=sampling)


def loss(logprobs, reference, _, mask, *, sequences=None):
    return kl_loss(
        logprobs, reference, mask, coefficient=0.3, aggregate=sequence_mean, sequences=sequences
    )


def token_layouts(function):
    def layouts(batch: Ragged):
        padded = [batch.draw(seed, scale=0.3) for seed in range(3)]
        packed = function(*map(batch.pack, padded), batch.pack(batch.mask))
        return batch.pack(function(*padded, batch.mask)), packed

    return layouts


def loss_layouts(batch: Ragged):
    padded = [batch.draw(seed, scale=0.3) for seed in range(3)]
    ours = loss(*padded, batch.mask)
    packed = loss(*map(batch.pack, padded), batch.pack(batch.mask), sequences=batch.sequences)
    return [ours.loss, batch.pack(ours.kl)], list(packed)


def reward_sample(seed: int) -> tuple[Tensor, ...]:
    """Terminal reward, token rewards, log-probs, reference and mask of one sequence."""
    logprobs, reference, _, chosen = tokens(seed)
    return normal(seed + 300), normal(seed + 400, 6), logprobs, reference, chosen


def rewards(terminal, token_rewards, logprobs, reference, mask, *, sequences=None):
    return kl_shaped_rewards(
        terminal,
        logprobs,
        reference,
        mask,
        coefficient=0.3,
        token_rewards=token_rewards,
        sequences=sequences,
    )


def reward_layouts(batch: Ragged):
    terminal = normal(9, 4)
    padded = [batch.draw(seed, scale=0.3) for seed in range(3)]
    ours = rewards(terminal, *padded, batch.mask)
    packed = rewards(
        terminal, *map(batch.pack, padded), batch.pack(batch.mask), sequences=batch.sequences
    )
    return [batch.pack(field) for field in ours], list(packed)


def logits(seed: int) -> tuple[Tensor, ...]:
    return normal(seed, 6, VOCAB), normal(seed + 100, 6, VOCAB), mask(seed)


tempered = partial(full_kl, temperature=0.7)


def vocabulary_layouts(batch: Ragged):
    both = [
        torch.stack([batch.draw(10 * which + token) for token in range(VOCAB)], -1)
        for which in range(2)
    ]
    packed = tempered(*map(batch.pack, both), batch.pack(batch.mask))
    return batch.pack(tempered(*both, batch.mask)), packed


ESTIMATORS = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "absolute": absolute,
    "clamped": clamped(k3, log_ratio_bound=20.0, value_bound=10.0),
    "straight_through": straight_through(),
}

CASES = [
    *(
        Case(
            name=f"kl_penalty ({name})",
            function=partial(penalty, estimator=estimator),
            sample=tokens,
            differentiable=(0,),
            layouts=token_layouts(partial(penalty, estimator=estimator)),
            reasons=BY_DESIGN if name == "straight_through" else {},
        )
        for name, estimator in ESTIMATORS.items()
    ),
    Case(
        name="kl_penalty (importance weight)",
        function=weighted,
        sample=tokens,
        differentiable=(0,),
        layouts=token_layouts(weighted),
    ),
    Case(
        name="kl_loss (sequence mean)",
        function=loss,
        sample=tokens,
        differentiable=(0,),
        layouts=loss_layouts,
    ),
    Case(
        name="kl_shaped_rewards",
        function=rewards,
        sample=reward_sample,
        layouts=reward_layouts,
        reasons=dict.fromkeys(NO_GRADIENT, "a reward: no gradient"),
    ),
    Case(
        name="adaptive_kl_coefficient",
        function=partial(adaptive_kl_coefficient, target_kl=1.0, gain=0.1),
        sample=lambda seed: (normal(seed).abs(), normal(seed + 1).abs()),
        reasons={**NO_GRADIENT, "packed = padded": "no tokens among the inputs"},
    ),
    Case(
        name="full_kl",
        function=tempered,
        sample=logits,
        differentiable=(0,),
        layouts=vocabulary_layouts,
    ),
]
