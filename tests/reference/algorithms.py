"""Slow references of the named losses: plain floats, and gradients derived by hand.

A batch is a list of `Row`s, which hold the unmasked tokens of a sequence. An objective maps a row
to the sum over its tokens, and to the derivative of that sum by each log pi_theta; what is under a
stop-gradient is a constant there. `loss` adds the rows up, each with its share.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Row(NamedTuple):
    """log-probs, advantages, versions and places (in the batch) of the tokens of a sequence."""

    theta: list
    prox: list
    behav: list
    advantages: list
    versions: list
    places: list


def rows_of(*batch):
    """From nested lists: log-probs (theta, proximal, behavior), advantages, mask, versions."""
    rows = []
    place = 0
    for columns in zip(*batch, strict=True):
        kept = []
        for *token, chosen, version in zip(*columns, strict=True):
            if chosen:
                kept.append([*token, version, place])
            place += 1
        rows.append(Row(*map(list, zip(*kept, strict=True))) if kept else Row(*[[]] * 6))
    return rows


# --- shares of a row: the factor on the sum over its tokens


def per_token(_row, rows):
    return 1 / sum(len(other.theta) for other in rows)


def per_sequence(row, rows):
    return 1 / (len(row.theta) * sum(bool(other.theta) for other in rows))


def per_sequence_sum(_row, rows):
    return 1 / sum(bool(other.theta) for other in rows)


def per_fixed_length(length):
    return lambda row, rows: per_sequence_sum(row, rows) / length


def loss(rows, objective, share):
    """The loss, and its derivative by place."""
    total, gradient = 0.0, {}
    for row in rows:
        if not row.theta:
            continue
        value, derivatives = objective(row)
        weight = share(row, rows)
        total -= weight * value
        for place, derivative in zip(row.places, derivatives, strict=True):
            gradient[place] = -weight * derivative
    return total, gradient


# --- objectives of one token: (value, derivative)


def clipped(ratio, advantage, low, high):
    """min(r A, clip(r) A); the derivative of r by log pi is r, that of clip(r) outside is 0."""
    free = ratio * advantage
    bounded = min(max(ratio, 1 - low), 1 + high) * advantage
    return (free, free) if free <= bounded else (bounded, 0.0)


def dual_clipped(ratio, advantage, low, high, c):
    value, derivative = clipped(ratio, advantage, low, high)
    return (c * advantage, 0.0) if advantage < 0 and value < c * advantage else (value, derivative)


def by_token(function, weights=None):
    """A row's objective from that of a token, `function(theta, prox, behav, A)`.

    `weights` maps the row to what each token is multiplied with; None is pi_prox / pi_behav.
    """

    def objective(row):
        factors = (weights or rho)(row)
        tokens = zip(row.theta, row.prox, row.behav, row.advantages, strict=True)
        results = [function(*token) for token in tokens]
        value = sum(w * v for w, (v, _) in zip(factors, results, strict=True))
        return value, [w * d for w, (_, d) in zip(factors, results, strict=True)]

    return objective


def ones(row):
    return [1.0] * len(row.theta)


def rho(row):
    return [math.exp(p - b) for p, b in zip(row.prox, row.behav, strict=True)]


def capped(cap):
    return lambda row: [min(w, cap) for w in rho(row)]


def product_capped(cap):
    return lambda row: [min(math.prod(rho(row)), cap)] * len(row.theta)


def banded(low, high):
    return lambda row: [w if low <= w <= high else 0.0 for w in rho(row)]


def product_banded(low, high):
    def weights(row):
        product = math.prod(rho(row))
        return [product if low <= product <= high else 0.0] * len(row.theta)

    return weights


def geometric_banded(low, high):
    def weights(row):
        mean = math.prod(rho(row)) ** (1 / len(row.theta))
        return [w if low <= mean <= high else 0.0 for w in rho(row)]

    return weights


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def near_by_binary_kl(delta, cap=math.inf):
    def weights(row):
        pairs = [(math.exp(p), math.exp(b)) for p, b in zip(row.prox, row.behav, strict=True)]
        near = [max(binary_kl(p, q), binary_kl(q, p)) <= delta for p, q in pairs]
        return [min(w, cap) if ok else 0.0 for w, ok in zip(rho(row), near, strict=True)]

    return weights


def near_by_largest_kl(delta, cap=math.inf):
    def weights(row):
        near = max((w - 1 - math.log(w) for w in rho(row)), default=0.0) <= delta
        return [min(w, cap) if near else 0.0 for w in rho(row)]

    return weights


def ppo_clip(low, high, weights=None):
    return by_token(lambda t, p, _, a: clipped(math.exp(t - p), a, low, high), weights)


def dual_clip(low, high, c):
    return by_token(lambda t, p, _, a: dual_clipped(math.exp(t - p), a, low, high, c))


def weighted(weight, weights=None):
    """sg(weight) A log pi."""

    def token(theta, prox, behav, advantage):
        factor = weight(theta, prox, behav, advantage) * advantage
        return factor * theta, factor

    return by_token(token, weights)


def reinforce():
    return weighted(lambda *_: 1.0)


def cispo(low, high):
    return weighted(lambda t, p, _b, _a: min(max(math.exp(t - p), 1 - low), 1 + high))


def truncated_reinforce(cap):
    return weighted(lambda t, p, _b, _a: min(math.exp(t - p), cap))


def aipo(cap):
    return weighted(lambda t, _p, b, _a: min(math.exp(t - b), cap), ones)


def importance(theta, _prox, behav, advantage):
    value = math.exp(theta - behav) * advantage
    return value, value


def importance_sampling():
    return by_token(importance, ones)


def topr(cap):
    def objective(row):
        ratio = math.exp(sum(t - b for t, b in zip(row.theta, row.behav, strict=True)))
        factors = [a * (1.0 if a >= 0 else min(ratio, cap)) for a in row.advantages]
        return sum(f * t for f, t in zip(factors, row.theta, strict=True)), factors

    return objective


def dppo_tv(delta, penalty=0.0):
    def token(theta, _, behav, advantage):
        shift = math.exp(theta) - math.exp(behav)
        kept = shift <= delta if advantage > 0 else shift >= -delta
        value = math.exp(theta - behav) * advantage * kept
        distance = theta - behav
        return value - penalty * distance**2, value - 2 * penalty * distance

    return by_token(token, ones)


def dppo_kl(delta):
    def token(theta, _, behav, advantage):
        p, q = math.exp(theta), math.exp(behav)
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        dropped = divergence > delta and (p - q) * advantage > 0
        value = 0.0 if dropped else p / q * advantage
        return value, value

    return by_token(token, ones)


def dro(beta):
    def token(theta, prox, _, advantage):
        distance = theta - prox
        return advantage * theta - beta / 2 * distance**2, advantage - beta * distance

    return by_token(token)


def kimi(tau):
    """A log pi(y) - tau/2 log r(y)^2, each token's share of both weighted by its rho."""

    def objective(row):
        distances = [t - p for t, p in zip(row.theta, row.prox, strict=True)]
        total, weights = sum(distances), rho(row)
        pulled = sum(w * d for w, d in zip(weights, distances, strict=True))
        reward = sum(w * a * t for w, a, t in zip(weights, row.advantages, row.theta, strict=True))
        derivatives = [
            w * a - tau / 2 * (w * total + pulled)
            for w, a in zip(weights, row.advantages, strict=True)
        ]
        return reward - tau / 2 * pulled * total, derivatives

    return objective


