"""Slow references of proximal policies and entropy terms, in plain floats."""

from __future__ import annotations

import math


def share_of_theta(version, trainer_version):
    """Where v - 1 lies between v_mu and v, with the exceptions of the paper."""
    if version < 0 or version == trainer_version:
        return 0.0
    share = (trainer_version - 1 - version) / (trainer_version - version)
    return min(max(share, 0.0), 1.0) if version < trainer_version else 0.0


def log_linear(theta, behavior, version, trainer_version):
    alpha = share_of_theta(version, trainer_version)
    return behavior + alpha * (theta - behavior)


def linear(theta, behavior, version, trainer_version):
    alpha = share_of_theta(version, trainer_version)
    return math.log(alpha * math.exp(theta) + (1 - alpha) * math.exp(behavior))


def weighted_mean(history, decay):
    """sum_i decay^(n - i) x_i / sum_i decay^(n - i)."""
    weights = [decay**age for age in range(len(history))][::-1]
    return sum(w * x for w, x in zip(weights, history, strict=True)) / sum(weights)


def top_entropy(entropies, fraction):
    """Which entropies are at least the (1 - fraction) quantile, linear between order statistics."""
    ordered = sorted(entropies)
    position = (1 - fraction) * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    quantile = ordered[below] + (position - below) * (ordered[above] - ordered[below])
    return [entropy >= quantile for entropy in entropies]
