r"""Losses of pairs: a response that was chosen and one that was rejected for the same prompt.

    token log-probs --sequence_logprob_sums--> l_c, l_r --+
    reference's     --sequence_logprob_sums--> f_c, f_r --+--> h --objective--> mean over pairs

$h = (l_c - f_c) - (l_r - f_r)$ is the preference of the policy beyond its reference's. Pairs
are tensors of one shape; masked pairs (NaN too) reach neither value nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from areal_lab.functional.aggregate import Count, token_mean
from areal_lab.functional.checks import applied, check_same_shape, check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows

PreferenceObjective: TypeAlias = Callable[[Tensor], Tensor]
"""Preference h of each pair to its loss. Bind numbers with `functools.partial`."""


class PreferenceLoss(NamedTuple):
    """A loss of pairs and what happened to them; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    preference: Tensor
    """h of each pair, in nats; positive where the chosen response is preferred. 0 where masked."""
    chosen_log_ratio: Tensor
    """log pi_theta - log pi_ref of the chosen response; times beta, DPO's implicit reward."""
    rejected_log_ratio: Tensor
    """Log ratio of the rejected response."""


class BradleyTerryLoss(NamedTuple):
    """A reward model's loss of pairs; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    preference: Tensor
    """Score of the chosen response minus that of the rejected one; 0 where masked."""


def sequence_logprob_sums(
    logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> Float[Tensor, " sequences"]:
    r"""$\log \pi(y) = \sum_t \log \pi(y_t)$ of each sequence; 0 of one without an unmasked token.

    In float64: losses of pairs subtract such sums, and for 32k tokens a float32 is off by 0.001.

    Source: DPO (arXiv:2305.18290), section 4.

    Args:
        logprobs: log-prob of each token; gets a gradient.
        mask: True on the tokens of the response.
    """
    check_token_inputs(mask, logprobs=logprobs)
    ids, count = sequences_or_rows(mask, sequences)
    return segment_reduce(logprobs.double(), ids, count, mask=mask)


def sequence_logprob_means(
    logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> Float[Tensor, " sequences"]:
    r"""$\log \pi(y) / |y|$ of each sequence, which takes length out; 0 of an empty one.

    Source: SimPO (arXiv:2405.14734), eq. 3.

    Args:
        logprobs: log-prob of each token; gets a gradient.
        mask: True on the tokens of the response.
    """
    check_token_inputs(mask, logprobs=logprobs)
    ids, count = sequences_or_rows(mask, sequences)
    return segment_reduce(logprobs, ids, count, mask=mask, reduce="mean")


def dpo_loss(
    chosen_logprobs: Float[Tensor, "*pairs"],
    rejected_logprobs: Float[Tensor, "*pairs"],
    reference_chosen_logprobs: Float[Tensor, "*pairs"],
    reference_rejected_logprobs: Float[Tensor, "*pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    mask: Bool[Tensor, "*pairs"] | None = None,
    pair_count: Count | None = None,
) -> PreferenceLoss:
    r"""Direct preference optimization.

    $$ -(1 - s) \log \sigma(\beta h) - s \log \sigma(-\beta h) $$

    Args:
        reference_chosen_logprobs: log pi_ref of the chosen response; zeros for no reference.
        beta: strength of the reference: the larger, the closer to it.
        label_smoothing: s, the share of labels that are believed to be the wrong way round.

    The other arguments are those of `preference_loss`, from `sequence_logprob_sums`.

    Source: DPO (arXiv:2305.18290), eq. 7; smoothing: Mitchell, A note on DPO with noisy
    preferences and relationship to IPO (2023).

    Raises:
        ValueError: shapes differ, beta is not positive, or s is outside [0, 0.5].
    """
    return preference_loss(
        chosen_logprobs,
        rejected_logprobs,
        reference_chosen_logprobs,
        reference_rejected_logprobs,
        objective=partial(logistic_objective, beta=beta, label_smoothing=label_smoothing),
        mask=mask,
        pair_count=pair_count,
    )


def ipo_loss(
    chosen_logprobs: Float[Tensor, "*pairs"],
    rejected_logprobs: Float[Tensor, "*pairs"],
    reference_chosen_logprobs: Float[Tensor, "*pairs"],
    reference_rejected_logprobs: Float[Tensor, "*pairs"],
    *,
    beta: float = 0.1,
    mask: Bool[Tensor, "*pairs"] | None = None,
    pair_count: Count | None = None,
) -> PreferenceLoss:
    r"""Identity preference optimization: h is to reach a fixed distance rather than infinity.

    $$ \left(h - \frac{1}{2 \beta}\right)^2 $$

    Give it sums, as in the paper, or means over tokens (`sequence_logprob_means`): the distance is
    the same number of nats either way, per response or per token. All four must be of one kind.

    Args:
        beta: 1 / (2 beta) is the distance; the paper's tau.

    The other arguments are those of `preference_loss`.

    Source: IPO (arXiv:2310.12036), eq. 17.

    Raises:
        ValueError: shapes differ, or beta is not positive.
    """
    return preference_loss(
        chosen_logprobs,
        rejected_logprobs,
        reference_chosen_logprobs,
        reference_rejected_logprobs,
        objective=partial(squared_objective, beta=beta),
        mask=mask,
        pair_count=pair_count,
    )


def preference_loss(
    chosen_logprobs: Float[Tensor, "*pairs"],
    rejected_logprobs: Float[Tensor, "*pairs"],
    reference_chosen_logprobs: Float[Tensor, "*pairs"],
    reference_rejected_logprobs: Float[Tensor, "*pairs"],
    *,
    objective: PreferenceObjective,
    mask: Bool[Tensor, "*pairs"] | None = None,
    pair_count: Count | None = None,
) -> PreferenceLoss:
    r"""Loss of the preference h; named losses are calls of this.

    $$ \mathrm{mean}(\mathrm{objective}(h)), \quad h = (l_c - f_c) - (l_r - f_r) $$

    Args:
        chosen_logprobs: l_c, log pi_theta of the chosen response.
        rejected_logprobs: l_r, of the rejected response. These two get a gradient, the others none.
        reference_chosen_logprobs: f_c, log pi_ref of the chosen response.
        reference_rejected_logprobs: f_r, log pi_ref of the rejected response.
        objective: h of each pair to its loss, such as `logistic_objective`.
        mask: True where a pair counts; None counts all. An empty mask gives 0.
        pair_count: pairs of the whole batch; None counts the mask.

    Source: the family of such losses: GPO (arXiv:2402.05749).

    Raises:
        ValueError: shapes differ, or `pair_count` is a number that is not positive.
    """
    mask = _pair_mask(
        mask,
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        reference_chosen_logprobs=reference_chosen_logprobs,
        reference_rejected_logprobs=reference_rejected_logprobs,
    )
    chosen = select(chosen_logprobs, mask) - select(reference_chosen_logprobs.detach(), mask)
    rejected = select(rejected_logprobs, mask) - select(reference_rejected_logprobs.detach(), mask)
    preference = chosen - rejected
    return PreferenceLoss(
        loss=_pair_mean(
            applied(
                "objective",
                objective,
                preference,
                gives=Tensor,
                example="partial(logistic_objective, beta=0.1)",
            ),
            mask,
            pair_count,
        ),
        preference=preference.detach(),
        chosen_log_ratio=chosen.detach(),
        rejected_log_ratio=rejected.detach(),
    )


def logistic_objective(
    preference: Float[Tensor, "*pairs"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, "*pairs"]:
    r"""$-(1 - s) \log \sigma(\beta h) - s \log \sigma(-\beta h)$: DPO's.

    Source: DPO (arXiv:2305.18290), eq. 7.

    Raises:
        ValueError: beta is not positive, or s is outside [0, 0.5].
    """
    _check_beta(beta)
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, but must be in [0, 0.5]: beyond one half the "
            "rejected responses would be preferred; swap chosen and rejected instead"
        )
    logit = beta * preference
    right, wrong = -logsigmoid(logit), -logsigmoid(-logit)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def squared_objective(
    preference: Float[Tensor, "*pairs"], *, beta: float
) -> Float[Tensor, "*pairs"]:
    r"""$(h - 1 / (2 \beta))^2$: IPO's.

    Source: IPO (arXiv:2310.12036), eq. 17.

    Raises:
        ValueError: beta is not positive.
    """
    _check_beta(beta)
    return (preference - 1 / (2 * beta)).square()


def bradley_terry_loss(
    chosen_scores: Float[Tensor, "*pairs"],
    rejected_scores: Float[Tensor, "*pairs"],
    *,
    margin: Float[Tensor, "*pairs"] | None = None,
    center: float = 0.0,
    mask: Bool[Tensor, "*pairs"] | None = None,
    pair_count: Count | None = None,
) -> BradleyTerryLoss:
    r"""Loss of a reward model: the chosen response should score higher.

    $$ -\log \sigma(s_c - s_r - m) + c (s_c + s_r)^2 $$

    Args:
        chosen_scores: s_c, the model's score of the chosen response.
        rejected_scores: s_r. Both get a gradient.
        margin: m, difference of the scores to reach; gets no gradient. None is 0.
        center: c, which keeps the mean score of a pair at 0; the other term leaves it free.

    The other arguments are those of `preference_loss`.

    Source: InstructGPT (arXiv:2203.02155), eq. 1; margin: Llama 2 (arXiv:2307.09288), eq. 2;
    center: Eisenstein et al. (arXiv:2312.09244), section 2.

    Raises:
        ValueError: shapes differ, `center` is negative or not finite, or `pair_count` is a number
            that is not positive.
    """
    if not 0 <= center < math.inf:
        raise ValueError(f"center is {center}, but must be >= 0 and finite")
    mask = _pair_mask(mask, chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    chosen, rejected = select(chosen_scores, mask), select(rejected_scores, mask)
    preference = chosen - rejected
    logit = preference
    if margin is not None:
        check_same_shape("margin", margin, "chosen_scores", chosen_scores)
        logit = preference - select(margin.detach(), mask)
    losses = -logsigmoid(logit)
    if center:
        losses = losses + center * (chosen + rejected).square()
    return BradleyTerryLoss(_pair_mean(losses, mask, pair_count), preference.detach())


def _pair_mask(mask: Tensor | None, **values: Tensor) -> Tensor:
    name, first = next(iter(values.items()))
    for other, value in values.items():
        check_same_shape(other, value, name, first)
    if mask is None:
        return torch.ones_like(first, dtype=torch.bool)
    check_token_inputs(mask)
    check_same_shape("mask", mask, name, first)
    return mask


def _pair_mean(losses: Tensor, mask: Tensor, pair_count: Count | None) -> Tensor:
    if isinstance(pair_count, int | float) and not pair_count > 0:
        raise ValueError(
            f"pair_count is {pair_count}, but must be positive: the pairs of the whole batch; "
            "leave it out to count this mask"
        )
    # A pair is to this mean what a token is to that of a policy loss.
    return token_mean(losses, mask, token_count=pair_count)


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise ValueError(f"beta is {beta}, but must be > 0 and finite")
