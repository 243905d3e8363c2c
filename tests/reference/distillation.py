"""Distillation from sampled tokens and from distributions: floats and loops."""

from __future__ import annotations

import math

from tests.reference.kl import kl


def jensen_shannon(student, teacher, beta):
    """GKD (arXiv:2306.13649): beta KL(T || m) + (1 - beta) KL(S || m)."""
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def lumped(p, tokens):
    """Probabilities of the given tokens, and of all others together."""
    others = sum(x for token, x in enumerate(p) if token not in tokens)
    return [*(p[token] for token in tokens), others]


def renormalized(p, tokens):
    total = sum(p[token] for token in tokens)
    return [p[token] / total for token in tokens]


def advantages(given, old, teacher, mask, *, kappa, centered):
    """A - kappa (l_old - l_T), less the mean distance if centered; 0 where masked."""
    distances = [
        o - t
        for rows in zip(old, teacher, mask, strict=True)
        for o, t, keep in zip(*rows, strict=True)
        if keep
    ]
    baseline = sum(distances) / len(distances) if centered else 0.0
    return [
        [
            a - kappa * (o - t - baseline) if keep else 0.0
            for a, o, t, keep in zip(*rows, strict=True)
        ]
        for rows in zip(given, old, teacher, mask, strict=True)
    ]


def on_policy_loss(theta, old, teacher, mask, *, kappa):
    """Mean over unmasked tokens of kappa pi_theta / pi_old (l_theta - l_T)."""
    terms = [
        kappa * math.exp(x - o) * (x - t)
        for rows in zip(theta, old, teacher, mask, strict=True)
        for x, o, t, keep in zip(*rows, strict=True)
        if keep
    ]
    return sum(terms) / len(terms)
