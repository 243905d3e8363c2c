"""One optimizer batch: advantages, proximal log-probs, minibatches of token-budget micro-batches.

    trajectories -> advantages -> omit A = 0 (PPO) -> minibatches -> trees -> micro-batches
                                                     |
    pi_prox: parameters before this batch            | minibatch 1: from its own training forward
                                                     | 2 to n: a pass without gradient, before 1
                                                     v
                        forward, loss / N, backward (each micro-batch) -> clip -> AdamW

`N` is the number of tokens the policy chose in the whole minibatch, so the cut into micro-batches
and the omitted sequences without gradient affect memory and time only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.control.microbatch import dynamic_batches
from areal_lab.data.batch import PackedBatch, input_tokens, pack
from areal_lab.data.prefix_tree import ForwardCost, grow_trees
from areal_lab.data.trajectory import Trajectory
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.divergences.entropy import entropy_bonus
from areal_lab.functional.segments import Segments
from areal_lab.models.dtypes import compute_dtype
from areal_lab.training.forward import on_device, predict
from areal_lab.training.metrics import TokenRecord, step_metrics, token_record
from areal_lab.training.model import forward_cost
from areal_lab.training.objective.loss import (
    Advantages,
    BatchFacts,
    ChosenLoss,
    LossTokens,
    asks_for_lengths,
    choose_advantages,
    choose_length_penalty,
    choose_loss,
)
from areal_lab.training.protocol import Span, TrainBatchRequest
from areal_lab.training.settings import TrainerSettings, lr_factor


class NonFiniteStep(ArithmeticError):
    """The loss or gradient of a step is infinite or NaN; the message names the step."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy with its optimizer, schedule and loss."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    loss: ChosenLoss
    advantages: Advantages
    settings: TrainerSettings
    dtype: torch.dtype
    cost: ForwardCost


class StepOutcome(NamedTuple):
    """Metrics and time spans of a step."""

    metrics: dict[str, float]
    spans: tuple[Span, ...]
    advantages: Float[Tensor, " N"]
    """Of each trajectory."""
    records: list[TokenRecord]
    """Of each micro-batch."""


