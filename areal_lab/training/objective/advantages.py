"""The advantages that the settings ask for: of samples, or of tokens with what a critic says.

default, named, custom, pickled --choose_advantages--> function(rewards [N], groups [N], facts)
                                                           |
AdvantageFacts (lengths, tokens, KL, values), by name -----'   only those in its signature
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.config.functions import (
    Form,
    check_call,
    load_function,
    main,
    unpickle_function,
)
from areal_lab.functional.advantages.group import group_advantages, no_scale, std_of_group
from areal_lab.functional.advantages.reward_shaping import overlong_penalty
from areal_lab.functional.losses.policy import requested_keywords
from areal_lab.functional.segments import Segments
from areal_lab.training.objective.compose import compose_advantages, with_signature
from areal_lab.training.objective.formulas import Role
from areal_lab.training.objective.loss import call_of, imported
from areal_lab.training.settings import TrainerSettings

Advantages = Callable[..., Any]
"""`(rewards [N], groups [N])`, and by name any of `AdvantageFacts`. Returns advantages `[N]` of
samples, or `[T]` of tokens, or `AdvantagesAndReturns` of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageFacts:
    """Arguments that advantages may request, for `N` samples with `T` tokens that the policy
    chose.
    """

    length_tokens: Int[Tensor, " N"]
    mask: Bool[Tensor, " T"]
    """False where a sample is not trained on."""
    sequences: Segments
    """Sample of each token; those of a sample are neighbors."""
    token_rewards: Float[Tensor, " T"] | None = None
    """Minus the KL penalty of each token; None without `actor.kl_ctl`."""
    values: Float[Tensor, " T"] | None = None
    """Values of a critic, before each token; None without a critic."""
    bootstrap_values: Float[Tensor, " N"] | None = None
    """Values of a critic beyond the last token; 0 for responses that ended."""


def choose_advantages(settings: TrainerSettings) -> Advantages:
    """Group advantages by the settings, or the named, custom or pickled function."""
    actor = settings.actor
    if settings.advantage_file:
        function = unpickle_function(Path(settings.advantage_file).read_bytes())
    elif actor.advantage_fn:
        function = imported("advantage_fn", actor.advantage_fn)
        try:
            check_signature(function)
        except ValueError as error:
            raise ValueError(f"advantage_fn {actor.advantage_fn!r} {error}") from error
    elif actor.advantage:
        function = compose_advantages(call_of("actor.advantage", actor.advantage, Role.ADVANTAGE))
    else:
        function = partial(group_advantages, scale=std_of_group if actor.adv_norm_std else no_scale)
    penalty = choose_length_penalty(settings)
    return function if penalty is None else _less_overlong(function, penalty)


def choose_length_penalty(settings: TrainerSettings) -> Callable[[Tensor], Tensor] | None:
    """The penalty on the rewards of long responses, from their tokens [N]; None if it is off."""
    actor, longest = settings.actor, settings.config.gconfig.max_new_tokens
    if not actor.overlong_share:
        return None
    return partial(
        overlong_penalty,
        max_length_tokens=longest,
        buffer_tokens=max(1, round(actor.overlong_share * longest)),
        factor=actor.overlong_penalty_factor,
    )


def asked_facts(function: Advantages) -> list[str]:
    """The fields of `AdvantageFacts` that are parameters of the function."""
    try:
        return requested_keywords(function, [field.name for field in fields(AdvantageFacts)])
    except (TypeError, ValueError):  # built-in functions have no signature
        return []


def asked_of(function: Advantages, facts: AdvantageFacts) -> Mapping[str, Any]:
    """Arguments that the function requests."""
    return {name: getattr(facts, name) for name in asked_facts(function)}


def check_signature(function: Advantages) -> None:
    """Check that a function can be called for advantages, before anything is computed."""
    form = Form("advantages(rewards, groups)", may_wait=False)
    try:
        check_call(function, form, dict.fromkeys(asked_facts(function)))
    except ValueError as error:
        known = ", ".join(field.name for field in fields(AdvantageFacts))
        raise ValueError(f"{error}. By name it may take any of {known}") from error


def check_given(function: Advantages) -> None:
    """Check a function that a program passes; a critic is checked by the settings."""
    check_signature(function)
    if needs_critic(function):
        raise ValueError(
            "takes values of a critic, which the settings name and check; save the function in a "
            "module, and set actor.advantage_fn=module:function"
        )


def needs_critic(function: Advantages) -> bool:
    """Return whether the advantages are made from values."""
    return "values" in asked_facts(function)


def check_advantages(found: Any, *, samples: int, tokens: int) -> None:
    """Refuse what is neither of samples nor of tokens."""
    advantages = getattr(found, "advantages", found)
    shape = tuple(getattr(advantages, "shape", ()))
    if shape not in ((samples,), (tokens,)):
        raise ValueError(
            f"the advantages have shape {shape}, but must be one number per sample, shape "
            f"({samples},), or per token that the policy chose, shape ({tokens},)"
        )


def _less_overlong(function: Advantages, penalty: Callable[[Tensor], Tensor]) -> Advantages:
    """Advantages of the rewards minus a penalty on long responses."""
    own = asked_facts(function)

    def advantages(rewards: Tensor, groups: Tensor, **given: Any) -> Any:
        facts = {name: given[name] for name in own}
        return function(rewards + penalty(given["length_tokens"]), groups, **facts)

    asked = dict.fromkeys(["length_tokens", *own])
    return with_signature(advantages, ("rewards", "groups"), list(asked))


def _check_named(path: str) -> None:
    try:
        check_signature(load_function(path))
    except ValueError as error:
        raise ValueError(f"{path!r} {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _check_named))
