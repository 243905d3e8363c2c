"""Anchor ratios and surrogates in plain Python floats: a value and a slope for each token.

The slope is the derivative of the sum of all values by the token's log-prob, as the papers write
it: what they stop the gradient of is a number. A batch is a list of sequences, a sequence a list of
tokens that the policy chose; masked tokens are not in it.
"""

from __future__ import annotations

import math


def clamp(x, low, high):
    return min(max(x, low), high)


# --- ratios


def runs(mask):
    """Lists of neighboring positions that are unmasked, of one sequence."""
    found, current = [], []
    for t, chosen in enumerate(mask):
        if chosen:
            current.append(t)
        elif current:
            found.append(current)
            current = []
    return [*found, current] if current else found


def mean_log_ratio(theta, anchor, members):
    return sum(theta[t] - anchor[t] for t in members) / len(members)


# --- surrogates of one token: (log pi_theta, log pi_anchor, A) -> (value, slope)


def clip(theta, anchor, advantage, *, low, high, dual=math.inf):
    """PPO (arXiv:1707.06347), eq. 7, with the floor of arXiv:1912.09729 where A < 0."""
    ratio = math.exp(theta - anchor)
    plain = ratio * advantage
    value = min(plain, clamp(ratio, 1 - low, 1 + high) * advantage)
    if advantage < 0 and dual < math.inf:
        value = max(value, dual * advantage)
    return value, plain if value == plain else 0.0


def reinforce(theta, anchor, advantage, *, weight):
    """weight(r, A) A log pi, the weight being a number."""
    factor = weight(math.exp(theta - anchor), advantage) * advantage
    return factor * theta, factor


def importance(theta, anchor, advantage):
    ratio = math.exp(theta - anchor)
    return ratio * advantage, ratio * advantage


def sapo(theta, anchor, advantage, *, tau_positive, tau_negative):
    """SAPO (arXiv:2511.20347)."""
    ratio = math.exp(theta - anchor)
    tau = tau_positive if advantage > 0 else tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage


def dppo_tv(theta, anchor, advantage, *, low, high, cap=math.inf):
    """DPPO (arXiv:2602.04879), total variation of two outcomes."""
    shift = math.exp(theta) - math.exp(anchor)
    far = shift > high if advantage > 0 else shift < -low
    factor = 0.0 if far else min(math.exp(theta - anchor), cap) * advantage
    return factor, factor


def dppo_kl(theta, anchor, advantage, *, low, high, cap=math.inf):
    """DPPO (arXiv:2602.04879), KL divergence of two outcomes."""
    p, q = math.exp(theta), math.exp(anchor)
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    far = (p > q and divergence > high) if advantage > 0 else (p < q and divergence > low)
    factor = 0.0 if far else min(p / q, cap) * advantage
    return factor, factor


def prime_rl_ipo(theta, anchor, advantage, *, low, high):
    """A band of probabilities, whatever the sign of A; without the penalty."""
    inside = -low <= math.exp(theta) - math.exp(anchor) <= high
    factor = math.exp(theta - anchor) * advantage if inside else 0.0
    return factor, factor


def with_square(surrogate, strength):
    """Minus strength times the squared log ratio."""

    def penalized(theta, anchor, advantage):
        value, slope = surrogate(theta, anchor, advantage)
        moved = theta - anchor
        return value - strength * moved**2, slope - 2 * strength * moved

    return penalized


# --- surrogates of one sequence: lists of the three -> list of (value, slope)


def ratio_variance(theta, anchor, advantage, *, penalty):
    ratio = math.exp(theta - anchor)
    value = ratio * advantage - penalty * (ratio - 1) ** 2
    return value, ratio * advantage - 2 * penalty * (ratio - 1) * ratio


def by_token(surrogate):
    """A surrogate of one token, of a sequence."""
    return lambda theta, anchor, advantages: [
        surrogate(*token) for token in zip(theta, anchor, advantages, strict=True)
    ]


def gmpo(theta, anchor, advantages, *, low, high):
    """GMPO (arXiv:2507.20673), with a copy of the mean for each token."""
    moved = [p - q for p, q in zip(theta, anchor, strict=True)]
    bounded = [
        min(x, high) if a >= 0 else max(x, -low) for x, a in zip(moved, advantages, strict=True)
    ]
    mean = math.exp(sum(bounded) / len(bounded))
    total = sum(advantages) * mean
    return [
        (a * mean, total / len(moved) if x == b else 0.0)
        for a, x, b in zip(advantages, moved, bounded, strict=True)
    ]


def vespo(theta, anchor, advantages, *, positive, negative):
    """VESPO (arXiv:2602.10693)."""
    product = math.prod(math.exp(p - q) for p, q in zip(theta, anchor, strict=True))
    result = []
    for p, a in zip(theta, advantages, strict=True):
        power, decay = positive if a >= 0 else negative
        factor = product**power * math.exp(decay) * math.exp(-decay * product) * a
        result.append((factor * p, factor))
    return result


def kimi_sequence(theta, anchor, advantages, *, tau):
    """Kimi k1.5 (arXiv:2501.12599), section 2.3.2: tau/2 times the square of the sum."""
    moved = [p - q for p, q in zip(theta, anchor, strict=True)]
    return [
        (a * p - tau / 2 * x * sum(moved), a - tau * sum(moved))
        for a, p, x in zip(advantages, theta, moved, strict=True)
    ]


# --- tokens that Clip-Cov and KL-Cov (arXiv:2505.22617) choose, of one flat list of tokens


def covariance(logprobs, advantages):
    mean_a, mean_l = sum(advantages) / len(advantages), sum(logprobs) / len(logprobs)
    return [(a - mean_a) * (p - mean_l) for a, p in zip(advantages, logprobs, strict=True)]


def how_many(fraction, tokens):
    return max(math.floor(fraction * tokens), 1) if fraction > 0 else 0


def clip_cov_tokens(logprobs, advantages, noise, already_clipped, *, fraction, band):
    """Positions without a gradient: those of the least noise among the eligible."""
    shares = covariance(logprobs, advantages)
    eligible = [
        t for t, c in enumerate(shares) if band[0] <= c <= band[1] and not already_clipped[t]
    ]
    return set(sorted(eligible, key=lambda t: noise[t])[: how_many(fraction, len(shares))])


def kl_cov_tokens(logprobs, advantages, *, fraction):
    """Positions with a penalty: those of the largest covariance."""
    shares = covariance(logprobs, advantages)
    ranked = sorted(range(len(shares)), key=lambda t: -shares[t])
    return set(ranked[: how_many(fraction, len(shares))])
