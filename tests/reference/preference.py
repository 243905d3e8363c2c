"""Losses of pairs of responses: floats and loops."""

from __future__ import annotations

import math


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def sequence_sums(logprobs, mask):
    return [
        sum(x for x, keep in zip(row, chosen, strict=True) if keep)
        for row, chosen in zip(logprobs, mask, strict=True)
    ]


def preferences(chosen, rejected, reference_chosen, reference_rejected):
    """How much more than its reference the policy prefers the chosen response."""
    return [
        math.log(math.exp(c - r) / math.exp(fc - fr))
        for c, r, fc, fr in zip(chosen, rejected, reference_chosen, reference_rejected, strict=True)
    ]


def dpo_loss(*logprobs, beta, smoothing):
    """DPO (arXiv:2305.18290), eq. 7, with a share of labels the wrong way round."""
    losses = [
        -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)
        for h in preferences(*logprobs)
    ]
    return sum(losses) / len(losses)


def ipo_loss(*logprobs, tau):
    """IPO (arXiv:2310.12036), eq. 17."""
    losses = [(h - 1 / (2 * tau)) ** 2 for h in preferences(*logprobs)]
    return sum(losses) / len(losses)


def bradley_terry_loss(chosen, rejected, margins, center=0.0):
    """Minus log of the probability that the chosen response, its score less the margin, wins."""
    losses = []
    for c, r, m in zip(chosen, rejected, margins, strict=True):
        wins = math.exp(c - m) / (math.exp(c - m) + math.exp(r))
        losses.append(-math.log(wins) + center * (c + r) ** 2)
    return sum(losses) / len(losses)
