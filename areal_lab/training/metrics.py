"""Metrics of a training step: rewards, ratios, lags; each is a float under a plain name.

A metric without tokens is omitted rather than NaN: a batch in which every token lags has no
`sampler_gap_mean`, and its `sampler_gap_tokens` is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from areal_lab.control.events import GroupId, Version
from areal_lab.data.batch import PackedBatch
from areal_lab.data.trajectory import Trajectory
from areal_lab.functional.losses.policy import HasLoss
from areal_lab.functional.segments import Segments
from areal_lab.functional.staleness.control import weight_deviation
from areal_lab.functional.staleness.lag import (
    effective_sample_size,
    effective_sample_size_of_logs,
    token_lag,
    trajectory_lag,
)
from areal_lab.runlog.token_columns import TokenFields
from areal_lab.training.forward import Predictions


class TokenRecord(NamedTuple):
    """Detached per-token values of one micro-batch."""

    sequence_ids: Int[Tensor, " R"]
    """Index into the trajectories of the batch; ascending."""
    entropy: Float[Tensor, " R"]
    logprobs: Float[Tensor, " R"]
    proximal_logprobs: Float[Tensor, " R"]
    behavior_logprobs: Float[Tensor, " R"]
    versions: Int[Tensor, " R"]
    diagnostics: dict[str, Tensor]
    """Fields of the loss's result for each token, by name: floats or flags."""


def token_record(
    packed: PackedBatch, predicted: Predictions, proximal: Tensor, result: HasLoss
) -> TokenRecord:
    """Extract from one micro-batch what the metrics of the step need; computed values stay on
    their device.
    """
    fields: dict[str, object] = getattr(result, "_asdict", dict)()
    return TokenRecord(
        sequence_ids=packed.sequence_ids,
        entropy=predicted.entropy.detach(),
        logprobs=predicted.logprobs.detach(),
        proximal_logprobs=proximal,
        behavior_logprobs=packed.behavior_logprobs,
        versions=packed.versions,
        diagnostics={
            name: _floats_or_flags(value.detach())
            for name, value in fields.items()
            if isinstance(value, Tensor) and value.shape == proximal.shape
        },
    )


def on_host(records: Sequence[TokenRecord]) -> list[TokenRecord]:
    """The records on the host; the host waits for the device once for all of them."""
    computed = [
        value
        for r in records
        for value in (r.entropy, r.logprobs, r.proximal_logprobs, *r.diagnostics.values())
    ]
    if all(value.device.type == "cpu" for value in computed):
        return list(records)
    copied = torch.cat([value.float() for value in computed]).cpu()
    pieces = iter(copied.split([len(value) for value in computed]))
    return [
        record._replace(
            entropy=next(pieces),
            logprobs=next(pieces),
            proximal_logprobs=next(pieces),
            # `to` turns the flags, which were copied as 0 and 1, into flags again.
            diagnostics={k: next(pieces).to(v.dtype) for k, v in record.diagnostics.items()},
        )
        for record in records
    ]


def _floats_or_flags(values: Tensor) -> Tensor:
    return values if values.dtype == torch.bool else values.float()


def token_fields(advantages: Float[Tensor, " N"], records: Sequence[TokenRecord]) -> TokenFields:
    """The records of all micro-batches as columns, in the order of the batch."""
    ids = _joined([record.sequence_ids for record in records])
    order = np.argsort(ids, kind="stable")
    samples, tokens = np.unique(ids, return_counts=True)

    def column(values: Callable[[TokenRecord], Tensor]) -> NDArray[Any]:
        return _joined([values(record) for record in records])[order]

    return TokenFields(
        samples=samples,
        tokens=tokens,
        advantages=advantages.cpu().numpy(),
        proximal_minus_behavior=column(lambda r: r.proximal_logprobs - r.behavior_logprobs),
        logprob_minus_proximal=column(lambda r: r.logprobs - r.proximal_logprobs),
        entropy=column(lambda r: r.entropy),
        loss={
            name: _joined([record.diagnostics[name] for record in records])[order]
            for name in (records[0].diagnostics if records else ())
        },
    )


def _joined(parts: Sequence[Tensor]) -> NDArray[Any]:
    return torch.cat(list(parts)).numpy() if parts else np.zeros(0, np.float32)


