"""Reduce one loss per token to one number. Frameworks disagree most here.

    token_sum          sum over tokens                       the caller has already divided
    token_mean         sum over tokens / N                   long sequences count more
    sequence_mean      mean over sequences of their means    each sequence counts the same
    sequence_sum_mean  mean over sequences of their sums     a long one as its length
    fixed_length_mean  sum over tokens / (B L)               the same, L a constant
    prompt_mean        mean over prompts of token means      each prompt counts the same

Padded `[N, T]` and packed `[T]` batches use the same code. With the counts of the whole batch, the
results of its micro-batches sum to the result of the batch. A sequence (or prompt) may be split
over micro-batches only where the function says so. One without a token adds 0 and is counted only
by a given count.

Sums and results are float32 at least. A count of 0, which only a tensor can hold, divides by 1: a
batch without a token gives 0, as an empty mask does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import applied, check_integer, wide
from areal_lab.functional.masked import masked_sum
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows

Count: TypeAlias = int | float | Tensor
"""Number of tokens (or sequences) that the mean is over; a scalar tensor stays on its device.

A number must be positive. A tensor's value is not checked; 0 counts as 1.
"""

Aggregate: TypeAlias = Callable[[Tensor, Tensor, Segments | None], Tensor]
"""`(values, mask, sequences) -> scalar`. Bind counts with `functools.partial`."""


def token_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,  # noqa: ARG001 - part of the signature of an aggregate
    *,
    token_count: Count | None = None,
) -> Float[Tensor, ""]:
    r"""Mean over tokens.

    $$ \frac{1}{N} \sum_t m_t x_t $$

    Args:
        sequences: ignored; tokens may be split over micro-batches in any way.
        token_count: N, the tokens of the *whole* batch over all micro-batches and ranks, so that
            the sum over the parts is the mean over the whole. None counts this mask; an empty
            mask then gives 0.

    Source: DAPO (arXiv:2503.14476), eq. 8, with N over the batch as every framework has it.

    Raises:
        ValueError: shapes differ, or `token_count` is a number that is not positive.
    """
    return masked_sum(wide(values), mask) / _divisor(token_count, mask.sum(), "token_count")


def token_sum(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,  # noqa: ARG001 - part of the signature of an aggregate
) -> Float[Tensor, ""]:
    r"""Sum over tokens, $\sum_t m_t x_t$; 0 for an empty mask.

    For advantages that were divided beforehand, as SkyRL and tinker-cookbook do. Tokens may be
    split over micro-batches in any way.

    Source: episodic REINFORCE, Williams (1992).
    """
    return masked_sum(wide(values), mask)


def sequence_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
    *,
    sequence_count: Count | None = None,
) -> Float[Tensor, ""]:
    r"""Mean over sequences of the mean over their tokens.

    $$ \frac{1}{B} \sum_i \frac{1}{|y_i|} \sum_{t \in i} m_t x_t $$

    Args:
        sequences: sequence of each token (`packed_sequences`); None takes rows. A sequence stays
            in one micro-batch, where its tokens are counted.
        sequence_count: B of the whole batch. None counts the sequences here that have a token;
            a sequence without one adds 0 either way.

    Source: DeepSeekMath (arXiv:2402.03300), eq. 3.

    Raises:
        ValueError: shapes differ, or `sequence_count` is a number that is not positive.
    """
    ids, count = sequences_or_rows(mask, sequences)
    means = segment_reduce(values, ids, count, mask=mask, reduce="mean")
    return means.sum() / _divisor(sequence_count, _occupied(mask, ids, count), "sequence_count")


def sequence_sum_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
    *,
    sequence_count: Count | None = None,
) -> Float[Tensor, ""]:
    r"""Mean over sequences of the sum over their tokens.

    $$ \frac{1}{B} \sum_i \sum_{t \in i} m_t x_t $$

    Args:
        sequences: sequence of each token (`packed_sequences`); None takes rows. With a count, a
            sequence may be split over micro-batches.
        sequence_count: B of the whole batch. None counts the sequences here that have a token.

    Source: REINFORCE for language models, as in RLOO (arXiv:2402.14740).

    Raises:
        ValueError: shapes differ, or `sequence_count` is a number that is not positive.
    """
    ids, count = sequences_or_rows(mask, sequences)
    divisor = _divisor(sequence_count, _occupied(mask, ids, count), "sequence_count")
    return masked_sum(wide(values), mask) / divisor


def fixed_length_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
    *,
    max_tokens: Count,
    sequence_count: Count | None = None,
) -> Float[Tensor, ""]:
    r"""Mean over sequences of the sum over their tokens, divided by one fixed length.

    $$ \frac{1}{B\,L} \sum_i \sum_{t \in i} m_t x_t $$

    Args:
        sequences: sequence of each token (`packed_sequences`); None takes rows. With a count, a
            sequence may be split over micro-batches.
        max_tokens: L, the generation budget of a sequence in tokens: a constant of the run, not
            the longest of this batch, which would bring the bias in length back.
        sequence_count: B of the whole batch. None counts the sequences here that have a token.

    Source: Dr. GRPO (arXiv:2503.20783), section 3, and its code.

    Raises:
        ValueError: shapes differ, or a count is a number that is not positive.
    """
    mean = sequence_sum_mean(values, mask, sequences, sequence_count=sequence_count)
    return mean / _positive(max_tokens, "max_tokens", "the tokens that a sequence may have")


def prompt_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,  # noqa: ARG001 - part of the signature of an aggregate
    *,
    groups: Segments,
    group_count: Count | None = None,
    group_tokens: Int[Tensor, " groups"] | None = None,
) -> Float[Tensor, ""]:
    r"""Mean over prompts of the mean over all tokens of the prompt's samples.

    $$ \frac{1}{P} \sum_p \frac{1}{N_p} \sum_{t \in p} m_t x_t, \quad N_p = \sum_{t \in p} m_t $$

    Args:
        groups: the prompt that each token belongs to; bind it with `functools.partial`.
        group_count: P of the whole batch. None counts the prompts that have a token.
        group_tokens: $N_p$ of each prompt over the *whole* batch. None counts this mask, which is
            right when all samples of a prompt are in one micro-batch; otherwise give the counts.

    Source: DAPO (arXiv:2503.14476), eq. 8, read literally: the sum over tokens is inside the
    expectation over prompts.

    Raises:
        ValueError: shapes differ, or `group_count` is a number that is not positive, or there is
            not one integer in `group_tokens` for each group.
    """
    ids, count = sequences_or_rows(mask, groups)
    sums = segment_reduce(values, ids, count, mask=mask)
    here = segment_reduce(mask.long(), ids, count)
    tokens = here if group_tokens is None else group_tokens
    check_integer("group_tokens", tokens)
    if tokens.shape != here.shape:
        raise ValueError(
            f"group_tokens has shape {tuple(tokens.shape)}, but there are {count} groups; give "
            "the number of tokens of each group over the whole batch"
        )
    means = sums / tokens.clamp(min=1)
    return means.sum() / _divisor(group_count, (tokens > 0).sum(), "group_count")


def aggregated(
    aggregate: Aggregate,
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> Float[Tensor, ""]:
    """Apply the aggregate that a caller passed to these values.

    Raises:
        TypeError: it is not an aggregate.
    """
    return applied(
        "aggregate", aggregate, values, mask, sequences, gives=Tensor, example="token_mean"
    )


def _occupied(mask: Tensor, ids: Tensor, count: int) -> Tensor:
    return (segment_reduce(mask.long(), ids, count) > 0).sum()


def _divisor(count: Count | None, counted: Tensor, name: str) -> Count:
    if count is None:
        return counted.clamp(min=1)
    return _positive(count, name, "the count over the whole batch; leave it out to count this mask")


def _positive(count: Count, name: str, meaning: str) -> Count:
    if isinstance(count, torch.Tensor):
        # To look at it would wait for its device. Nothing was counted: 0 / 0 would be NaN.
        return torch.where(count == 0, torch.ones_like(count), count)
    if not count > 0:
        raise ValueError(f"{name} is {count}, but must be positive: {meaning}")
    return count
