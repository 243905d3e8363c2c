"""Truncating samplers in plain Python floats, token by token, and the log-probs under them."""

from __future__ import annotations

import math

from tests.reference.formulas import softmax


def keep_top_k(logits, k):
    """The k largest and what equals the k-th, as a list of booleans."""
    smallest = sorted(logits, reverse=True)[: min(k, len(logits))][-1]
    return [z >= smallest for z in logits]


def keep_top_p(logits, p):
    """Take tokens from the most likely one on until their mass is p; ties go in together."""
    probabilities = softmax(logits)
    mass, smallest = 0.0, math.inf
    for z, probability in sorted(zip(logits, probabilities, strict=True), reverse=True):
        if mass >= p:
            break
        mass += probability
        smallest = z
    return [z >= smallest for z in logits]


def keep_min_p(logits, p):
    """At least p times as likely as the most likely token."""
    probabilities = softmax(logits)
    return [probability >= p * max(probabilities) for probability in probabilities]


def keep_in_turn(logits, rules):
    """Each rule sees what the one before left."""
    kept = [True] * len(logits)
    for rule in rules:
        left = [index for index, keep in enumerate(kept) if keep]
        survives = rule([logits[index] for index in left])
        kept = [False] * len(logits)
        for index, keep in zip(left, survives, strict=True):
            kept[index] = keep
    return kept


def restricted_logprob_and_entropy(logits, target, temperature, kept):
    """Of softmax(z / tau) over the kept tokens alone; nothing kept has no entropy."""
    left = [z / temperature for z, keep in zip(logits, kept, strict=True) if keep]
    if not left:
        return -math.inf, 0.0
    p = softmax(left)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    if not kept[target]:
        return -math.inf, entropy
    return math.log(p[sum(kept[:target])]), entropy


def squared_probs(logits, temperature, kept):
    """sum p^2 of softmax(z / tau) over the kept tokens alone; nothing kept gives 0."""
    left = [z / temperature for z, keep in zip(logits, kept, strict=True) if keep]
    return sum(p * p for p in softmax(left)) if left else 0.0
