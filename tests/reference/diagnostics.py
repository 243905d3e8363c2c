"""Divergences between two policies, from the distributions themselves and from samples."""

from __future__ import annotations

import math


def expectation(p, function):
    return sum(x * function(i) for i, x in enumerate(p))


def divergences(policy, sampler):
    """Of two distributions over the same symbols, by their definitions."""
    p, q = policy, sampler
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(one, other):
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    return {
        "kl_from_sampler": kl(q, p),
        "kl_to_sampler": kl(p, q),
        "chi_square": sum((a - b) ** 2 / b for a, b in zip(p, q, strict=True)),
        "total_variation": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "jensen_shannon": (kl(q, middle) + kl(p, middle)) / 2,
    }


def mean(values):
    return sum(values) / len(values)


def off_policy(proximal, behavior, low, high):
    """Of sequences of log-probs of unmasked tokens; each formula as its docstring has it."""
    tokens = [
        (math.exp(p), math.exp(b))
        for rows in zip(proximal, behavior, strict=True)
        for p, b in zip(*rows, strict=True)
    ]
    rho = [p / b for p, b in tokens]
    pairs = [(p, b) for p, b in zip(proximal, behavior, strict=True) if p]
    products = [math.exp(sum(p) - sum(b)) for p, b in pairs]
    return {
        "tokens": len(rho),
        "mean_weight": mean(rho),
        "share_below": mean([w < low for w in rho]),
        "share_above": mean([w > high for w in rho]),
        "mean_absolute_log_ratio": mean([abs(math.log(w)) for w in rho]),
        "largest_absolute_log_ratio": max(abs(math.log(w)) for w in rho),
        "effective_sample_share": sum(rho) ** 2 / sum(w * w for w in rho) / len(rho),
        "sequence_effective_sample_share": sum(products) ** 2
        / sum(w * w for w in products)
        / len(products),
        "kl_behavior_proximal": [
            mean([-math.log(w) for w in rho]),
            mean([math.log(w) ** 2 / 2 for w in rho]),
            mean([w - 1 - math.log(w) for w in rho]),
        ],
        "kl_proximal_behavior": [
            mean([w * math.log(w) for w in rho]),
            mean([w * math.log(w) ** 2 / 2 for w in rho]),
            mean([w * (1 / w - 1 + math.log(w)) for w in rho]),
        ],
        "chi_square": mean([w * w for w in rho]) - 1,
        "sequence_chi_square": mean([w * w for w in products]) - 1,
        "total_variation": mean([abs(w - 1) for w in rho]) / 2,
        "jensen_shannon": mean(
            [(math.log(2 / (1 + w)) + w * math.log(2 * w / (1 + w))) / 2 for w in rho]
        ),
        "probability_gap": mean([abs(p - b) for p, b in tokens]),
        "multiplicative_error": mean([max(w, 1 / w) for w in rho]),
        "perplexity": mean([math.exp(-mean(p)) for p, _ in pairs]),
        "perplexity_ratio": mean([math.exp(-mean(p)) / math.exp(-mean(b)) for p, b in pairs]),
    }


def histogram(values, low, high, bins):
    """Every edge is compared with, one after the other."""
    counts = [0] * bins
    for value in values:
        index = 0
        while index < bins - 1 and value >= low + (high - low) * (index + 1) / bins:
            index += 1
        counts[index] += 1
    return counts
