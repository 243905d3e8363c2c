"""Build a policy loss and advantages from calls of named functions and the trainer's facts.

    Call(policy_loss, aggregate=Call(sequence_mean))
        --compose_loss--> loss(*tensors, sequence_count=...)

A part that needs facts of the batch, such as the count of its sequences, is bound again for each
micro-batch; everything else is bound once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.config.functions import load_function
from areal_lab.functional.corrections.weights import chain
from areal_lab.functional.losses.policy import HasLoss, PolicyLoss, anchored_at_behavior
from areal_lab.functional.segments import Segments
from areal_lab.training.objective.formula_calls import Call
from areal_lab.training.objective.formulas import (
    PARTS,
    TAKEN,
    Formula,
    Keyword,
    Role,
    Value,
    facts_of,
    keyword_of,
)

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def imported_formula(path: str, role: Role) -> Formula:
    """A custom function, `module:function`, with the keywords of its signature."""
    try:
        signature = inspect.signature(load_function(path))
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"which cannot be used: {error}") from error
    makes = _words(signature.return_annotation) in PARTS
    taken = {Role.LOSS: 5, Role.ADVANTAGE: 2}.get(role, 0 if makes else len(TAKEN[role]))
    keywords = []
    takes_any = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in _POSITIONAL and taken:
            taken -= 1
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            default = None if parameter.default is parameter.empty else str(parameter.default)
            words = _words(parameter.annotation)
            found = keyword_of(parameter.name, words, default, facts_of(role, makes=makes))
            if found.part is None and found.value is Value.CLOSED:  # its annotations are its own
                found = Keyword(
                    found.name, default=default, optional=default == "None", filled=found.filled
                )
            keywords.append(found)
    return Formula(
        name=path, path=path, role=role, keywords=tuple(keywords), makes=makes, takes_any=takes_any
    )


def compose_loss(call: Call, *, at_behavior: bool = False) -> PolicyLoss:
    """A policy loss as a trainer calls it."""
    function = load_function(call.formula.path)
    if call.formula.one_old_policy:
        return anchored_at_behavior(function, **_keywords(call, {}))
    facts = sorted({fact for part in _parts(call) for fact in _facts(part)})
    if facts or "aggregate" in call.parts:  # an aggregate without a count is a sum
        function = _with_parts(function, call, facts)
    else:
        function = _bound(function, _keywords(call, {}))
    return _at_behavior(function) if at_behavior else cast(PolicyLoss, function)


def compose_advantages(call: Call) -> Callable[..., Any]:
    """Advantages as a trainer calls them, `(rewards [N], groups [N], ...)`: of samples `[N]`, or of
    tokens `[T]`."""
    function = _bound(load_function(call.formula.path), _keywords(call, {}))
    facts = call.formula.facts
    return _of_tokens(function, facts) if "mask" in facts else function


def _of_tokens(function: Callable[..., Any], facts: list[str]) -> Callable[..., Any]:
    """Advantages of tokens, which may ignore groups."""

    def advantages(
        rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], **given: Tensor | Segments
    ) -> Any:
        own = {"groups": groups} if "groups" in facts else {}
        return function(rewards, **own, **given)

    asked = [name for name in facts if name not in ("rewards", "groups")]
    return with_signature(advantages, ("rewards", "groups"), asked)


def with_signature(
    function: Callable[..., Any], positional: Sequence[str], asked: Sequence[str]
) -> Callable[..., Any]:
    """Give a function the parameters that a trainer fills: in order, and by name."""
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # as of any function
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
        + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in asked]
    )
    return function


def _at_behavior(loss: Callable[..., HasLoss]) -> PolicyLoss:
    """Loss centered at the behavior policy, whose weight pi_prox / pi_behav is 1."""

    def centered(
        logprobs: Tensor,
        proximal_logprobs: Tensor,  # noqa: ARG001 - part of the protocol
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        **facts: Any,
    ) -> HasLoss:
        return loss(logprobs, behavior_logprobs, behavior_logprobs, advantages, mask, **facts)

    centered.__wrapped__ = loss  # type: ignore[attr-defined]  # where its keywords are looked for
    return centered


def _with_parts(function: Callable[..., Any], call: Call, facts: list[str]) -> Callable[..., Any]:
    """Loss whose parts are bound to the facts of each call."""
    own = call.formula.facts
    # A loss that asks for a count adds up over micro-batches; a composed one does, whatever its
    # aggregate asks for.
    asked = list(dict.fromkeys(["token_count", *own, *facts]))

    def composed(*tokens: Tensor, **given: Any) -> HasLoss:
        keywords = _keywords(call, given) | {name: given[name] for name in own if name in given}
        return cast(HasLoss, function(*tokens, **keywords))

    names = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "mask")
    return with_signature(composed, names, asked)


def _keywords(call: Call, given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(call.values)
    for name, part in call.parts.items():
        if isinstance(part, tuple):
            found[name] = chain(*(_function(one, given) for one in part))
        else:
            found[name] = _function(part, given)
    for name, fact in call.segments.items():
        found[name] = given[fact]
    return found


def _function(call: Call, given: Mapping[str, Any]) -> Callable[..., Any]:
    """Part as a function, with its facts bound."""
    function = load_function(call.formula.path)
    keywords = _keywords(call, given)
    keywords |= {name: given[name] for name in call.formula.facts if name in given}
    return (
        cast("Callable[..., Any]", function(**keywords))
        if call.formula.makes
        else _bound(function, keywords)
    )


def _bound(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    # Without keywords the function itself: `scale is no_scale` matters.
    return partial(function, **keywords) if keywords else function


def _parts(call: Call) -> Iterator[Call]:
    for part in call.parts.values():
        for one in part if isinstance(part, tuple) else (part,):
            yield one
            yield from _parts(one)


def _facts(part: Call) -> list[str]:
    return [*part.formula.facts, *part.segments.values()]


def _words(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", str(annotation))
    )
