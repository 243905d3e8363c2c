r"""A squared ratio as a pull to the anchor, instead of a trust region with an edge.

These do not vanish where A = 0: the pull is there on every unmasked token, also in groups of equal
rewards, and also when it is the only term left. As log pi_theta goes to -infinity the square
outgrows A log pi, so the value goes to -infinity whatever the sign of A.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy
from areal_lab.functional.segments import segment_reduce, value_of_segment
from areal_lab.functional.surrogates.clip import Surrogate
from areal_lab.functional.surrogates.reinforce import importance_surrogate, reinforce_surrogate


def kimi_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, tau: float = 0.1
) -> Surrogate:
    r"""Kimi k1.5's mirror descent, separately for each token.

    $$ A \log \pi_\theta - \frac{\tau}{2} (\log r)^2 $$

    The form that ROLL has; in the paper the square is of the whole response's log ratio, which is
    `kimi_sequence_surrogate`. Does not vanish where A = 0.

    Args:
        policy: log-probs and ratio to the anchor, the policy at the start of the iteration; both
            carry a gradient.
        tau: strength of the pull; 0 is REINFORCE.

    Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2.

    Raises:
        ValueError: shapes differ, or `tau` is negative.
    """
    _check_strength("tau", tau)
    return _pulled(policy, advantages, policy.log_ratio.square(), tau)


def kimi_sequence_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, tau: float = 0.1
) -> Surrogate:
    r"""Kimi k1.5's mirror descent as in the paper: the log ratio of the whole response is squared.

    $$ A \log \pi_\theta(y_t) - \frac{\tau}{2} \log r_t \sum_{u \in i} \log r_u $$

    The values of a sequence sum to A log pi(y) - tau/2 (log r(y))^2: sum them (a mean over tokens
    divides both terms alike). Does not vanish where A = 0.

    Args:
        policy: log-probs and ratio of each token (`token_ratio`) to the anchor; both carry a
            gradient.
        tau: strength of the pull; 0 is REINFORCE.

    Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2.

    Raises:
        ValueError: shapes differ, or `tau` is negative.
    """
    _check_strength("tau", tau)
    ids, count = policy.sequences
    totals = segment_reduce(policy.log_ratio, ids, count, mask=policy.mask)
    total = value_of_segment(totals, ids)
    # A token of log-prob -infinity alone decides the square of its sequence: the products of the
    # other tokens with it are of a lower order, and infinite with either sign.
    finite_part = total.isinf() & policy.log_ratio.isfinite()
    square = policy.log_ratio * torch.where(finite_part, 0.0, total)
    return _pulled(policy, advantages, square, tau)


def dro_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, beta: float
) -> Surrogate:
    r"""DRO's policy objective, separately for each token.

    $$ A \log \pi_\theta - \frac{\beta}{2} (\log r)^2 $$

    The formula of `kimi_surrogate`; what differs is where it comes from, A = reward minus a learned
    value, and that beta has no default (verl requires it too). Does not vanish where A = 0.

    Args:
        policy: log-probs and ratio to the anchor; both carry a gradient.
        beta: strength of the pull; 0 is REINFORCE.

    Source: DRO (arXiv:2405.19107), whose square is of the whole response as in
    `kimi_sequence_surrogate`; by token as in verl.

    Raises:
        ValueError: shapes differ, or `beta` is negative.
    """
    _check_strength("beta", beta)
    return _pulled(policy, advantages, policy.log_ratio.square(), beta)


def ratio_variance_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, penalty: float | Tensor
) -> Surrogate:
    r"""The ratio times the advantage, minus a multiple of the ratio's squared distance from 1.

    $$ r A - \lambda (r - 1)^2 $$

    Over tokens that the anchor sampled, E[r] = 1, so the mean square is the variance of the ratio.
    The largest value is at $r = 1 + A / (2 \lambda)$: a soft edge, which lies further out for a
    larger advantage. Does not vanish where A = 0.

    Args:
        policy: ratio to the anchor, which carries the gradient.
        penalty: lambda, one number; 0 is `importance_surrogate`. Gets no gradient.

    Source: R2VPO (arXiv:2605.26784), as retold: a penalty on the variance of the ratio in place of
    clipping. The paper was not at hand; the variance is read as the second moment about 1.

    Raises:
        ValueError: shapes differ, or `penalty` is a negative number.
    """
    if not isinstance(penalty, Tensor):
        _check_strength("penalty", penalty)
        if penalty == 0:  # 0 * inf would be NaN
            return importance_surrogate(policy, advantages)
    strength = penalty.detach() if isinstance(penalty, Tensor) else penalty
    pull = strength * torch.expm1(policy.log_ratio).square()
    # The square outgrows r A, which would be infinity minus infinity in value and gradient.
    finite = policy._replace(log_ratio=select(policy.log_ratio, ~pull.detach().isposinf()))
    plain = importance_surrogate(finite, advantages)
    return plain._replace(value=plain.value - pull)


def _pulled(
    policy: AnchoredPolicy, advantages: Tensor, square: Tensor, strength: float
) -> Surrogate:
    reinforced = reinforce_surrogate(policy, advantages)
    if strength == 0:  # 0 * inf would be NaN
        return reinforced
    pull = strength / 2 * square
    value = torch.where(pull.isposinf(), -pull, reinforced.value - pull)
    return reinforced._replace(value=value)


def _check_strength(name: str, strength: float) -> None:
    if not strength >= 0:
        raise ValueError(f"{name} is {strength}, but must be >= 0; 0 switches the pull off")
