"""V-trace: values and advantages of the policy from samples of an older one."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.advantages.gae import AdvantagesAndReturns
from areal_lab.functional.advantages.recurrence import linear_recurrence, next_in_sequence
from areal_lab.functional.advantages.returns import (
    Discount,
    Holes,
    carry_over_holes,
    check_unit,
    chosen,
    finite_or_none,
    per_token_or_number,
    step_discounts,
)
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.ratios import capped_ratio
from areal_lab.functional.segments import Segments


def vtrace(
    rewards: Float[Tensor, "*shape"],
    values: Float[Tensor, "*shape"],
    log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    gamma: Discount = 1.0,
    lambda_: Discount = 1.0,
    rho_cap: float = 1.0,
    trace_cap: float = 1.0,
    advantage_cap: float = 1.0,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> AdvantagesAndReturns:
    r"""V-trace targets and policy-gradient advantages.

    $$ e_t = \bar\rho_t (r_t + \gamma V_{t+1} - V_t) + \gamma c_t \lambda_{t+1} e_{t+1}, \qquad
    R_t = V_t + e_t $$

    $$ A_t = \min(\rho_t, \bar\rho_{pg})
    \left( r_t + \gamma (V_{t+1} + \lambda_{t+1} e_{t+1}) - V_t \right) $$

    with $\rho_t = \pi_\theta / \pi_{behav}$, $\bar\rho_t = \min(\rho_t, \bar\rho)$ and
    $c_t = \min(\rho_t, \bar c)$; t + 1 is the next unmasked token. On policy, with caps of
    at least 1, these are the lambda returns and GAE's advantages.

    A is already weighted by the capped ratio: train with $A \log \pi_\theta$, without a further
    ratio. Gradients flow to rewards, values and bootstrap values; `log_ratio` gets none.

    Source: IMPALA (arXiv:1802.01561), section 4.1 and remark 2; lambda and the caps as in rlax.

    Args:
        values: V before each token.
        log_ratio: log pi_theta - log pi_behav of each token; a cap is put on it before exp.
        gamma: discount of the step that leaves a token; one number, or one per token.
        lambda_: one number, or one per token: the weight that the token before gives to the error
            from this one on, as in `gae`.
        rho_cap: bound of the weight of each error: which policy the values belong to.
        trace_cap: bound of the weight of later errors: how far they travel back. 1 in rlax.
        advantage_cap: bound of the weight of the advantage.
        bootstrap_values: value beyond the last token of each sequence; None is 0.

    Returns:
        Advantages for the policy; returns R, the targets of the values. 0 where masked.

    Raises:
        ValueError: shapes differ, an unmasked input is NaN or infinite, gamma or lambda_ is not in
            0 .. 1, or a cap is not positive.
    """
    return leaky_vtrace(
        rewards,
        values,
        log_ratio,
        mask,
        alpha=1.0,
        gamma=gamma,
        lambda_=lambda_,
        rho_cap=rho_cap,
        trace_cap=trace_cap,
        advantage_cap=advantage_cap,
        bootstrap_values=bootstrap_values,
        holes=holes,
        sequences=sequences,
    )


def leaky_vtrace(
    rewards: Float[Tensor, "*shape"],
    values: Float[Tensor, "*shape"],
    log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    alpha: float | Float[Tensor, ""],
    gamma: Discount = 1.0,
    lambda_: Discount = 1.0,
    rho_cap: float = 1.0,
    trace_cap: float = 1.0,
    advantage_cap: float = 1.0,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> AdvantagesAndReturns:
    r"""V-trace whose caps leak: each capped weight is mixed with the importance weight itself.

    $$ \min(\rho_t, c) \;\to\; \alpha \min(\rho_t, c) + (1 - \alpha)\, \rho_t $$

    for each of the three caps c of `vtrace`. Alpha 1 is V-trace; alpha 0 is importance sampling,
    unbiased and of unbounded variance.

    Source: Zahavy et al., A self-tuning actor-critic algorithm (arXiv:2002.12928); rlax.

    Args:
        alpha: share of the capped weight; a tensor gets a gradient.

    The other arguments are those of `vtrace`.

    Returns:
        Advantages for the policy; returns, the targets of the values. 0 where masked.

    Raises:
        ValueError: as `vtrace`, or alpha is a number outside 0 .. 1.
    """
    if not isinstance(alpha, Tensor):
        check_unit("alpha", alpha, "1 is V-trace, 0 importance sampling")
    check_token_inputs(mask, rewards=rewards, values=values, log_ratio=log_ratio)
    rewards, values = chosen("rewards", rewards, mask), chosen("values", values, mask)
    log_ratio = chosen("log_ratio", log_ratio.detach(), mask)
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values, log_ratio = rewards.to(dtype), values.to(dtype), log_ratio.to(dtype)
    lambda_ = per_token_or_number("lambda_", lambda_, mask, dtype)
    discounts = step_discounts(gamma, mask, holes, sequences, dtype)
    beyond = finite_or_none("bootstrap_values", bootstrap_values)

    # The factor 0 keeps each value where it is, and the mask carries it back over holes.
    nearest = linear_recurrence(0.0, values, mask, beyond=beyond, sequences=sequences)
    next_values = next_in_sequence(nearest, beyond=beyond, sequences=sequences)
    one_step = rewards + discounts * next_values - values
    trace = discounts * _leaky_ratio(log_ratio, trace_cap, alpha, name="trace_cap")
    weighted = _leaky_ratio(log_ratio, rho_cap, alpha, name="rho_cap") * one_step
    # What the token before sees, lambda_t e_t, is the recurrence, and is carried back over holes.
    seen = linear_recurrence(lambda_ * trace, lambda_ * weighted, mask, sequences=sequences)
    following = next_in_sequence(seen, sequences=sequences)
    errors, later = weighted + trace * following, discounts * following
    weight = _leaky_ratio(log_ratio, advantage_cap, alpha, name="advantage_cap")
    advantages = weight * (one_step + later)
    zero = torch.zeros_like(advantages)
    return AdvantagesAndReturns(
        advantages=torch.where(mask, advantages, zero),
        returns=torch.where(mask, values + errors, zero),
    )


def _leaky_ratio(log_ratio: Tensor, cap: float, alpha: float | Tensor, *, name: str) -> Tensor:
    capped = capped_ratio(log_ratio, cap, name=name)
    if not isinstance(alpha, Tensor) and alpha == 1:  # 0 times an infinite ratio would be NaN
        return capped
    return alpha * capped + (1 - alpha) * torch.exp(log_ratio)
