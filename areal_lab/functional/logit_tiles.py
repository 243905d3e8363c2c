r"""Logits in tiles of some tokens by some of the vocabulary, and the passes over one tile.

A tile of t tokens and v vocabulary entries costs reading v weights and t hidden states, so for a
given size about square tiles move the least memory. Passes over the elements of a tile go block by
block, small enough that the next pass finds the block in the processor's cache.

    tile [t, v] --> per token: log-normaliser, entropy inside the tile --> joined over tiles
    tile [t, v] --> gradient with respect to the logits
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from areal_lab.functional.cutoff import NOT_KEPT

_BLOCK_ENTRIES = 1 << 18
"""Logits that element-wise passes go over at a time: 1 MiB in float32."""


class TileSums(NamedTuple):
    """Of each token over the vocabulary of one tile; of several tiles stacked."""

    peak: Tensor
    """Largest logit."""
    log_mass: Tensor
    """log sum exp(logit - peak)."""
    entropy: Tensor
    """Of the softmax of this tile's logits alone, in nats."""


class Restriction(NamedTuple):
    """Which tokens could be drawn: a mask, or a threshold per token."""

    mask: Tensor | None
    """`[T, V]`, True = kept."""
    cutoff: Tensor | None
    """`[T]`; smaller logits are not kept."""

    def dropped(self, logits: Tensor, rows: slice, columns: slice) -> Tensor | None:
        """Which of these logits, at `[rows, columns]` of all, are not kept; None: all are."""
        if self.mask is not None:
            return ~self.mask[rows, columns]
        if self.cutoff is not None:
            return logits < self.cutoff[rows, None]
        return None


class Scratch:
    """Two wide buffers of the size of a block, used again and again."""

    def __init__(self, like: Tensor, tile_entries: int, widest: int) -> None:
        on_cpu = like.device.type == "cpu"
        # A GPU has no such cache, and every pass costs a launch: there a block is the tile.
        block = min(tile_entries, max(_BLOCK_ENTRIES, widest)) if on_cpu else tile_entries
        self.entries = max(1, block)
        self.first, self.second = (
            torch.empty(self.entries, dtype=wide_dtype(like.dtype), device=like.device)
            for _ in range(2)
        )

    def pair(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Two buffers of this shape."""
        return (
            self.first[: rows * columns].view(rows, columns),
            self.second[: rows * columns].view(rows, columns),
        )

    def blocks(self, tile: Tensor) -> Iterator[slice]:
        """Rows of a tile that fit."""
        return slices(tile.shape[0], max(1, self.entries // tile.shape[1]))


def tile_shape(tokens: int, vocab: int, entries: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of at most `entries` logits, about square."""
    rows = min(max(1, tokens), max(1, math.isqrt(entries)))
    columns = min(vocab, max(1, entries // rows))
    rows = min(max(1, tokens), max(rows, entries // columns))
    return _even(tokens, rows), _even(vocab, columns)


def sums(logits: Tensor, dropped: Tensor | None, scratch: Scratch) -> TileSums:
    """Log-normaliser and entropy of each row of a block."""
    z, p = scratch.pair(*logits.shape)
    if dropped is None:
        peak = wide(logits.amax(1))
        torch.sub(logits, peak[:, None], out=z)
    else:
        z.copy_(logits).masked_fill_(dropped, NOT_KEPT)
        peak = z.amax(1)
        z.sub_(peak[:, None])
    torch.exp(z, out=p)
    mass = p.sum(1)
    log_mass = mass.log()
    # As a batched dot product this would take five times as long.
    return TileSums(peak, log_mass, log_mass - z.mul_(p).sum(1) / mass)


def join(tiles: TileSums) -> TileSums:
    r"""From `[tiles, T]` to `[T]`: sums over the whole vocabulary.

    The softmax first draws a tile n with probability w_n and then a token in it, therefore
    H = sum_n w_n (H_n - log w_n).
    """
    peak = tiles.peak.amax(0)
    log_masses = tiles.log_mass + (tiles.peak - peak)
    log_mass = log_masses.logsumexp(0)
    log_share = log_masses - log_mass
    return TileSums(peak, log_mass, (log_share.exp() * (tiles.entropy - log_share)).sum(0))


def logits_gradient(
    logits: Tensor,
    dropped: Tensor | None,
    scratch: Scratch,
    *,
    out: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    targets: Tensor,
) -> None:
    r"""Gradient of `sum(g * logprobs + k * entropy)` with respect to a block of logits.

    $$ g (1_y - p) - k p (\log p + H) $$

    Args:
        out: receives it; may be `logits`.
        targets: counted from the first column; outside the block for tokens elsewhere.
    """
    log_p, p = scratch.pair(*logits.shape)
    torch.sub(logits, normalizer[:, None], out=log_p)
    if dropped is not None:
        log_p.masked_fill_(dropped, NOT_KEPT)
    gradient = p if out.dtype != p.dtype else out
    if grad_entropy is None:
        torch.exp(log_p, out=p)
        torch.mul(p, -grad_logprobs[:, None], out=gradient)
    else:
        torch.exp(log_p, out=p)
        # -p (g + k (l + H)) = p (-k l - (g + k H))
        log_p.mul_(-grad_entropy[:, None]).sub_((grad_logprobs + grad_entropy * entropy)[:, None])
        torch.mul(log_p, p, out=gradient)
    inside = (targets >= 0) & (targets < logits.shape[1])
    index = targets.clamp(0, logits.shape[1] - 1)
    gradient.scatter_add_(1, index[:, None], torch.where(inside, grad_logprobs, 0)[:, None])
    if gradient is not out:
        out.copy_(gradient)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, scale: float, fresh: bool) -> None:
    """total += scale * left @ right; a fresh total has arbitrary contents, which are dropped."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0.0 if fresh else 1.0, alpha=scale)
    elif fresh:
        total.copy_(left @ right).mul_(scale)
    else:
        total.add_(left @ right, alpha=scale)


def slices(length: int, step: int, start: int = 0) -> Iterator[slice]:
    """`start .. length` in steps; the last may be shorter."""
    for first in range(start, length, step):
        yield slice(first, min(first + step, length))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that softmax and sums are computed in: float32, or float64 when that comes in."""
    return torch.promote_types(dtype, torch.float32)


def wide(values: Tensor) -> Tensor:
    """Values in their wide type."""
    return values.to(wide_dtype(values.dtype))


def _even(length: int, step: int) -> int:
    """The smallest step that needs no more steps: no short last one."""
    return -(-length // -(-length // step)) if length else 1
