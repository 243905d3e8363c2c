"""AdamW with a learning-rate schedule: a step clips the gradient, or refuses one not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from areal_lab.config.schema import OptimizerConfig
from areal_lab.training.ranks import Ranks
from areal_lab.training.settings import lr_factor


class NonFiniteStep(ArithmeticError):
    """The loss or gradient of a step is infinite or NaN; the message names the step."""


class Stepped(NamedTuple):
    """What a step did."""

    loss: float
    """Of the minibatch."""
    grad_norm: float
    """Norm of its gradient before it was clipped."""
    lr: float


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW on the trained parameters of a model, with the schedule of its learning rate."""

    adamw: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    gradient_clipping: float
    ranks: Ranks

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def step(self, loss: Tensor) -> Stepped:
        """Clip the gradient and update the parameters. The host waits for the device once.

        Args:
            loss: this rank's share; a scalar.

        Raises:
            NonFiniteStep: on every rank, if the loss or the gradient of any of them is not finite;
                nothing has changed then.
        """
        groups = self.adamw.param_groups
        loss_value, grad_norm = _clip_gradient(
            [parameter for group in groups for parameter in group["params"]],
            loss,
            largest=self.gradient_clipping,
            step=self.schedule.last_epoch + 1,
            ranks=self.ranks,
        )
        lr = float(groups[0]["lr"])
        self.adamw.step()
        self.schedule.step()
        return Stepped(loss_value, grad_norm, lr)


def make_optimizer(
    model: nn.Module,
    numbers: OptimizerConfig,
    *,
    steps: int,
    ranks: Ranks,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """AdamW on the parameters of a model that require a gradient.

    Args:
        model: sharded, where there are several ranks.
        numbers: learning rate and the like.
        steps: optimizer steps of the whole run, for the schedule.
        ranks: the processes that train together.
        rates: other learning rates, by the name of the parameter; not of the first one.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(rates.get(name, numbers.lr), []).append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": parameters, "lr": lr} for lr, parameters in groups.items()],
        lr=numbers.lr,
        betas=(numbers.beta1, numbers.beta2),
        eps=numbers.eps,
        weight_decay=numbers.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: lr_factor(step, numbers, steps)
    )
    return Optimizer(adamw, schedule, numbers.gradient_clipping, ranks)


def _clip_gradient(
    parameters: Sequence[nn.Parameter], loss: Tensor, *, largest: float, step: int, ranks: Ranks
) -> tuple[float, float]:
    """Clip the gradient; parameters without one get zeros. Returns the loss and the norm before.

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
    # Offloaded gradients are in main memory, where the loss is not.
    both = torch.stack([ranks.total(loss).float(), norm.float().to(loss.device)])
    total, length = both.cpu().tolist()
    if not (math.isfinite(total) and math.isfinite(length)):
        raise NonFiniteStep(
            f"optimizer step {step} has loss {total} and gradient norm {length}, and was skipped. "
            "Try a smaller learning rate, and check the log-probs and rewards of its batch"
        )
    if length > largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return total, length
