r"""Distance of the policy from its anchor: $\log r = \log \pi_\theta - \log \pi_{anchor}$.

    theta ---ratio---> anchor (proximal) ---behavior weight---> behavior

The anchor is where the trust region is centered: the proximal policy in the decoupled objective,
the behavior policy in ordinary PPO. Only `logprobs` gets a gradient.

    tokens                        a  b  .  c  |  d  e       . masked, | next sequence
    token_ratio                   1  2  .  3  |  4  5       each its own
    segment_ratio                 1  1  .  2  |  3  3       mean over a run of unmasked tokens
    sequence_ratio                1  1  .  1  |  2  2       mean over the sequence
    sequence_token_ratio          1  1  .  1  |  2  2       the same value, gradient of each token
    sequence_product_ratio        1  1  .  1  |  2  2       sum over the sequence

Means and sums are of log r: the ratio itself is a geometric mean or a product. Inputs of fewer
digits than float32 are widened to it before they are subtracted, and the results stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs, wide
from areal_lab.functional.masked import log_difference, select
from areal_lab.functional.segments import (
    Reduction,
    Segments,
    segment_reduce,
    sequences_or_rows,
    unmasked_runs,
    value_of_segment,
)


class AnchoredPolicy(NamedTuple):
    """Log ratio and log-probs of policy and anchor; 0 where masked. Float32 at least."""

    log_ratio: Float[Tensor, "*shape"]
    """log r of each token, as the surrogate uses it; carries the gradient."""
    logprobs: Float[Tensor, "*shape"]
    """log pi_theta; carries the gradient. For surrogates of the REINFORCE family."""
    anchor_logprobs: Float[Tensor, "*shape"]
    """log pi_anchor, detached."""
    mask: Bool[Tensor, "*shape"]
    """True where the policy chose the token."""
    sequences: Segments
    """Sequence of each token, for surrogates that look at whole sequences."""


AnchorRatio: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments | None], AnchoredPolicy]
"""`(logprobs, anchor_logprobs, mask, sequences) -> AnchoredPolicy`."""


def token_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> AnchoredPolicy:
    r"""Ratio of each token.

    $$ \log r_t = \log \pi_\theta(y_t) - \log \pi_{anchor}(y_t) $$

    Where both log-probs are -infinity the ratio is 1 and has no gradient.

    Source: PPO (arXiv:1707.06347), section 3.
    """
    check_token_inputs(mask, logprobs=logprobs, anchor_logprobs=anchor_logprobs)
    logprobs = wide(select(logprobs, mask))
    anchor_logprobs = wide(select(anchor_logprobs.detach(), mask))
    return AnchoredPolicy(
        log_ratio=log_difference(logprobs, anchor_logprobs),
        logprobs=logprobs,
        anchor_logprobs=anchor_logprobs,
        mask=mask,
        sequences=sequences_or_rows(mask, sequences),
    )


def sequence_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> AnchoredPolicy:
    r"""Geometric mean of the ratios of a sequence, the same for all of its tokens.

    $$ \log s_i = \frac{1}{|y_i|} \sum_{t \in i} (\log \pi_\theta(y_t) - \log \pi_{anchor}(y_t)) $$

    The gradient goes through the mean, so each token gets 1/|y_i| of what the sequence gets.

    Args:
        mask: True where the policy chose the token; |y_i| counts these. Elsewhere everything
            is 0, ratio 1.

    Source: GSPO (arXiv:2507.18071), section 4.1.
    """
    policy = token_ratio(logprobs, anchor_logprobs, mask, sequences)
    return policy._replace(log_ratio=_spread(policy, policy.sequences, "mean"))


def sequence_token_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> AnchoredPolicy:
    r"""Value of the sequence's geometric mean, gradient of the token itself ("GSPO-token").

    $$ s_{i,t} = \mathrm{sg}(s_i)\, \pi_\theta(y_t) / \mathrm{sg}(\pi_\theta(y_t)) $$

    With one advantage per sequence, a surrogate of this ratio has the loss and the gradient that it
    has with `sequence_ratio`; but here tokens may have different advantages.

    The derivative of the value is not the gradient, by construction: finite differences differ.

    Source: GSPO (arXiv:2507.18071), section 4.3.
    """
    policy = token_ratio(logprobs, anchor_logprobs, mask, sequences)
    value = _spread(policy, policy.sequences, "mean").detach()
    # log r - sg(log r) is an exact 0 that carries the gradient, but inf - inf is NaN.
    carrier = torch.where(policy.log_ratio.isfinite(), policy.log_ratio, 0.0)
    return policy._replace(log_ratio=value + (carrier - carrier.detach()))


def segment_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
    *,
    turns: Segments | None = None,
) -> AnchoredPolicy:
    r"""Geometric mean of the ratios of a turn, such as a run of unmasked tokens.

    As `sequence_ratio`, with turns instead of sequences. Where they are not given they are
    `unmasked_runs`: a masked token (a prompt, the output of a tool) ends a run, and so does the end
    of a sequence. A batch of chosen tokens only has no gaps between turns, and must give them,
    else this is `sequence_ratio`. A trainer gives them to a loss that asks for `turns`:
    `ratio=partial(segment_ratio, turns=turns)`.

    Args:
        turns: turn of each token, no turn being of two sequences; None takes the runs of
            unmasked tokens.

    Source: ROLL's `ratio_type=segment`; no paper defines it.
    """
    policy = token_ratio(logprobs, anchor_logprobs, mask, sequences)
    if turns is None:
        turns = unmasked_runs(mask, policy.sequences)
    return policy._replace(log_ratio=_spread(policy, sequences_or_rows(mask, turns), "mean"))


def sequence_product_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> AnchoredPolicy:
    r"""Ratio of the probabilities of a whole sequence, the same for all of its tokens.

    $$ \log W_i = \sum_{t \in i} (\log \pi_\theta(y_t) - \log \pi_{anchor}(y_t)) $$

    The importance ratio proper, of a variance that grows with the length. For surrogates that bound
    it, such as `topr_surrogate`.

    Source: importance sampling of trajectories, as in TOPR (arXiv:2503.14286).
    """
    policy = token_ratio(logprobs, anchor_logprobs, mask, sequences)
    return policy._replace(log_ratio=_spread(policy, policy.sequences, "sum"))


def _spread(policy: AnchoredPolicy, segments: Segments, reduce: Reduction) -> Tensor:
    """Mean or sum of the log ratios of each segment at each of its unmasked tokens."""
    ids, count = segments
    reduced = segment_reduce(policy.log_ratio, ids, count, mask=policy.mask, reduce=reduce)
    return select(value_of_segment(reduced, ids), policy.mask)


def detached_ratio(policy: AnchoredPolicy) -> Float[Tensor, "*shape"]:
    """pi_theta / pi_anchor as a diagnostic: no gradient, 1 where masked."""
    return torch.exp(policy.log_ratio.detach())


def capped_ratio(
    log_ratio: Float[Tensor, "*shape"], cap: float, *, name: str = "cap"
) -> Float[Tensor, "*shape"]:
    """min(exp(log_ratio), cap) as a weight: no gradient, and no overflow on the way.

    Raises:
        ValueError: the cap is not positive; the sentence calls it by `name`.
    """
    check_cap(cap, name=name)
    return torch.exp(log_ratio.detach().clamp(max=math.log(cap)))


def check_cap(cap: float, *, name: str = "cap") -> None:
    """Refuse a bound of a ratio that is not positive.

    Raises:
        ValueError: the cap is not positive.
    """
    if not cap > 0:
        raise ValueError(
            f"{name} is {cap}, but it bounds a ratio, which is positive, from above and must be "
            "> 0; infinity switches it off"
        )