@dataclass(slots=True)
class Timeline:
    """Spans of one step, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        """Time what happens inside."""
        start_s = time.time()
        yield
        self.spans.append(Span(name, start_s, time.time(), args))


def make_learner(model: PreTrainedModel, settings: TrainerSettings) -> Learner:
    """Create the optimizer, learning-rate schedule and loss of a model."""
    numbers = settings.actor.optimizer
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=numbers.lr,
        betas=(numbers.beta1, numbers.beta2),
        eps=numbers.eps,
        weight_decay=numbers.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, numbers, settings.optimizer_steps)
    )
    return Learner(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loss=choose_loss(settings),
        advantages=choose_advantages(settings),
        settings=settings,
        dtype=compute_dtype(settings.actor.dtype, settings.device),
        cost=forward_cost(model),
    )


def train_batch(learner: Learner, request: TrainBatchRequest) -> StepOutcome:
    """Update the policy on one batch.

    Raises:
        ValueError: if the batch has fewer groups than there are minibatches.
        NonFiniteStep: if the loss or gradient of a minibatch is not finite; the parameters are then
            those before that minibatch.
    """
    timeline = Timeline()
    trajectories = request.trajectories
    with timeline.span("advantages and packing"):
        advantages = batch_advantages(trajectories, learner.advantages)
        minibatches = [
            _micro_batches(learner, request, with_loss(learner, trajectories, members), advantages)
            for members in split_by_group(trajectories, learner.settings.actor.ppo_n_minibatches)
        ]
    with timeline.span("proximal log-probs"):
        # The first minibatch needs no separate pass: in its forward the parameters are pi_prox.
        proximal: list[list[Tensor | None]] = [[None] * len(minibatches[0].parts)]
        proximal += [
            [score(learner, part) for part in minibatch.parts] for minibatch in minibatches[1:]
        ]
    updates = [
        _update(learner, minibatch, known, advantages, timeline)
        for minibatch, known in zip(minibatches, proximal, strict=True)
    ]
    records = [record for update in updates for record in update.records]
    metrics = step_metrics(trajectories, advantages, records, request.version)
    metrics |= {
        "loss": math.fsum(update.loss for update in updates) / len(updates),
        "grad_norm": max(update.grad_norm for update in updates),
        "lr": updates[-1].lr,
        "packed_tokens": float(sum(len(p.tokens) for m in minibatches for p in m.parts)),
        "micro_batches": float(sum(len(m.parts) for m in minibatches)),
        "optimizer_steps": float(len(updates)),
    }
    metrics |= _overlong_metrics(learner, trajectories)
    return StepOutcome(metrics, tuple(timeline.spans), advantages, records)


def batch_advantages(
    trajectories: Sequence[Trajectory], function: Advantages
) -> Float[Tensor, " N"]:
    """Advantage of each trajectory: its reward relative to its group.

    Raises:
        ValueError: if the function does not return one number per trajectory.
    """
    rewards = torch.tensor([t.reward for t in trajectories])
    facts = {}
    if asks_for_lengths(function):
        facts["length_tokens"] = torch.tensor([t.generated_tokens for t in trajectories])
    advantages = function(rewards, torch.tensor([t.group for t in trajectories]), **facts)
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"the advantages have shape {tuple(advantages.shape)}, but must be one number "
            f"per sample, shape {tuple(rewards.shape)}"
        )
    return advantages.detach()


def split_by_group(trajectories: Sequence[Trajectory], parts: int) -> list[list[int]]:
    """Cut a batch into minibatches of whole groups, in batch order, with equal counts of groups if
    possible.

    Raises:
        ValueError: if there are fewer groups than parts.
    """
    groups = list(dict.fromkeys(trajectory.group for trajectory in trajectories))
    if len(groups) < parts:
        raise ValueError(
            f"ppo_n_minibatches is {parts}, but must be <= {len(groups)}, the groups of the batch"
        )
    part_of = {group: rank * parts // len(groups) for rank, group in enumerate(groups)}
    split: list[list[int]] = [[] for _ in range(parts)]
    for index, trajectory in enumerate(trajectories):
        split[part_of[trajectory.group]].append(index)
    return split


def with_loss(
    learner: Learner, trajectories: Sequence[Trajectory], members: list[int]
) -> list[int]:
    """Those members of a minibatch that are trained on: without the masked ones, which were cut
    off. What is left counts for the means."""
    if not learner.settings.actor.mask_truncated:
        return members
    return [index for index in members if not trajectories[index].truncated]


def _overlong_metrics(learner: Learner, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    metrics = {}
    if learner.settings.actor.mask_truncated:
        metrics["masked_samples"] = float(sum(t.truncated for t in trajectories))
    if (penalty := choose_length_penalty(learner.settings)) is not None:
        lengths = torch.tensor([t.generated_tokens for t in trajectories])
        metrics["overlong_penalty_mean"] = float(penalty(lengths).mean())
    return metrics


class _Minibatch(NamedTuple):
    parts: list[PackedBatch]
    token_count: int
    sequence_count: int
    groups: Tensor
    """Ids of the groups, ascending."""
    group_tokens: Tensor
    """Tokens that the policy chose in each group."""
    version: Version
    """Version of the parameters before the batch."""


class _Update(NamedTuple):
    loss: float
    grad_norm: float
    lr: float
    records: list[TokenRecord]


def _micro_batches(
    learner: Learner, request: TrainBatchRequest, members: list[int], advantages: Tensor
) -> _Minibatch:
    """Pack the sequences with a gradient into micro-batches of whole trees; count all of them."""
    trajectories = request.trajectories
    tokens_of: dict[int, int] = {}
    for member in (trajectories[index] for index in members):
        tokens_of[member.group] = tokens_of.get(member.group, 0) + member.generated_tokens
    device = torch.device(learner.settings.device)
    facts = (
        sum(tokens_of.values()),
        len(members),
        torch.tensor(sorted(tokens_of), device=device),
        torch.tensor([tokens_of[group] for group in sorted(tokens_of)], device=device),
        request.version,
    )
    if learner.loss.vanishes_without_advantage and not learner.settings.actor.entropy_coeff:
        members = [index for index in members if advantages[index] != 0]
    if not members:
        return _Minibatch([], *facts)
    chosen = [trajectories[index] for index in members]
    budget = learner.settings.actor.max_tokens_per_mb
    trees = grow_trees([input_tokens(t) for t in chosen], learner.cost, max_tokens=budget)
    # A sequence longer than the budget cannot be split; it gets its own micro-batch.
    small = [tree for tree in trees if tree.tokens <= budget]
    batches = [[tree] for tree in trees if tree.tokens > budget]
    for chosen_trees in dynamic_batches([tree.tokens for tree in small], max_tokens=budget):
        batches.append([small[index] for index in chosen_trees])
    parts = []
    for batch in batches:
        packed = pack(chosen, batch)
        # Use ids of the whole batch, which index into the advantages.
        packed = packed._replace(sequence_ids=torch.tensor(members)[packed.sequence_ids])
        parts.append(on_device(packed, device))
    return _Minibatch(parts, *facts)


def score(learner: Learner, packed: PackedBatch) -> Float[Tensor, " R"]:
    """Log-probs of the chosen tokens under the current parameters, without gradient."""
    with torch.no_grad():
        return predict(
            learner.model, packed, temperature=learner.settings.temperature, dtype=learner.dtype
        ).logprobs


def _update(
    learner: Learner,
    minibatch: _Minibatch,
    proximal: Sequence[Tensor | None],
    advantages: Tensor,
    timeline: Timeline,
) -> _Update:
    """One optimizer step. `proximal` is `None` where the parameters still are pi_prox."""
    learner.optimizer.zero_grad(set_to_none=True)
    records = []
    loss = 0.0
    for packed, known in zip(minibatch.parts, proximal, strict=True):
        with timeline.span("forward/backward", tokens=len(packed.tokens)):
            share, record = _forward_loss(learner, packed, known, advantages, minibatch)
            share.backward()
            loss += share.item()
            records.append(record)
    with timeline.span("optimizer"):
        grad_norm = _clip_gradient(learner, loss)
        lr = float(learner.optimizer.param_groups[0]["lr"])
        learner.optimizer.step()
        learner.schedule.step()
    return _Update(loss, grad_norm, lr, records)


def _forward_loss(
    learner: Learner,
    packed: PackedBatch,
    known_proximal: Tensor | None,
    advantages: Tensor,
    minibatch: _Minibatch,
) -> tuple[Tensor, TokenRecord]:
    entropy_coeff = learner.settings.actor.entropy_coeff
    predicted = predict(
        learner.model,
        packed,
        temperature=learner.settings.temperature,
        dtype=learner.dtype,
        entropy_gradient=entropy_coeff != 0,
    )
    proximal = predicted.logprobs.detach() if known_proximal is None else known_proximal
    facts = BatchFacts(
        token_count=minibatch.token_count,
        sequences=Segments(packed.sequence_ids, len(advantages)),
        sequence_count=minibatch.sequence_count,
        turns=Segments(packed.turn_ids, packed.turn_count),
        groups=Segments(
            torch.searchsorted(minibatch.groups, packed.group_ids), len(minibatch.groups)
        ),
        group_count=len(minibatch.groups),
        group_tokens=minibatch.group_tokens,
        versions=packed.versions,
        trainer_version=minibatch.version,
    )
    tokens = LossTokens(
        predicted.logprobs,
        proximal,
        packed.behavior_logprobs,
        advantages.to(proximal)[packed.sequence_ids],
        torch.ones_like(proximal, dtype=torch.bool),
    )
    loss, result = learner.loss(tokens, facts)
    if entropy_coeff:
        mean = partial(token_mean, token_count=minibatch.token_count)
        loss = loss + entropy_bonus(
            predicted.entropy, tokens.mask, coefficient=entropy_coeff, aggregate=mean
        )
    return loss, token_record(packed, predicted, proximal, result)


def _clip_gradient(learner: Learner, loss: float) -> float:
    """Clip the gradient; returns its norm before. Parameters without a gradient get zeros.

    A batch of equal rewards has no gradient; momentum still moves the parameters then, as it would
    with computed zeros.
    """
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if not (math.isfinite(loss) and bool(torch.isfinite(norm))):
        raise NonFiniteStep(
            f"optimizer step {learner.schedule.last_epoch + 1} has loss {loss} and gradient norm "
            f"{norm.item()}, and was skipped. Try a smaller learning rate, and check the log-probs "
            "and rewards of its batch"
        )
    largest = learner.settings.actor.optimizer.gradient_clipping
    if float(norm) > largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return float(norm)
