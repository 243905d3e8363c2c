"""Policy loss from the settings.

    default, named, custom, pickled --choose_loss--> ChosenLoss --call--> loss of a micro-batch
                                                            |
    BatchFacts (counts, sequences, turns, groups, versions) '   only those in its signature

As a program, `python -m areal_lab.training.objective.loss module:function`, it checks whether a
trainer can call the function; a separate process, because the module's imports may be heavy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.config.functions import load_function, main, unpickle_function
from areal_lab.config.problem import ConfigError
from areal_lab.control.events import Version
from areal_lab.functional.corrections.weights import truncate
from areal_lab.functional.losses.policy import (
    HasLoss,
    PolicyLoss,
    anchored_at_behavior,
    decoupled_ppo,
    ppo,
    requested_keywords,
)
from areal_lab.functional.segments import Segments
from areal_lab.training.objective.compose import compose_loss, imported_formula
from areal_lab.training.objective.formula_calls import Call, read_call
from areal_lab.training.objective.formulas import Role
from areal_lab.training.settings import TrainerSettings


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
    dual_variable: float = 0.0
    """Multiplier of the constraint of a loss that asks for it; see `Learner.dual`."""


_COUNTS = frozenset({"token_count", "sequence_count", "group_count"})


_LOCAL: Final = frozenset(
    {
        *("ppo", "decoupled_ppo", "grpo", "dr_grpo", "dapo", "dual_clip_ppo", "token_tis"),
        *("sequence_tis", "icepop", "sequence_mis", "geometric_mis", "a3po", "reinforce", "cispo"),
        *("truncated_reinforce", "importance_sampling", "aipo", "topr", "dppo_tv", "dppo_kl"),
        *("gspo", "gspo_token", "luspo", "gmpo", "sapo", "vespo", "kpop", "trm", "mu_grpo"),
        *("unbounded", "truncate", "mask_outside", "mask_above", "sequence_product"),
        *("sequence_geometric_mean", "mask_sequences_outside", "mask_outlier_sequences"),
        "mask_binary_kl",
    }
)
"""Losses that are sums of advantages times factors of the same response, without a penalty, and
corrections of tokens and responses: a response of advantage 0 changes nothing."""


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """A policy loss and a property of it that the trainer uses."""

    function: PolicyLoss
    vanishes_without_advantage: bool
    """True if a token of advantage 0 is known to contribute neither loss nor gradient.

    True for PPO, a sum of advantages times bounded factors, and for others of its kind; another
    loss may have a penalty or bonus, so no token is omitted for it."""

    def __call__(self, tokens: LossTokens, facts: BatchFacts) -> tuple[Tensor, HasLoss]:
        """Return the micro-batch's share of the minibatch's loss, and the result of the
        function.

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
    """Return decoupled PPO with a truncated weight, standard PPO, or the named or custom
    function.
    """
    if settings.loss_file:
        return _custom_loss(unpickle_function(Path(settings.loss_file).read_bytes()), "loss")
    actor = settings.actor
    if actor.loss_fn:
        return _custom_loss(imported("loss_fn", actor.loss_fn), f"loss_fn {actor.loss_fn!r}")
    if actor.loss:
        call = call_of("actor.loss", actor.loss, Role.LOSS)
        function = compose_loss(call, at_behavior=not actor.use_decoupled_loss)
        check_loss(function, f"actor.loss {call.formula.name!r}")
        return ChosenLoss(function, vanishes_without_advantage=_is_local(call))
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


def call_of(setting: str, given: Mapping[str, Any], role: Role) -> Call:
    """Return the call that a setting names."""
    call, problems = read_call(setting, given, role, imported_formula)
    if call is None:
        raise ConfigError(*problems)
    return call


def _is_local(call: Call) -> bool:
    """Return whether a response of advantage 0 adds nothing, and does not affect the others."""
    parts = [
        one for part in call.parts.values() for one in (part if isinstance(part, tuple) else [part])
    ]
    return call.formula.name in _LOCAL and all(map(_is_local, parts))


def check_loss(function: Callable[..., Any], name: str) -> None:
    """Check that a function can be called as a policy loss, before anything is computed."""
    known = [field.name for field in fields(BatchFacts)]
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        signature.bind(*[None] * 5, **dict.fromkeys(requested_facts(function)))
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("it is async or yields, but must return the loss")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be called as a policy loss: {error}. It takes logprobs, "
            "proximal_logprobs, behavior_logprobs, advantages and mask, and by name any of "
            f"{', '.join(known)}; bind other parameters with functools.partial"
        ) from error


def _custom_loss(function: Callable[..., Any], name: str) -> ChosenLoss:
    check_loss(function, name)
    return ChosenLoss(cast(PolicyLoss, function), vanishes_without_advantage=False)


def imported(field: str, path: str) -> Callable[..., Any]:
    """The function of a setting."""
    try:
        return load_function(path)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{field} {path!r} cannot be imported: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda name: check_loss(load_function(name), f"{name!r}")))
