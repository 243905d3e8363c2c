r"""Token sampling: the inverse of the cumulative distribution at a hashed uniform number.

    u = hash(seed, position) in [0, 1)        token = first v with P(<= v) > u

The token depends on the request's seed and the position in its sequence (prompt included), not on
the batch around it, so a request that is sent again with its tokens continues unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.engines.protocol import SamplingParams

_MASK_64 = (1 << 64) - 1
_UNIFORM_BITS = 23
"""Chosen so that u * total < total in float32: a last token of probability 0 is never sampled."""


class SampledTokens(NamedTuple):
    """One token per row."""

    tokens: Int[Tensor, " N"]
    logprobs: Float[Tensor, " N"]
    """log softmax(logits / temperature) over the whole vocabulary, before top-k and top-p."""


def sample_tokens(
    logits: Float[Tensor, "N V"], sampling: Sequence[SamplingParams], positions: Sequence[int]
) -> SampledTokens:
    """Sample one token per row.

    At temperature 0 the most likely token is taken, and log-probs are those of temperature 1, as in
    SGLang.

    Args:
        logits: of the next token; converted to float32.
        sampling: sampling parameters of each row.
        positions: index of the sampled token in its sequence, prompt included.

    Raises:
        FloatingPointError: if a log-prob is not finite.
    """
    temperatures = [params.temperature or 1.0 for params in sampling]
    logits = logits.float()
    if any(value != 1.0 for value in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)

    tokens = torch.empty(len(sampling), dtype=torch.long, device=logits.device)
    greedy = [i for i, params in enumerate(sampling) if params.temperature == 0]
    plain = [i for i, p in enumerate(sampling) if p.temperature > 0 and not _is_truncated(p)]
    truncated = [i for i, p in enumerate(sampling) if p.temperature > 0 and _is_truncated(p)]
    uniforms = logits.new_tensor(
        [
            uniform(params.seed, position)
            for params, position in zip(sampling, positions, strict=True)
        ]
    )
    if greedy:
        tokens[greedy] = logprobs[greedy].argmax(dim=-1)
    if len(plain) == len(sampling):
        tokens = _invert(logprobs.exp(), uniforms)
    elif plain:
        tokens[plain] = _invert(logprobs[plain].exp(), uniforms[plain])
    if truncated:
        tokens[truncated] = _sample_truncated(
            logprobs[truncated].exp(), [sampling[i] for i in truncated], uniforms[truncated]
        )
    chosen = logprobs.gather(1, tokens.clamp_(max=logits.shape[1] - 1)[:, None]).squeeze(1)
    if not chosen.isfinite().all():
        raise FloatingPointError(
            "log-probs of sampled tokens are not finite; check the weights for NaN and infinity"
        )
    return SampledTokens(tokens, chosen)


def uniform(seed: int, position: int) -> float:
    """A pseudo-random number in [0, 1), a function of both arguments only.

    Counter-based: two rounds of the splitmix64 finalizer (Steele, Lea, Flood 2014).
    """
    return (_mix(_mix(seed & _MASK_64) ^ (position & _MASK_64)) >> (64 - _UNIFORM_BITS)) * (
        2.0**-_UNIFORM_BITS
    )


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0


def _invert(
    probabilities: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"]
) -> Int[Tensor, " N"]:
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _sample_truncated(
    probabilities: Float[Tensor, "N V"],
    sampling: Sequence[SamplingParams],
    uniforms: Float[Tensor, " N"],
) -> Int[Tensor, " N"]:
    """Sample from the top-k tokens, of these from the fewest whose mass reaches top-p."""
    vocabulary = probabilities.shape[1]
    top_k = [vocabulary if params.top_k < 0 else params.top_k for params in sampling]
    keep = min(max(top_k), vocabulary)
    kept, order = probabilities.topk(keep, dim=-1)
    rank = torch.arange(keep, device=kept.device)
    kept = kept * (rank < kept.new_tensor(top_k)[:, None])
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    kept = kept * (before < kept.new_tensor([params.top_p for params in sampling])[:, None])
    return order.gather(1, _invert(kept, uniforms)[:, None]).squeeze(1)