# --- objectives of a sequence


def mean_ratio(row):
    total = sum(t - p for t, p in zip(row.theta, row.prox, strict=True))
    return math.exp(total / len(row.theta))


def gspo(low, high, token_gradient):
    """The clip of s_i; its gradient goes through the mean, or stays with the token."""

    def objective(row):
        results = [clipped(mean_ratio(row), a, low, high) for a in row.advantages]
        weights = rho(row)
        value = sum(w * v for w, (v, _) in zip(weights, results, strict=True))
        own = [w * d for w, (_, d) in zip(weights, results, strict=True)]
        return value, own if token_gradient else [sum(own) / len(own)] * len(own)

    return objective


def gmpo(low, high):
    def objective(row):
        bounded, free = [], []
        for theta, prox, advantage in zip(row.theta, row.prox, row.advantages, strict=True):
            distance = theta - prox
            bounded.append(min(distance, high) if advantage >= 0 else max(distance, -low))
            free.append(bounded[-1] == distance)
        ratio = math.exp(sum(bounded) / len(bounded))
        total = sum(w * a for w, a in zip(rho(row), row.advantages, strict=True)) * ratio
        return total, [total / len(free) * is_free for is_free in free]

    return objective


def sapo(tau_positive, tau_negative):
    def token(theta, prox, _, advantage):
        ratio = math.exp(theta - prox)
        tau = tau_positive if advantage > 0 else tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage

    return by_token(token)


def vespo(positive, negative):
    def objective(row):
        product = math.prod(math.exp(t - b) for t, b in zip(row.theta, row.behav, strict=True))
        factors = []
        for advantage in row.advantages:
            k, decay = positive if advantage >= 0 else negative
            factors.append(product**k * math.exp(decay * (1 - product)) * advantage)
        return sum(f * t for f, t in zip(factors, row.theta, strict=True)), factors

    return objective


