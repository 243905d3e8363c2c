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
"""Few enough that u * total < total in float32: a last token of probability 0 is never sampled."""


class SampledTokens(NamedTuple):
    """One token per row, on the device of the logits."""

    tokens: Int[Tensor, " N"]
    logprobs: Float[Tensor, " N"]
    """log softmax(logits / temperature) over the whole vocabulary, before top-k and top-p."""

    def on_host(self) -> list[tuple[int, float]]:
        """Tokens with their log-probs, read in one copy."""
        # Both are exact in float64.
        tokens, logprobs = torch.stack((self.tokens.double(), self.logprobs.double())).cpu()
        if not logprobs.isfinite().all():
            raise FloatingPointError(
                "log-probs of sampled tokens are not finite; check the weights for NaN and infinity"
            )
        return list(zip(tokens.long().tolist(), logprobs.tolist(), strict=True))


def sample_tokens(
    logits: Float[Tensor, "R V"],
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    rows: Sequence[int] | None = None,
) -> SampledTokens:
    """Sample one token per request.

    At temperature 0 the most likely token is taken, and log-probs are those of temperature 1, as in
    SGLang.

    Args:
        positions: index of the sampled token in its sequence, prompt included.
        rows: the row of logits of each request; by default request i has row i.
    """

    def there(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), logits.device)

    # One distribution for all requests with the same row and temperature.
    rows = range(len(sampling)) if rows is None else rows
    asked = [(row, p.temperature or 1.0) for row, p in zip(rows, sampling, strict=True)]
    distinct = {pair: index for index, pair in enumerate(dict.fromkeys(asked))}
    of = [distinct[pair] for pair in asked]
    if [row for row, _ in distinct] != list(range(logits.shape[0])):
        logits = logits[there([row for row, _ in distinct], torch.long)]
    logits = logits.float()
    if any(temperature != 1.0 for _, temperature in distinct):
        logits = logits / there([temperature for _, temperature in distinct])[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)

    # Hashed on the host: the same numbers on every device.
    uniforms = [uniform(p.seed, at) for p, at in zip(sampling, positions, strict=True)]
    greedy = [i for i, params in enumerate(sampling) if params.temperature == 0]
    plain = [i for i, p in enumerate(sampling) if p.temperature > 0 and not _is_truncated(p)]
    truncated = [i for i, p in enumerate(sampling) if p.temperature > 0 and _is_truncated(p)]
    tokens = torch.empty(len(sampling), dtype=torch.long, device=logits.device)
    if greedy:
        most_likely = logprobs.argmax(dim=-1)
        tokens[there(greedy, torch.long)] = most_likely[there([of[i] for i in greedy], torch.long)]
    if plain:
        used = {row: index for index, row in enumerate(dict.fromkeys(of[i] for i in plain))}
        shared = logprobs
        if len(used) < len(logprobs):
            shared = logprobs[there(list(used), torch.long)]
        slots, width = _slots([used[of[i]] for i in plain])
        of_slots = torch.zeros(len(used) * width)
        of_slots[slots] = torch.tensor([uniforms[i] for i in plain])
        of_slots = to_device(of_slots.view(len(used), width), logits.device)
        sampled = _invert(shared.exp(), of_slots).flatten()[to_device(slots, logits.device)]
        tokens[there(plain, torch.long)] = sampled
    if truncated:
        vocabulary = logits.shape[1]
        top_k = [sampling[i].top_k for i in truncated]
        top_k = [vocabulary if k < 0 else min(k, vocabulary) for k in top_k]
        tokens[there(truncated, torch.long)] = _sample_truncated(
            logprobs[there([of[i] for i in truncated], torch.long)].exp(),
            there([uniforms[i] for i in truncated]),
            top_k=there(top_k),
            top_p=there([sampling[i].top_p for i in truncated]),
            keep=max(top_k),
        )
    tokens.clamp_(max=logits.shape[1] - 1)
    return SampledTokens(tokens, logprobs[there(of, torch.long), tokens])


def _slots(of: Sequence[int]) -> tuple[Int[Tensor, " N"], int]:
    """Place of each request in a table with a line per distribution, and the table's width."""
    taken: list[int] = [0] * (max(of) + 1)
    columns = []
    for line in of:
        columns.append(taken[line])
        taken[line] += 1
    width = max(taken)
    return torch.tensor([line * width + at for line, at in zip(of, columns, strict=True)]), width


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
    probabilities: Float[Tensor, "N V"], uniforms: Float[Tensor, "N K"]
) -> Int[Tensor, "N K"]:
    cumulative = probabilities.cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def _sample_truncated(
    probabilities: Float[Tensor, "N V"],
    uniforms: Float[Tensor, " N"],
    *,
    top_k: Float[Tensor, " N"],
    top_p: Float[Tensor, " N"],
    keep: int,
) -> Int[Tensor, " N"]:
    """Sample from the top-k tokens, of these from the fewest whose mass reaches top-p."""
    kept, order = probabilities.topk(keep, dim=-1)
    rank = torch.arange(keep, device=kept.device)
    kept = kept * (rank < top_k[:, None])
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    kept = kept * (before < top_p[:, None])
    return order.gather(1, _invert(kept, uniforms[:, None])).squeeze(1)
