"""Slow references for recurrences, returns and advantages: floats, loops, one sequence at a time.

Lists in, lists out. Where a function takes a mask, holes are dealt with by hand as its text says.
"""

from __future__ import annotations

import math


def linear_recurrence(factors, inputs, mask=None, *, beyond=0.0, reverse=True):
    """y = a y + b at each unmasked step; y is left alone at masked ones."""
    steps = range(len(inputs))
    y, out = beyond, [0.0] * len(inputs)
    for t in reversed(steps) if reverse else steps:
        if mask is None or mask[t]:
            y = factors[t] * y + inputs[t]
        out[t] = y
    return out


def episodes(mask, restart):
    """Positions of the unmasked tokens; with `restart` one list for each run of neighbors."""
    positions = [t for t, keep in enumerate(mask) if keep]
    if not restart:
        return [positions]
    runs = []
    for t in positions:
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def by_episode(function, columns, mask, bootstrap, restart):
    """Apply `function(columns of an episode, value beyond it)`; 0 at masked tokens.

    Only the last episode has something beyond it.
    """
    runs = episodes(mask, restart)
    out = [0.0] * len(mask)
    for number, run in enumerate(runs):
        beyond = bootstrap if number == len(runs) - 1 else 0.0
        results = function([[column[t] for t in run] for column in columns], beyond)
        for t, result in zip(run, results, strict=True):
            out[t] = result
    return out


def discounted_returns(rewards, mask, *, gammas, bootstrap=0.0, restart=False):
    """The sum itself: sum over s >= t of (product of gammas from t to s - 1) r_s."""

    def sums(columns, beyond):
        r, g = columns
        out = []
        for t in range(len(r)):
            weight, total = 1.0, 0.0
            for s in range(t, len(r)):
                total += weight * r[s]
                weight *= g[s]
            out.append(total + weight * beyond)
        return out

    return by_episode(sums, [rewards, gammas], mask, bootstrap, restart)


def gae(rewards, values, mask, *, gammas, lambdas, bootstrap=0.0, restart=False):
    """Arithmetic of arXiv:1506.02438, section 3: sum of (gamma lambda)^l delta_{t + l}."""

    def sums(columns, beyond):
        r, v, g, lam = columns
        v = [*v, beyond]
        out = []
        for t in range(len(r)):
            weight, total = 1.0, 0.0
            for s in range(t, len(r)):
                total += weight * (r[s] + g[s] * v[s + 1] - v[s])
                if s + 1 < len(r):
                    weight *= g[s] * lam[s + 1]
            out.append(total)
        return out

    columns = [rewards, values, gammas, lambdas]
    return by_episode(sums, columns, mask, bootstrap, restart)


def n_step_mixture(rewards, values, *, gamma, lam, bootstrap):
    """(1 - lambda) sum of lambda^(n-1) times the n-step return, the rest to the full return."""
    length = len(rewards)
    v = [*values, bootstrap]

    def n_step(t, n):
        return sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * v[t + n]

    out = []
    for t in range(length):
        left = length - t
        mixed = sum((1 - lam) * lam ** (n - 1) * n_step(t, n) for n in range(1, left))
        out.append(mixed + lam ** (left - 1) * n_step(t, left))
    return out


def vtrace(
    rewards, values, log_ratio, mask, *, gammas, lam, rho_cap, trace_cap, advantage_cap,
    bootstrap=0.0, restart=False, alpha=1.0,
):  # fmt: skip
    """(advantages, targets) by the sum of arXiv:1802.01561, eq. 1, with lambda of remark 2.

    With alpha below 1 caps leak, as in arXiv:2002.12928.
    """

    def capped(ratio, cap):
        return alpha * min(cap, ratio) + (1 - alpha) * ratio

    def both(columns, beyond):
        r, v, x, g = columns
        v = [*v, beyond]
        ratio = [math.exp(each) for each in x]
        targets = []
        for s in range(len(r)):
            weight, total = 1.0, v[s]
            for t in range(s, len(r)):
                total += weight * capped(ratio[t], rho_cap) * (r[t] + g[t] * v[t + 1] - v[t])
                weight *= g[t] * lam * capped(ratio[t], trace_cap)
            targets.append(total)
        targets.append(beyond)
        advantages = []
        for s in range(len(r)):
            beyond_s = lam * targets[s + 1] + (1 - lam) * v[s + 1]
            weight = capped(ratio[s], advantage_cap)
            advantages.append(weight * (r[s] + g[s] * beyond_s - v[s]))
        return list(zip(advantages, targets[:-1], strict=True))

    columns = [rewards, values, log_ratio, gammas]
    pairs = by_episode(both, columns, mask, bootstrap, restart)
    pairs = [pair or (0.0, 0.0) for pair in pairs]
    return [a for a, _ in pairs], [r for _, r in pairs]


def terminal_rewards(reward, mask):
    """The reward at the last unmasked token."""
    positions = [t for t, keep in enumerate(mask) if keep]
    return [reward if positions and t == positions[-1] else 0.0 for t in range(len(mask))]


def turn_returns(rewards, mask, turns, *, gamma):
    """Total of each turn that has an unmasked token, discounted from turn to turn."""
    totals = {}
    for reward, keep, turn in zip(rewards, mask, turns, strict=True):
        if keep:
            totals[turn] = totals.get(turn, 0.0) + reward
    later, returns = 0.0, {}
    for turn in reversed(totals):
        later = returns[turn] = totals[turn] + gamma * later
    return [returns[turn] if keep else 0.0 for keep, turn in zip(mask, turns, strict=True)]


def optimal_token_baseline(rewards, logprobs, squared, mask, groups, *, gamma, weights=None):
    """Lists of sequences: (advantages, returns) of arXiv:2602.07078."""
    returns, energies = [], []
    for i, row in enumerate(rewards):
        returns.append(discounted_returns(row, mask[i], gammas=[gamma] * len(row)))
        total, energy = 0.0, []
        for t, keep in enumerate(mask[i]):
            if keep:
                total += 1 - 2 * math.exp(logprobs[i][t]) + squared[i][t]
            rho = 1.0 if weights is None else weights[i][t]
            energy.append(total * rho**2 if keep else 0.0)
        energies.append(energy)
    cells = {}
    for i, row in enumerate(mask):
        number = 0
        for t, keep in enumerate(row):
            if keep:
                cells.setdefault((groups[i], number), []).append((i, t))
                number += 1
    advantages = [[0.0] * len(row) for row in rewards]
    for members in cells.values():
        mass = sum(energies[i][t] for i, t in members)
        baseline = sum(energies[i][t] * returns[i][t] for i, t in members) / mass
        for i, t in members:
            advantages[i][t] = returns[i][t] - baseline
    return advantages, returns
