"""Policy losses: anchor ratio -> surrogate -> weight chain -> aggregate.

    logprobs, anchor --ratio--> r --surrogate(A)--> objective --x weight--> --aggregate--> -loss
    proximal, behavior -------behavior_weight--> correct(...) ---^

Padded `[N, T]` or packed `[T]` tensors alike. Masks are boolean, True = the policy chose the token.
Only `logprobs` gets a gradient, and masked values (NaN too) reach neither value nor gradient. A
token that a correction dropped adds 0; its ratio still counts in that of its sequence.

Call a policy loss with the keywords that its signature asks for; see `PolicyLoss`.

trainer, loss_surface, gradient_check ---has---> token_count, sequences, ..., versions
loss(*tensors, *, token_count=None) ---asks for---> token_count
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Aggregate, Count, aggregated, token_mean
from areal_lab.functional.checks import applied, check_token_inputs, wide
from areal_lab.functional.corrections.weights import (
    BehaviorWeight,
    Correction,
    behavior_weight,
    unbounded,
)
from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy, AnchorRatio, detached_ratio, token_ratio
from areal_lab.functional.segments import Segments, segment_reduce
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon,
    Surrogate,
    SurrogateFunction,
    clip_surrogate,
)


class PolicyLossResult(NamedTuple):
    """A loss and what happened to the tokens; everything except `loss` is detached."""

    loss: Float[Tensor, ""]
    """Scalar, to be minimized."""
    ratio: Float[Tensor, "*shape"]
    """pi_theta / pi_anchor of each token; 1 where masked."""
    behavior_weight: Float[Tensor, "*shape"]
    """Corrected pi_prox / pi_behav of each token; 1 in losses without one, and where masked."""
    clipped: Bool[Tensor, "*shape"]
    """True where the surrogate removed the gradient of a token that no correction dropped."""


class ConstrainedLossResult(NamedTuple):
    """A loss with a constraint, and what happened to the tokens; only `loss` has a gradient."""

    loss: Float[Tensor, ""]
    """Scalar, to be minimized."""
    ratio: Float[Tensor, "*shape"]
    """pi_theta / pi_anchor of each token; 1 where masked."""
    behavior_weight: Float[Tensor, "*shape"]
    """Corrected pi_prox / pi_behav of each token; 1 in losses without one, and where masked."""
    clipped: Bool[Tensor, "*shape"]
    """True where the surrogate removed the gradient of a token that no correction dropped."""
    dual_step: Float[Tensor, ""]
    """Change of the dual variable after the optimizer step, before it is kept at 0 or above; adds
    up over micro-batches under one `token_count`."""


class PlainLoss(NamedTuple):
    """The minimum that a policy loss returns."""

    loss: Float[Tensor, ""]
    """Scalar, to be minimized."""


@runtime_checkable
class HasLoss(Protocol):
    """The field that a trainer needs; the other fields of a NamedTuple are diagnostics."""

    @property
    def loss(self) -> Tensor:
        """Scalar, to be minimized; carries the gradient."""


@runtime_checkable
class PolicyLoss(Protocol):
    """A policy loss as a trainer calls it, and the arguments that the named losses share.

    The five tensors have one entry per token, padded `[N, T]` or packed `[T]`:

        logprobs            log pi_theta of the sampled tokens; the only input with a gradient
        proximal_logprobs   log pi_prox, the policy that the trust region is centered at
        behavior_logprobs   log pi_behav, as the sampler reported them, one version per token
        advantages          A of each token
        mask                True = the policy chose this token

    A trainer passes those of these keywords that a loss has as parameters:

        token_count       tokens the policy chose in the whole batch; None counts this mask, and
                          losses whose mean is over sequences ignore it
        sequences         `Segments`: the sequence that each token belongs to; None takes rows
        sequence_count    sequences of the whole batch that have such a token; None counts these
        turns             `Segments`: the turn (run of chosen tokens) that each token belongs to
        groups            `Segments`: the prompt whose group each token belongs to
        group_count       groups of the whole batch
        group_tokens      tokens of each group over the whole batch, by its number in `groups`
        versions          version of the weights that sampled each token
        trainer_version   version of the weights before this batch
        dual_variable     multiplier of a constraint; a trainer adds `dual_step` of the result to it
                          after each optimizer step, and keeps it at 0 or above

    Bind other numbers beforehand, as in `partial(decoupled_ppo, clip_epsilon=0.1)`:

        clip_epsilon      half-width of the trust region, or (below, above)
        correct           what happens to the weight pi_prox / pi_behav, as `truncate(5.0)`

    The named losses raise a ValueError where shapes differ or a number is out of range, and a
    TypeError where a function or `sequences` is of the wrong kind. A custom loss needs this
    signature and any of these keywords.
    """

    def __call__(
        self,
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        token_count: Count | None = None,
    ) -> HasLoss:
        """Loss of one micro-batch; summed over micro-batches when `token_count` is global."""


def ppo(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""Clipped PPO objective, as a loss to minimize.

    $$ L = -\frac{1}{N} \sum_t \min(r_t A_t, \mathrm{clip}(r_t, 1 \pm \epsilon) A_t),
    \quad r = \pi_\theta / \pi_{old} $$

    Source: PPO (arXiv:1707.06347), eq. 7.

    Args:
        old_logprobs: log pi_old, the policy that sampled and that the trust region is centered at.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        old_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        aggregate=partial(token_mean, token_count=token_count),
    )


def decoupled_ppo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Decoupled PPO objective, as a loss to minimize.

    $$ L = -\frac{1}{N} \sum_t \frac{\pi_{prox}}{\pi_{behav}}
    \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t), \quad u = \pi_\theta / \pi_{prox} $$

    Equals ordinary PPO when `proximal_logprobs` is `behavior_logprobs`.

    Source: AReaL (arXiv:2505.24298), eq. 5.

    Args:
        correct: bounds the weight, as `truncate(5.0)`; the weight itself is always applied.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        correct=correct,
        aggregate=partial(token_mean, token_count=token_count),
        sequences=sequences,
    )


def policy_loss(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    surrogate: SurrogateFunction,
    ratio: AnchorRatio = token_ratio,
    correct: Correction = unbounded,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Compose a policy loss from its four parts; named losses are calls of this.

    $$ L = -\mathrm{aggregate}(\mathrm{correct}(\pi_{prox}/\pi_{behav})\ \mathrm{surrogate}(r, A)),
    \quad r = \mathrm{ratio}(\pi_\theta, \pi_{prox}) $$

    A token that the correction drops (weight 0) adds 0 to the loss, and is still counted by the
    mean. It is dropped because of pi_prox / pi_behav; its ratio to the anchor still counts in the
    ratio of its sequence or turn, and gets the gradient of that. Only a ratio that is not a
    positive finite number counts as 1 there.

    Args:
        proximal_logprobs: log pi_prox, the anchor of the ratio.
        behavior_logprobs: log pi_behav; the same tensor as the anchor gives weights of 1.
        surrogate: `(policy, advantages) -> Surrogate`, what is maximized per token.
        ratio: `(logprobs, anchor_logprobs, mask, sequences) -> AnchoredPolicy`.
        correct: what happens to the weight pi_prox / pi_behav.
        aggregate: `(values, mask, sequences) -> scalar`.

    The other arguments are those of `PolicyLoss`.

    Source: definition; with the clipped surrogate it is AReaL (arXiv:2505.24298), eq. 5.

    Raises:
        TypeError: a part is not a function of its kind, or `sequences` is not `Segments`.
    """
    check_token_inputs(
        mask,
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
    )
    start = behavior_weight(proximal_logprobs, behavior_logprobs, mask, sequences)
    weight = applied(
        "correct", correct, start, gives=BehaviorWeight, example="truncate(2.0)"
    ).weight
    kept = weight != 0
    anchor = proximal_logprobs.detach()
    # Before the ratio: a dropped token may have an infinite one, and 0 * inf is NaN.
    drift = wide(logprobs.detach()) - wide(anchor)
    usable = kept | (drift.abs() < math.log(torch.finfo(drift.dtype).max))
    neutral = torch.where(anchor.isfinite(), anchor, 0.0)
    policy = applied(
        "ratio",
        ratio,
        torch.where(usable, logprobs, neutral.to(logprobs.dtype)),
        torch.where(usable, anchor, neutral),
        mask,
        start.sequences,
        gives=AnchoredPolicy,
        example="token_ratio",
    )
    objective = applied(
        "surrogate", surrogate, policy, advantages, gives=Surrogate, example="clip_surrogate"
    )
    value = weight * select(objective.value, kept)
    return PolicyLossResult(
        loss=-aggregated(aggregate, value, mask, policy.sequences),
        ratio=detached_ratio(policy),
        behavior_weight=weight,
        clipped=objective.clipped & kept,
    )


