"""Policy loss typed into a text field: compiled, tried once, with errors that name the line.

    text --read_loss--> TypedLoss(function, check)      or TypedLoss(problem="line 3: ...")

The text is Python and is executed as it is: never let it come from someone you would not lend your
keyboard to.
"""

from __future__ import annotations

import ast
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from areal_lab import functional
from areal_lab.functional import GradientCheck, HasLoss, gradient_check
from areal_lab.functional.losses.policy import keywords_of_batch, loss_of
from areal_lab.training.objective.loss import check_loss

_FILE: Final = "<your loss>"
_SIGNATURE: Final = "logprobs, proximal_logprobs, behavior_logprobs, advantages, mask"


@dataclass(frozen=True, slots=True)
class TypedLoss:
    """A loss from its text."""

    text: str
    name: str = ""
    """Name of the function."""
    function: Callable[..., HasLoss] | None = None
    """Function; None if it cannot train."""
    problem: str = ""
    """Why it cannot, in one line."""
    check: GradientCheck | None = None
    """Inputs that got a gradient; None if the function could not be called."""


EXAMPLES = MappingProxyType(
    {
        "PPO": """\
def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - behavior_logprobs)
    value = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return PlainLoss(-token_mean(value, mask))
""",
        "clip from above": """\
def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - behavior_logprobs)
    value = torch.minimum(ratio * advantages, 1.2 * advantages)
    return PlainLoss(-token_mean(value, mask))
""",
        "no ratio": """\
def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    value = logprobs * advantages
    return PlainLoss(-token_mean(value, mask))
""",
        "no ratio, good only": """\
def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    value = logprobs * advantages.clamp(min=0)
    return PlainLoss(-token_mean(value, mask))
""",
        "no minimum": """\
def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - behavior_logprobs)
    value = ratio.clamp(0.8, 1.2) * advantages
    return PlainLoss(-token_mean(value, mask))
""",
    }
)
"""Losses to start a custom one from, by name."""


def read_loss(text: str) -> TypedLoss:
    """Compile the last function of a text, and call it once as `gradient_check` does.

    Every public name of `areal_lab.functional` and `torch` are there without an import. Bad text is
    not an error here: it is the `problem` of the result, with the number of its line.

    Args:
        text: Python that defines a function of the five tensors of `PolicyLoss`.
    """
    names: dict[str, Any] = {"torch": torch, "__name__": "typed_loss"}
    names |= {name: getattr(functional, name) for name in functional.__all__}
    try:
        parsed = ast.parse(text, _FILE)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        return TypedLoss(text, problem=f"{line}{getattr(error, 'msg', error)}")
    defined = [part.name for part in parsed.body if isinstance(part, ast.FunctionDef)]
    if not defined:
        return TypedLoss(text, problem=f"no function: begin with def my_loss({_SIGNATURE}):")
    name = defined[-1]
    try:
        exec(compile(parsed, _FILE, "exec"), names)
        function = names[name]
        check_loss(function, name)
        _require_a_number(function)
        check = gradient_check(function)
    except Exception as error:  # whatever the text raises is what its author has to see
        return TypedLoss(text, name, problem=_where(error))
    gradient = check.inputs["logprobs"].largest
    if gradient == 0:
        return TypedLoss(
            text, name, problem="logprobs gets no gradient: nothing would be learned", check=check
        )
    if not math.isfinite(gradient):
        return TypedLoss(
            text, name, problem="the gradient of logprobs is NaN or infinite", check=check
        )
    return TypedLoss(text, name, function, check=check)


def _require_a_number(function: Callable[..., HasLoss]) -> None:
    """Call a loss on four on-policy tokens."""
    ids, mask = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    logprobs, advantages = torch.full((4,), -1.0), torch.tensor([1.0, -1.0, 0.5, -0.5])
    call = partial(function, **keywords_of_batch(function, ids, mask))
    loss = loss_of(call, logprobs, logprobs, logprobs, advantages, mask).loss
    if loss.dim() > 0:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but must be one number: "
            "take its token_mean(value, mask)"
        )


def _where(error: Exception) -> str:
    """Format the error, with the line of the text in which it was raised, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    message = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, ValueError | TypeError):
        message = f"{type(error).__name__}: {message}"
    return f"line {lines[-1]}: {message}" if lines else message
