r"""Supervised losses: log-likelihood of given tokens, and regression of the value function.

Padded `[N, T]` or packed `[T]` tensors alike; how tokens are averaged is an aggregate, as for
policy losses. Masked values (NaN too) reach neither value nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Aggregate, aggregated, token_mean
from areal_lab.functional.checks import applied, check_number, check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.segments import Segments

ErrorFunction: TypeAlias = Callable[[Tensor], Tensor]
"""Difference between value and target to the error of each token."""


class SFTLoss(NamedTuple):
    """Negative log-likelihood; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    nll: Tensor
    """-log pi of each token, in nats, without its weight; 0 where masked."""


class ValueLoss(NamedTuple):
    """A regression loss; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    clipped: Tensor
    """True where the clip removed the gradient of an unmasked token."""
    errors: Tensor
    """Aggregated error of each token; 0 where masked."""


def sft_loss(
    logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    weights: Float[Tensor, "*shape"] | None = None,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> SFTLoss:
    r"""Negative log-likelihood of demonstrations.

    $$ -\mathrm{aggregate}(w_t \log \pi_\theta(y_t)) $$

    Args:
        logprobs: log pi_theta of the given tokens; the only input that gets a gradient.
        mask: True where a token is to be learned; an empty mask gives 0.
        weights: w of each token; None weighs all the same. The aggregate's count does not change.
        aggregate: `(values, mask, sequences) -> scalar`: `token_mean`, or `sequence_mean` to count
            each demonstration the same. In micro-batches bind the count of the whole batch by
            `partial`, as for a policy loss: each would else be a separate mean.

    Source: InstructGPT (arXiv:2203.02155), section 3.5.
    """
    check_token_inputs(mask, logprobs=logprobs)
    nll = -select(logprobs, mask)
    weighted = nll
    if weights is not None:
        check_token_inputs(mask, weights=weights)
        weighted = select(weights.detach(), mask) * nll
    return SFTLoss(aggregated(aggregate, weighted, mask, sequences), nll.detach())


def value_loss(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    old_values: Float[Tensor, "*shape"] | None = None,
    clip_epsilon: float = 0.2,
    error: ErrorFunction | None = None,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> ValueLoss:
    r"""Error of the value function, which gains nothing by leaving the clip range.

    $$ \mathrm{aggregate}(\max(e(v_t - R_t),\ e(\mathrm{clip}(v_t, v^{old}_t \pm \epsilon) - R_t))),
    \quad e(d) = d^2 / 2 $$

    The gradient is gone where v left the range *towards* the return, and stays where it left the
    range away from it.

    Args:
        values: v of each token; the only input that gets a gradient.
        returns: R, the target of v.
        old_values: v of the critic that made the advantages, the center of the range. None only
            without a clip.
        clip_epsilon: half-width of the range, in the unit of the returns; infinity never clips.
        error: `half_squared_error` (default), `squared_error`, or one from `huber_error`.

    Source: the code of PPO's authors, as described in arXiv:2005.12729, section 3.

    Raises:
        ValueError: shapes differ, `clip_epsilon` is not positive, or there is a clip but no
            `old_values`.
    """
    check_token_inputs(mask, values=values, returns=returns)
    if not clip_epsilon > 0:
        raise ValueError(
            f"clip_epsilon is {clip_epsilon}, but must be > 0: how far a value may move; infinity "
            "never clips"
        )
    error = error or half_squared_error
    values, returns = select(values, mask), select(returns.detach(), mask)
    free = _error(error, values - returns)
    if math.isinf(clip_epsilon):
        loss = aggregated(aggregate, free, mask, sequences)
        return ValueLoss(loss, torch.zeros_like(mask), free.detach())
    if old_values is None:
        raise ValueError(
            f"old_values is None, but clip_epsilon is {clip_epsilon}, a distance from them; give "
            "the values that the advantages were made with, or clip_epsilon=math.inf"
        )
    check_token_inputs(mask, old_values=old_values)
    old_values = select(old_values.detach(), mask)
    bounded = values.clamp(old_values - clip_epsilon, old_values + clip_epsilon)
    held = _error(error, bounded - returns)
    errors = torch.maximum(free, held)
    loss = aggregated(aggregate, errors, mask, sequences)
    return ValueLoss(loss, (held > free).detach(), errors.detach())


def _error(error: ErrorFunction, difference: Tensor) -> Tensor:
    return applied("error", error, difference, gives=Tensor, example="huber_error(1.0)")


def half_squared_error(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """$d^2 / 2$, whose gradient is the difference itself.

    Source: OpenAI Baselines' PPO, whose value loss has this half.
    """
    return difference.square() / 2


def squared_error(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """$d^2$, whose gradient is twice as large as that of `half_squared_error`.

    Source: PPO (arXiv:1707.06347), eq. 9.
    """
    return difference.square()


def huber_error(delta: float) -> ErrorFunction:
    r"""$d^2 / 2$ up to $|d| = \delta$, then $\delta (|d| - \delta / 2)$: no gradient above delta.

    Source: Huber (1964), Robust estimation of a location parameter.

    Raises:
        ValueError: delta is not positive.
    """
    check_number("delta", delta, "huber_error(1.0)")
    if not delta > 0:
        raise ValueError(f"delta is {delta}, but must be > 0; infinity is half_squared_error")

    def huber(difference: Tensor) -> Tensor:
        inside = difference.clamp(-delta, delta)
        return inside * (difference - inside / 2)

    return huber
