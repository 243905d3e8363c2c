"""Rows of the table: log-probs and entropy from hidden states and from logits, with truncation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.logprobs.cutoff import in_turn, top_k, top_p
from areal_lab.functional.logprobs.token_logprobs import (
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
    squared_probs,
    squared_probs_from_logits,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

TOKENS, HIDDEN, VOCAB = 5, 3, 7
SAMPLER = in_turn(top_k(5), top_p(0.9))


def states(seed: int) -> tuple[Tensor, ...]:
    """Hidden states, output weights, targets: each the most likely token, which all rules keep."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.double)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.double)
    return hidden, weight, (hidden @ weight.T).argmax(1)


def with_mask(seed: int) -> tuple[Tensor, ...]:
    """The same and a mask that keeps the target."""
    hidden, weight, targets = states(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    mask = torch.rand(TOKENS, VOCAB, generator=generator) > 0.4
    return hidden, weight, targets, mask.scatter(1, targets[:, None], value=True)


def as_logits(seed: int) -> tuple[Tensor, ...]:
    hidden, weight, targets = states(seed)
    return hidden @ weight.T, targets


chunked = partial(logprobs_and_entropy, temperature=0.7, chunk_tokens=4, cache_bytes=0)
from_logits = partial(logprobs_and_entropy_from_logits, temperature=0.7)


def masked(hidden, weight, targets, mask):
    return chunked(hidden, weight, targets, keep=mask)


def both_layouts(function):
    """Of a function of hidden states, targets and masks: padded, token by token, and packed."""

    def layouts(batch: Ragged):
        hidden = torch.stack([batch.draw(seed) for seed in range(HIDDEN)], dim=-1)
        mask = torch.arange(20 * VOCAB).view(4, 5, VOCAB) % 3 > 0
        inputs = (hidden, torch.arange(20).view(4, 5) % VOCAB, mask)
        padded = function(*[x.flatten(0, 1) for x in inputs])
        return [batch.pack(x.view(4, 5)) for x in padded], list(function(*map(batch.pack, inputs)))

    return layouts


def both_layouts_of_one(function):
    """The same of a function of hidden states with one result."""
    return both_layouts(lambda hidden, *_: [function(hidden)])


WEIGHT = states(0)[1]
CACHE = {"cache_bytes": 3 * VOCAB * 8}

CASES = [
    Case(
        name="logprobs_and_entropy",
        function=chunked,
        sample=states,
        differentiable=(0, 1),
        layouts=both_layouts(lambda h, y, _: chunked(h, WEIGHT, y)),
    ),
    Case(
        name="logprobs_and_entropy (kept logits)",
        function=partial(chunked, **CACHE),
        sample=states,
        differentiable=(0, 1),
        layouts=both_layouts(lambda h, y, _: chunked(h, WEIGHT, y, **CACHE)),
    ),
    Case(
        name="logprobs_and_entropy (top-k, top-p)",
        function=partial(chunked, keep=SAMPLER),
        sample=states,
        differentiable=(0, 1),
        layouts=both_layouts(lambda h, y, _: chunked(h, WEIGHT, y, keep=SAMPLER)),
    ),
    Case(
        name="logprobs_and_entropy (mask)",
        function=masked,
        sample=with_mask,
        differentiable=(0, 1),
        layouts=both_layouts(lambda h, y, m: chunked(h, WEIGHT, y, keep=m)),
    ),
    Case(
        name="squared_probs",
        function=partial(squared_probs, temperature=0.7, chunk_tokens=2),
        sample=lambda seed: states(seed)[:2],
        layouts=both_layouts_of_one(lambda h: squared_probs(h, WEIGHT, chunk_tokens=2)),
        reasons=NO_GRADIENT,
    ),
    Case(
        name="squared_probs_from_logits (top-k, top-p)",
        function=partial(squared_probs_from_logits, keep=SAMPLER),
        sample=lambda seed: as_logits(seed)[:1],
        layouts=both_layouts_of_one(lambda h: squared_probs_from_logits(h @ WEIGHT.T)),
        reasons=NO_GRADIENT,
    ),
    Case(
        name="logprobs_and_entropy_from_logits",
        function=from_logits,
        sample=as_logits,
        differentiable=(0,),
        layouts=both_layouts(lambda h, y, _: from_logits(h @ WEIGHT.T, y)),
    ),
    Case(
        name="logprobs_and_entropy_from_logits (top-k, top-p)",
        function=partial(from_logits, keep=SAMPLER),
        sample=as_logits,
        differentiable=(0,),
        layouts=both_layouts(lambda h, y, _: from_logits(h @ WEIGHT.T, y, keep=SAMPLER)),
    ),
]
