"""The policy loss and the advantages that the settings ask for.

    default, named or pickled loss --choose_loss--> ChosenLoss --call--> loss of a micro-batch
                                                            |
    BatchFacts (counts, sequences, turns, groups, versions) '   only those in its signature

As a program, `python -m areal_lab.training.loss module:function`, it checks whether a trainer can
call the function; a separate process, because the module's imports may be heavy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.config.functions import load_function, main, unpickle_function
from areal_lab.control.events import Version
from areal_lab.functional.advantages.group import group_advantages, no_scale, std_of_group
from areal_lab.functional.corrections.weights import truncate
from areal_lab.functional.losses.keywords import requested_keywords
from areal_lab.functional.losses.policy import (
    HasLoss,
    PolicyLoss,
    anchored_at_behavior,
    decoupled_ppo,
    ppo,
)
from areal_lab.functional.segments import Segments
from areal_lab.training.settings import TrainerSettings

Advantages = Callable[[Tensor, Tensor], Tensor]
"""`(rewards [N], groups [N]) -> advantages [N]`."""


class LossTokens(NamedTuple):
    """The five tensors of a policy loss, in its order; one micro-batch, packed."""

    logprobs: Float[Tensor, " R"]
    proximal_logprobs: Float[Tensor, " R"]
    behavior_logprobs: Float[Tensor, " R"]
    advantages: Float[Tensor, " R"]
    mask: Bool[Tensor, " R"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Keyword arguments of a loss in addition to its five tensors; see `PolicyLoss`."""

    token_count: int
    """Number of tokens that the policy chose in the whole minibatch."""
    sequences: Segments
    sequence_count: int
    turns: Segments
    groups: Segments
    group_count: int
    group_tokens: Int[Tensor, " groups"]
    versions: Int[Tensor, " R"]
    trainer_version: Version


_COUNTS = frozenset({"token_count", "sequence_count", "group_count"})


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """A policy loss and a property of it that the trainer uses."""

    function: PolicyLoss
    vanishes_without_advantage: bool
    """Whether a token of advantage 0 is known to contribute neither loss nor gradient.

    True for PPO, a sum of advantages times bounded factors; a custom loss may have a penalty or
    bonus, so no token is omitted for it."""

    def __call__(self, tokens: LossTokens, facts: BatchFacts) -> tuple[Tensor, HasLoss]:
        """The micro-batch's share of the minibatch's loss, and what the function returned.

        Shares add up to the minibatch's loss. A function that requests none of the counts is
        assumed to return a mean over its tokens, which is weighted by their share of the minibatch.
        """
        requested = requested_facts(self.function)
        # The protocol names `token_count` only; a function may have other keywords.
        call = cast(Callable[..., HasLoss], self.function)
        result = call(*tokens, **{name: getattr(facts, name) for name in requested})
        loss = result.loss
        if not _COUNTS.intersection(requested):
            loss = loss * (tokens.mask.sum() / facts.token_count)
        return loss, result


def requested_facts(function: Callable[..., Any]) -> list[str]:
    """The fields of `BatchFacts` that are unbound parameters of the function."""
    return requested_keywords(function, [field.name for field in fields(BatchFacts)])


def choose_loss(settings: TrainerSettings) -> ChosenLoss:
    """Decoupled PPO with a truncated weight, standard PPO, or a custom function.

    Raises:
        ValueError: if a custom loss cannot be imported, or cannot be called as a policy loss.
    """
    if settings.loss_file:
        return _custom_loss(unpickle_function(Path(settings.loss_file).read_bytes()), "loss")
    actor = settings.actor
    if actor.loss_fn:
        return _custom_loss(_imported("loss_fn", actor.loss_fn), f"loss_fn {actor.loss_fn!r}")
    if not actor.use_decoupled_loss:
        return ChosenLoss(anchored_at_behavior(ppo, clip_epsilon=actor.eps_clip), True)
    return ChosenLoss(
        partial(
            decoupled_ppo,
            clip_epsilon=actor.eps_clip,
            correct=truncate(actor.behav_imp_weight_cap),
        ),
        vanishes_without_advantage=True,
    )


def choose_advantages(settings: TrainerSettings) -> Advantages:
    """Group advantages by the settings, or a custom function.

    Raises:
        ValueError: if a custom function cannot be imported.
    """
    actor = settings.actor
    if actor.advantage_fn:
        return cast(Advantages, _imported("advantage_fn", actor.advantage_fn))
    return partial(group_advantages, scale=std_of_group if actor.adv_norm_std else no_scale)


def check_loss(function: Callable[..., Any], name: str) -> None:
    """Check that a function can be called as a policy loss, before anything is computed.

    Raises:
        ValueError: if it does not take the five tensors, or requires an unknown keyword.
    """
    known = [field.name for field in fields(BatchFacts)]
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        signature.bind(*[None] * 5, **dict.fromkeys(requested_facts(function)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be called as a policy loss: {error}. It takes logprobs, "
            "proximal_logprobs, behavior_logprobs, advantages and mask, and by name any of "
            f"{', '.join(known)}; bind other parameters with functools.partial"
        ) from error


def _custom_loss(function: Callable[..., Any], name: str) -> ChosenLoss:
    check_loss(function, name)
    return ChosenLoss(cast(PolicyLoss, function), vanishes_without_advantage=False)


def _imported(field: str, path: str) -> Callable[..., Any]:
    try:
        return load_function(path)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{field} {path!r} cannot be imported: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda name: check_loss(load_function(name), f"{name!r}")))
