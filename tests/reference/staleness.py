"""Statistics of age and of weights, one token at a time."""

from __future__ import annotations

from decimal import Decimal


def mean_by_lag(values, lags, bins):
    """The last bin holds everything from bins - 1 on; a bin without a value gives 0."""
    found = [[] for _ in range(bins)]
    for value, lag in zip(values, lags, strict=True):
        found[min(max(lag, 0), bins - 1)].append(value)
    return [sum(group) / len(group) if group else 0.0 for group in found]


def effective_sample_share(weights):
    """1 / mean((w / mean of w)^2)."""
    mean = sum(weights) / len(weights)
    return 1 / (sum((w / mean) ** 2 for w in weights) / len(weights))


def effective_sample_size_of_logs(logs):
    """With decimals, whose exponents have room for e^2000."""
    weights = [Decimal(log).exp() for log in logs]
    return float(sum(weights) ** 2 / sum(w * w for w in weights))
