"""From one loss per token to one number: where the frameworks disagree most.

    token_mean       sum over tokens / N                 long sequences count more
    sequence_mean    mean over sequences of their means  each sequence counts the same

Padded `[N, T]` and packed `[T]` batches go through the same code. Split a batch and sum the parts:
with a global count the result does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.masked import masked_sum
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows

Count: TypeAlias = int | float | Tensor
"""How many tokens (or sequences) the mean is over; a scalar tensor stays on its device."""

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
        values: one value per token.
        mask: True where a token counts.
        sequences: not looked at.
        token_count: N, the tokens of the *whole* batch over all micro-batches and ranks, so that
            the sum over the parts is the mean over the whole. None counts this mask; an empty
            mask then gives 0.

    Source: DAPO (arXiv:2503.14476), eq. 8, with N over the batch as every framework has it.

    Raises:
        ValueError: shapes differ, or `token_count` is a number that is not positive.
    """
    return masked_sum(values, mask) / _divisor(token_count, mask.sum(), "token_count")


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
        values: one value per token.
        mask: True where a token counts.
        sequences: sequence of each token (`packed_sequences`); None takes rows.
        sequence_count: B of the whole batch. None counts the sequences here that have a token;
            a sequence without one adds 0 either way.

    Source: DeepSeekMath (arXiv:2402.03300), eq. 3.

    Raises:
        ValueError: shapes differ, or `sequence_count` is a number that is not positive.
    """
    ids, count = sequences_or_rows(mask, sequences)
    means = segment_reduce(values, ids, count, mask=mask, reduce="mean")
    tokens = segment_reduce(mask.long(), ids, count)
    return means.sum() / _divisor(sequence_count, (tokens > 0).sum(), "sequence_count")


def _divisor(count: Count | None, counted: Tensor, name: str) -> Count:
    if count is None:
        return counted.clamp(min=1)
    if not isinstance(count, Tensor) and not count > 0:
        raise ValueError(
            f"{name} is {count}, but must be positive: the count over the whole batch; "
            "leave it out to count this mask"
        )
    return count
