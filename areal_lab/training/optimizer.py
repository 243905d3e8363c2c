"""AdamW with a learning-rate schedule: a step clips the gradient, or refuses one not finite.

    loss, gradients --> norm, cosine to the previous gradient --> project or skip --> clip --> AdamW

The host waits for the device once for all of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from areal_lab.config.schema import OptimizerConfig
from areal_lab.functional.staleness.control import aligned_part
from areal_lab.training.ranks import Ranks
from areal_lab.training.settings import lr_factor


class NonFiniteStep(ArithmeticError):
    """The loss or gradient of a step is infinite or NaN; the message names the step."""


class Stepped(NamedTuple):
    """Result of a step."""

    loss: float
    """Loss of the minibatch."""
    grad_norm: float
    """Norm of its gradient before it was changed."""
    lr: float
    cosine: float | None = None
    """Cosine to the previous gradient; None if it is not measured."""
    aligned: bool = False
    """True if the gradient was projected, or the step skipped."""


@dataclass(frozen=True, slots=True)
class GradientAlignment:
    """Bound on the cosine of consecutive gradients, with the last one."""

    threshold: float
    action: Literal["project", "skip"]
    parameters: Mapping[str, nn.Parameter]
    previous: Mapping[str, Tensor]
    """Last gradient of each parameter, before it was changed; zeros before there is one."""

    def measure(self, norm: Tensor, ranks: Ranks) -> list[Tensor]:
        """Cosine, whether it is beyond the threshold, coefficient, and norm of the projection."""
        pairs = [
            (parameter.grad, self.previous[name])
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        ]
        # Of shards, as the norm: whole only after it is summed up.
        dot = ranks.whole(torch.stack([(one * other).sum() for one, other in pairs]).sum())
        before = ranks.whole(torch.nn.utils.get_total_norm([other for _, other in pairs]))
        return [*aligned_part(dot, norm, before, threshold=self.threshold)]

    def take_off(self, coefficient: float) -> None:
        """Subtract a multiple of the previous gradient, and keep the gradient as it was."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                kept = parameter.grad.clone() if coefficient else parameter.grad
                if coefficient:
                    parameter.grad.add_(self.previous[name], alpha=-coefficient)
                self.previous[name].copy_(kept)


def align_gradients(
    model: nn.Module, threshold: float, action: Literal["project", "skip"]
) -> GradientAlignment | None:
    """Control of the alignment of a model's gradients; None if the threshold is 1."""
    if threshold >= 1:
        return None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    previous = {name: torch.zeros_like(one.detach()) for name, one in trained.items()}
    return GradientAlignment(threshold, action, trained, previous)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW on the trained parameters of a model, with the schedule of its learning rate."""

    adamw: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    gradient_clipping: float
    ranks: Ranks
    alignment: GradientAlignment | None = None

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def step(self, loss: Tensor, lr_scale: Tensor | None = None) -> Stepped:
        """Clip the gradient and update the parameters. The host waits for the device once.

        Args:
            lr_scale: factor of the learning rate of this step alone.
        """
        groups = self.adamw.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        norm = _gradient_norm(parameters, self.ranks)
        scale = torch.ones((), device=loss.device) if lr_scale is None else lr_scale
        found = [] if self.alignment is None else self.alignment.measure(norm, self.ranks)
        # Offloaded gradients are in main memory, where the loss is not.
        numbers = [self.ranks.total(loss), norm, scale, *found]
        total, length, factor, *alignment = (
            torch.stack([one.to(loss.device, torch.float32) for one in numbers]).cpu().tolist()
        )
        if not (math.isfinite(total) and math.isfinite(length)):
            raise NonFiniteStep(
                f"optimizer step {self.schedule.last_epoch + 1} has loss {total} and gradient norm "
                f"{length}, and was skipped. Try a smaller learning rate, and check the log-probs "
                "and rewards of its batch"
            )
        cosine, beyond, left = None, False, length
        if self.alignment is not None:
            cosine, beyond, coefficient, left = alignment[0], bool(alignment[1]), *alignment[2:]
            self.alignment.take_off(coefficient if self.alignment.action == "project" else 0.0)
        for group in groups:  # for this step: the schedule sets the next rates
            group["lr"] *= factor
        lr = float(groups[0]["lr"])
        if not (beyond and self.alignment is not None and self.alignment.action == "skip"):
            if left > self.gradient_clipping:
                largest = self.gradient_clipping
                torch.nn.utils.clip_grads_with_norm_(
                    parameters, largest, found[-1] if found else norm
                )
            self.adamw.step()
        self.schedule.step()
        return Stepped(total, length, lr, cosine, beyond)


def make_optimizer(
    model: nn.Module,
    numbers: OptimizerConfig,
    *,
    steps: int,
    ranks: Ranks,
    rates: Mapping[str, float] = MappingProxyType({}),
    alignment: GradientAlignment | None = None,
) -> Optimizer:
    """AdamW on the parameters of a model that require a gradient.

    Args:
        rates: other learning rates, by the name of the parameter; not of the first one.
        alignment: bound on the cosine of consecutive gradients.
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
    _create_moments(adamw)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: lr_factor(step, numbers, steps)
    )
    return Optimizer(adamw, schedule, numbers.gradient_clipping, ranks, alignment)


def _create_moments(adamw: torch.optim.AdamW) -> None:
    """Create the moments as the first step would.

    Before any step they are next to each other; between the buffers of a step they would leave gaps
    in the heap of a CPU process that no later buffer fits into.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _gradient_norm(parameters: Sequence[nn.Parameter], ranks: Ranks) -> Tensor:
    """Norm of the gradient; parameters without one get zeros.

    A batch of equal rewards has no gradient; momentum still moves the parameters then, as it would
    with computed zeros.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Of shards, the norm is not summed up before it is whole.
    return ranks.whole(torch.nn.utils.get_total_norm(gradients))
