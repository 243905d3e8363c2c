r"""Surrogates that treat separately the few tokens that reduce the entropy most.

Entropy falls with the covariance of log-prob and advantage. A token's share in it is

$$ c_t = (A_t - \bar A)(\log \pi_\theta(y_t) - \overline{\log \pi_\theta}), $$

with means over the unmasked tokens of this call: of a micro-batch, where that is what is passed.
Numbers of tokens are tensors and shapes static, hence nothing waits for a device.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import masked_mean, select
from areal_lab.functional.ratios import AnchoredPolicy
from areal_lab.functional.surrogates.clip import (
    Surrogate,
    SurrogateFunction,
    clip_surrogate,
    surrogate_advantages,
)
from areal_lab.functional.surrogates.reinforce import importance_surrogate


def clip_cov_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    noise: Float[Tensor, "*shape"],
    fraction: float = 2e-4,
    band: tuple[float, float] = (1.0, 5.0),
    surrogate: SurrogateFunction = clip_surrogate,
) -> Surrogate:
    r"""Clip-Cov: no gradient for a random few of the tokens with a covariance within a band.

    $$ \mathrm{surrogate}(r_t, A_t)\ [t \notin I], \qquad
    I \sim \mathrm{Uniform}\{t: c_{low} \le c_t \le c_{high}\},\quad |I| = \lfloor f N \rfloor $$

    Args:
        noise: uniform numbers of the shape of the tokens, `torch.rand_like(advantages)`; the
            smallest are chosen. An argument, so that the function is one and maps under `vmap`.
        fraction: f of the unmasked tokens; at least one is chosen if there is one in the band, as
            in verl. 0 chooses none.
        band: covariances that can be chosen; both ends are inside.
        surrogate: applied to the others. `clip_surrogate` as in verl and SkyRL; tokens it
            has clipped are not chosen again. The paper's is `importance_surrogate`.

    Source: Clip-Cov (arXiv:2505.22617), section 4.

    Raises:
        ValueError: shapes differ, `fraction` is not in 0 to 1, or the band is empty.
    """
    low, high = band
    if not low <= high:
        raise ValueError(f"band is {band}, but must be (low, high) with low <= high")
    check_token_inputs(policy.mask, noise=noise)
    base = surrogate(policy, advantages)
    covariance = advantage_covariance(policy, advantages)
    eligible = (covariance >= low) & (covariance <= high) & policy.mask & ~base.clipped
    chosen = _smallest(noise.detach(), eligible, _count(fraction, policy.mask))
    removed = chosen & (surrogate_advantages(policy, advantages) != 0)
    return Surrogate(select(base.value, ~chosen), base.clipped | removed)


def kl_cov_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    fraction: float = 2e-4,
    penalty: float = 1.0,
    surrogate: SurrogateFunction = importance_surrogate,
) -> Surrogate:
    r"""KL-Cov: the few tokens with the largest covariance are pulled to the anchor.

    $$ \mathrm{surrogate}(r_t, A_t) - \kappa\, |\log r_t|\ [t \in I], \qquad
    I = \text{the } \lfloor f N \rfloor \text{ largest } c_t $$

    |log r| does not vanish where A = 0, and has no gradient at r = 1: on policy nothing is pulled.

    Args:
        fraction: f of the unmasked tokens, at least one; 0 chooses none. The authors' run scripts
            have 2e-3 for a model of 7B parameters and 2e-4 for one of 32B; verl's default is 2e-4,
            SkyRL's 0.2.
        penalty: kappa.
        surrogate: what is applied to all tokens; not clipped, as in the paper, verl and SkyRL.

    Source: KL-Cov (arXiv:2505.22617), section 4; |log r| for its KL divergence as in verl.

    Raises:
        ValueError: shapes differ, `fraction` is not in 0 to 1, or `penalty` is negative.
    """
    if not penalty >= 0:
        raise ValueError(f"penalty is {penalty}, but must be >= 0; 0 switches it off")
    base = surrogate(policy, advantages)
    covariance = advantage_covariance(policy, advantages)
    chosen = _smallest(-covariance, policy.mask, _count(fraction, policy.mask))
    # Where the anchor cannot sample the token, r A is infinite too and outgrows the penalty.
    pulled = chosen & ~base.value.isinf()
    distance = select(policy.log_ratio, pulled).abs()
    return base._replace(value=base.value - penalty * distance)


def advantage_covariance(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    r"""Share of each token in the covariance of advantage and log-prob; no gradient.

    $$ c_t = (A_t - \bar A)(\log \pi_\theta(y_t) - \overline{\log \pi_\theta}) $$

    Their mean is the covariance; 0 where masked, and everywhere when all advantages are equal.

    Source: arXiv:2505.22617, section 4.
    """
    advantages = surrogate_advantages(policy, advantages)
    logprobs = policy.logprobs.detach()
    product = (advantages - masked_mean(advantages, policy.mask)) * (
        logprobs - masked_mean(logprobs, policy.mask)
    )
    return select(product, policy.mask)


def _count(fraction: float, mask: Bool[Tensor, "*shape"]) -> Int[Tensor, ""]:
    """floor(fraction * tokens), at least 1 unless the fraction is 0; in double, as in Python."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, but must be within 0 to 1, as in 2e-4")
    return (fraction * mask.sum().double()).long().clamp(min=1 if fraction > 0 else 0)


def _smallest(
    values: Float[Tensor, "*shape"], eligible: Bool[Tensor, "*shape"], count: Int[Tensor, ""]
) -> Bool[Tensor, "*shape"]:
    """True at the `count` smallest eligible values; of equal values the first."""
    order = select(values, eligible, fill=float("inf")).reshape(-1).argsort(stable=True)
    positions = torch.arange(order.shape[0], device=order.device)
    ranks = torch.zeros_like(order).scatter(0, order, positions)
    return eligible & (ranks.reshape(values.shape) < count)
