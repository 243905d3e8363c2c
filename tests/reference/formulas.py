"""Slow references in plain Python floats, written from the papers, one loop per sum.

Nested lists in, nested lists out; a batch is a list of sequences, a sequence a list of numbers.
"""

from __future__ import annotations

import math


def softmax(logits):
    peak = max(logits)
    mass = sum(math.exp(z - peak) for z in logits)
    return [math.exp(z - peak) / mass for z in logits]


def logprob_and_entropy(logits, target, temperature):
    """log softmax(z / tau)[y] and -sum p log p of one token."""
    p = softmax([z / temperature for z in logits])
    return math.log(p[target]), -sum(x * math.log(x) for x in p if x > 0)


def clipped_objective(ratio, advantage, low, high):
    """min(r A, clip(r, 1 - low, 1 + high) A): PPO (arXiv:1707.06347), eq. 7."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * advantage, clipped * advantage)


def ppo_loss(logprobs, old, advantages, mask, *, low, high):
    """Minus the mean over all unmasked tokens of the clipped objective."""
    total, count = 0.0, 0
    for rows in zip(logprobs, old, advantages, mask, strict=True):
        for theta, before, advantage, chosen in zip(*rows, strict=True):
            if chosen:
                total += clipped_objective(math.exp(theta - before), advantage, low, high)
                count += 1
    return -total / count


def decoupled_loss(logprobs, proximal, behavior, advantages, mask, *, low, high, bound):
    """AReaL (arXiv:2505.24298), eq. 5; `bound` maps the weight pi_prox / pi_behav."""
    total, count = 0.0, 0
    for rows in zip(logprobs, proximal, behavior, advantages, mask, strict=True):
        for theta, prox, behav, advantage, chosen in zip(*rows, strict=True):
            if chosen:
                objective = clipped_objective(math.exp(theta - prox), advantage, low, high)
                total += bound(math.exp(prox - behav)) * objective
                count += 1
    return -total / count


def sequence_mean(values, mask):
    """Mean over sequences with a token of the mean over their tokens."""
    means = []
    for row, chosen in zip(values, mask, strict=True):
        kept = [value for value, keep in zip(row, chosen, strict=True) if keep]
        if kept:
            means.append(sum(kept) / len(kept))
    return sum(means) / len(means)


def mean(values):
    return sum(values) / len(values)


def std(values, unbiased):
    degrees = len(values) - 1 if unbiased else len(values)
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / degrees) if degrees else 0.0


def group_advantages(rewards, groups, *, leave_one_out, scale, unbiased, eps):
    """(R - b) / (sigma + eps), group by group; scale is "none", "group" or "batch"."""
    centered = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [j for j, other in enumerate(groups) if other == group]
        if leave_one_out:
            members = [j for j in members if j != i] or [i]
        centered.append(reward - mean([rewards[j] for j in members]))
    if scale == "none":
        return centered
    result = []
    for value, group in zip(centered, groups, strict=True):
        members = [r for r, other in zip(rewards, groups, strict=True) if other == group]
        sigma = std(members if scale == "group" else centered, unbiased)
        result.append(value / (sigma + eps))
    return result


def effective_sample_size(weights):
    return sum(weights) ** 2 / sum(w * w for w in weights)


def trajectory_lag(versions, mask, trainer_version):
    """(head, tail, mean) of one trajectory: of its oldest and newest token, and over all."""
    lags = [trainer_version - v for v, keep in zip(versions, mask, strict=True) if keep]
    return max(lags), min(lags), mean(lags)
