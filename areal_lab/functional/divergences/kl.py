r"""Distance of the policy from a reference: estimates from sampled tokens, exact from logits.

With $x = \log \pi_\theta - \log \pi_{ref}$ of a token that was sampled from $\pi_\theta$:

    estimator  value         its mean               mean of its gradient: that of
    k1         x             KL(theta || ref)       0
    k2         x^2 / 2       KL + O(x^3)            KL(theta || ref)
    k3         e^-x - 1 + x  KL(theta || ref)       KL(ref || theta)
    absolute   |x|           above KL               L1 distance of the two

The value matters in a reward, the gradient in a loss. The reference never gets a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Aggregate, aggregated, token_mean
from areal_lab.functional.checks import applied, check_same_shape, check_token_inputs, wide
from areal_lab.functional.divergences.vocabulary import log_distribution, reverse_kl
from areal_lab.functional.masked import log_difference, select
from areal_lab.functional.segments import Segments

KLEstimator: TypeAlias = Callable[[Tensor], Tensor]
"""Function `x -> estimate`, with x = log pi_theta - log pi_ref of each token, which carries the
gradient."""


class KLLoss(NamedTuple):
    """A penalty to add to a loss; the estimates are detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    kl: Tensor
    """Estimate of each token, without the coefficient; 0 where masked."""


def k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""$k_1 = x$: unbiased, of either sign; its gradient is 0 on average, so not for a loss.

    Source: Schulman, Approximating KL divergence (2020).
    """
    return log_ratio


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""$k_2 = x^2 / 2$: biased value; its gradient is that of KL(theta || ref) on average.

    Source: Schulman, Approximating KL divergence (2020); gradient: arXiv:2506.09477.
    """
    return log_ratio.square() / 2


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""$k_3 = e^{-x} - 1 + x$: unbiased, never negative.

    Its gradient is that of KL(ref || theta) on average: not of the divergence that it estimates.
    Infinite where x is, of either sign.

    Source: Schulman, Approximating KL divergence (2020); DeepSeekMath (arXiv:2402.03300), eq. 4.
    """
    # expm1: near the reference, where x^2 / 2 is left over, e^-x - 1 + x would be rounding error.
    # Bounded: at x = -infinity the sum would be inf - inf.
    return torch.expm1(-log_ratio) + log_ratio.clamp(min=torch.finfo(log_ratio.dtype).min)


def absolute(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    r"""$|x|$; its gradient is that of $\sum_v |\pi_\theta - \pi_{ref}|$ on average, 0 at x = 0.

    Source: definition; verl's `abs`.
    """
    return log_ratio.abs()


def straight_through(value: KLEstimator = k3, gradient: KLEstimator = k2) -> KLEstimator:
    """Value of one estimator with the gradient of another.

    By default value and gradient are both those of KL(theta || ref) on average.

    Source: verl's estimators that end in `+`, such as `k3+`; the gradient of k2:
    arXiv:2506.09477.
    """

    def estimator(log_ratio: Tensor) -> Tensor:
        slope = gradient(log_ratio)
        return value(log_ratio).detach() + (slope - slope.detach())

    return estimator


def clamped(
    estimator: KLEstimator, *, log_ratio_bound: float = math.inf, value_bound: float = math.inf
) -> KLEstimator:
    """Clamp the input of an estimator, its output, or both, to plus and minus a bound.

    Beyond a bound the gradient is 0: the tokens that are furthest away are no longer pulled back.

    Args:
        estimator: the function to clamp.
        log_ratio_bound: largest |x|.
        value_bound: largest absolute value of the estimate.

    Source: clamps of verl, SkyRL, NeMo-RL, OpenRLHF and AReaL; no paper has one.

    Raises:
        ValueError: a bound is not positive.
    """
    for name, bound in (("log_ratio_bound", log_ratio_bound), ("value_bound", value_bound)):
        if not bound > 0:
            raise ValueError(f"{name} is {bound}, but must be > 0; infinity switches it off")

    def bounded(log_ratio: Tensor) -> Tensor:
        inside = log_ratio.clamp(-log_ratio_bound, log_ratio_bound)
        return estimator(inside).clamp(-value_bound, value_bound)

    return bounded


def kl_penalty(
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    estimator: KLEstimator = k3,
    sampling_logprobs: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Estimate of KL(theta || ref) at each token, in float32 at least; 0 where masked.

    $$ k(x_t), \quad x_t = \log \pi_\theta(y_t) - \log \pi_{ref}(y_t) $$

    With `sampling_logprobs`, the estimate is weighted by $\pi_\theta / \pi_s$, and the gradient
    goes through the weight too. With `k1` or `k3` value and gradient are then those of
    KL(theta || ref) on average, whatever policy $\pi_s$ sampled the tokens. The product is
    computed in float64; as $\pi_\theta$ goes to 0, that of `k3` goes to $\pi_{ref} / \pi_s$.

    Args:
        estimator: `k1`, `k2`, `k3`, `absolute`, or one made by `straight_through` or `clamped`.
        sampling_logprobs: log pi_s, the policy that the tokens came from. None gives no weight.
            `logprobs` itself gives a weight of 1 that has a gradient.

    Source: weighted: DeepSeek-V3.2 (arXiv:2512.02556), unbiased KL estimate.

    Raises:
        TypeError: the estimator is not a function of the log ratio.
    """
    check_token_inputs(mask, logprobs=logprobs, reference_logprobs=reference_logprobs)
    chosen = wide(select(logprobs, mask))
    reference = wide(select(reference_logprobs.detach(), mask))
    if sampling_logprobs is None:
        return select(_estimate(estimator, log_difference(chosen, reference)), mask)
    check_token_inputs(mask, sampling_logprobs=sampling_logprobs)
    sampling = wide(select(sampling_logprobs.detach(), mask))
    return select(_weighted(estimator, chosen, reference, sampling), mask)


