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
and the omitted sequences without gradient affect memory and time only. The same is true of the cut
into ranks: each data rank packs different groups, and gradients are averaged over ranks, so a loss
is multiplied by their number.

On a GPU the host waits for the device once per optimizer step, for its loss and gradient norm, and
once per batch, for the values of metrics. The times of spans are read after these waits.

Scores of a batch before training: values of a critic, and the reference's log-probs.

    trajectories --pack--> critic    -> values [T], bootstrap values [N]
                           reference -> log-probs [T]

Every rank scores its groups, and all get all scores: advantages are taken over the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.data.batch import PackedBatch, SampleTokens, sample_tokens
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.divergences.entropy import entropy_bonus
from areal_lab.functional.losses.policy import HasLoss
from areal_lab.functional.segments import Segments
from areal_lab.functional.staleness.control import StepScale, age_weights, learning_rate_scale
from areal_lab.models.copies import to_device
from areal_lab.training.batch_advantages import BatchAdvantages, batch_advantages, overlong_metrics
from areal_lab.training.critic import Critic, CriticUpdate, SharedCritic, ValueTargets
from areal_lab.training.forward import Predictions
from areal_lab.training.learner import Learner
from areal_lab.training.metrics import TokenRecord, on_host, step_metrics, token_record
from areal_lab.training.minibatch import (
    Minibatch,
    make_minibatch,
    not_masked,
    on_device,
    split_by_group,
)
from areal_lab.training.objective.loss import BatchFacts, LossTokens
from areal_lab.training.optimizer import Stepped
from areal_lab.training.protocol import Span, TrainBatchRequest
from areal_lab.training.throughput import PeakMemory, StepMeter, tflop, total_flops
from areal_lab.training.timeline import Timeline

_OF_SHARED_CRITIC: Final = {"value_error": "critic_loss", "value_clipped": "value_clip_fraction"}
"""Token fields whose means are the metrics of a critic."""


class StepOutcome(NamedTuple):
    """Metrics and time spans of a step."""

    metrics: dict[str, float]
    """Metrics that follow from the batch and the weights."""
    measured: dict[str, float]
    """Metrics of time and memory (`training.throughput`), which differ between equal steps."""
    spans: tuple[Span, ...]
    advantages: Float[Tensor, " N"]
    """Advantage of each trajectory; the mean if its tokens have separate ones."""
    records: list[TokenRecord]
    """Records of each micro-batch of all data ranks, on the host; on rank 0 only."""


def train_batch(
    learner: Learner, request: TrainBatchRequest, *, profiled: bool = False
) -> StepOutcome:
    """Update the policy on one batch.

    Args:
        profiled: True if a torch profiler records, which then shows the spans, too.
    """
    meter = StepMeter(learner.device)
    timeline = Timeline(learner.device, profiled)
    trajectories = request.trajectories
    everyone = list(range(len(trajectories)))
    kept = not_masked(trajectories, everyone, mask_truncated=learner.settings.actor.mask_truncated)
    scores = score_batch(learner, trajectories, kept, request.version, timeline)
    with timeline.host_span("advantages and packing"):
        advantages = batch_advantages(
            trajectories,
            learner.advantages,
            kept=kept,
            **scores._asdict(),
            kl_reward=learner.kl_reward,
        )
        minibatches = _minibatches(learner, request, advantages)
        advantages, aged = _by_age(learner, request, advantages)
    later = [part for minibatch in minibatches[1:] for part in minibatch.parts]
    with timeline.span("proximal log-probs", **tflop(learner.policy.flops, later)):
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
    spans = timeline.finish()
    of_ranks = learner.ranks.collect(
        _OfRank(
            here,
            tokens=sum(len(part.tokens) for part in parts),
            flops=total_flops(spans),
            peak_memory=meter.peak_memory(),
        )
    )
    records = [record for rank in of_ranks for record in rank.records]
    metrics = step_metrics(trajectories, advantages.of_samples, records, request.version)
    metrics |= {
        "loss": math.fsum(update.actor.loss for update in updates) / len(updates),
        "grad_norm": max(update.actor.grad_norm for update in updates),
        "lr": updates[-1].actor.lr,
        "packed_tokens": float(sum(rank.tokens for rank in of_ranks)),
        "micro_batches": float(len(records)),
        "optimizer_steps": float(len(updates)),
    }
    metrics |= overlong_metrics(learner.settings, trajectories)
    metrics |= aged | _control_metrics(learner, updates)
    metrics |= advantages.metrics | _critic_metrics(learner, minibatches, updates)
    if isinstance(learner.critic, SharedCritic):
        for field, name in _OF_SHARED_CRITIC.items():
            if (mean := metrics.pop(f"{field}_mean", None)) is not None:
                metrics[name] = mean
    flops = [rank.flops for rank in of_ranks if rank.flops is not None]
    measured = meter.metrics(
        tokens=sum(rank.tokens for rank in of_ranks),
        flops=math.fsum(flops) if flops else None,
        peaks=[rank.peak_memory for rank in of_ranks],
        processes=learner.ranks.count,
    )
    return StepOutcome(metrics, measured, spans, advantages.of_samples, records)


