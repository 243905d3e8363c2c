"""KL estimators, KL in rewards, and exact divergences with their gradients: floats and loops."""

from __future__ import annotations

import math


def estimate(name, theta, ref):
    """Schulman (2020), with r = pi_ref / pi_theta: -log r, (log r)^2 / 2, r - 1 - log r."""
    log_r = ref - theta
    return {
        "k1": -log_r,
        "k2": log_r**2 / 2,
        "k3": math.exp(log_r) - 1 - log_r,
        "absolute": abs(log_r),
    }[name]


def kl(p, q):
    """sum p log(p / q)."""
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def l1(p, q):
    return sum(abs(x - y) for x, y in zip(p, q, strict=True))


def reverse_kl_gradient(p, ref):
    """Of KL(p || ref) with respect to the logits of p, by hand: p_j (log(p_j / ref_j) - KL)."""
    total = kl(p, ref)
    return [x * (math.log(x / y) - total) for x, y in zip(p, ref, strict=True)]


def forward_kl_gradient(p, ref):
    """Of KL(ref || p) with respect to the logits of p: p_j - ref_j."""
    return [x - y for x, y in zip(p, ref, strict=True)]


def l1_gradient(p, ref):
    """Of sum |p - ref| with respect to the logits of p: p_j (s_j - sum_v p_v s_v), s the sign."""
    signs = [(x > y) - (x < y) for x, y in zip(p, ref, strict=True)]
    mean = sum(x * s for x, s in zip(p, signs, strict=True))
    return [x * (s - mean) for x, s in zip(p, signs, strict=True)]


def shaped_rewards(terminal, theta, ref, mask, *, name, beta, token_rewards=None):
    """r_t = -beta k_t, and R at the last unmasked token: Ziegler et al. (arXiv:1909.08593)."""
    result = []
    for row, reward in enumerate(terminal):
        rewards = [0.0] * len(mask[row])
        chosen = [t for t, keep in enumerate(mask[row]) if keep]
        for t in chosen:
            rewards[t] -= beta * estimate(name, theta[row][t], ref[row][t])
            if token_rewards is not None:
                rewards[t] += token_rewards[row][t]
        if chosen:
            rewards[chosen[-1]] += reward
        result.append(rewards)
    return result


def next_coefficient(beta, measured, target, gain, bound):
    """Ziegler et al. (arXiv:1909.08593), section 2.2."""
    error = max(-bound, min(bound, (measured - target) / target))
    return beta * (1 + gain * error)
