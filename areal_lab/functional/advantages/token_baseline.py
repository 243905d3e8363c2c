"""A baseline for each token position of a prompt's samples, instead of one for each prompt."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.advantages.gae import AdvantagesAndReturns
from areal_lab.functional.advantages.recurrence import linear_recurrence
from areal_lab.functional.advantages.returns import (
    Discount,
    Holes,
    carry_over_holes,
    chosen,
    discounted_returns,
)
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.segments import Segments, dense_ids, segment_reduce, sequences_or_rows


def optimal_token_baseline(
    rewards: Float[Tensor, "*shape"],
    logprobs: Float[Tensor, "*shape"],
    squared_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    groups: Segments,
    gamma: Discount = 1.0,
    behavior_weight: Float[Tensor, "*shape"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> AdvantagesAndReturns:
    r"""Return minus the baseline of least variance at each position, over the samples of a prompt.

    $$ A_{i,t} = R_{i,t} - \frac{\sum_j W_{j,t} R_{j,t}}{\sum_j W_{j,t}}, \qquad
    W_{j,t} = \rho_{j,t}^2 \sum_{s \le t} \left( 1 - 2 \pi(y_{j,s}) + \sum_v \pi_v^2 \right) $$

    R is the discounted return from the token on. Each term of W is the squared norm of the
    gradient of log pi(y) with respect to the logits, so that W stands for the squared norm of the
    gradient up to there. The sums run over the samples j of the group that have a t-th unmasked
    token; where it is the only one, A is 0. Where all W are 0 the baseline is the plain mean.

    Source: optimal token baseline (arXiv:2602.07078), with the logit-gradient proxy. The formulas
    are those of verl's page and code; rho of samples of an older policy is where the docstring of
    `compute_optimal_token_baseline_advantage` in verl has it, whose code has it inside of the sum.

    Args:
        rewards: r of each token; the only input that gets a gradient.
        logprobs: log pi of the sampled tokens.
        squared_probs: sum over the vocabulary of pi squared, at each token.
        groups: prompt of each token; samples of a prompt may be anywhere.
        gamma: discount of the step that leaves a token.
        behavior_weight: rho of each token, for samples of an older policy; None is 1.
        holes: `carry_over_holes` or `restart_at_holes`, for the returns.
        sequences: sample of each token when packed; None takes rows.

    Returns:
        Advantages, and the returns R. 0 where masked.

    Raises:
        ValueError: shapes differ, or an unmasked input is NaN or infinite.
    """
    check_token_inputs(mask, rewards=rewards, logprobs=logprobs, squared_probs=squared_probs)
    group_ids, _ = sequences_or_rows(mask, groups)
    returns = discounted_returns(rewards, mask, gamma=gamma, holes=holes, sequences=sequences)
    energy = (
        1
        - 2 * torch.exp(chosen("logprobs", logprobs.detach(), mask))
        + chosen("squared_probs", squared_probs.detach(), mask)
    ).to(returns.dtype)
    weights = linear_recurrence(1.0, energy, mask, sequences=sequences, reverse=False)
    if behavior_weight is not None:
        weights = weights * chosen("behavior_weight", behavior_weight.detach(), mask).square()
    # Rounding may leave -1e-8 where pi is 1.
    weights = weights.clamp(min=0)

    # Position among the unmasked tokens, so that prompts of any length and holes do not matter.
    order = torch.cumsum(mask.reshape(-1).long(), 0).reshape(mask.shape)
    ids, count = sequences_or_rows(mask, sequences)
    before = segment_reduce(order - mask.long(), ids, count, reduce="min")[ids]
    position = order - 1 - before
    cells = dense_ids((group_ids.long() * mask.numel() + position).reshape(-1)).reshape(mask.shape)

    def over_samples(per_token: Tensor) -> Tensor:
        return segment_reduce(per_token, cells, mask.numel(), mask=mask)[cells]

    weights = torch.where(over_samples(weights) > 0, weights, mask.to(weights.dtype))
    # Relative to the smallest return of the cell, so that equal returns give exact zeros.
    total = over_samples(weights)
    smallest = segment_reduce(returns.detach(), cells, mask.numel(), mask=mask, reduce="min")[cells]
    above = returns - smallest
    mean = over_samples(weights * above) / torch.where(total > 0, total, 1.0)
    return AdvantagesAndReturns(torch.where(mask, above - mean, 0.0), returns)
