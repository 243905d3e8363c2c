"""Slow references of sample-level advantages, written from the papers, one loop per sum.

Lists of floats in and out; `members(groups, i)` are the indices that share the group of sample i.
"""

from __future__ import annotations

import math


def members(groups, i):
    return [j for j, group in enumerate(groups) if group == groups[i]]


def mean(values):
    return sum(values) / len(values)


def std(values, unbiased=True):
    degrees = len(values) - 1 if unbiased else len(values)
    if degrees == 0:
        return 0.0
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / degrees)


def over(numerator, scale, eps):
    """0 / 0 is 0: nothing to compare."""
    return numerator / (scale + eps) if numerator else 0.0


def grpo(rewards, groups, eps):
    result = []
    for i, reward in enumerate(rewards):
        group = [rewards[j] for j in members(groups, i)]
        result.append(over(reward - mean(group), std(group), eps))
    return result


def dr_grpo(rewards, groups):
    return [
        reward - mean([rewards[j] for j in members(groups, i)]) for i, reward in enumerate(rewards)
    ]


def rloo(rewards, groups):
    result = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in members(groups, i) if j != i]
        result.append(reward - mean(others) if others else 0.0)
    return result


def lite_ppo(rewards, groups, eps):
    return [over(centered, std(rewards), eps) for centered in dr_grpo(rewards, groups)]


def leave_one_out_both(rewards, groups, eps, unbiased):
    """Mean and standard deviation of the others, unscaled where the others are all equal."""
    result = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in members(groups, i) if j != i]
        if not others:
            result.append(0.0)
            continue
        scale = std(others, unbiased) if len(set(others)) > 1 else 1.0
        result.append((reward - mean(others)) / (scale + eps))
    return result


def opo(rewards, groups, lengths):
    """arXiv:2505.23585: the baseline weighs rewards by length."""
    result = []
    for i, reward in enumerate(rewards):
        group = members(groups, i)
        tokens = sum(lengths[j] for j in group)
        result.append(reward - sum(lengths[j] * rewards[j] for j in group) / tokens)
    return result


def gpg(rewards, groups):
    """arXiv:2504.02546 with F = 1: alpha = B / (B - M), M samples without a gradient."""
    centered = dr_grpo(rewards, groups)
    silent = 0
    for i in range(len(rewards)):
        group = [rewards[j] for j in members(groups, i)]
        silent += max(group) == min(group)
    if silent == len(rewards):
        return [0.0] * len(rewards)
    return [len(rewards) / (len(rewards) - silent) * value for value in centered]


def max_rl(rewards, groups, eps):
    result = []
    for i, reward in enumerate(rewards):
        average = mean([rewards[j] for j in members(groups, i)])
        result.append(over(reward - average, average, eps))
    return result


def pass_at_k(rewards, groups, eps):
    """arXiv:2503.19595: best of all minus best of the others, over the standard deviation."""
    result = []
    for i in range(len(rewards)):
        group = members(groups, i)
        others = [rewards[j] for j in group if j != i]
        everyone = [rewards[j] for j in group]
        gain = max(everyone) - max(others) if others else 0.0
        result.append(over(gain, std(everyone), eps))
    return result


def whiten(values, *, unbiased, eps):
    """Of a flat list of the unmasked values."""
    if not values:
        return []
    variance = std(values, unbiased) ** 2
    return [(x - mean(values)) / math.sqrt(variance + eps) for x in values]


def reinforce_plus_plus_baseline(rewards, groups, mask, *, unbiased, eps):
    """Rows of tokens; group-centered rewards, whitened over all unmasked tokens."""
    centered = dr_grpo(rewards, groups)
    flat = [value for value, row in zip(centered, mask, strict=True) for chosen in row if chosen]
    whitened = iter(whiten(flat, unbiased=unbiased, eps=eps))
    return [[next(whitened) if chosen else 0.0 for chosen in row] for row in mask]


def normalize_then_sum(rewards, groups, weights, eps):
    """`rewards[i][k]`."""
    columns = [grpo([row[k] for row in rewards], groups, eps) for k in range(len(rewards[0]))]
    samples = zip(*columns, strict=True)
    return [sum(w * a for w, a in zip(weights, row, strict=True)) for row in samples]


def sum_then_normalize(rewards, groups, weights, eps):
    return grpo(
        [sum(w * r for w, r in zip(weights, row, strict=True)) for row in rewards], groups, eps
    )


def gdpo(rewards, groups, weights, eps):
    summed = normalize_then_sum(rewards, groups, weights, eps)
    return [over(value - mean(summed), std(summed), eps) for value in summed]


def gigpo(
    episode_rewards, episode_groups, step_returns, step_groups, step_episodes, *, weight, eps
):
    """arXiv:2505.10978: of the episode, plus omega times of the step in its state."""
    episodes = grpo(episode_rewards, episode_groups, eps)
    steps = grpo(step_returns, step_groups, eps)
    return [
        episodes[episode] + weight * step
        for episode, step in zip(step_episodes, steps, strict=True)
    ]


def rae(rewards, agents, baselines, decay):
    """Advantages against the baselines before the batch, then one update after another."""
    advantages = [r - baselines[agent] for r, agent in zip(rewards, agents, strict=True)]
    after = list(baselines)
    for reward, agent in zip(rewards, agents, strict=True):
        after[agent] = decay * after[agent] + (1 - decay) * reward
    return advantages, after
