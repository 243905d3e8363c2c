"""Distance between the trainer's policy and the sampler's, in one call, and by age.

    proximal, behavior --> log rho --> weights, divergences, effective sample sizes --> log

Everything is detached and nothing waits for a device. Sums are in float64, since nearly equal
policies drown in float32's rounding. Nothing unmasked gives 0, and NaN for quantiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.corrections.sequence import mean_of_sequence, sum_of_sequence
from areal_lab.functional.corrections.weights import behavior_weight, check_band
from areal_lab.functional.divergences.kl import k3
from areal_lab.functional.divergences.sampled import (
    KLEstimates,
    chi_square,
    jensen_shannon,
    kl_from_sampler,
    kl_to_sampler,
    total_variation,
)
from areal_lab.functional.masked import masked_mean, masked_quantiles, select
from areal_lab.functional.segments import Segments, segment_reduce
from areal_lab.functional.staleness.lag import (
    effective_sample_share,
    effective_sample_size_by_lag,
    effective_sample_size_of_logs,
    lag_histogram,
    mean_by_lag,
)


class OffPolicyDiagnostics(NamedTuple):
    """Proximal against behavior; scalars unless said, detached."""

    tokens: Tensor
    """Number of unmasked tokens."""
    mean_weight: Tensor
    """Mean of rho; 1 in expectation, so its distance from 1 is noise or a mismatch."""
    weight_quantiles: Tensor
    """[Q]; quantiles of rho."""
    share_below: Tensor
    """Share of tokens with rho under the lower bound."""
    share_above: Tensor
    """Share of tokens with rho over the upper bound."""
    mean_absolute_log_ratio: Tensor
    """Mean of |log rho|, in nats."""
    largest_absolute_log_ratio: Tensor
    """Largest |log rho|, in nats."""
    effective_sample_share: Tensor
    """Effective sample size of the token weights over the tokens."""
    sequence_effective_sample_share: Tensor
    """Effective sample share of sequences, each weighted with its product of rho."""
    kl_behavior_proximal: KLEstimates
    """KL(behavior || proximal), plain means."""
    kl_proximal_behavior: KLEstimates
    """KL(proximal || behavior), means weighted with rho."""
    chi_square: Tensor
    """Chi-square divergence of proximal from behavior, per token."""
    sequence_chi_square: Tensor
    """Chi-square of sequences; infinite when it overflows."""
    total_variation: Tensor
    """Total variation distance, estimated from the weights."""
    jensen_shannon: Tensor
    """Jensen-Shannon divergence, in nats."""
    probability_gap: Tensor
    """Mean |pi_prox - pi_behav| of the sampled tokens themselves."""
    multiplicative_error: Tensor
    """Mean of exp |log rho|: by which factor probabilities are off; 1 when equal."""
    perplexity: Tensor
    """exp(-mean log pi_prox) of each sequence, mean over sequences."""
    perplexity_ratio: Tensor
    """Perplexity under proximal over that under behavior, mean over sequences."""


class DivergenceByLag(NamedTuple):
    """Divergences of the tokens of each lag, in the bins of `lag_histogram`; 0 for a lag without
    tokens.
    """

    tokens: Tensor
    """Number of unmasked tokens."""
    mean_weight: Tensor
    """Mean of rho."""
    mean_absolute_log_ratio: Tensor
    """Mean of |log rho|, in nats."""
    kl: Tensor
    """KL(behavior || proximal), k3."""
    chi_square: Tensor
    """Mean of rho^2 - 1."""
    effective_sample_share: Tensor
    """Effective sample size over the tokens."""


def off_policy_diagnostics(
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    sequences: Segments | None = None,
    bounds: tuple[float, float] = (0.5, 2.0),
    quantiles: tuple[float, ...] = (0.01, 0.5, 0.99),
) -> OffPolicyDiagnostics:
    r"""All diagnostics of the gap between trainer and sampler, for one batch.

    $$ \rho_t = \pi_{prox}(y_t) / \pi_{behav}(y_t), \quad y_t \sim \pi_{behav} $$

    A token that one of the two cannot sample (-infinity) makes infinite what is infinite, and the
    rest takes its limit.

    Source: with the functions of the same names.

    Args:
        proximal_logprobs: log pi_prox, or of any policy that shall be compared; no gradient.
        bounds: (low, high) on rho for `share_below` and `share_above`; on a bound is within.
        quantiles: which quantiles of rho.

    Raises:
        ValueError: shapes differ, bounds are not 0 <= low <= high, or a quantile is not in 0 .. 1.
    """
    check_band(*bounds)
    if not all(0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles are {quantiles}, but must be in 0 .. 1, as 0.99")
    weight, logs, mask, rows, _ = behavior_weight(
        proximal_logprobs.double(), behavior_logprobs.double(), mask, sequences
    )
    proximal = select(proximal_logprobs.detach(), mask).double()
    behavior = select(behavior_logprobs.detach(), mask).double()
    has_tokens = segment_reduce(mask.long(), rows.ids, rows.count) > 0
    products = sum_of_sequence(logs, mask, rows)
    sequence_ess = effective_sample_size_of_logs(products, has_tokens)
    everything = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
    levels = torch.tensor(quantiles, dtype=torch.double, device=mask.device)
    return OffPolicyDiagnostics(
        tokens=mask.sum(),
        mean_weight=masked_mean(weight, mask),
        weight_quantiles=masked_quantiles(weight, mask, levels),
        share_below=masked_mean((weight < bounds[0]).double(), mask),
        share_above=masked_mean((weight > bounds[1]).double(), mask),
        mean_absolute_log_ratio=masked_mean(logs.abs(), mask),
        largest_absolute_log_ratio=segment_reduce(
            logs.abs(), everything, 1, mask=mask, reduce="max"
        )[0],
        effective_sample_share=effective_sample_share(weight, mask),
        sequence_effective_sample_share=sequence_ess / has_tokens.sum().clamp(min=1),
        kl_behavior_proximal=kl_from_sampler(logs, mask),
        kl_proximal_behavior=kl_to_sampler(logs, mask),
        chi_square=chi_square(logs, mask),
        sequence_chi_square=chi_square(products, has_tokens),
        total_variation=total_variation(logs, mask),
        jensen_shannon=jensen_shannon(logs, mask),
        probability_gap=masked_mean((proximal.exp() - behavior.exp()).abs(), mask),
        multiplicative_error=masked_mean(logs.abs().exp(), mask),
        perplexity=masked_mean(torch.exp(-mean_of_sequence(proximal, mask, rows)), has_tokens),
        perplexity_ratio=masked_mean(torch.exp(-mean_of_sequence(logs, mask, rows)), has_tokens),
    )


def divergence_by_lag(
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    lag: Int[Tensor, "*shape"],
    *,
    bins: int,
) -> DivergenceByLag:
    r"""Distance between sampler and trainer for the tokens of each lag.

    $$ D_l = \mathrm{mean}\{ d(\rho_t) : v - v_t = l \} $$

    Args:
        proximal_logprobs: log pi_prox of the sampled tokens; gets no gradient.
        lag: lag of each token, from `token_lag`.
        bins: lags 0, 1, ...; the last bin holds everything from `bins - 1` on.

    Source: with the functions of divergences.py.

    Raises:
        ValueError: shapes differ, lag is not integer-valued, or `bins` is not positive.
    """
    weight, logs, mask, *_ = behavior_weight(
        proximal_logprobs.double(), behavior_logprobs.double(), mask
    )
    tokens = lag_histogram(lag, mask, bins=bins)
    size = effective_sample_size_by_lag(weight, lag, mask, bins=bins)
    return DivergenceByLag(
        tokens=tokens,
        mean_weight=mean_by_lag(weight, lag, mask, bins=bins),
        mean_absolute_log_ratio=mean_by_lag(logs.abs(), lag, mask, bins=bins),
        kl=mean_by_lag(k3(-logs.clamp(max=1e4)), lag, mask, bins=bins),
        chi_square=mean_by_lag(torch.expm1(2 * logs), lag, mask, bins=bins),
        effective_sample_share=size / tokens.clamp(min=1),
    )
