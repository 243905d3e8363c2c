"""Clip the gradient of a step, and refuse one that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from areal_lab.training.ranks import Ranks


class NonFiniteStep(ArithmeticError):
    """The loss or gradient of a step is infinite or NaN; the message names the step."""


class Clipped(NamedTuple):
    """Loss of a minibatch, and the norm of its gradient before it was clipped."""

    loss: float
    grad_norm: float


def clip_gradient(
    parameters: Sequence[nn.Parameter], loss: Tensor, *, largest: float, step: int, ranks: Ranks
) -> Clipped:
    """Clip the gradient; parameters without one get zeros. The host waits for the device once.

    A batch of equal rewards has no gradient; momentum still moves the parameters then, as it would
    with computed zeros.

    Args:
        parameters: all trained ones.
        loss: this rank's share; a scalar.
        largest: bound of the norm.
        step: number of the optimizer step, for the error.
        ranks: sums the loss and collects the norm, so that all of them decide alike.

    Raises:
        NonFiniteStep: on every rank, if the loss or the gradient of any of them is not finite.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Of shards, the norm is not summed up before it is whole.
    norm = ranks.whole(torch.nn.utils.get_total_norm(gradients))
    total, length = torch.stack([ranks.total(loss).float(), norm.float()]).cpu().tolist()
    if not (math.isfinite(total) and math.isfinite(length)):
        raise NonFiniteStep(
            f"optimizer step {step} has loss {total} and gradient norm {length}, and was skipped. "
            "Try a smaller learning rate, and check the log-probs and rewards of its batch"
        )
    if length > largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return Clipped(total, length)