def _by_age(
    learner: Learner, request: TrainBatchRequest, advantages: BatchAdvantages
) -> tuple[BatchAdvantages, dict[str, float]]:
    """Multiply the advantages of each sample by the weight of its age, which a loss is linear in.

    What is recorded of samples, `of_samples`, stays as it is.
    """
    half_life = learner.settings.actor.age_half_life
    if not half_life:
        return advantages, {}
    lags = [
        math.fsum((request.version - s.version) * len(s.tokens) for s in one.segments)
        / max(1, one.generated_tokens)
        for one in request.trajectories
    ]
    weights = age_weights(torch.tensor(lags), half_life=half_life)
    of_tokens = advantages.of_tokens * weights[advantages.tokens.ids()]
    return advantages._replace(of_tokens=of_tokens), {"age_weight_mean": float(weights.mean())}


def _control_metrics(learner: Learner, updates: Sequence[_Update]) -> dict[str, float]:
    """Metrics of the controls of optimizer steps that the settings ask for."""
    metrics = {}
    cosines = [one.actor.cosine for one in updates if one.actor.cosine is not None]
    if cosines:
        metrics["gradient_cosine"] = math.fsum(cosines) / len(cosines)
        metrics["aligned_steps"] = float(sum(one.actor.aligned for one in updates))
    shares = [float(one.share) for one in updates if one.share is not None]
    if shares:
        metrics["sequence_effective_share"] = math.fsum(shares) / len(shares)
    if learner.dual is not None:
        metrics["dual_variable"] = learner.dual.value
    return metrics


class _OfRank(NamedTuple):
    """Result of a data rank for the metrics."""

    records: list[TokenRecord]
    tokens: int
    flops: float | None
    peak_memory: PeakMemory | None


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
    """Known values of the `T` tokens of the batch before its update, on the device."""

    places: SampleTokens
    advantages: Float[Tensor, " T"]
    differ: bool
    """True if the tokens of a sample have separate advantages."""
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
    share: Tensor | None
    """Effective share of the responses' weights; None unless it scales the learning rate."""


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
    """Take one optimizer step of each model. `proximal` is `None` if the parameters are pi_prox."""
    device, ranks = learner.device, learner.ranks
    learner.optimizer.zero_grad()
    records = []
    loss, dual_step = torch.zeros((), device=device), torch.zeros((), device=device)
    placed = minibatch.on(device)
    for packed, known in zip(minibatch.parts, proximal, strict=True):
        work = _work(learner, packed, tokens)
        with timeline.span("forward/backward", tokens=len(packed.tokens), **work):
            share, record, result = _forward_loss(learner, packed, known, tokens, placed)
            # Gradients are averaged over the ranks, and the shares of all ranks are to be summed.
            (share * ranks.data_count).backward()
            loss += share.detach()
            dual_step += getattr(result, "dual_step", 0.0)
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
    scale = _step_scale(learner, records, samples=len(tokens.places.lengths))
    with timeline.span("optimizer"):
        stepped = learner.optimizer.step(loss, None if scale is None else scale.factor)
    if learner.dual is not None:
        learner.dual.add(float(ranks.total(dual_step)))
    critic = None
    if isinstance(learner.critic, Critic) and tokens.targets is not None:
        critic = learner.critic.update(minibatch, tokens.targets, ranks, timeline)
    return _Update(stepped, records, critic, None if scale is None else scale.effective_share)


def _step_scale(
    learner: Learner, records: Sequence[TokenRecord], *, samples: int
) -> StepScale | None:
    """Factor of the learning rate from the weights of the responses in the forward pass, of all
    ranks.
    """
    on_policy_share = learner.settings.actor.lr_ess_share
    if not on_policy_share:
        return None
    sums = torch.zeros(2, samples, dtype=torch.float64, device=learner.device)
    for record in records:
        ids = to_device(record.sequence_ids, learner.device)
        log_ratio = (record.proximal_logprobs - record.behavior_logprobs).double()
        sums[0].index_add_(0, ids, log_ratio)
        sums[1].index_add_(0, ids, torch.ones_like(log_ratio))
    log_weights, tokens = learner.ranks.total(sums)
    return learning_rate_scale(log_weights, tokens > 0, on_policy_share=on_policy_share)


