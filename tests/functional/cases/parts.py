"""Rows of the table: the parts that other functions are made of, and masks and segments."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional import (
    BehaviorWeight,
    Segments,
    add_moments,
    chain,
    decoupled_ppo,
    dense_ids,
    drop,
    group_advantages,
    in_turn,
    length_weighted_mean,
    log_distribution,
    logprobs_and_entropy_from_logits,
    masked_mean,
    masked_sum,
    max_of_sequence,
    mean_of_group,
    mean_of_sequence,
    mean_reward_of_group,
    min_p,
    no_moments,
    no_scale,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    replace_weight,
    segment_reduce,
    select,
    sequence_edges,
    sequences_or_rows,
    std_of_group,
    std_of_rewards,
    sum_of_sequence,
    token_moments,
    top_k,
    top_p,
    truncate,
)
from tests.functional.case import Case, Ragged

SAME = {"packed = padded": "one value per token in every layout"}
SAMPLES = {"packed = padded": "one value per sample, not per token"}
INTEGERS = {
    **SAME,
    **dict.fromkeys(("grad", "jacrev", "double backward"), "not a function of real numbers"),
}


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """A value and the mask of six tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, generator=generator, dtype=torch.double)
    return values, torch.tensor([True, True, False, True, seed > 0, True])


def grouped(seed: int) -> tuple[Tensor, Tensor]:
    return tokens(seed)[0], torch.tensor([3, 3, 3, 1, 1, 3])


def logits(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 7, generator=generator, dtype=torch.double), torch.tensor([True] * 3)


def of_sequences(reduce):
    def function(values, mask, sequences=None):
        return reduce(values, mask, sequences_or_rows(mask, sequences))

    return function


def reduced(reduce):
    def function(values, mask, sequences):
        return segment_reduce(values, *sequences, mask=mask, reduce=reduce)

    return of_sequences(function)


def in_both(function):
    def layouts(batch: Ragged):
        values = batch.draw(0)
        packed = function(batch.pack(values), batch.pack(batch.mask), sequences=batch.sequences)
        return function(values, batch.mask), packed

    return layouts


def plus_plus(values, mask, sequences=None):
    shape = mask.shape[:-1] if sequences is None else (sequences.count,)
    rewards = torch.ones(shape, dtype=values.dtype)
    return reinforce_plus_plus_advantages(
        rewards, mask, token_rewards=values, gamma=0.9, sequences=sequences
    )


def plus_plus_layouts(batch: Ragged):
    padded, packed = in_both(plus_plus)(batch)
    return batch.pack(padded), packed


def dropped(weight: BehaviorWeight) -> BehaviorWeight:
    return replace_weight(drop(weight, weight.weight < 0.5), weight.weight / 2)


def chained(values, mask):
    zeros = torch.zeros_like(values)
    correct = chain(truncate(1.1), dropped)
    return decoupled_ppo(values, zeros, zeros + 0.3, zeros + 1, mask, correct=correct).loss


def kept(values, mask):  # noqa: ARG001
    keep = in_turn(top_k(5), top_p(0.9), min_p(0.01))
    targets = values.detach().argmax(-1)
    return logprobs_and_entropy_from_logits(values, targets, keep=keep)


def token_case(name, function, **options) -> Case:
    return Case(
        name=name,
        function=function,
        sample=tokens,
        differentiable=(0,),
        **({"layouts": in_both(function)} | options),
    )


def sample_case(name, function, covers) -> Case:
    return Case(
        name=name,
        function=function,
        sample=grouped,
        differentiable=(0,),
        covers=covers,
        reasons=SAMPLES,
    )


CASES = [
    *(token_case(f"segment_reduce ({r})", reduced(r)) for r in ("sum", "mean", "min", "max")),
    token_case("sum_of_sequence", of_sequences(sum_of_sequence), covers=("sequences_or_rows",)),
    token_case("mean_of_sequence", of_sequences(mean_of_sequence)),
    token_case("max_of_sequence", of_sequences(max_of_sequence)),
    token_case("select", select, layouts=None, reasons=SAME),
    token_case("masked_sum", masked_sum, layouts=None, reasons=SAME),
    token_case("masked_mean", masked_mean, layouts=None, reasons=SAME),
    token_case("reinforce_plus_plus_advantages", plus_plus, layouts=plus_plus_layouts),
    token_case(
        "add_moments",
        lambda x, m: add_moments(no_moments(), token_moments(x, m)),
        layouts=None,
        reasons=SAME,
        covers=("no_moments",),
    ),
    Case(
        name="sequence_edges",
        function=lambda x, m: sequence_edges(x, Segments(m.long().cumsum(0), 7), last=True),
        sample=tokens,
        reasons=INTEGERS,
    ),
    Case(
        name="dense_ids",
        function=lambda x, ids: dense_ids(ids),  # noqa: ARG005
        sample=grouped,
        reasons=INTEGERS,
    ),
    sample_case(
        "group_advantages (length_weighted_mean, std_of_rewards)",
        lambda r, g: group_advantages(r, g, baseline=length_weighted_mean(g), scale=std_of_rewards),
        ("length_weighted_mean", "std_of_rewards"),
    ),
    sample_case(
        "group_advantages (mean_of_group, std_of_group)",
        partial(group_advantages, baseline=mean_of_group, scale=std_of_group),
        ("mean_of_group", "std_of_group"),
    ),
    sample_case(
        "group_advantages (mean_reward_of_group)",
        lambda r, g: group_advantages(r + 9, g, scale=mean_reward_of_group),
        ("mean_reward_of_group",),
    ),
    sample_case(
        "pass_at_k_advantages (no_scale)",
        partial(pass_at_k_advantages, scale=no_scale),
        ("best_of_others", "no_scale"),
    ),
    token_case(
        "decoupled_ppo (chain, drop, replace_weight)",
        chained,
        layouts=None,
        reasons=SAME,
        covers=("chain", "drop", "replace_weight"),
    ),
    Case(
        name="logprobs_and_entropy_from_logits (in_turn: top_k, top_p, min_p)",
        function=kept,
        sample=logits,
        differentiable=(0,),
        covers=("in_turn", "top_k", "top_p", "min_p"),
        reasons=SAME,
    ),
    Case(
        name="log_distribution",
        function=log_distribution,
        sample=logits,
        differentiable=(0,),
        reasons=SAME,
    ),
]
