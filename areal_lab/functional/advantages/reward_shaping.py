r"""Shape rewards before advantages are computed, and advantages before the loss.

reward --+ overlong_penalty--> shape_rewards --> normalize_rewards --> advantages --> clip
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.advantages.whitening import Moments, add_moments, token_moments
from areal_lab.functional.checks import check_finite, check_integer


def shape_rewards(
    rewards: Float[Tensor, "*shape"],
    *,
    bias: float = 0.0,
    scale: float = 1.0,
    clip: float = math.inf,
) -> Float[Tensor, "*shape"]:
    r"""Shift, then scale, then clip.

    $$ R' = \mathrm{clip}(s (R + b), -c, c) $$

    Args:
        rewards: R; gets a gradient where it is not clipped.
        bias: b, in the unit of R.
        scale: s.
        clip: c, in the unit of the result; infinity leaves it as it is. AReaL clips at 20.

    Source: AReaL's reward bias, scaling and clip; with `bias=-0.5, scale=10` right and wrong
    responses give 5 and -5.

    Raises:
        ValueError: rewards are not finite, or `clip` is negative or NaN.
    """
    if not clip >= 0:
        raise ValueError(f"clip is {clip}, but must be >= 0: the largest absolute reward")
    check_finite("rewards", rewards)
    return ((rewards + bias) * scale).clamp(-clip, clip)


def overlong_penalty(
    length_tokens: Int[Tensor, " N"],
    *,
    max_length_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
) -> Float[Tensor, " N"]:
    r"""Penalty on the reward of a response close to the length limit; float32, in [-f, 0].

    $$ P(y) = f \cdot \begin{cases} 0 & |y| \le L_{max} - L_{cache} \\
    \frac{(L_{max} - L_{cache}) - |y|}{L_{cache}} & L_{max} - L_{cache} < |y| \le L_{max} \\
    -1 & |y| > L_{max} \end{cases} $$

    Never below -f: a response beyond L_max (of a sampler with a higher limit) is no worse
    than one that reaches it. Has no gradient.

    Source: DAPO (arXiv:2503.14476), eq. 13; there L_max = 20,480 and L_cache = 4,096.

    Args:
        length_tokens: |y|, prompt excluded.
        max_length_tokens: L_max, at which the penalty is whole.
        buffer_tokens: L_cache, over which it grows.
        factor: f, the penalty at L_max; the paper's is 1.

    Raises:
        ValueError: lengths are not integers, `buffer_tokens` is not in `1 .. max_length_tokens`, or
            `factor` is negative.
    """
    check_integer("length_tokens", length_tokens)
    if not 1 <= buffer_tokens <= max_length_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens} and max_length_tokens {max_length_tokens}, but the "
            "first must be >= 1 and at most the second: the last tokens before it"
        )
    if not factor >= 0:
        raise ValueError(f"factor is {factor}, but must be >= 0: what is taken off at L_max")
    excess = (length_tokens - (max_length_tokens - buffer_tokens)).clamp(0, buffer_tokens)
    return factor * ((-excess).to(torch.float32) / buffer_tokens)


class NormalizedRewards(NamedTuple):
    """Rewards over their running deviation, and the state to pass with the next batch."""

    rewards: Tensor
    """Normalized rewards; carries the gradient."""
    moments: Moments
    """Moments of everything seen so far, including this batch; detached."""


def no_moments() -> Moments:
    """The state before the first batch.

    Source: definition.
    """
    zero = torch.zeros((), dtype=torch.float64)
    return Moments(zero, zero, zero)


def normalize_rewards(
    rewards: Float[Tensor, "*shape"],
    moments: Moments,
    *,
    decay: float = 1.0,
    center: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> NormalizedRewards:
    r"""Normalize by the mean and deviation of all rewards so far, this batch included.

    $$ R' = \frac{R - \mu}{\sigma + \epsilon}, \quad \mu, \sigma \text{ of } m \leftarrow
    \beta m + m_{batch} $$

    The state is explicit: pass in what the last call returned, `no_moments()` at first. A
    single first reward, and rewards that were always equal, give 0 when centered.

    Source: Engstrom et al., implementation matters (arXiv:2005.12729), of rewards instead of
    returns.

    Args:
        rewards: R of each sample; the only input that gets a gradient, through the moments too.
        moments: of the rewards before this batch.
        decay: beta, what the past counts for at each batch; 1 never forgets.
        center: take off the mean; False only scales.
        eps: added to the deviation.

    Raises:
        ValueError: rewards are not finite, `decay` is not in [0, 1] or `eps` is not positive.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}, but must be in [0, 1]: 1 never forgets")
    if not eps > 0:
        raise ValueError(f"eps is {eps}, but must be > 0: equal rewards have deviation 0")
    check_finite("rewards", rewards)
    past = Moments(*(decay * moment.detach() for moment in moments))
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    seen = add_moments(past, token_moments(rewards, everyone))
    deviation = seen.variance(unbiased=unbiased).sqrt() + eps
    centered = rewards - seen.mean().to(rewards.dtype) if center else rewards
    normalized = centered / deviation.to(rewards.dtype)
    return NormalizedRewards(normalized, Moments(*(moment.detach() for moment in seen)))


def clip_advantages(
    advantages: Float[Tensor, "*shape"], *, bound: float
) -> Float[Tensor, "*shape"]:
    r"""Bound the size of advantages: $\mathrm{clip}(A, -c, c)$.

    Group deviations that are tiny make advantages that are huge.

    Source: ROLL (arXiv:2506.06122), its advantage clip.

    Args:
        advantages: A per sample or token; gets a gradient where it is not clipped.
        bound: c, the largest absolute value.

    Raises:
        ValueError: `bound` is negative or NaN.
    """
    if not bound >= 0:
        raise ValueError(f"bound is {bound}, but must be >= 0: the largest absolute advantage")
    return advantages.clamp(-bound, bound)