def step_metrics(
    trajectories: Sequence[Trajectory],
    advantages: Float[Tensor, " N"],
    records: Sequence[TokenRecord],
    version: Version,
) -> dict[str, float]:
    """Metrics of one batch.

    Rewards and lengths are over all samples, lags over all trajectories. Entropy, ratios and
    weights are over the tokens in the forward pass, which for PPO are those with a nonzero
    advantage.
    """
    samples = [t for t in trajectories if t.row == 0]
    of_sample: Counter[tuple[GroupId, int]] = Counter()
    for one in trajectories:
        of_sample[one.group, one.sample] += one.generated_tokens
    rewards = torch.tensor([t.reward for t in samples], dtype=torch.float64)
    lengths = torch.tensor(list(of_sample.values()), dtype=torch.float64)
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "trained_groups": float(len({t.group for t in trajectories})),
        "trained_samples": float(len(samples)),
        "trained_tokens": float(lengths.sum()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_share": sum(t.truncated for t in samples) / len(samples),
        "zero_advantage_samples": float((advantages == 0).sum()),
        "sampler_gap_tokens": 0.0,
    }
    turns = [len(trajectory.turns) for trajectory in trajectories]
    if max(turns) > 1 or len(samples) < len(trajectories):
        metrics |= {
            "turns_mean": sum(turns) / len(samples),
            "turns_max": float(max(turns)),
            "rows_per_sample": len(trajectories) / len(samples),
        }
    metrics |= _components(samples)
    return metrics | _lags(trajectories, version) | _token_metrics(records, version)


def _components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named component of the rewards, over the samples that have it, unweighted."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            values.setdefault(name, []).append(value)
    return {
        f"reward_{name}_mean": math.fsum(of_name) / len(of_name)
        for name, of_name in sorted(values.items())
    }


def _lags(trajectories: Sequence[Trajectory], version: Version) -> dict[str, float]:
    versions: list[int] = []
    ids: list[int] = []
    for index, trajectory in enumerate(trajectories):
        for segment in trajectory.segments:
            versions.extend([segment.version] * len(segment.tokens))
            ids.extend([index] * len(segment.tokens))
    mask = torch.ones(len(ids), dtype=torch.bool)
    lag = token_lag(torch.tensor(versions), mask, version)
    members = Segments(torch.tensor(ids), len(trajectories))
    head, tail, _, _ = trajectory_lag(lag, mask, sequences=members)
    metrics = {}
    for name, values in (("head", head), ("tail", tail), ("token", lag)):
        metrics[f"lag_{name}_mean"] = float(values.double().mean())
        metrics[f"lag_{name}_max"] = float(values.max())
    return metrics


def _token_metrics(records: Sequence[TokenRecord], version: Version) -> dict[str, float]:
    if not records:
        return {}
    metrics = {"entropy": float(torch.cat([r.entropy for r in records]).double().mean())}
    fresh = torch.cat([r.versions for r in records]) == version
    gap = torch.cat([(r.proximal_logprobs - r.behavior_logprobs).abs() for r in records])[fresh]
    if len(gap):
        metrics["sampler_gap_mean"] = float(gap.double().mean())
        metrics["sampler_gap_max"] = float(gap.max())
        metrics["sampler_gap_tokens"] = float(len(gap))
    ratio = torch.cat([r.proximal_logprobs - r.behavior_logprobs for r in records])
    everyone = torch.ones_like(ratio, dtype=torch.bool)
    metrics["weight_deviation"] = float(weight_deviation(ratio, everyone))
    effective = effective_sample_size_of_logs(ratio, everyone)
    metrics["effective_share"] = float(effective) / max(1, len(ratio))
    moved = torch.cat([(r.logprobs - r.behavior_logprobs).abs() for r in records])
    metrics |= {"drift": float(moved.double().mean()), "drift_max": float(moved.max())}
    for name in records[0].diagnostics:
        values = torch.cat([r.diagnostics[name] for r in records])
        # The conventional name of the share of clipped tokens.
        label = "clip_fraction" if name == "clipped" else f"{name}_mean"
        metrics[label] = float(values.double().mean())
        if name == "behavior_weight":
            everything = torch.ones_like(values, dtype=torch.bool)
            metrics["behavior_weight_max"] = float(values.max())
            metrics["dropped_fraction"] = float((values == 0).double().mean())
            metrics["effective_sample_size"] = float(effective_sample_size(values, everything))
    return metrics