def _forward_loss(
    learner: Learner,
    packed: PackedBatch,
    known_proximal: Tensor | None,
    known: _KnownTokens,
    minibatch: Minibatch,
) -> tuple[Tensor, TokenRecord, HasLoss]:
    """Loss, record and result of a micro-batch; `packed` is on the host, all else on the device."""
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
    facts = _facts(placed, minibatch, len(known.places.lengths))
    if learner.dual is not None:
        facts = replace(facts, dual_variable=learner.dual.value)
    loss, result = learner.loss(tokens, facts)
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
    return loss, record, result


def _work(learner: Learner, packed: PackedBatch, known: _KnownTokens) -> dict[str, float]:
    """Work of a micro-batch as the number of its span, with that of frozen models."""
    frozen = [] if learner.teacher is None else [learner.teacher.policy]
    reference = learner.reference
    if _penalizes(learner) and reference is not None and known.reference_logprobs is None:
        frozen.append(reference.policy)
    of_models = [tflop(learner.policy.flops, [packed], training=True)]
    of_models += [tflop(policy.flops, [packed]) for policy in frozen]
    counted = [work["tflop"] for work in of_models if work]
    return {"tflop": math.fsum(counted)} if counted else {}


def _penalizes(learner: Learner) -> bool:
    """True if the loss needs the log-probs of a reference."""
    return learner.reference is not None and learner.settings.actor.kl_loss_coef != 0


class _FrozenLogprobs(NamedTuple):
    """Log-probs of frozen models for the chosen tokens of a micro-batch, if the loss needs them."""

    reference: Tensor | None
    teacher: Tensor | None


def _frozen_logprobs(
    learner: Learner, placed: PackedBatch, known: _KnownTokens, rows: Tensor
) -> _FrozenLogprobs:
    reference = None
    if learner.reference is not None and _penalizes(learner):
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
    """Add the other terms to the loss; also return fields of tokens to record."""
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


class BatchScores(NamedTuple):
    """Scores of all tokens that the policy chose, sample after sample, on the host.

    0 for samples that are not trained on.
    """

    values: Float[Tensor, " T"] | None = None
    """Before each token; None without a critic."""
    bootstrap_values: Float[Tensor, " N"] | None = None
    """Values beyond the last token of responses that were cut off, 0 for others."""
    reference_logprobs: Float[Tensor, " T"] | None = None
    """Log-probs of the reference; None unless the distance from it is part of the reward."""


def score_batch(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    members: list[int],
    version: Version,
    timeline: Timeline,
) -> BatchScores:
    """Score the members of a batch, without gradient."""
    critic = learner.critic
    reference = None if learner.kl_reward is None else learner.reference
    if critic is None and reference is None:
        return BatchScores()
    bootstraps = critic is not None and critic.bootstraps
    read = [_with_one_more(t) if bootstraps and t.truncated else t for t in trajectories]
    minibatch = make_minibatch(
        read,
        members,
        version=version,
        has_gradient=lambda _: True,
        cost=learner.cost,
        max_tokens=learner.settings.actor.max_tokens_per_mb,
        ranks=learner.ranks,
    )
    tokens, places = sample_tokens(trajectories), sample_tokens(read)
    own = places.first[tokens.ids()] + torch.cat([torch.arange(n) for n in tokens.lengths])
    scores = BatchScores()
    if critic is not None:
        with timeline.span("values", **tflop(critic.flops, minibatch.parts)):
            values = _scored(learner, minibatch, places, critic.values)
        cut = places.lengths > tokens.lengths
        # One place beyond those of the sample; of others, any place.
        beyond = values[(places.first + places.lengths - 1)]
        scores = BatchScores(values[own], torch.where(cut, beyond, 0.0))
    if reference is not None:
        work = tflop(reference.policy.flops, minibatch.parts)
        with timeline.span("reference log-probs", **work):
            logprobs = _scored(learner, minibatch, places, reference.logprobs)
        scores = scores._replace(reference_logprobs=logprobs[own])
    return scores


def _scored(
    learner: Learner,
    minibatch: Minibatch,
    places: SampleTokens,
    model: Callable[[PackedBatch], Tensor],
) -> Float[Tensor, " T"]:
    """Scores of every token, of all ranks, on the host."""
    device = learner.device
    scored = torch.zeros(int(places.lengths.sum()), device=device)
    with torch.no_grad():
        for packed in minibatch.parts:
            rows = to_device(places.rows(packed), device)
            scored[rows] = model(on_device(packed, device)).float()
        for packed in minibatch.idle:
            model(on_device(packed, device))
    return learner.ranks.total(scored).cpu()


def _with_one_more(trajectory: Trajectory) -> Trajectory:
    """Append a placeholder for the next token: the value before it is the one beyond the end."""
    last = trajectory.segments[-1]
    next_token = Segment((trajectory.prompt_tokens[0],), (0.0,), last.version)
    return replace(trajectory, parts=(*trajectory.parts, next_token), turn_returns=())
