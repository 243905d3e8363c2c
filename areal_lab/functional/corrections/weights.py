r"""The weight $\rho = \pi_{prox} / \pi_{behav}$ that corrects for the sampler's older policy.

A correction maps a `BehaviorWeight` to a new one; `chain` applies several. The weight itself is
always part of the decoupled objective; corrections bound it.

    behavior_weight(...) --> truncate(2.0) --> ... --> weight * surrogate

    unbounded, truncate, mask_outside, mask_above     by token                    (this file)
    sequence_product, mask_sequences_outside, ...     by sequence        (sequence_corrections.py)
    reject, keep(divergence_mask(...)), ...           by divergence               (rejection.py)
    mask_second_moment                                by the whole batch      (second_moment.py)

Masked tokens have weight 1 throughout. Unmasked ones have a positive finite weight, or exactly 0
once they are dropped; they stay dropped, and are still counted by the mean. Weights are float32 at
least, whatever the type of the log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count
from areal_lab.functional.checks import check_number, check_same_shape, check_token_inputs, wide
from areal_lab.functional.masked import log_difference, masked_sum, select
from areal_lab.functional.segments import Segments, check_segments, sequences_or_rows


class BehaviorWeight(NamedTuple):
    """The weights that a chain of corrections passes on; nothing has a gradient."""

    weight: Float[Tensor, "*shape"]
    """Factor of the surrogate; 0 drops the token from the sum; 1 where masked."""
    log_ratio: Float[Tensor, "*shape"]
    """log pi_prox - log pi_behav, as it was at the start of the chain; 0 where masked."""
    mask: Bool[Tensor, "*shape"]
    """True where the policy chose the token."""
    sequences: Segments
    """Sequence of each token, for corrections of whole sequences."""
    behavior_logprobs: Float[Tensor, "*shape"]
    """log pi_behav, for corrections by probabilities: those of pi_prox are these plus `log_ratio`;
    0 where masked."""


Correction: TypeAlias = Callable[[BehaviorWeight], BehaviorWeight]
"""One link of the chain."""


def behavior_weight(
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> BehaviorWeight:
    r"""Importance weight of each token, unbounded.

    $$ \rho_t = \pi_{prox}(y_t) / \pi_{behav}(y_t) $$

    Beyond the positive finite numbers of its dtype a weight is the nearest of them: `inf * 0` would
    be NaN, and 0 marks a dropped token. A token is also dropped if the proximal policy cannot
    sample it (minus infinity, as outside of its top-p) and the sampler can: its weight is 0.

    Args:
        proximal_logprobs: log pi_prox of the sampled tokens.
        behavior_logprobs: log pi_behav, as the sampler reported them. Where both are equal the
            weight is 1, also where both are infinite.
        mask: True where the policy chose the token; elsewhere the weight is 1.

    Source: AReaL (arXiv:2505.24298), eq. 5.
    """
    check_token_inputs(
        mask, proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs
    )
    proximal = wide(select(proximal_logprobs.detach(), mask))
    behavior = wide(select(behavior_logprobs.detach(), mask))
    log_ratio = log_difference(proximal, behavior)
    weight = select(positive_exp(log_ratio), log_ratio != -torch.inf)
    return BehaviorWeight(weight, log_ratio, mask, sequences_or_rows(mask, sequences), behavior)


def unbounded(weight: BehaviorWeight) -> BehaviorWeight:
    """Do not change the weight: unbiased, with unbounded variance.

    Source: AReaL (arXiv:2505.24298), eq. 5, which bounds nothing.
    """
    return weight


def truncate(cap: float, *, floor: float = 0.0) -> Correction:
    r"""Bound the weight: $\mathrm{clip}(\rho, floor, cap)$. Biased, every token still learns.

    Tokens that an earlier correction dropped stay dropped, whatever the floor.

    Args:
        cap: largest weight; infinity for none.
        floor: smallest weight; 0 for none.

    Source: IMPALA (arXiv:1802.01561), section 4.1; for language models "TIS".

    Raises:
        ValueError: the cap is not positive, or the floor is negative or above the cap.
    """
    check_band(floor, cap, names=("floor", "cap"))

    def truncated(weight: BehaviorWeight) -> BehaviorWeight:
        return replace_weight(weight, weight.weight.clamp(min=floor, max=cap))

    return truncated


def mask_outside(low: float, high: float, *, inclusive: bool = True) -> Correction:
    r"""Drop tokens whose weight is outside of a band: $\rho\,[low \le \rho \le high]$.

    The count that a mean divides by does not change: a dropped token adds 0.

    Args:
        low: smallest weight that is kept; 0 for no lower bound.
        high: largest weight that is kept; infinity for no upper bound.
        inclusive: False drops a weight that equals a bound.

    Source: IcePop, as in Ring-1T (arXiv:2510.18855).

    Raises:
        ValueError: not 0 <= low <= high, or high is 0.
    """
    check_band(low, high)

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        return drop(weight, inside(weight.weight, low, high, inclusive=inclusive))

    return masked


def mask_above(cap: float) -> Correction:
    r"""Drop tokens whose weight is above the cap: $\rho\,[\rho \le cap]$.

    `mask_outside` with an upper bound only.

    Source: IcePop, as in Ring-1T (arXiv:2510.18855), with the upper bound only.

    Raises:
        ValueError: the cap is not positive.
    """
    check_band(0.0, cap, names=("low", "cap"))
    return mask_outside(0.0, cap)


def keep(kept: Bool[Tensor, "*shape"]) -> Correction:
    """Keep the tokens of a mask, such as that of `divergence_mask` or a rule of your own.

    For rules that need more than log rho (advantages, probabilities, theta), and for those over a
    whole batch, of which a micro-batch then gets its part.

    Args:
        kept: True where the token stays; what it says of masked tokens does not matter.

    Source: definition.

    Raises:
        ValueError: `kept` is not boolean, or (when applied) not of the shape of the mask.
    """
    if not isinstance(kept, Tensor):
        raise TypeError(
            f"kept is a {type(kept).__name__}, but must be a boolean tensor; pass keep(mask)"
        )
    if kept.dtype != torch.bool:
        raise ValueError(f"kept has dtype {kept.dtype}, but must be torch.bool; pass kept.bool()")

    def kept_only(weight: BehaviorWeight) -> BehaviorWeight:
        return drop(weight, kept)

    return kept_only


def self_normalize(
    *, weight_sum: Count | None = None, token_count: Count | None = None
) -> Correction:
    r"""Divide the weights by their mean over all unmasked tokens, dropped ones included.

    $$ \tilde\rho_t = \rho_t \Big/ \frac{1}{N} \sum_s m_s \rho_s $$

    Afterwards the mean weight is 1. When every weight is 0 they stay 0.

    Args:
        weight_sum: sum of the weights of the whole batch as they arrive here; None sums these.
            With it and `token_count`, a batch gives the same in parts.
        token_count: N of the whole batch; None counts this mask.

    Source: self-normalized importance sampling, as in Owen, Monte Carlo theory, methods and
    examples, section 9.2.

    Raises:
        ValueError: only one of the two is given: sums over parts and over the whole do not mix.
    """
    if (weight_sum is None) != (token_count is None):
        raise ValueError(
            f"weight_sum is {weight_sum} and token_count {token_count}, but they belong together: "
            "give both of the whole batch, or none"
        )

    def normalized(weight: BehaviorWeight) -> BehaviorWeight:
        # In float64 and bounded: saturated weights would have an infinite sum.
        wide = weight.weight.double()
        if weight_sum is None or token_count is None:
            mean = masked_sum(wide, weight.mask) / weight.mask.sum().clamp(min=1)
        else:
            mean = torch.as_tensor(weight_sum, device=wide.device).detach().double() / token_count
        mean = mean.clamp(max=torch.finfo(wide.dtype).max)
        scaled = wide / torch.where(mean > 0, mean, torch.ones_like(mean))
        return replace_weight(weight, _to_positive(scaled, weight.weight.dtype))

    return normalized


def over_segments(segments: Segments, correct: Correction) -> Correction:
    """Apply a correction of sequences to other segments: turns, or all samples of a prompt.

    Source: definition; ROLL has corrections by `segment`.

    Raises:
        ValueError: (when applied) the ids are not of the shape of the mask.
    """

    def corrected(weight: BehaviorWeight) -> BehaviorWeight:
        check_segments("segments", segments, "mask", weight.mask)
        result = correct(weight._replace(sequences=segments))
        return result._replace(sequences=weight.sequences)

    return corrected


def chain(*corrections: Correction) -> Correction:
    """Apply corrections from left to right.

    Source: definition.
    """

    def chained(weight: BehaviorWeight) -> BehaviorWeight:
        for correct in corrections:
            weight = correct(weight)
        return weight

    return chained


def replace_weight(weight: BehaviorWeight, new: Float[Tensor, "*shape"]) -> BehaviorWeight:
    """Set new weights in a custom correction; masked and dropped tokens keep theirs.

    Source: definition.

    Raises:
        ValueError: the new weights are not of the shape of the mask.
    """
    check_same_shape("new", new, "mask", weight.mask)
    alive = weight.mask & (weight.weight != 0)
    return weight._replace(weight=torch.where(alive, new, weight.weight))


def drop(weight: BehaviorWeight, kept: Bool[Tensor, "*shape"]) -> BehaviorWeight:
    """Drop the unmasked tokens that are not kept, in a custom correction.

    Source: definition.

    Raises:
        ValueError: `kept` is not of the shape of the mask.
    """
    check_same_shape("kept", kept, "mask", weight.mask)
    return weight._replace(weight=select(weight.weight, kept | ~weight.mask))


def positive_exp(logs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp, bounded to the positive normal numbers of the dtype: neither 0 nor infinite."""
    return _to_positive(torch.exp(logs), logs.dtype)


def _to_positive(values: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    return values.clamp(min=limits.tiny, max=limits.max).to(dtype)


def inside(values: Tensor, low: float, high: float, *, inclusive: bool = True) -> Tensor:
    """True where low <= value <= high (or < on both sides); NaN is outside."""
    if inclusive:
        return (values >= low) & (values <= high)
    return (values > low) & (values < high)


def check_band(low: float, high: float, *, names: tuple[str, str] = ("low", "high")) -> None:
    """Refuse a band of weights that is empty or has a negative bound.

    Raises:
        ValueError: not 0 <= low <= high, or high is 0.
    """
    low_name, high_name = names
    for name, bound in zip(names, (low, high), strict=True):
        check_number(name, bound, "truncate(2.0)")
    if not high > 0:
        raise ValueError(
            f"{high_name} is {high}, but pi_prox/pi_behav is positive, so its bound must be > 0; "
            "infinity switches it off"
        )
    if not 0 <= low <= high:
        raise ValueError(
            f"{low_name} is {low} and {high_name} {high}, but weights are positive and need "
            f"0 <= {low_name} <= {high_name}, as in 0.5 and 5.0"
        )
