"""One optimizer batch: advantages, proximal log-probs, minibatches of token-budget micro-batches.

    trajectories -> scores -> advantages -> omit A = 0 -> minibatches -> trees -> micro-batches
                                                     |
    pi_prox: parameters before this batch            | minibatch 1: from its own training forward
                                                     | 2 to n: a pass without gradient, before 1
                                                     v
                        forward, loss / N, backward (each micro-batch) -> clip -> AdamW
                                                      the same for a critic, if there is one

Scores are the values of a critic and the log-probs of a reference that is part of the reward.

`N` is the number of tokens the policy chose in the whole minibatch, so the cut into micro-batches
and the omitted sequences without gradient affect memory and time only. The same holds for the cut
into ranks: each data rank packs groups of its own, and gradients are averaged over ranks, so a loss
is multiplied by their number.

On a GPU the host waits for the device once per optimizer step, for its loss and gradient norm, and
once per batch, for the values that metrics are made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.data.batch import PackedBatch, SampleTokens
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.divergences.entropy import entropy_bonus
from areal_lab.functional.segments import Segments
from areal_lab.models.copies import to_device
from areal_lab.training.batch_advantages import (
    BatchAdvantages,
    batch_advantages,
    overlong_metrics,
)
from areal_lab.training.critic import Critic, CriticUpdate, SharedCritic, ValueTargets
from areal_lab.training.device import on_device
from areal_lab.training.forward import Predictions
from areal_lab.training.learner import Learner
from areal_lab.training.metrics import TokenRecord, on_host, step_metrics, token_record
from areal_lab.training.minibatch import Minibatch, make_minibatch, not_masked, split_by_group
from areal_lab.training.objective.loss import BatchFacts, LossTokens
from areal_lab.training.optimizer import Stepped
from areal_lab.training.protocol import Span, TrainBatchRequest
from areal_lab.training.scores import BatchScores, score_batch
from areal_lab.training.timeline import Timeline

_OF_SHARED_CRITIC: Final = {"value_error": "critic_loss", "value_clipped": "value_clip_fraction"}
"""Fields of tokens whose means are the metrics of a critic."""


class StepOutcome(NamedTuple):
    """Metrics and time spans of a step."""

    metrics: dict[str, float]
    spans: tuple[Span, ...]
    advantages: Float[Tensor, " N"]
    """Of each trajectory; where tokens have their own, their mean."""
    records: list[TokenRecord]
    """Of each micro-batch of all data ranks, on the host; on rank 0 only."""


def train_batch(learner: Learner, request: TrainBatchRequest) -> StepOutcome:
    """Update the policy on one batch.

    Raises:
        ValueError: if the batch has fewer groups than there are minibatches.
        NonFiniteStep: if the loss or gradient of a minibatch is not finite; the parameters are then
            those before that minibatch.
    """
    timeline = Timeline()
    trajectories = request.trajectories
    everyone = list(range(len(trajectories)))
    kept = not_masked(trajectories, everyone, mask_truncated=learner.settings.actor.mask_truncated)
    scores = score_batch(learner, trajectories, kept, request.version, timeline)
    with timeline.span("advantages and packing"):
        advantages = batch_advantages(
            trajectories,
            learner.advantages,
            kept=kept,
            **scores._asdict(),
            kl_reward=learner.kl_reward,
        )
        minibatches = _minibatches(learner, request, advantages)
    with timeline.span("proximal log-probs"):
        # The first minibatch needs no separate pass: in its forward the parameters are pi_prox.
        proximal: list[list[Tensor | None]] = [[None] * len(minibatches[0].parts)]
        for minibatch in minibatches[1:]:
            scored = [score(learner, part) for part in minibatch.passes]
            proximal.append([*scored[: len(minibatch.parts)]])
    known_tokens = _known_tokens(advantages, scores, learner.device)
    updates = [
        _update(learner, minibatch, known, known_tokens, timeline)
        for minibatch, known in zip(minibatches, proximal, strict=True)
    ]
    # Of all ranks; the others than rank 0 get nothing here.
    parts = [part for minibatch in minibatches for part in minibatch.parts]
    here = on_host([record for update in updates for record in update.records])
    of_ranks = learner.ranks.collect((here, sum(len(part.tokens) for part in parts)))
    records = [record for rank, _ in of_ranks for record in rank]
    metrics = step_metrics(trajectories, advantages.of_samples, records, request.version)
    metrics |= {
        "loss": math.fsum(update.actor.loss for update in updates) / len(updates),
        "grad_norm": max(update.actor.grad_norm for update in updates),
        "lr": updates[-1].actor.lr,
        "packed_tokens": float(sum(tokens for _, tokens in of_ranks)),
        "micro_batches": float(len(records)),
        "optimizer_steps": float(len(updates)),
    }
    metrics |= overlong_metrics(learner.settings, trajectories)
    metrics |= advantages.metrics | _critic_metrics(learner, minibatches, updates)
    if isinstance(learner.critic, SharedCritic):
        for field, name in _OF_SHARED_CRITIC.items():
            if (mean := metrics.pop(f"{field}_mean", None)) is not None:
                metrics[name] = mean
    return StepOutcome(metrics, tuple(timeline.spans), advantages.of_samples, records)


def _minibatches(
    learner: Learner, request: TrainBatchRequest, advantages: BatchAdvantages
) -> list[Minibatch]:
    actor, trajectories = learner.settings.actor, request.trajectories
    # A critic learns from tokens without an advantage too, and so does a student.
    others = learner.critic is not None or learner.teacher is not None
    terms = actor.entropy_coeff or actor.kl_loss_coef
    local = learner.loss.vanishes_without_advantage and not terms and not others
    nonzero = advantages.nonzero()
    return [
        make_minibatch(
            trajectories,
            not_masked(trajectories, members, mask_truncated=actor.mask_truncated),
            version=request.version,
            has_gradient=lambda index: nonzero[index] or not local,
            cost=learner.cost,
            max_tokens=actor.max_tokens_per_mb,
            ranks=learner.ranks,
        )
        for members in split_by_group(trajectories, actor.ppo_n_minibatches)
    ]


def score(learner: Learner, packed: PackedBatch) -> Float[Tensor, " R"]:
    """Log-probs of the chosen tokens under the current parameters, without gradient."""
    with torch.no_grad():
        predicted = learner.policy(on_device(packed, learner.device))
    logprobs: Tensor = predicted.logprobs
    return logprobs


class _KnownTokens(NamedTuple):
    """What is known of the `T` tokens of the batch before its update, on the device."""

    places: SampleTokens
    """On the host."""
    advantages: Float[Tensor, " T"]
    differ: bool
    """Whether the tokens of a sample have advantages of their own."""
    reference_logprobs: Float[Tensor, " T"] | None
    targets: ValueTargets | None


def _known_tokens(
    advantages: BatchAdvantages, scores: BatchScores, device: torch.device
) -> _KnownTokens:
    targets = None
    if scores.values is not None and advantages.returns is not None:
        returns, values = advantages.returns.float(), scores.values
        targets = ValueTargets(
            to_device(returns, device), to_device(values, device), advantages.tokens
        )
    reference = scores.reference_logprobs
    return _KnownTokens(
        places=advantages.tokens,
        advantages=to_device(advantages.of_tokens, device),
        differ=advantages.differ,
        reference_logprobs=None if reference is None else to_device(reference, device),
        targets=targets,
    )


class _Update(NamedTuple):
    actor: Stepped
    records: list[TokenRecord]
    critic: CriticUpdate | None


def _critic_metrics(
    learner: Learner, minibatches: Sequence[Minibatch], updates: Sequence[_Update]
) -> dict[str, float]:
    steps = [update.critic for update in updates if update.critic is not None]
    if not steps:
        return {}
    clipped = learner.ranks.total(torch.stack([step.clipped for step in steps]).sum())
    tokens = sum(minibatch.token_count for minibatch in minibatches)
    return {
        "critic_loss": math.fsum(step.stepped.loss for step in steps) / len(steps),
        "critic_grad_norm": max(step.stepped.grad_norm for step in steps),
        "critic_lr": steps[-1].stepped.lr,
        "value_clip_fraction": float(clipped) / max(1, tokens),
    }


def _update(
    learner: Learner,
    minibatch: Minibatch,
    proximal: Sequence[Tensor | None],
    tokens: _KnownTokens,
    timeline: Timeline,
) -> _Update:
    """One optimizer step of each model. `proximal` is `None` where the parameters are pi_prox."""
    device, ranks = learner.device, learner.ranks
    learner.optimizer.zero_grad()
    records = []
    loss = torch.zeros((), device=device)
    placed = minibatch.on(device)
    for packed, known in zip(minibatch.parts, proximal, strict=True):
        with timeline.span("forward/backward", tokens=len(packed.tokens)):
            share, record = _forward_loss(learner, packed, known, tokens, placed)
            # Gradients are averaged over the ranks, and the shares of all ranks are to be summed.
            (share * ranks.data_count).backward()
            loss += share.detach()
            records.append(record)
    for packed in minibatch.idle:
        with timeline.span("forward/backward", tokens=0):
            # Sharded layers need every rank in every pass: one without effect, but in the graph.
            placed_idle = on_device(packed, device)
            if learner.reference is not None and tokens.reference_logprobs is None:
                learner.reference.logprobs(placed_idle)
            if learner.teacher is not None:
                learner.teacher.logprobs(placed_idle)
            predicted = learner.policy(placed_idle)
            idle = predicted.logprobs.sum()
            if predicted.values is not None:
                idle = idle + predicted.values.sum()
            (idle * 0.0).backward()
    with timeline.span("optimizer"):
        stepped = learner.optimizer.step(loss)
    critic = None
    if isinstance(learner.critic, Critic) and tokens.targets is not None:
        critic = learner.critic.update(minibatch, tokens.targets, ranks, timeline)
    return _Update(stepped, records, critic)


def _forward_loss(
    learner: Learner,
    packed: PackedBatch,
    known_proximal: Tensor | None,
    known: _KnownTokens,
    minibatch: Minibatch,
) -> tuple[Tensor, TokenRecord]:
    """Loss and record of a micro-batch; `packed` is on the host, all else on the device."""
    placed = on_device(packed, learner.device)
    rows = to_device(known.places.rows(packed), learner.device)
    frozen = _frozen_logprobs(learner, placed, known, rows)
    predicted = learner.policy(placed)
    proximal = predicted.logprobs.detach() if known_proximal is None else known_proximal
    tokens = LossTokens(
        predicted.logprobs,
        proximal,
        placed.behavior_logprobs,
        known.advantages.to(proximal.dtype)[rows],
        torch.ones_like(proximal, dtype=torch.bool),
    )
    loss, result = learner.loss(tokens, _facts(placed, minibatch, len(known.places.lengths)))
    record = token_record(packed, predicted, proximal, result)
    if known.differ:
        record.diagnostics["advantage"] = tokens.advantages
    loss, fields = _with_other_terms(
        learner, loss, tokens, predicted, frozen, token_count=minibatch.token_count
    )
    if isinstance(critic := learner.critic, SharedCritic):
        assert predicted.values is not None
        assert known.targets is not None
        error = known.targets.loss(
            predicted.values,
            rows,
            clip_epsilon=critic.clip_epsilon,
            token_count=minibatch.token_count,
        )
        loss = loss + critic.coefficient * error.loss
        fields |= {"value_error": error.errors, "value_clipped": error.clipped}
    record.diagnostics.update(fields)
    return loss, record


class _FrozenLogprobs(NamedTuple):
    """What frozen models say of the chosen tokens of a micro-batch, if the loss needs it."""

    reference: Tensor | None
    teacher: Tensor | None


def _frozen_logprobs(
    learner: Learner, placed: PackedBatch, known: _KnownTokens, rows: Tensor
) -> _FrozenLogprobs:
    reference = None
    if learner.reference is not None and learner.settings.actor.kl_loss_coef:
        scored = known.reference_logprobs
        reference = learner.reference.logprobs(placed) if scored is None else scored[rows]
    teacher = None if learner.teacher is None else learner.teacher.logprobs(placed)
    return _FrozenLogprobs(reference, teacher)


def _facts(placed: PackedBatch, minibatch: Minibatch, samples: int) -> BatchFacts:
    groups = torch.searchsorted(minibatch.groups, placed.group_ids)
    return BatchFacts(
        token_count=minibatch.token_count,
        sequences=Segments(placed.sequence_ids, samples),
        sequence_count=minibatch.sequence_count,
        turns=Segments(placed.turn_ids, placed.turn_count),
        groups=Segments(groups, len(minibatch.groups)),
        group_count=len(minibatch.groups),
        group_tokens=minibatch.group_tokens,
        versions=placed.versions,
        trainer_version=minibatch.version,
    )


def _with_other_terms(
    learner: Learner,
    loss: Tensor,
    tokens: LossTokens,
    predicted: Predictions,
    frozen: _FrozenLogprobs,
    *,
    token_count: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with the terms beside it, and fields of tokens to record."""
    fields = {}
    if learner.teacher is not None and frozen.teacher is not None:
        loss, fields["teacher_kl"] = learner.teacher.mixed(
            loss, tokens.logprobs, tokens.behavior_logprobs, frozen.teacher, token_count=token_count
        )
    if coefficient := learner.settings.actor.entropy_coeff:
        mean = partial(token_mean, token_count=token_count)
        loss = loss + entropy_bonus(
            predicted.entropy, tokens.mask, coefficient=coefficient, aggregate=mean
        )
    if learner.reference is not None and frozen.reference is not None:
        penalty = learner.reference.penalty(
            tokens.logprobs, frozen.reference, tokens.mask, token_count=token_count
        )
        loss, fields["reference_kl"] = loss + penalty.loss, penalty.kl
    return loss, fields
