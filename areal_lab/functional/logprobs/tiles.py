"""Logits in tiles of some tokens by some of the vocabulary: passes over a tile, derivatives.

Second derivative of log-prob and entropy with respect to hidden states and output weights.

All vocabulary of some tokens at once and every step an ordinary operation: for checks, Hessians
and curvature, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from areal_lab.functional.checks import wide, wide_dtype
from areal_lab.functional.logprobs.cutoff import NOT_KEPT

_BLOCK_ENTRIES = 1 << 18
"""Logits that element-wise passes go over at a time: 1 MiB in float32."""


class TileSums(NamedTuple):
    """Sums over the vocabulary of one tile for each token; also of several stacked tiles."""

    peak: Tensor
    """Largest logit."""
    log_mass: Tensor
    """log sum exp(logit - peak)."""
    entropy: Tensor
    """Entropy of the softmax of this tile's logits alone, in nats."""


class Restriction(NamedTuple):
    """Tokens that the sampler could sample: a mask, or a threshold per token."""

    mask: Tensor | None
    """`[T, V]`, True = kept."""
    cutoff: Tensor | None
    """`[T]`; smaller logits are not kept."""

    def dropped(self, logits: Tensor, rows: slice, columns: slice) -> Tensor | None:
        """Return which logits at `[rows, columns]` are not kept; None if all are kept."""
        if self.mask is not None:
            return ~self.mask[rows, columns]
        if self.cutoff is not None:
            return logits < self.cutoff[rows, None]
        return None


