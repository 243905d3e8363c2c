r"""Tokens that a truncating sampler can sample: top-k, top-p, min-p, applied in order.

Each rule is a threshold on the logits of a token: `logits [..., V] --> smallest logit kept [...]`.

    keep=top_k(50)    keep=in_turn(top_k(50), top_p(0.95))    keep=your_own_rule
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from areal_lab.functional.checks import applied, check_number

Cutoff: TypeAlias = Callable[[Tensor], Tensor]
"""Logits `[*shape, V]`, divided by the temperature and detached, to the smallest logit that could
be sampled `[*shape]`; what equals it could be sampled too."""

NOT_KEPT = -1e30
"""Replacement of a logit of -infinity: its probability is exactly 0, but 0 times it is not NaN."""


def top_k(k: int) -> Cutoff:
    r"""The k most likely tokens, and those as likely as the last of them.

    Source: Fan et al. (arXiv:1805.04833), section on generation; ties as in vLLM and transformers.

    Args:
        k: tokens kept; all when the vocabulary has fewer.

    Raises:
        ValueError: k is below 1.
    """
    check_number("k", k, "top_k(50)")
    if k < 1:
        raise ValueError(f"k is {k}, but must be at least 1; leave the rule out to keep all tokens")

    def cutoff(logits: Tensor) -> Tensor:
        return logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1]

    return cutoff


def top_p(p: float) -> Cutoff:
    r"""The nucleus: the fewest tokens, most likely first, whose probabilities reach p.

    Of tokens as likely as the last of them all are kept, so that their order does not matter.
    Source: Holtzman et al. (arXiv:1904.09751), nucleus sampling.

    Args:
        p: in (0, 1]; 1 keeps all tokens.

    Raises:
        ValueError: p is not in (0, 1].
    """
    _check_probability("p", p)

    def cutoff(logits: Tensor) -> Tensor:
        if p == 1:
            return torch.full_like(logits[..., 0], -math.inf)
        ordered = logits.sort(dim=-1, descending=True).values
        mass = ordered.softmax(-1)
        # Kept while what is more likely does not reach p: the token that crosses p is the last.
        inside = mass.cumsum(-1) - mass < p
        return torch.where(inside, ordered, torch.inf).amin(-1)

    return cutoff


def min_p(p: float) -> Cutoff:
    r"""Tokens at least p times as likely as the most likely one.

    Source: Nguyen et al. (arXiv:2407.01082).

    Args:
        p: in (0, 1]; 1 keeps the most likely token.

    Raises:
        ValueError: p is not in (0, 1].
    """
    _check_probability("p", p)
    return lambda logits: logits.amax(-1) + math.log(p)


def in_turn(*rules: Cutoff) -> Cutoff:
    r"""Rules one after the other, each seeing the distribution that the one before left.

    `in_turn(top_k(50), top_p(0.95))` is what vLLM and transformers do. Rules that all see the whole
    distribution are `lambda z: torch.maximum(top_k(50)(z), top_p(0.95)(z))`.

    Source: the order of vLLM and transformers.
    """

    def cutoff(logits: Tensor) -> Tensor:
        lowest = torch.full_like(logits[..., 0], -math.inf)
        for rule in rules:
            left = logits.masked_fill(logits < lowest.unsqueeze(-1), -math.inf)
            lowest = torch.maximum(lowest, rule(left))
        return lowest

    return cutoff


def clear_cutoff(rule: Cutoff, logits: Tensor) -> Tensor:
    """The rule's cutoff, moved halfway to the largest logit below it.

    A product of matrices that is computed again in other tiles differs in its last bits; halfway
    between two logits the same tokens are kept nevertheless.
    """
    lowest = smallest_kept(rule, logits)
    below = logits.masked_fill(logits >= lowest.unsqueeze(-1), -math.inf).amax(-1)
    return (lowest + below) / 2


def smallest_kept(rule: Cutoff, logits: Tensor) -> Tensor:
    """Cutoff by the rule that the caller passed as `keep`.

    Raises:
        TypeError: it is not a rule.
    """
    return applied("keep", rule, logits, gives=Tensor, example="top_p(0.95)")


def _check_probability(name: str, value: float) -> None:
    check_number(name, value, "top_p(0.95)")
    if not 0 < value <= 1:
        raise ValueError(
            f"{name} is {value}, but must be in (0, 1]; leave the rule out to keep all tokens"
        )