def kl_loss(
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    coefficient: float | Float[Tensor, ""],
    estimator: KLEstimator = k3,
    sampling_logprobs: Float[Tensor, "*shape"] | None = None,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> KLLoss:
    r"""Penalty on the distance from the reference, to be added to a policy loss.

    $$ \beta\ \mathrm{aggregate}(k(x_t)) $$

    Give it the aggregate of the policy loss: without importance weights the sum is then GRPO's
    objective, which has the penalty inside its mean. Token by token, it does not see how a token
    moves what comes after it; a penalty in the reward does (`kl_shaped_rewards`).

    Args:
        coefficient: beta.
        estimator: see the table at the top: here it is the gradient that matters. `k3` is GRPO's;
            `straight_through()` has the gradient of the divergence that is estimated.
        sampling_logprobs: see `kl_penalty`.
        aggregate: `(values, mask, sequences) -> scalar`: that of the policy loss, with the counts
            of the policy loss bound by `partial`. Without them each micro-batch adds a separate
            mean, and the sum is the penalty times the number of micro-batches.

    Source: DeepSeekMath (arXiv:2402.03300), eq. 3.

    Raises:
        ValueError: shapes differ, or the coefficient is negative or not finite.
    """
    check_coefficient(coefficient)
    kl = kl_penalty(
        logprobs,
        reference_logprobs,
        mask,
        estimator=estimator,
        sampling_logprobs=sampling_logprobs,
    )
    return KLLoss(coefficient * aggregated(aggregate, kl, mask, sequences), kl.detach())


def _weighted(
    estimator: KLEstimator, logprobs: Tensor, reference: Tensor, sampling: Tensor
) -> Tensor:
    """Estimate times pi_theta / pi_s, also where the weight vanishes and the estimate explodes.

    In float64, since a weight of e^-120 times a k3 of e^120 is 0 * inf in float32. Where pi_theta
    is smaller than e^-600 of one of the others, value and gradient have reached their limits; it
    counts as e^-600 there, which float64 can multiply with e^600.
    """
    dtype = logprobs.dtype
    reference, sampling = reference.double(), sampling.double()
    bounded = logprobs.double().clamp(min=torch.maximum(reference, sampling) - _SMALLEST_LOG_RATIO)
    weight = torch.exp(log_difference(bounded, sampling))
    return (weight * _estimate(estimator, log_difference(bounded, reference))).to(dtype)


def _estimate(estimator: KLEstimator, log_ratio: Tensor) -> Tensor:
    return applied("estimator", estimator, log_ratio, gives=Tensor, example="k3 or clamped(k3)")


_SMALLEST_LOG_RATIO = 600.0
"""exp(600) is about the largest that leaves float64 some room: its largest number is exp(709)."""


def full_kl(
    logits: Float[Tensor, "*shape V"],
    reference_logits: Float[Tensor, "*shape V"],
    mask: Bool[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape"]:
    r"""KL(theta || ref) of each position over the whole vocabulary: no estimate; 0 where masked.

    $$ \sum_v \pi_\theta(v) (\log \pi_\theta(v) - \log \pi_{ref}(v)) $$

    Holds several tensors of the size of the logits. A token that pi_theta cannot sample (a logit of
    -infinity) adds 0; one that only the reference cannot sample makes the result infinite.

    Args:
        logits: of pi_theta; the only input that gets a gradient.
        reference_logits: of pi_ref.
        temperature: divides both logits.

    Source: definition; Kullback and Leibler, On information and sufficiency (1951).

    Raises:
        ValueError: shapes differ, or the temperature is not positive and finite.
    """
    check_same_shape("reference_logits", reference_logits, "logits", logits)
    log_p = log_distribution(logits, mask, temperature=temperature)
    log_ref = log_distribution(reference_logits.detach(), mask, temperature=temperature)
    return select(reverse_kl(log_p, log_ref), mask)


def check_coefficient(coefficient: float | Tensor) -> None:
    """Refuse a negative or infinite number; a tensor is not checked.

    Raises:
        ValueError: the coefficient is negative or not finite.
    """
    if not isinstance(coefficient, Tensor) and not 0 <= coefficient < math.inf:
        raise ValueError(
            f"coefficient is {coefficient}, but must be >= 0 and finite: the penalty is charged, "
            "its sign is part of the formula"
        )