class Scratch:
    """Two wide buffers of the size of a block, used again and again; made when first used."""

    def __init__(self, like: Tensor, tile_entries: int, widest: int) -> None:
        on_cpu = like.device.type == "cpu"
        # A GPU has no such cache, and every pass costs a launch: there a block is the tile.
        block = min(tile_entries, max(_BLOCK_ENTRIES, widest)) if on_cpu else tile_entries
        self.entries = max(1, block)
        self.dtype, self.device = wide_dtype(like.dtype), like.device
        self._buffers: tuple[Tensor, ...] = ()

    def pair(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Two buffers of this shape."""
        if not self._buffers:
            self._buffers = tuple(
                torch.empty(self.entries, dtype=self.dtype, device=self.device) for _ in range(2)
            )
        first, second = (one[: rows * columns].view(rows, columns) for one in self._buffers)
        return first, second

    def blocks(self, tile: Tensor) -> Iterator[slice]:
        """Rows of a tile that fit."""
        return slices(tile.shape[0], max(1, self.entries // tile.shape[1]))


def tile_shape(tokens: int, vocab: int, entries: int, multiple: int = 1) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of at most `entries` logits, about square.

    Args:
        multiple: of which the number of vocabulary entries is one, unless a tile has all or fewer
            fit.
    """
    rows = min(max(1, tokens), max(1, math.isqrt(entries)))
    columns = min(vocab, max(1, entries // rows))
    if multiple > columns or columns == vocab:
        multiple = 1
    fewest = _even(vocab, columns - columns % multiple)
    columns = -(-fewest // multiple) * multiple
    rows = min(max(1, tokens), max(rows, entries // columns))
    return _even(tokens, rows), columns


def sums(
    logits: Tensor, restriction: Restriction, rows: slice, columns: slice, scratch: Scratch
) -> TileSums:
    """Log-normalizer and entropy of each token over one tile, which is at `[rows, columns]`."""
    peak, mass, moment = torch.empty(
        3, logits.shape[0], 1, dtype=scratch.dtype, device=scratch.device
    )
    for block in scratch.blocks(logits):
        part = logits[block]
        z, p = scratch.pair(*part.shape)
        dropped = restriction.dropped(part, moved(block, rows.start), columns)
        if dropped is not None:
            part = z.copy_(part).masked_fill_(dropped, NOT_KEPT)
        peak[block] = part.amax(1, keepdim=True)
        torch.sub(part, peak[block], out=z)
        torch.exp(z, out=p)
        torch.sum(p, 1, keepdim=True, out=mass[block])
        # As a batched dot product this would take five times as long.
        torch.sum(z.mul_(p), 1, keepdim=True, out=moment[block])
    log_mass = mass.log()
    return TileSums(peak[:, 0], log_mass[:, 0], (log_mass - moment / mass)[:, 0])


def join(tiles: TileSums) -> TileSums:
    r"""Join sums over tiles `[tiles, T]` to sums over the whole vocabulary `[T]`.

    The softmax first picks a tile n with probability w_n and then a token in it, therefore
    H = sum_n w_n (H_n - log w_n).
    """
    peak = tiles.peak.amax(0)
    log_masses = tiles.log_mass + (tiles.peak - peak)
    log_mass = log_masses.logsumexp(0)
    log_share = log_masses - log_mass
    return TileSums(peak, log_mass, (log_share.exp() * (tiles.entropy - log_share)).sum(0))


class TokenGradients(NamedTuple):
    r"""Per-token factors `[T, 1]` of the gradient with respect to the logits.

    $$ d = g (1_y - p) - k p (\log p + H) = p (-k \log p - (g + k H)) + g 1_y $$
    """

    normalizer: Tensor
    factor: Tensor | None
    """-k; None without a gradient of the entropy."""
    offset: Tensor
    """g + k H."""
    of_target: Tensor
    """d of the target itself, from its log-prob: exact also where p is almost 1."""


def token_gradients(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    *,
    logprobs: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
) -> TokenGradients:
    """Compute the factors from the gradients g and k of log-probs and entropies `[T]`."""
    offset = grad_logprobs
    slope = grad_logprobs
    if grad_entropy is not None:
        offset = grad_logprobs + grad_entropy * entropy
        slope = offset + grad_entropy * logprobs
    # A target that could not be sampled has the probability 0 and a log-prob of -infinity.
    drawn = torch.where(logprobs == -math.inf, 0, logprobs.exp() * slope)
    return TokenGradients(
        normalizer[:, None],
        None if grad_entropy is None else -grad_entropy[:, None],
        offset[:, None],
        (grad_logprobs - drawn)[:, None],
    )


def logits_gradient(
    logits: Tensor,
    restriction: Restriction,
    rows: slice,
    columns: slice,
    scratch: Scratch,
    *,
    of_tokens: TokenGradients,
    out: Tensor,
) -> None:
    """Gradient with respect to logits at `[rows, columns]`, except the targets; see `put_targets`.

    Args:
        of_tokens: of all tokens.
        out: receives it; may be `logits`.
    """
    for block in scratch.blocks(logits):
        part, at = logits[block], moved(block, rows.start)
        log_p, p = scratch.pair(*part.shape)
        torch.sub(part, of_tokens.normalizer[at], out=log_p)
        dropped = restriction.dropped(part, at, columns)
        if dropped is not None:
            log_p.masked_fill_(dropped, NOT_KEPT)
        torch.exp(log_p, out=p)
        to = out[block] if out.dtype == p.dtype else log_p
        if of_tokens.factor is None:
            torch.mul(p, -of_tokens.offset[at], out=to)
        else:
            log_p.mul_(of_tokens.factor[at]).sub_(of_tokens.offset[at])
            torch.mul(log_p, p, out=to)
        if to is log_p:
            out[block] = to


def put_targets(
    gradient: Tensor, targets: Tensor, rows: slice, columns: slice, of_target: Tensor
) -> None:
    """Write the gradient of the targets that are in this tile of the gradient."""
    index, inside = target_index(targets[rows], columns)
    here = torch.where(inside, of_target[rows].to(gradient.dtype), gradient.gather(1, index))
    gradient.scatter_(1, index, here)


def target_index(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Targets counted from the first of these columns, `[t, 1]`, and which are among them."""
    index = targets[:, None] - columns.start
    last = columns.stop - columns.start - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, scale: float, fresh: bool) -> None:
    """Compute total += scale * left @ right; a fresh total has arbitrary contents, which are
    dropped.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0.0 if fresh else 1.0, alpha=scale)
    elif fresh:
        total.copy_(left @ right).mul_(scale)
    else:
        total.add_(left @ right, alpha=scale)


def moved(part: slice, by: int) -> slice:
    """Shift a slice."""
    return slice(part.start + by, part.stop + by)


def slices(length: int, step: int, start: int = 0) -> Iterator[slice]:
    """`start .. length` in steps; the last may be shorter."""
    for first in range(start, length, step):
        yield slice(first, min(first + step, length))


def _even(length: int, step: int) -> int:
    """Smallest step for the same number of steps: no short last one."""
    return -(-length // -(-length // step)) if length else 1


def second_order(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    restriction: Restriction,
    rows: slice,
    g: Tensor,
    k: Tensor,
    along_hidden: Tensor | None,
    along_weight: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `<d_hidden, along_hidden> + <d_weight, along_weight>` (see ChunkedGradients).

    The inner product is `sum(d * u)` with d the gradient with respect to the logits and u the
    change of the logits along the two directions. Returns its gradients with respect to hidden,
    weight, g and k.

    Args:
        restriction: of all tokens, of which these are `rows`.
    """
    h, w = wide(hidden) / temperature, wide(weight)
    a = torch.zeros_like(h) if along_hidden is None else wide(along_hidden) / temperature
    b = torch.zeros_like(w) if along_weight is None else wide(along_weight)
    u = a @ w.T + h @ b.T
    logits = h @ w.T
    dropped = restriction.dropped(logits, rows, slice(None))
    if dropped is not None:
        logits = logits.masked_fill(dropped, NOT_KEPT)
    log_p = torch.log_softmax(logits, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    index = targets[:, None]
    g, k = g[:, None], k[:, None]

    mean_u = (p * u).sum(1, keepdim=True)
    mean_lu = (p * log_p * u).sum(1, keepdim=True)
    d = -p * (g + k * (log_p + entropy))
    d = d.scatter_add(1, index, g)
    away = u - mean_u
    curvature = log_p * u - mean_lu + away * (1 + entropy) - mean_u * (log_p + entropy)
    q = -p * (g * away + k * curvature)

    to_hidden = (q @ w + d @ b) / temperature
    to_weight = q.T @ h + d.T @ a
    to_g = (u.gather(1, index) - mean_u)[:, 0]
    to_k = -(mean_lu + entropy * mean_u)[:, 0]
    return to_hidden, to_weight, to_g, to_k


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """Local rows of the output embedding, and the communication with the processes that have the
    other rows. All of them call with the same tokens.
    """

    first: int
    """Token of the first row."""
    vocabulary: int
    """Tokens of all parts."""
    gather: Callable[[Tensor], Tensor]
    """Tensors of one shape from every part, stacked in one order, on each of them."""
    add_up: Callable[[Tensor], object]
    """Replace tensors of one shape by their sum, in place, on each of them."""

    def own(self, targets: Tensor) -> Tensor:
        """Targets counted from the first token of this part; targets of other parts are outside its
        range.
        """
        return targets - self.first
