r"""Proximal policy without a second forward pass over the batch: interpolated, or averaged.

    version   v_mu ---------------- v - 1 ----- v
    log-prob  behavior  ---alpha--> proximal    theta      A-3PO: between two known log-probs

    theta_0, theta_1, ... --ema_update--> mean of the weights     PPO-EWMA: a slower policy

Either way the result is handed to `decoupled_ppo` as `proximal_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_token_inputs
from areal_lab.functional.masked import select


def a3po_proximal_logprobs(
    logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    versions: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    trainer_version: int | Int[Tensor, ""],
) -> Float[Tensor, "*shape"]:
    r"""Proximal log-probs as a point between behavior and current ones, by age (log-linear).

    $$ \log \pi_{prox} \approx \log \pi_\mu + \alpha\,(\log \pi_\theta - \log \pi_\mu), \quad
    \alpha = \mathrm{clip}\!\left(\frac{v - 1 - v_\mu}{v - v_\mu}; 0, 1\right) $$

    The log-prob of a token is taken to move in a straight line with the version of the weights:
    $\log\pi_\mu$ at $v_\mu$, $\log\pi_\theta$ at v. The proximal policy is one update older than
    theta, at v - 1, which lies the share $\alpha$ of the way. With a lag d = v - v_mu of at least 1
    that is 1 - 1/d: behavior itself for d = 1, near theta for old tokens. For d = 0, and for
    tokens that no version sampled (-1: prompts, observations), $\alpha$ is 0.

    Args:
        logprobs: log pi_theta of the sampled tokens; gets no gradient here.
        behavior_logprobs: log pi_mu, as the sampler reported them.
        versions: $v_\mu$, version that sampled the token.
        mask: True = the policy chose this token; elsewhere the result is 0.
        trainer_version: v, the version that theta counts as. A-3PO and AReaL give the version
            before the batch. Theta is then already on the way to the next one; `version + 1`
            places the proximal policy at the weights before the batch, where a recomputation
            would have it.

    Source: A-3PO (arXiv:2512.06547); AReaL, "Proximal Log-Probability Approximation".

    Raises:
        ValueError: shapes differ, or versions are not integers.
    """
    alpha = _share_of_theta(versions, mask, trainer_version, logprobs)
    check_token_inputs(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    behavior = select(behavior_logprobs.detach(), mask)
    # Where theta has no share it does not matter, even if it is -infinity. A behavior log-prob of
    # -infinity stays, since its share is never 0.
    way = select(select(logprobs.detach(), mask) - behavior, (alpha > 0) & ~behavior.isinf())
    return behavior + alpha * way


def linear_proximal_logprobs(
    logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    versions: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    trainer_version: int | Int[Tensor, ""],
) -> Float[Tensor, "*shape"]:
    r"""Proximal log-probs as `a3po_proximal_logprobs`, but interpolated linearly in
    probabilities.

    $$ \pi_{prox} \approx \alpha\,\pi_\theta + (1 - \alpha)\,\pi_\mu $$

    Never below the log-linear one, by the concavity of the logarithm.

    Args:
        logprobs: log pi_theta of the sampled tokens; gets no gradient here.
        behavior_logprobs: log pi_mu, as the sampler reported them.
        versions: $v_\mu$, version that sampled the token.
        mask: True = the policy chose this token; elsewhere the result is 0.
        trainer_version: v, the version that theta counts as; see `a3po_proximal_logprobs`.

    Source: AReaL, "Proximal Log-Probability Approximation" (`linear`), without its 1e-10.

    Raises:
        ValueError: shapes differ, or versions are not integers.
    """
    alpha = _share_of_theta(versions, mask, trainer_version, logprobs)
    check_token_inputs(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    theta, behavior = select(logprobs.detach(), mask), select(behavior_logprobs.detach(), mask)
    return torch.logaddexp(alpha.log() + theta, torch.log1p(-alpha) + behavior)


def _share_of_theta(
    versions: Tensor, mask: Tensor, trainer_version: int | Tensor, like: Tensor
) -> Tensor:
    check_integer("versions", versions)
    check_token_inputs(mask, versions=versions)
    lag = (trainer_version - versions).to(like.dtype)
    sampled = mask & (versions >= 0) & (lag > 0)
    lag = select(lag, sampled, fill=1.0)
    return ((lag - 1) / lag).clamp(0, 1)


class EMAWeights(NamedTuple):
    """An exponential moving average of weights; a pytree, never changed in place."""

    weights: dict[str, Tensor]
    """The average of each tensor."""
    total: Tensor
    """Number of weights in the average, old ones counted less: 1, 1 + b, 1 + b + b^2, ..."""


def ema_weights(weights: Mapping[str, Tensor]) -> EMAWeights:
    """The average of one set of weights: itself, detached, with its own memory.

    Args:
        weights: named tensors, such as `model.state_dict()`. Give float32 ones: in bfloat16 an
            update of less than 1/256 of the difference rounds to nothing.

    Source: PPO-EWMA (arXiv:2110.00641).
    """
    return EMAWeights(
        {name: tensor.detach().clone() for name, tensor in weights.items()},
        torch.ones((), dtype=torch.double),
    )


def ema_update(
    average: EMAWeights, weights: Mapping[str, Tensor], *, decay: float | Float[Tensor, ""]
) -> EMAWeights:
    r"""The average with the newest weights in it.

    $$ W' = \beta W + 1, \quad
    \bar\theta' = \frac{\beta W}{W'}\,\bar\theta + \frac{1}{W'}\,\theta $$

    That is $\sum_i \beta^{n-i} \theta_i / \sum_i \beta^{n-i}$: the usual average with Adam's
    correction of its start, so the first weights do not linger. The mean age of what is averaged
    tends to $\beta / (1 - \beta)$ updates.

    Args:
        average: average so far.
        weights: the newest weights, under the same names. Tensors that are not floating (counters)
            are taken as they are.
        decay: $\beta$, from 0 (the newest weights only) to 1 (the plain mean of all).

    Returns:
        A new average; nothing is changed in place and nothing has a gradient.

    Source: PPO-EWMA (arXiv:2110.00641), as in the code of its authors.

    Raises:
        ValueError: the names differ, a shape differs, or `decay` is a number outside of [0, 1].
    """
    if not isinstance(decay, Tensor) and not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}, but must be in [0, 1]; 0 keeps no memory")
    _check_same_names(average.weights, weights)
    total = (decay * average.total + 1).detach()
    share = 1 / total

    def mixed(old: Tensor, new: Tensor) -> Tensor:
        old, new = old.detach(), new.detach()
        if not old.is_floating_point():
            return new.clone()
        # The mean of equal weights is exactly those weights, and with a share of 1 the newest.
        return torch.lerp(old, new.to(old), share.to(old))

    mixtures = {name: mixed(old, weights[name]) for name, old in average.weights.items()}
    return EMAWeights(mixtures, total)


def _check_same_names(average: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    differing = sorted(average.keys() ^ weights.keys())
    if differing:
        raise ValueError(
            f"weights and average differ in the names {differing[:5]}; give the same tensors as "
            "to ema_weights"
        )
    for name, old in average.items():
        if old.shape != weights[name].shape:
            raise ValueError(
                f"weights[{name!r}] has shape {tuple(weights[name].shape)} and the average "
                f"{tuple(old.shape)}, but they must be equal; start over with ema_weights"
            )
