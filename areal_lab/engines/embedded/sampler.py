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
from areal_lab.models.copies import to_device

_MASK_64 = (1 << 64) - 1
_UNIFORM_BITS = 23
"""Chosen so that u * total < total in float32: a last token of probability 0 is never sampled."""


class SampledTokens(NamedTuple):
    """One token per row, on the device of the logits."""

    tokens: Int[Tensor, " N"]
    logprobs: Float[Tensor, " N"]
    """log softmax(logits / temperature) over the whole vocabulary, before top-k and top-p."""

    def on_host(self) -> list[tuple[int, float]]:
        """Tokens with their log-probs, read in one copy.

        Raises:
            FloatingPointError: if a log-prob is not finite.
        """
        # Both are exact in float64.
        tokens, logprobs = torch.stack((self.tokens.double(), self.logprobs.double())).cpu()
        if not logprobs.isfinite().all():
            raise FloatingPointError(
                "log-probs of sampled tokens are not finite; check the weights for NaN and infinity"
            )
        return list(zip(tokens.long().tolist(), logprobs.tolist(), strict=True))


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
    """

    def there(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), logits.device)

    temperatures = [params.temperature or 1.0 for params in sampling]
    logits = logits.float()
    if any(value != 1.0 for value in temperatures):
        logits = logits / there(temperatures)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)

    # Hashed on the host: the same numbers on every device.
    uniforms = there([uniform(p.seed, at) for p, at in zip(sampling, positions, strict=True)])
    greedy = [i for i, params in enumerate(sampling) if params.temperature == 0]
    plain = [i for i, p in enumerate(sampling) if p.temperature > 0 and not _is_truncated(p)]
    truncated = [i for i, p in enumerate(sampling) if p.temperature > 0 and _is_truncated(p)]
    if len(plain) == len(sampling):
        tokens = _invert(logprobs.exp(), uniforms)
    else:
        tokens = torch.empty(len(sampling), dtype=torch.long, device=logits.device)
        if greedy:
            rows = there(greedy, torch.long)
            tokens[rows] = logprobs[rows].argmax(dim=-1)
        if plain:
            rows = there(plain, torch.long)
            tokens[rows] = _invert(logprobs[rows].exp(), uniforms[rows])
        if truncated:
            rows, vocabulary = there(truncated, torch.long), logits.shape[1]
            asked = [sampling[i].top_k for i in truncated]
            top_k = [vocabulary if k < 0 else min(k, vocabulary) for k in asked]
            tokens[rows] = _sample_truncated(
                logprobs[rows].exp(),
                uniforms[rows],
                top_k=there(top_k),
                top_p=there([sampling[i].top_p for i in truncated]),
                keep=max(top_k),
            )
    of_tokens = logprobs.gather(1, tokens.clamp_(max=logits.shape[1] - 1)[:, None])
    return SampledTokens(tokens, of_tokens.squeeze(1))


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
    uniforms: Float[Tensor, " N"],
    *,
    top_k: Float[Tensor, " N"],
    top_p: Float[Tensor, " N"],
    keep: int,
) -> Int[Tensor, " N"]:
    """Sample from the top-k tokens, of these from the fewest whose mass reaches top-p.

    Args:
        keep: the largest `top_k`, on the host.
    """
    kept, order = probabilities.topk(keep, dim=-1)
    rank = torch.arange(keep, device=kept.device)
    kept = kept * (rank < top_k[:, None])
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    kept = kept * (before < top_p[:, None])
    return order.gather(1, _invert(kept, uniforms)[:, None]).squeeze(1)
