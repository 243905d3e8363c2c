r"""Drop tokens that sampler and trainer disagree on: by divergence, probability or advantage.

Functions that end in `_mask` say which tokens stay; `keep(mask)` makes a correction of one.

    reject(k3, high=0.1)                                            token
    reject(k1, low=-0.01, high=0.01, statistic=mean_of_sequence)    sequence
    reject(k3, high=0.1, statistic=max_of_sequence)                 sequence, by its furthest token
    mask_binary_kl(0.1)                                             token, by both probabilities
    keep(divergence_mask(logprobs, behavior_logprobs, mask, k2, high=0.02))      theta, not proximal

Estimators are functions of x, the log ratio *sampler over policy*, because the samples come from
the sampler: their mean estimates KL(sampler || policy).

$$ x = \log \pi_{behav} - \log \pi = -\log \rho, \qquad
k_1 = x,\quad k_2 = x^2 / 2,\quad k_3 = e^{-x} - 1 + x = \rho - 1 - \log \rho $$
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import applied, check_token_inputs, wide
from areal_lab.functional.corrections.sequence import SequenceStatistic, mean_of_sequence
from areal_lab.functional.corrections.weights import BehaviorWeight, Correction, drop, inside
from areal_lab.functional.divergences.sampled import binary_kl
from areal_lab.functional.masked import select
from areal_lab.functional.ratios import check_cap
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows

Divergence: TypeAlias = Callable[[Tensor], Tensor]
"""Estimator of a divergence from x, elementwise, as `k1`, `k2`, `k3` of `kl`."""


def reject(
    divergence: Divergence,
    *,
    high: float,
    low: float = -float("inf"),
    statistic: SequenceStatistic | None = None,
) -> Correction:
    r"""Drop tokens or sequences whose divergence from behavior to proximal is outside of a band.

    $$ \rho_t\,[low \le k(-\log \rho_t) \le high] $$

    With a `statistic`, k is summed, averaged or maximized over the sequence, which is dropped as a
    whole. $k_1$ has a sign, so a bound on it from above alone only drops small $\rho$; to bound
    $\rho$ itself use `mask_outside` or `mask_sequences_outside`.

    Args:
        divergence: k, a function of $x = -\log \rho$, elementwise.
        high: largest divergence that is kept.
        low: smallest divergence that is kept; for estimators that have a sign.
        statistic: `sum_of_sequence`, `mean_of_sequence`, `max_of_sequence`, or None for tokens.

    Source: the rejection modes of verl and AReaL; no paper defines all of them. Estimators:
    Schulman, Approximating KL Divergence (2020).

    Raises:
        ValueError: not low <= high.
    """
    _check_bounds(low, high)

    def rejected(weight: BehaviorWeight) -> BehaviorWeight:
        values = _divergence(divergence, -weight.log_ratio)
        return drop(
            weight, _within(values, weight.mask, weight.sequences, low, high, statistic=statistic)
        )

    return rejected


def mask_binary_kl(delta: float) -> Correction:
    r"""Drop tokens on which proximal and behavior policy differ, by both of their probabilities.

    $$ \rho_t\,[\max(\mathrm{KL}(p, q), \mathrm{KL}(q, p)) \le \delta], \qquad
    p = \pi_{prox}(y_t),\ q = \pi_{behav}(y_t) $$

    KL is `binary_kl`. A ratio of 1.3 is little for a token of probability 1e-5 and much for one of
    0.7; this bound sees the difference, unlike a band of ratios. "KPop".

    Args:
        delta: largest divergence that is kept, in nats; infinity keeps all.

    Source: AReaL 2.0, `rejection_sampling.metric=binary_kl` ("KPop"), as retold: a token is masked
    if the divergence in either direction exceeds the bound. The code was not at hand.

    Raises:
        ValueError: delta is negative or NaN.
    """
    _check_bounds(0.0, delta, "delta")

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        behavior = weight.behavior_logprobs
        proximal = torch.where(behavior.isfinite(), behavior + weight.log_ratio, behavior)
        both = torch.maximum(binary_kl(proximal, behavior), binary_kl(behavior, proximal))
        return drop(weight, inside(both, 0.0, delta))

    return masked


def divergence_mask(
    policy_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    divergence: Divergence,
    *,
    high: float,
    low: float = -float("inf"),
    statistic: SequenceStatistic | None = None,
    sequences: Segments | None = None,
) -> Bool[Tensor, "*shape"]:
    r"""True for tokens whose divergence from the sampler is within a band.

    $$ [low \le k(\log \pi_{behav} - \log \pi) \le high] $$

    With $k_2$ and the trained policy this is the KL-mask, $\frac12 (\log \pi_\theta -
    \log \pi_{behav})^2 \le \tau$.

    Args:
        policy_logprobs: log pi of any policy, as theta or proximal; gets no gradient.
        divergence: k, a function of x, elementwise.
        high: largest divergence that is kept.
        low: smallest divergence that is kept.
        statistic: None for tokens, or what is made of a sequence's divergences.

    Returns:
        True where a token stays; False where masked.

    Source: KL-mask: torchrl's `kl_mask_threshold`; no paper defines it.

    Raises:
        ValueError: shapes differ, or not low <= high.
    """
    check_token_inputs(mask, policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs)
    _check_bounds(low, high)
    behavior = wide(select(behavior_logprobs.detach(), mask))
    x = behavior - wide(select(policy_logprobs.detach(), mask))
    segments = sequences_or_rows(mask, sequences)
    return _within(_divergence(divergence, x), mask, segments, low, high, statistic=statistic)


def probability_difference_mask(
    policy_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    low: float,
    high: float,
    statistic: SequenceStatistic | None = None,
    sequences: Segments | None = None,
) -> Bool[Tensor, "*shape"]:
    r"""True for tokens with nearly the same probability under sampler and policy.

    $$ [low \le \pi(y_t) - \pi_{behav}(y_t) \le high] $$

    With a `statistic` the probabilities are those of the sequence, $e^{s(\log \pi)}$: geometric
    mean with `mean_of_sequence`, product with `sum_of_sequence`.

    Args:
        policy_logprobs: log pi of any policy, as theta or proximal; gets no gradient.
        low: smallest difference that is kept, in -1 .. 0.
        high: largest difference that is kept, in 0 .. 1.
        statistic: None for tokens, or what is made of a sequence's log-probs.
        sequences: sequence (or turn) of each token; None takes rows.

    Returns:
        True where a token stays; False where masked.

    Source: the train-infer filters of ROLL; no paper defines them.

    Raises:
        ValueError: shapes differ, or not low <= high.
    """
    check_token_inputs(mask, policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs)
    _check_bounds(low, high)
    policy = wide(select(policy_logprobs.detach(), mask))
    behavior = wide(select(behavior_logprobs.detach(), mask))
    if statistic is None:
        return inside(policy.exp() - behavior.exp(), low, high) & mask
    segments = sequences_or_rows(mask, sequences)
    policy = _statistic(statistic, policy, mask, segments)
    behavior = _statistic(statistic, behavior, mask, segments)
    return inside(policy.exp() - behavior.exp(), low, high)[segments.ids] & mask


def off_policy_sequence_mask(
    logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    threshold: float,
    sequences: Segments | None = None,
) -> Bool[Tensor, "*shape"]:
    r"""Drop tokens with a negative advantage in sequences that have become unlikely.

    $$ M_{i,t} = \begin{cases} 0 & A_{i,t} < 0 \text{ and } \frac{1}{|y_i|} \sum_{s \in i}
    (\log \pi_{behav} - \log \pi_\theta) > \delta \\ 1 & \text{otherwise} \end{cases} $$

    Tokens with an advantage of 0 or more always stay: good responses are to be learned, however
    unlikely they have become. "OPSM".

    Args:
        logprobs: log pi_theta; gets no gradient.
        advantages: A of each token, usually the same for all of a sequence.
        threshold: delta, the largest mean log ratio that is kept, in nats per token.

    Returns:
        True where a token stays; False where masked.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, "Off-Policy Sequence Masking".

    Raises:
        ValueError: shapes differ, or the threshold is NaN.
    """
    check_token_inputs(
        mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages
    )
    _check_bounds(-float("inf"), threshold, "threshold")
    behavior = wide(select(behavior_logprobs.detach(), mask))
    x = behavior - wide(select(logprobs.detach(), mask))
    segments = sequences_or_rows(mask, sequences)
    near = mean_of_sequence(x, mask, segments) <= threshold
    return (near[segments.ids] | ~(select(advantages.detach(), mask) < 0)) & mask


def veto_suffix_mask(
    logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    threshold: float,
    sequences: Segments | None = None,
) -> Bool[Tensor, "*shape"]:
    r"""Drop what follows the first token that became too likely, where the advantage is negative.

    $$ M_t = 0 \iff A_t < 0 \text{ and } \exists\, s < t:\ \pi_\theta(y_s) / \pi_{behav}(y_s) > c $$

    Behind such a token the sampler's suffix belongs to a prefix that it hardly wrote itself, and
    pushing it down moves probability without a bound. The token itself stays, and so does
    everything with an advantage of 0 or more.

    Args:
        logprobs: log pi_theta; gets no gradient.
        advantages: A of each token, usually the same for all of a sequence.
        mask: True where the policy chose the token; others are no trigger.
        threshold: c, the largest ratio that vetoes nothing; infinity drops nothing.
        sequences: sequence of each token, its tokens in order; None takes rows.

    Returns:
        True where a token stays; False where masked.

    Source: mu-GRPO (arXiv:2605.17570), "negative-advantage veto", as retold; the paper was not at
    hand. Read plainly: a trigger is a ratio above the threshold, and is itself trained on.

    Raises:
        ValueError: shapes differ, or the threshold is not positive.
    """
    check_token_inputs(
        mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages
    )
    check_cap(threshold, name="threshold")
    behavior = wide(select(behavior_logprobs.detach(), mask))
    moved = wide(select(logprobs.detach(), mask)) - behavior
    trigger = (moved > math.log(threshold)) & mask
    ids, count = sequences_or_rows(mask, sequences)
    places = torch.arange(mask.numel(), device=mask.device).reshape(mask.shape)
    # The place of the first trigger of each sequence; without one, behind the last token.
    first = segment_reduce(torch.where(trigger, places, mask.numel()), ids, count, reduce="min")
    behind = places > first[ids]
    return ~(behind & (select(advantages.detach(), mask) < 0)) & mask


def _divergence(divergence: Divergence, x: Tensor) -> Tensor:
    return applied("divergence", divergence, x, gives=Tensor, example="k3")


def _statistic(
    statistic: SequenceStatistic, values: Tensor, mask: Tensor, sequences: Segments
) -> Tensor:
    return applied(
        "statistic", statistic, values, mask, sequences, gives=Tensor, example="mean_of_sequence"
    )


def _within(
    values: Tensor,
    mask: Tensor,
    sequences: Segments,
    low: float,
    high: float,
    *,
    statistic: SequenceStatistic | None,
) -> Tensor:
    if statistic is None:
        return inside(values, low, high) & mask
    values = _statistic(statistic, values, mask, sequences)
    return inside(values, low, high)[sequences.ids] & mask


def _check_bounds(low: float, high: float, name: str = "high") -> None:
    if not low <= high:
        raise ValueError(
            f"low is {low} and {name} {high}, but a band needs low <= {name} and no NaN"
        )
