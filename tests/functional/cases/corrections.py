"""Rows of the table: each correction inside a policy loss, and the masks by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.corrections.rejection import (
    divergence_mask,
    mask_binary_kl,
    off_policy_sequence_mask,
    probability_difference_mask,
    reject,
    veto_suffix_mask,
)
from areal_lab.functional.corrections.second_moment import mask_second_moment, second_moment_mask
from areal_lab.functional.corrections.sequence import (
    mask_outlier_sequences,
    mask_sequences_outside,
    max_of_sequence,
    mean_of_sequence,
    sequence_geometric_mean,
    sequence_product,
    sum_of_sequence,
)
from areal_lab.functional.corrections.weights import (
    behavior_weight,
    chain,
    keep,
    mask_above,
    mask_outside,
    over_segments,
    self_normalize,
    truncate,
    unbounded,
)
from areal_lab.functional.divergences.kl import k2, k3
from areal_lab.functional.losses.policy import decoupled_ppo, policy_loss
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import clip_surrogate
from tests.functional.case import NO_GRADIENT, Case, Ragged
from tests.functional.cases.losses import tokens

TURNS = Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2)


def loss_with(correct):
    return lambda *batch: decoupled_ppo(*batch, correct=correct)


def in_both(correct):
    """The loss and its weights; padded rows against packed sequences."""

    def layouts(batch: Ragged):
        padded = [*(batch.draw(seed, scale=0.3) for seed in range(4)), batch.mask]
        packed = map(batch.pack, padded)
        ours = policy_loss(*padded, surrogate=clip_surrogate, correct=correct)
        theirs = policy_loss(
            *packed, surrogate=clip_surrogate, correct=correct, sequences=batch.sequences
        )
        return [ours.loss, batch.pack(ours.behavior_weight)], [theirs.loss, theirs.behavior_weight]

    return layouts


def mask_in_both(function, inputs: int):
    def layouts(batch: Ragged):
        padded = [*(batch.draw(seed, scale=0.3) for seed in range(inputs)), batch.mask]
        return batch.pack(function(*padded)), function(*map(batch.pack, padded), batch.sequences)

    return layouts


def only_logs(seed: int) -> tuple[Tensor, ...]:
    _, proximal, behavior, _, mask = tokens(seed)
    return proximal, behavior, mask


def behavior_weights(proximal, behavior, mask, sequences=None):
    return behavior_weight(proximal, behavior, mask, sequences)[:2]


def second_moment(proximal, behavior, mask, _=None):
    inside = [torch.where(mask, x, 0.0) for x in (proximal, behavior)]
    return second_moment_mask(inside[0] - inside[1], mask, threshold=0.05)


def near(proximal, behavior, mask, sequences=None):
    return divergence_mask(proximal, behavior, mask, k2, high=0.04, sequences=sequences)


def near_on_average(proximal, behavior, mask, sequences=None):
    return divergence_mask(
        proximal, behavior, mask, k3, high=0.04, statistic=mean_of_sequence, sequences=sequences
    )


def probable(proximal, behavior, mask, sequences=None):
    return probability_difference_mask(
        proximal, behavior, mask, low=-0.1, high=0.05, sequences=sequences
    )


def probable_on_average(proximal, behavior, mask, sequences=None):
    return probability_difference_mask(
        proximal,
        behavior,
        mask,
        low=-0.1,
        high=0.05,
        statistic=mean_of_sequence,
        sequences=sequences,
    )


def not_unlearned(logprobs, behavior, advantages, mask, sequences=None):
    return off_policy_sequence_mask(
        logprobs, behavior, advantages, mask, threshold=0.01, sequences=sequences
    )


def not_vetoed(logprobs, behavior, advantages, mask, sequences=None):
    return veto_suffix_mask(
        logprobs, behavior, advantages, mask, threshold=1.1, sequences=sequences
    )


def with_kept(logprobs, proximal, behavior, advantages, mask):
    kept = not_unlearned(logprobs, behavior, advantages, mask)
    return decoupled_ppo(logprobs, proximal, behavior, advantages, mask, correct=keep(kept))


def kept_in_both(batch: Ragged):
    padded = [*(batch.draw(seed, scale=0.3) for seed in range(4)), batch.mask]
    kept = not_unlearned(padded[0], *padded[2:])
    ours = decoupled_ppo(*padded, correct=keep(kept))
    theirs = decoupled_ppo(*map(batch.pack, padded), correct=keep(batch.pack(kept)))
    return [ours.loss, batch.pack(ours.behavior_weight)], [theirs.loss, theirs.behavior_weight]


def over_prompts_in_both(batch: Ragged):
    """Two samples a prompt: sequences 0 and 1, 2 and 3."""
    padded = [*(batch.draw(seed, scale=0.3) for seed in range(4)), batch.mask]
    ids = batch.rows.ids // 2
    ours = decoupled_ppo(*padded, correct=over_segments(Segments(ids, 2), sequence_product))
    packed = over_segments(Segments(batch.pack(ids), 2), sequence_product)
    theirs = decoupled_ppo(*map(batch.pack, padded), correct=packed)
    return [ours.loss, batch.pack(ours.behavior_weight)], [theirs.loss, theirs.behavior_weight]


CORRECTIONS = {
    "unbounded": unbounded,
    "truncate (floor and cap)": truncate(1.2, floor=0.9),
    "mask_above": mask_above(1.1),
    "mask_outside": mask_outside(0.8, 1.25),
    "sequence_product": sequence_product,
    "sequence_product (truncated)": chain(sequence_product, truncate(1.1)),
    "sequence_product (masked)": chain(sequence_product, mask_outside(0.5, 3.0)),
    "sequence_geometric_mean": sequence_geometric_mean,
    "mask_sequences_outside": mask_sequences_outside(0.9, 1.1),
    "mask_outlier_sequences": mask_outlier_sequences(0.6, 1.5),
    "reject (k3, token)": reject(k3, high=0.03),
    "reject (k2, sequence sum)": reject(k2, high=0.2, statistic=sum_of_sequence),
    "reject (k3, sequence max)": reject(k3, high=0.2, statistic=max_of_sequence),
    "mask_binary_kl": mask_binary_kl(0.05),
    "mask_second_moment": mask_second_moment(0.05),
    "self_normalize": chain(mask_outside(0.8, 1.25), self_normalize()),
    "self_normalize (global sums)": self_normalize(weight_sum=torch.tensor(11.0), token_count=10),
}

MASKS = {
    "second_moment_mask": (second_moment, only_logs, 2),
    "divergence_mask (k2)": (near, only_logs, 2),
    "divergence_mask (k3, sequence mean)": (near_on_average, only_logs, 2),
    "probability_difference_mask": (probable, only_logs, 2),
    "probability_difference_mask (geometric)": (probable_on_average, only_logs, 2),
    "off_policy_sequence_mask": (
        not_unlearned,
        lambda seed: (tokens(seed)[0], *tokens(seed)[2:]),
        3,
    ),
    "veto_suffix_mask": (
        not_vetoed,
        lambda seed: (tokens(seed)[0], *tokens(seed)[2:]),
        3,
    ),
}

CASES = [
    Case(
        name="behavior_weight",
        function=behavior_weights,
        sample=only_logs,
        layouts=lambda batch: (
            [batch.pack(x) for x in behavior_weights(batch.draw(0), batch.draw(1), batch.mask)],
            behavior_weights(*map(batch.pack, (batch.draw(0), batch.draw(1), batch.mask))),
        ),
        reasons=NO_GRADIENT,
    ),
    *(
        Case(
            name=name,
            function=loss_with(correct),
            sample=tokens,
            differentiable=(0,),
            layouts=in_both(correct),
        )
        for name, correct in CORRECTIONS.items()
    ),
    Case(
        name="keep",
        function=with_kept,
        sample=tokens,
        differentiable=(0,),
        layouts=kept_in_both,
    ),
    Case(
        name="over_segments",
        function=loss_with(over_segments(TURNS, sequence_product)),
        sample=tokens,
        differentiable=(0,),
        layouts=over_prompts_in_both,
    ),
    *(
        Case(
            name=name,
            function=function,
            sample=sample,
            layouts=mask_in_both(function, inputs),
            reasons=NO_GRADIENT,
        )
        for name, (function, sample, inputs) in MASKS.items()
    ),
]
