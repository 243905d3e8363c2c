r"""Divergences between two policies, estimated from sampled tokens alone.

    sampler ---- samples ----> log rho = log pi - log pi_sampler, one per token

Each takes `log_ratio` $= \log \rho$ with the sampler *below*, so a plain mean estimates
KL(sampler || policy); the other direction has the weight rho in its mean. Token by token, or of
whole sequences with the sums of their log ratios (`segment_reduce`) and a mask of those that have a
token. Computed in float64, since nearly equal policies drown in float32's rounding; detached; 0
when nothing is unmasked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.divergences.kl import k1, k2, k3
from areal_lab.functional.masked import masked_mean, select
from areal_lab.functional.segments import segment_reduce


class KLEstimates(NamedTuple):
    """Three estimates of one Kullback-Leibler divergence, in nats."""

    k1: Tensor
    """Unbiased; of either sign."""
    k2: Tensor
    """Half the mean squared log ratio: small variance, unbiased to second order only."""
    k3: Tensor
    """Unbiased; never negative."""


def kl_from_sampler(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> KLEstimates:
    r"""KL(sampler || policy): the direction of the samples, plain means.

    The estimators of `kl` at $x = -\log \rho$:

    $$ k_1 = -\log\rho, \quad k_2 = \tfrac12 \log^2\rho, \quad k_3 = \rho - 1 - \log\rho $$

    Args:
        log_ratio: log rho; gets no gradient.

    Source: Schulman, Approximating KL Divergence (2020).
    """
    logs = _logs(log_ratio, mask)
    return KLEstimates(
        k1=masked_mean(k1(-logs), mask),
        k2=masked_mean(k2(-logs), mask),
        # Where rho overflows, rho - 1 - log rho would be infinity minus infinity.
        k3=masked_mean(k3(-logs.clamp(max=1e4)), mask),
    )


def kl_to_sampler(log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> KLEstimates:
    r"""KL(policy || sampler), from samples of the sampler: means weighted with rho.

    $$ k_1 = \rho \log\rho, \quad k_2 = \tfrac12 \rho \log^2\rho, \quad
    k_3 = \rho\,(1/\rho - 1 + \log\rho) = 1 - \rho + \rho\log\rho $$

    Without the weight, $1/\rho - 1 + \log\rho$ estimates neither direction: its expectation is
    $E[1/\rho] - 1 - \mathrm{KL}(\mathrm{sampler}\,\|\,\mathrm{policy})$.

    A token that the policy cannot sample (log rho = -infinity) adds the limits 0, 0 and 1.

    Args:
        log_ratio: log rho; gets no gradient.

    Source: Schulman, Approximating KL Divergence (2020), with an importance weight.
    """
    logs = _bounded(_logs(log_ratio, mask))
    weight = _weight(logs)
    return KLEstimates(
        k1=masked_mean(weight * k1(logs), mask),
        k2=masked_mean(weight * k2(logs), mask),
        # weight * k3(logs), without its 1 / rho, which overflows where rho is tiny.
        k3=masked_mean(weight * logs - _minus_one(logs), mask),
    )


def chi_square(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Chi-square divergence of the policy from the sampler, $E[\rho^2] - 1$.

    The variance of the weights, when their mean is 1; infinite when a square overflows.

    Source: Polyanskiy and Wu, Information Theory: From Coding to Learning (2025), chapter 7.
    """
    return masked_mean(torch.expm1(2 * _logs(log_ratio, mask)), mask)


