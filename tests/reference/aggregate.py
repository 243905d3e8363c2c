"""Slow references of the aggregates: lists of sequences, one loop per sum.

`values` and `mask` are lists of rows; `groups` gives the prompt of each row.
"""

from __future__ import annotations


def kept(values, mask):
    """The unmasked values of each row."""
    return [
        [value for value, keep in zip(row, chosen, strict=True) if keep]
        for row, chosen in zip(values, mask, strict=True)
    ]


def token_sum(values, mask):
    return sum(value for row in kept(values, mask) for value in row)


def token_mean(values, mask, count=None):
    tokens = sum(len(row) for row in kept(values, mask))
    return token_sum(values, mask) / (count or max(tokens, 1))


def sequence_mean(values, mask, count=None):
    rows = [row for row in kept(values, mask) if row]
    return sum(sum(row) / len(row) for row in rows) / (count or max(len(rows), 1))


def sequence_sum_mean(values, mask, count=None):
    rows = [row for row in kept(values, mask) if row]
    return sum(sum(row) for row in rows) / (count or max(len(rows), 1))


def fixed_length_mean(values, mask, max_tokens, count=None):
    rows = [row for row in kept(values, mask) if row]
    return sum(sum(row) / max_tokens for row in rows) / (count or max(len(rows), 1))


def prompt_mean(values, mask, groups, count=None):
    prompts = {}
    for row, group in zip(kept(values, mask), groups, strict=True):
        prompts.setdefault(group, []).extend(row)
    means = [sum(tokens) / len(tokens) for tokens in prompts.values() if tokens]
    return sum(means) / (count or max(len(means), 1))
