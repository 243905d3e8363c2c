r"""Controls of an optimizer step by how stale its data is: weight, learning rate, direction.

    lag of a sample      ---age_weights------------> factor of its loss
    weights of responses ---learning_rate_scale----> factor of the learning rate
    two gradients        ---aligned_part-----------> multiple of the last one to take off
    weights of tokens    ---weight_deviation-------> the number that rises before a collapse

Pure functions of numbers that a trainer has anyway; it keeps what is left from step to step.
Nothing has a gradient, and nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs, wide
from areal_lab.functional.masked import masked_mean, select
from areal_lab.functional.ratios import check_cap
from areal_lab.functional.staleness.lag import effective_sample_size_of_logs


def age_weights(lag: Real[Tensor, "*shape"], *, half_life: float) -> Float[Tensor, "*shape"]:
    r"""Weight of samples by their lag: 1 if fresh, half of it after each half-life.

    $$ w = 2^{-\max(0, \mathrm{lag}) / h} $$

    Not normalized: a batch of old samples takes a smaller step.

    Args:
        lag: versions between sampling and training, such as `trajectory_lag(...).mean`.
        half_life: h in versions; infinity gives 1.

    Source: a weight by staleness kept runs alive at bounds of 16 to 28 versions (okoge-kaz/miles,
    experiments/notes, as retold); its form was not at hand, and this is the plainest one.

    Raises:
        ValueError: the half-life is not positive.
    """
    if not half_life > 0:
        raise ValueError(f"half_life is {half_life}, but must be > 0 versions; infinity gives 1")
    return torch.exp2(-wide(lag.detach()).clamp(min=0) / half_life)


class StepScale(NamedTuple):
    """Factor of a learning rate and what it is made of."""

    factor: Float[Tensor, ""]
    """In 0 .. 1."""
    effective_share: Float[Tensor, ""]
    """Effective sample size of the responses over their number, in 0 .. 1."""


def learning_rate_scale(
    log_weights: Float[Tensor, " S"], mask: Bool[Tensor, " S"], *, on_policy_share: float = 1.0
) -> StepScale:
    r"""Factor of the learning rate by the effective sample size of a batch (VCPO).

    $$ \sqrt{\min\Big(1, \frac{\mathrm{ESS}}{S} \Big/ s_{on}\Big)}, \qquad
    \mathrm{ESS} = \frac{(\sum_i w_i)^2}{\sum_i w_i^2}, \quad
    w_i = \prod_{t \in i} \pi_{prox} / \pi_{behav} $$

    A few responses with large weights make a noisy gradient, and AdamW's steps do not shrink with
    it. The weights are of whole responses and not bounded, so their share falls with the length: it
    was .001 to .01 in healthy runs of 16k tokens (okoge-kaz/miles), where `on_policy_share` has to
    be measured.

    Args:
        log_weights: log w of each response, a sum over its tokens.
        mask: True where there is such a response; without one the factor is 1.
        on_policy_share: s_on, the share at which the learning rate is the set one; 1 is that of
            equal weights.

    Source: VCPO (arXiv:2602.17616, version 2); mit-han-lab/vcpo, `ess_scaling` with the rule `sqrt`
    and `base_ess_ratio`. Its baseline by gradient norms needs a backward pass per response, which
    this trainer has not.

    Raises:
        ValueError: `on_policy_share` is not in (0, 1].
    """
    if not 0 < on_policy_share <= 1:
        raise ValueError(f"on_policy_share is {on_policy_share}, but must be in (0, 1]")
    size = effective_sample_size_of_logs(wide(log_weights), mask)
    count = mask.sum()
    share = torch.where(count > 0, size / count.clamp(min=1), torch.ones_like(size))
    return StepScale((share / on_policy_share).clamp(max=1.0).sqrt(), share)


class AlignedPart(NamedTuple):
    """Cosine of two consecutive gradients and the part to take off."""

    cosine: Float[Tensor, ""]
    """In -1 .. 1; 0 if one of them is 0."""
    beyond: Bool[Tensor, ""]
    """True if the cosine exceeds the threshold."""
    coefficient: Float[Tensor, ""]
    """g - coefficient * previous is orthogonal to `previous`; 0 unless `beyond`."""
    norm: Float[Tensor, ""]
    """Norm of that difference."""


def aligned_part(
    dot: Float[Tensor, ""],
    norm: Float[Tensor, ""],
    previous_norm: Float[Tensor, ""],
    *,
    threshold: float,
) -> AlignedPart:
    r"""The part of a gradient along the last one, if the two are aligned beyond a threshold (GAC).

    $$ c = \frac{g \cdot g'}{|g| |g'|}, \qquad g - [c > \tau] \frac{g \cdot g'}{|g'|^2}\, g',
    \qquad \Big|\,\cdot\,\Big| = |g| \sqrt{1 - [c > \tau]\, c^2} $$

    Consecutive gradients of fresh data are nearly orthogonal. Those of stale data keep pointing
    where the last steps already went, which overshoots. What is left never points against g.

    Args:
        dot: g . g', of the gradient and the one before it, over all parameters.
        norm: |g|.
        previous_norm: |g'|; 0 before there is one.
        threshold: tau, in [0, 1]; 1 changes nothing.

    Source: GAC, Gradient Alignment Control (arXiv:2603.01501), abstract and retellings: cosine of
    consecutive gradients, projection of the aligned part, or a skipped step. The equations were not
    at hand; this is the plain projection with one threshold.

    Raises:
        ValueError: the threshold is not in [0, 1].
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}, but must be in [0, 1]; 1 changes nothing")
    dot, norm, previous_norm = (wide(one.detach()) for one in (dot, norm, previous_norm))
    # One after the other: the product of two large norms may overflow.
    usable = (norm > 0) & (previous_norm > 0)
    one = torch.ones_like(norm)
    relative = dot / torch.where(usable, previous_norm, one)
    cosine = select(relative / torch.where(usable, norm, one), usable).clamp(-1.0, 1.0)
    beyond = cosine > threshold
    coefficient = select(relative / torch.where(usable, previous_norm, one), beyond)
    left = norm * (1 - torch.where(beyond, cosine, 0.0).square()).sqrt()
    return AlignedPart(cosine, beyond, coefficient, left)


def weight_deviation(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, cap: float = 2.0
) -> Float[Tensor, ""]:
    r"""Mean distance from 1 of the truncated importance weights of tokens.

    $$ \frac{1}{N} \sum_t |\min(\rho_t, C) - 1|, \qquad \rho = \pi_{prox} / \pi_{behav} $$

    Where C truncates nothing, half of it estimates the total variation of the two policies.

    Args:
        log_ratio: log rho of each token.
        mask: True where a token counts; 0 when none does.
        cap: C; the thresholds of the source hold for 2.

    Source: the diagnostic of okoge-kaz/miles (token TIS in [0, 2]): it reached .05 some 22 to 41
    updates before four collapses, and stayed at .015 to .023 in five stable runs.

    Raises:
        ValueError: shapes differ, or the cap is not positive.
    """
    check_token_inputs(mask, log_ratio=log_ratio)
    check_cap(cap)
    logs = wide(select(log_ratio.detach(), mask)).double()
    weight = torch.exp(logs).clamp(max=cap)
    return masked_mean((weight - 1).abs(), mask)
