"""Rows of the table: PPO, decoupled PPO, and a loss of own parts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.corrections.weights import chain, self_normalize, truncate
from areal_lab.functional.losses.policy import anchored_at_behavior, decoupled_ppo, policy_loss, ppo
from areal_lab.functional.surrogates.clip import dual_clip_surrogate
from tests.functional.case import Case, Ragged


def tokens(seed: int) -> tuple[Tensor, ...]:
    """log-probs under theta, proximal and behavior, advantages, mask; six tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(6, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0).abs() - 0.1
    proximal = logprobs + normal(0.3)
    mask = torch.tensor([True, True, False, True, True, True])
    return logprobs, proximal, proximal + normal(0.3), normal(1.0), mask


def both_layouts(loss):
    """Loss and per-token diagnostics of the padded and of the packed batch."""

    def layouts(batch: Ragged):
        padded = [batch.draw(seed, scale=0.3) for seed in range(4)]
        ours = loss(*padded, batch.mask)
        packed = loss(*map(batch.pack, padded), batch.pack(batch.mask))
        return [ours[0], *map(batch.pack, ours[1:])], list(packed)

    return layouts


def without_proximal(logprobs, _, behavior, advantages, mask):
    return ppo(logprobs, behavior, advantages, mask)


def truncated(*batch):
    return decoupled_ppo(*batch, correct=truncate(1.1))


own_parts = partial(
    policy_loss, surrogate=dual_clip_surrogate, correct=chain(truncate(1.5), self_normalize())
)


CASES = [
    Case(
        name=name,
        function=loss,
        sample=tokens,
        differentiable=(0,),
        layouts=both_layouts(loss),
    )
    for name, loss in [
        ("ppo", without_proximal),
        ("decoupled_ppo", decoupled_ppo),
        ("decoupled_ppo (truncated weight)", truncated),
        ("policy_loss (dual clip, normalized weight)", own_parts),
        ("anchored_at_behavior (ppo)", anchored_at_behavior(ppo, clip_epsilon=0.3)),
    ]
]
