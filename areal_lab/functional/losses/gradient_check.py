"""Check which inputs of a policy loss get a gradient, and which must not.

    logprobs             must: the policy that is trained
    proximal_logprobs    must not: where the trust region is centered
    behavior_logprobs    must not: the samples are given
    advantages           must not: the loss would move its own target
    masked tokens        must not, of any input, nor may their NaN reach the loss

`check_loss` of the trainer looks at the signature of a custom loss; this calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.losses.policy import HasLoss, keywords_of_batch, loss_of

_INPUTS = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
_TRAINED = _INPUTS[0]


class InputGradient(NamedTuple):
    """Derivative of the loss by one of its inputs."""

    largest: float
    """Largest absolute entry at an unmasked token; 0 where no gradient arrives."""
    largest_masked: float
    """Largest gradient at masked tokens; must be 0 for every input."""


class GradientCheck(NamedTuple):
    """Result of `gradient_check`."""

    inputs: dict[str, InputGradient]
    """Gradients by the name of the input, in the order of `PolicyLoss`."""
    sees_masked_nan: bool
    """True if NaN at masked tokens changes the loss or the gradient of others."""

    @property
    def problems(self) -> list[str]:
        """Problems of the loss, one sentence each with a fix; empty for a sound loss."""
        found = []
        for name, gradient in self.inputs.items():
            trained = name == _TRAINED
            if not math.isfinite(gradient.largest):
                found.append(f"the gradient of {name} is NaN or infinite")
            elif trained and gradient.largest == 0:
                found.append(f"{name} gets no gradient: do not detach it, or nothing is learned")
            elif not trained and gradient.largest != 0:
                found.append(
                    f"{name} gets a gradient (up to {gradient.largest:.3g}): use {name}.detach()"
                )
            if gradient.largest_masked != 0:
                found.append(
                    f"masked tokens of {name} get a gradient: reduce with the mask, as token_mean"
                )
        if self.sees_masked_nan:
            found.append(
                "NaN at masked tokens reaches the loss or its gradient: select(values, mask) "
                "before computing with them"
            )
        return found


def gradient_check(
    loss: Callable[..., HasLoss], batch: Sequence[Tensor] | None = None, **keywords: Any
) -> GradientCheck:
    """Call a policy loss and its backward pass once, and report which inputs got a gradient.

    Args:
        loss: a `PolicyLoss`, custom ones included.
        batch: logprobs, proximal_logprobs, behavior_logprobs, advantages and mask. None takes
            three responses packed to 15 tokens, some of them masked: one on policy, two with ratios
            on both sides of 1. The loss then gets the keywords it asks for, as from a trainer.
        keywords: keywords of the loss that belong to the batch, such as `sequences`.

    Source: definition.

    Raises:
        ValueError: the batch is not of five tensors of one shape.
        TypeError: the loss is not a function of the five tensors, or returns no `loss`.
    """
    if batch is None:
        *floats, mask, ids = _example()
        keywords = keywords_of_batch(loss, ids, mask) | keywords
    elif len(batch) != 5:
        raise ValueError(
            f"batch has {len(batch)} tensors, but must have 5: logprobs, proximal_logprobs, "
            "behavior_logprobs, advantages, mask"
        )
    else:
        *floats, mask = batch
        check_token_inputs(mask, **dict(zip(_INPUTS, floats, strict=True)))
    call = partial(loss, **keywords) if keywords else loss
    value, gradients = _gradients(call, floats, mask)
    spoiled = [torch.where(mask, values, torch.nan) for values in floats]
    value_spoiled, gradients_spoiled = _gradients(call, spoiled, mask)
    chosen = mask.flatten()
    same = torch.equal(value, value_spoiled) and torch.equal(
        gradients[0].flatten()[chosen], gradients_spoiled[0].flatten()[chosen]
    )
    return GradientCheck(
        inputs={
            name: InputGradient(_largest(gradient[mask]), _largest(gradient[~mask]))
            for name, gradient in zip(_INPUTS, gradients, strict=True)
        },
        sees_masked_nan=not same,
    )


def _gradients(
    call: Callable[..., HasLoss], floats: Sequence[Tensor], mask: Tensor
) -> tuple[Tensor, list[Tensor]]:
    leaves = [values.detach().clone().requires_grad_() for values in floats]
    value = loss_of(call, *leaves, mask).loss
    if not value.requires_grad:
        return value, [torch.zeros_like(leaf) for leaf in leaves]
    return value.detach(), list(torch.autograd.grad(value, leaves, materialize_grads=True))


def _largest(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def _example() -> tuple[Tensor, ...]:
    """Packed tokens of three responses: four float tensors, the mask, the ids.

    The first response is on policy, so that no trust region or rejection takes all gradients.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(15, generator=generator, dtype=torch.double)

    position = torch.arange(15)
    stale = position >= 5
    proximal = -1.0 - normal(1.0).abs()
    return (
        proximal + stale * normal(0.2),
        proximal,
        proximal + stale * normal(0.3),
        normal(1.0),
        position % 4 != 2,
        position // 5,
    )