# --- what needs the whole batch, or versions


def m2po(rows, threshold):
    """Drop the largest squared log ratios until the mean of the rest is below the threshold."""
    moments = sorted(
        ((p - b) ** 2, place)
        for row in rows
        for p, b, place in zip(row.prox, row.behav, row.places, strict=True)
    )
    while len(moments) > 1 and sum(m for m, _ in moments) / len(moments) >= threshold:
        moments.pop()
    kept = {place for _, place in moments}
    return by_token(importance, lambda row: [float(place in kept) for place in row.places])


def a3po(trainer_version, low, high, share_of_theta):
    """Decoupled PPO with the proximal log-probs put between behavior and theta."""

    def objective(row):
        prox = [
            b + share_of_theta(v, trainer_version) * (t - b)
            for t, b, v in zip(row.theta, row.behav, row.versions, strict=True)
        ]
        return ppo_clip(low, high)(row._replace(prox=prox))

    return objective


def covariances(rows):
    """(A - mean A)(log pi - mean log pi) by place."""
    tokens = [
        token for row in rows for token in zip(row.advantages, row.theta, row.places, strict=True)
    ]
    mean_a = sum(a for a, _, _ in tokens) / len(tokens)
    mean_l = sum(t for _, t, _ in tokens) / len(tokens)
    return {place: (a - mean_a) * (t - mean_l) for a, t, place in tokens}


def clip_cov(rows, *, low, high, fraction, band, noise):
    """The clipped objective without the tokens of a band whose noise is smallest."""
    spared = {
        place
        for row in rows
        for t, p, a, place in zip(row.theta, row.prox, row.advantages, row.places, strict=True)
        if a and clipped(math.exp(t - p), a, low, high)[1] == 0
    }
    eligible = [place for place, c in covariances(rows).items() if band[0] <= c <= band[1]]
    eligible = sorted((noise[place], place) for place in eligible if place not in spared)
    count = max(int(fraction * sum(len(row.theta) for row in rows)), 1 if fraction else 0)
    chosen = {place for _, place in eligible[:count]}

    def weights(row):
        return [w * (place not in chosen) for w, place in zip(rho(row), row.places, strict=True)]

    return ppo_clip(low, high, weights)


def kl_cov(rows, fraction, penalty):
    """r A, minus |log r| on the tokens of highest covariance."""
    ordered = sorted(covariances(rows).items(), key=lambda item: -item[1])
    count = max(int(fraction * len(ordered)), 1 if fraction else 0)
    chosen = {place for place, _ in ordered[:count]}

    def objective(row):
        value, derivatives = by_token(
            lambda t, p, _, a: (math.exp(t - p) * a, math.exp(t - p) * a)
        )(row)
        for i, (t, p, w) in enumerate(zip(row.theta, row.prox, rho(row), strict=True)):
            if row.places[i] in chosen:
                value -= penalty * w * abs(t - p)
                derivatives[i] -= penalty * w * ((t > p) - (t < p))
        return value, derivatives

    return objective


# --- losses against stale data: the ratio is to the sampler


def quantile(values, share):
    """Linear between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def sat(rows, *, low, high, share, exponent):
    """The outward end moves in beyond the quantile of |log r| over all rows."""
    moved = [abs(t - b) for row in rows for t, b in zip(row.theta, row.behav, strict=True)]
    edge = quantile(moved, share)

    def token(theta, _, behav, advantage):
        d = theta - behav
        kernel = 1 / (1 + (abs(d) / edge) ** exponent) if abs(d) > edge > 0 else 1.0
        below, above = (low, high * kernel) if d > 0 else (low * kernel, high)
        return clipped(math.exp(d), advantage, below, above)

    return by_token(token, ones)


def mu_grpo(low, high, threshold):
    def weights(row):
        factors, vetoed = [], False
        for theta, behav, advantage in zip(row.theta, row.behav, row.advantages, strict=True):
            factors.append(0.0 if vetoed and advantage < 0 else 1.0)
            vetoed = vetoed or math.exp(theta - behav) > threshold
        return factors

    def token(theta, _, behav, advantage):
        return clipped(math.exp(theta - behav), advantage, low, high)

    return by_token(token, weights)


def r2vpo(multiplier):
    def token(theta, _, behav, advantage):
        ratio = math.exp(theta - behav)
        value = ratio * advantage - multiplier * (ratio - 1) ** 2
        return value, ratio * advantage - 2 * multiplier * (ratio - 1) * ratio

    return by_token(token, ones)
