"""Slow references of reward shaping and of filters: loops over samples, plain floats."""

from __future__ import annotations

import math

from tests.reference.advantages import mean, members, std


def shape_reward(reward, bias, scale, clip):
    return min(max(scale * (reward + bias), -clip), clip)


def overlong_penalty(length, max_length, buffer):
    """DAPO (arXiv:2503.14476), eq. 13."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer
    return -1.0


def running_normalization(batches, *, eps):
    """Each batch by mean and unbiased deviation of all rewards up to its own."""
    seen, result = [], []
    for batch in batches:
        seen += batch
        result.append([(r - mean(seen)) / (std(seen) + eps) for r in batch])
    return result


def zero_variance(rewards, groups, tolerance):
    result = []
    for i in range(len(rewards)):
        group = [rewards[j] for j in members(groups, i)]
        result.append(max(group) - min(group) <= tolerance)
    return result


def in_band(rewards, groups, low, high):
    return [
        low < math.fsum(rewards[j] for j in members(groups, i)) / len(members(groups, i)) < high
        for i in range(len(rewards))
    ]


def counts(length, finished, max_length):
    """Whether a response counts under overlong filtering."""
    return length < max_length or finished
