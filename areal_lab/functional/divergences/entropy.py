"""Entropy of the policy as a term of the loss, with coefficients that change over a run.

    entropy [tokens] --aggregate--> H --x -coefficient--> + policy loss
                                    |
    coefficient of the next step <--'  adaptive_entropy_coefficient, linear_entropy_coefficient

Entropies are in nats per token, as `logprobs_and_entropy` gives them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Aggregate, aggregated, token_mean
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import masked_quantiles, select
from areal_lab.functional.segments import Segments


def entropy_bonus(
    entropy: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
    *,
    coefficient: float | Float[Tensor, ""],
    aggregate: Aggregate = token_mean,
) -> Float[Tensor, ""]:
    r"""Term to add to a policy loss that rewards entropy.

    $$ -c\ \mathrm{aggregate}(H_t) $$

    Args:
        entropy: H of each token's distribution; gets a gradient.
        mask: True = the policy chose this token. An empty mask gives 0.
        sequences: sequence of each token, for the aggregate; None takes rows.
        coefficient: c; 0 switches the term off, a negative one punishes entropy. A tensor, as
            `adaptive_entropy_coefficient` gives, gets no gradient.

    Source: Williams and Peng (1991); A3C (arXiv:1602.01783), section 4.
    """
    check_token_inputs(mask, entropy=entropy)
    weight = coefficient.detach() if isinstance(coefficient, Tensor) else coefficient
    return -weight * aggregated(aggregate, entropy, mask, sequences)


def adaptive_entropy_coefficient(
    coefficient: float | Float[Tensor, ""],
    entropy: float | Float[Tensor, ""],
    *,
    target: float = 0.2,
    step: float = 0.005,
    minimum: float = 0.0,
    maximum: float = 1.0,
) -> Float[Tensor, ""]:
    r"""Coefficient of the next step: a little more while entropy is low, a little less otherwise.

    $$ c' = \mathrm{clip}(c + \Delta\ (H \le H^* \ ?\ 1 : -1);\ c_{min}, c_{max}) $$

    Args:
        coefficient: c of this step; a number at the start of a run, then what this returned.
        entropy: mean entropy of the whole batch in nats; not that of a micro-batch.
        target: $H^*$ in nats.
        step: $\Delta$, by how much c moves in a step.
        minimum: bound of c. Without it a policy far above the target would be punished.
        maximum: bound of c. Without it a collapsed policy winds c up without end.

    Returns:
        A scalar tensor on the device of the entropy, without gradient. An entropy of NaN counts as
        above the target.

    Source: Skywork-OR1 (arXiv:2505.22312), adaptive entropy control; numbers and bounds as in TRL.
    In the paper the coefficient also acts only while H is at most the target: multiply it by
    `entropy <= target` for that.

    Raises:
        ValueError: `step` is negative, or the bounds are in the wrong order.
    """
    if not step >= 0:
        raise ValueError(f"step is {step}, but must be >= 0; 0 keeps the coefficient")
    if not minimum <= maximum:
        raise ValueError(
            f"minimum is {minimum} and maximum {maximum}, but the smaller has to come first"
        )
    entropy = _scalar(entropy)
    coefficient = _scalar(coefficient, entropy.device)
    direction = torch.where(entropy <= target, 1, -1).to(coefficient.dtype)
    return (coefficient + step * direction).clamp(minimum, maximum)


def _scalar(value: float | Tensor, device: torch.device | None = None) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(float(value), device=device)


def linear_entropy_coefficient(step: int, *, start: float, end: float = 0.0, steps: int) -> float:
    r"""Coefficient that goes from `start` to `end` in equal steps, then stays.

    $$ c_k = c_0 + (c_K - c_0) \min(k / K, 1) $$

    Args:
        step: k, optimizer steps done; 0 gives `start`.
        start: $c_0$.
        end: $c_K$.
        steps: K, steps after which `end` is reached.

    Source: a linear schedule, as PipelineRL has for its entropy bonus.

    Raises:
        ValueError: `step` is negative, or `steps` is not positive.
    """
    if step < 0 or steps < 1:
        raise ValueError(f"step is {step} and steps {steps}, but need step >= 0 and steps >= 1")
    return start + (end - start) * min(step / steps, 1.0)


def top_entropy_mask(
    entropy: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    fraction: float = 0.2,
    threshold: Float[Tensor, ""] | None = None,
) -> Bool[Tensor, "*shape"]:
    r"""The unmasked tokens of highest entropy: the mask to give to a policy loss.

    $$ m'_t = m_t\,[H_t \ge q_{1 - f}(H)] $$

    Tokens equal to the quantile are kept, so a fraction of 1 keeps all. The mask also changes what
    a mean divides by, unless it is given a count.

    Args:
        entropy: H of each token; gets no gradient.
        mask: True = the policy chose this token. An empty mask stays empty.
        fraction: f, the share of the unmasked tokens that is kept, in (0, 1].
        threshold: the entropy from which tokens are kept, instead of the quantile of *this* batch:
            `masked_quantiles` of the whole batch, where it is split into micro-batches.

    Source: Beyond the 80/20 Rule (arXiv:2506.01939), with its 20 %; TRL's `top_entropy_quantile`.

    Raises:
        ValueError: shapes differ, or `fraction` is outside of (0, 1].
    """
    check_token_inputs(mask, entropy=entropy)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction is {fraction}, but must be the share of tokens to keep, in (0, 1]"
        )
    entropy = select(entropy.detach(), mask)
    if threshold is None:
        quantile = torch.full((1,), 1 - fraction, dtype=torch.double, device=entropy.device)
        threshold = masked_quantiles(entropy, mask, quantile)[0]
    return mask & (entropy >= threshold)