def anchored_at_behavior(loss: Callable[..., HasLoss], **numbers: Any) -> PolicyLoss:
    """Turn a loss with one old policy, such as `ppo`, into a `PolicyLoss` centered at the behavior
    policy.

    `anchored_at_behavior(ppo, clip_epsilon=0.1)` is standard PPO on the log-probs that the sampler
    reported; the proximal ones are ignored. A trainer still passes the keywords that `loss` has.

    Source: definition; PPO (arXiv:1707.06347) has this one old policy.
    """
    bound = partial(loss, **numbers)

    def anchored(
        logprobs: Tensor,
        proximal_logprobs: Tensor,  # noqa: ARG001 - part of the protocol
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        **facts: Any,
    ) -> HasLoss:
        return bound(logprobs, behavior_logprobs, advantages, mask, **facts)

    # Where `inspect.signature` looks for the keywords.
    anchored.__wrapped__ = bound  # type: ignore[attr-defined]  # functions take any attribute
    return anchored


def requested_keywords(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Return the names that are unbound parameters of a function, in their order."""
    # The signature of a partial still has the parameters that it binds.
    inner = inspect.unwrap(function)
    bound: Mapping[str, Any] = inner.keywords if isinstance(inner, partial) else {}
    parameters = inspect.signature(function).parameters
    return [name for name in names if name in parameters and name not in bound]


def keywords_of_batch(function: Callable[..., Any], ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """Keywords that a loss requests, for a packed batch that is complete.

    Each sequence is one turn and a separate group, and all tokens are of the trainer's version.

    Args:
        ids: sequence of each token, numbered from 0.
        mask: True = the policy chose the token.
    """
    count = int(ids.max()) + 1
    sequences = Segments(ids, count)
    tokens = segment_reduce(mask.long(), ids, count)
    facts = {
        "token_count": int(mask.sum()),
        "sequences": sequences,
        "sequence_count": count,
        "turns": sequences,
        "groups": sequences,
        "group_count": count,
        "group_tokens": tokens,
        "versions": torch.zeros_like(ids),
        "trainer_version": 0,
        "dual_variable": 0.0,
    }
    return {name: facts[name] for name in requested_keywords(function, facts)}


def loss_of(call: Callable[..., HasLoss], *tokens: Tensor) -> HasLoss:
    """Call a loss that a caller passed with its five tensors.

    Raises:
        TypeError: it is not a function of them, or returns no `loss`.
    """
    return applied(
        "loss",
        call,
        *tokens,
        gives=HasLoss,  # type: ignore[type-abstract]  # a protocol: only looked at
        example="decoupled_ppo",
    )