def total_variation(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Total variation distance, $\tfrac12 E|\rho - 1|$; 0 to 1 in expectation.

    Source: Polyanskiy and Wu, Information Theory: From Coding to Learning (2025), chapter 7.
    """
    return masked_mean(_minus_one(_logs(log_ratio, mask)).abs() / 2, mask)


def jensen_shannon(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Jensen-Shannon divergence, in nats; 0 to log 2 in expectation.

    $$ \tfrac12 E\Big[\log\frac{2}{1 + \rho} + \rho \log\frac{2 \rho}{1 + \rho}\Big] $$

    Source: Lin, Divergence measures based on the Shannon entropy (1991).
    """
    logs = _bounded(_logs(log_ratio, mask))
    of_sampler = math.log(2) - torch.nn.functional.softplus(logs)
    of_policy = math.log(2) - torch.nn.functional.softplus(-logs)
    return masked_mean((of_sampler + _weight(logs) * of_policy) / 2, mask)


def log_ratio_histogram(
    log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    low: float = -2.0,
    high: float = 2.0,
    bins: int = 40,
) -> Int[Tensor, " bins"]:
    """Number of unmasked tokens in each of equally wide bins from `low` to `high`.

    The edges are `torch.linspace(low, high, bins + 1)`; a value on an edge is in the upper bin. The
    first and the last bin hold everything beyond them too; NaN is in the last.

    Args:
        log_ratio: log of a ratio of each token, in nats; gets no gradient.
        low: lower edge of the first bin.
        high: upper edge of the last bin.
        bins: number of bins.

    Source: definition.

    Raises:
        ValueError: shapes differ, not low < high, or `bins` is not positive.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}, but must be at least 1")
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"low is {low} and high {high}, but edges need low < high, both finite")
    position = (_logs(log_ratio, mask) - low) / (high - low) * bins
    # Bounded before it becomes an integer: what infinity and NaN become there is not defined.
    index = position.floor().clamp(0, bins - 1).nan_to_num(nan=bins - 1).long()
    return segment_reduce(mask.long(), index, bins)


def _logs(log_ratio: Tensor, mask: Tensor) -> Tensor:
    check_token_inputs(mask, log_ratio=log_ratio)
    return select(log_ratio.detach(), mask).double()


def _bounded(logs: Tensor) -> Tensor:
    """Log ratios to be multiplied with rho, which beyond is 0 or overflows: 0 * inf is NaN."""
    return logs.clamp(-1e4, 1e4)


def _weight(logs: Tensor) -> Tensor:
    return torch.exp(logs).clamp(max=torch.finfo(logs.dtype).max)


def _minus_one(logs: Tensor) -> Tensor:
    """rho - 1, exact near rho = 1; finite, because infinity minus infinity would be NaN."""
    return torch.expm1(logs).clamp(max=torch.finfo(logs.dtype).max)


def binary_kl(
    policy_logprobs: Float[Tensor, "*shape"], other_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    r"""KL divergence of two policies by token, with all other tokens taken as one.

    $$ \mathrm{KL}(p, q) = p \log \frac{p}{q} + (1 - p) \log \frac{1 - p}{1 - q}, \qquad
    p = \pi(y_t),\ q = \pi_{other}(y_t) $$

    At most the divergence over the whole vocabulary (merging outcomes only loses some), and known
    from the sampled token alone, unlike that one. Infinite where only `policy` leaves something
    to other tokens, or only `policy` can sample the token; 0 where both are sure of it.

    Args:
        policy_logprobs: log p of the sampled tokens, of the policy that the mean is over.
        other_logprobs: log q of the same tokens.

    Source: DPPO (arXiv:2602.04879), its binary divergences.
    """
    policy, other = policy_logprobs.detach(), other_logprobs.detach()
    # 1 - exp(log p), exact near p = 1; rounding may have left a log-prob just above 0.
    policy_rest = (-torch.expm1(policy)).clamp(min=0)
    other_rest = (-torch.expm1(other)).clamp(min=0)
    # 0 log 0 is 0: both policies sure of the token. Only the first unsure: infinite, rightly.
    others = torch.xlogy(policy_rest, policy_rest) - torch.xlogy(policy_rest, other_rest)
    # A policy that cannot sample the token: 0 log 0 again.
    moved = select(policy - other, policy != -math.inf)
    return torch.exp(policy) * moved + others
