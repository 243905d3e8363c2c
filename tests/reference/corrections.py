"""Corrections of the behavior weight, one token and one sequence at a time.

A batch is a list of sequences, a sequence a list of the log ratios of its unmasked tokens.
"""

from __future__ import annotations

import math


def token_weights(rows):
    return [[math.exp(x) for x in row] for row in rows]


def truncated(weights, cap, floor=0.0):
    return [[min(max(w, floor), cap) for w in row] for row in weights]


def masked(weights, low, high):
    return [[w if low <= w <= high else 0.0 for w in row] for row in weights]


def product(rows):
    """Every token gets the product over its sequence."""
    return [[math.prod(math.exp(x) for x in row)] * len(row) for row in rows]


def geometric_mean(rows):
    return [
        [math.prod(math.exp(x) for x in row) ** (1 / len(row))] * len(row) if row else []
        for row in rows
    ]


def geometric_band(rows, low, high):
    means = geometric_mean(rows)
    return [
        [math.exp(x) if low <= mean <= high else 0.0 for x, mean in zip(row, same, strict=True)]
        for row, same in zip(rows, means, strict=True)
    ]


def outlier_band(rows, low, high):
    result = []
    for row in rows:
        fine = all(low <= math.exp(x) <= high for x in row)
        result.append([math.exp(x) if fine else 0.0 for x in row])
    return result


def k1(rho):
    return -math.log(rho)


def k2(rho):
    return math.log(rho) ** 2 / 2


def k3(rho):
    """As it is written where the sampler is the first argument: rho - 1 - log rho."""
    return rho - 1 - math.log(rho)


def rejected(rows, estimator, low, high, statistic):
    """statistic is "token", or the reduction of the estimates of a sequence."""
    result = []
    for row in rows:
        weights = [math.exp(x) for x in row]
        values = [estimator(w) for w in weights]
        if statistic != "token" and values:
            together = {
                "sum": sum(values),
                "mean": sum(values) / len(values),
                "max": max(values),
            }[statistic]
            values = [together] * len(values)
        result.append(
            [w if low <= v <= high else 0.0 for w, v in zip(weights, values, strict=True)]
        )
    return result


def normalized(weights):
    every = [w for row in weights for w in row]
    mean = sum(every) / len(every)
    return [[w / mean for w in row] for row in weights]


def second_moment_kept(rows, threshold):
    """M2PO (arXiv:2510.01161): drop the largest, one after the other, until the mean is small."""
    remaining = [(x * x, i, j) for i, row in enumerate(rows) for j, x in enumerate(row)]
    while len(remaining) > 1 and sum(s for s, _, _ in remaining) / len(remaining) >= threshold:
        remaining.remove(max(remaining))
    kept = {(i, j) for _, i, j in remaining}
    return [[(i, j) in kept for j in range(len(row))] for i, row in enumerate(rows)]


def off_policy_sequence_kept(theta, behavior, advantages, threshold):
    """DeepSeek-V3.2 (arXiv:2512.02556): a negative advantage and a mean log ratio over delta."""
    result = []
    for new, old, advantage in zip(theta, behavior, advantages, strict=True):
        far = bool(new) and sum(b - a for a, b in zip(new, old, strict=True)) / len(new) > threshold
        result.append([not (a < 0 and far) for a in advantage])
    return result


def probability_kept(theta, behavior, low, high, level):
    """level: "token", "geometric" or "product" probabilities of the sequence."""
    result = []
    for new, old in zip(theta, behavior, strict=True):
        p, q = [math.exp(x) for x in new], [math.exp(x) for x in old]
        if level != "token" and p:
            power = 1 / len(p) if level == "geometric" else 1
            p = [math.prod(p) ** power] * len(p)
            q = [math.prod(q) ** power] * len(q)
        result.append([low <= a - b <= high for a, b in zip(p, q, strict=True)])
    return result
