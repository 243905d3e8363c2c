"""Likelihood of demonstrations and regression of values: floats and loops."""

from __future__ import annotations


def unmasked(values, mask):
    return [
        value
        for row, chosen in zip(values, mask, strict=True)
        for value, keep in zip(row, chosen, strict=True)
        if keep
    ]


def token_mean(values, mask):
    kept = unmasked(values, mask)
    return sum(kept) / len(kept)


def value_loss(values, old_values, returns, mask, *, clip, error):
    """Mean of the worse of the errors of v and of v held within old +- clip."""
    total, count = 0.0, 0
    for rows in zip(values, old_values, returns, mask, strict=True):
        for v, old, target, keep in zip(*rows, strict=True):
            if keep:
                held = min(max(v, old - clip), old + clip)
                total += max(error(v - target), error(held - target))
                count += 1
    return total / count


def huber(difference, delta):
    """Huber (1964)."""
    if abs(difference) <= delta:
        return difference**2 / 2
    return delta * (abs(difference) - delta / 2)
