"""Autograd for log-probs from hidden states: compute, reduce and discard tiles of logits.

    forward    hidden, weight --> tiles --> logprobs, entropy, log-normalizer [T]
    backward   the same tiles again, or kept ones --> gradient of the logits --> hidden, weight
    again      ordinary operations, differentiable as often as wanted

There are two functions, since the first derivative has its own backward pass. Where processes
divide the vocabulary, each one has tiles of its part, and they meet twice: in the sums over the
vocabulary `[T]`, and in the gradient of hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from areal_lab.functional.checks import wide, wide_dtype
from areal_lab.functional.logprobs import tiles
from areal_lab.functional.logprobs.cutoff import NOT_KEPT, Cutoff, clear_cutoff
from areal_lab.functional.logprobs.tiles import (
    Restriction,
    Scratch,
    TileSums,
    VocabularyPart,
    add_product,
    join,
    moved,
    put_targets,
    second_order,
    slices,
    target_index,
    tile_shape,
    token_gradients,
)

_FUSED: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types of logits that the kernels read."""
_ALIGNED_COLUMNS: Final = 128
"""Logits per row of a tile on a GPU are a multiple of it, where they are more: its products and
kernels read 16 bytes at a time."""


def passes(like: Tensor) -> Any:
    """The module with `sums` and `logits_gradient` for these logits: `fused` on a GPU with Triton,
    else `tiles`.
    """
    if like.device.type != "cuda" or like.dtype not in _FUSED or not _has_triton():
        return tiles
    # A kernel has no fake form, and a compiler fuses the operations itself.
    if torch.compiler.is_compiling() or isinstance(like, FakeTensor):
        return tiles
    from areal_lab.functional.logprobs import fused

    return fused


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden, weight) -> (logprobs, entropy), and what the backward pass saves work with."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        rule: Cutoff | None,
        part: VocabularyPart | None,
        temperature: float,
        entries: int,
        cached_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        (tokens, _), vocab = hidden.shape, weight.shape[0]
        kind = wide_dtype(hidden.dtype)
        cached = hidden.new_empty(cached_tokens, vocab)
        cutoff = torch.full((tokens,), -math.inf, dtype=kind, device=hidden.device)
        restriction = Restriction(mask, None if rule is None else cutoff)
        # A rule has to see all logits of a token at once.
        rows_step, columns_step = (
            _tile_shape(hidden, vocab, entries)
            if rule is None
            else (max(1, entries // vocab), vocab)
        )
        buffer = hidden.new_empty(min(rows_step, max(0, tokens - cached_tokens)) * columns_step)
        scratch = Scratch(hidden, rows_step * columns_step, columns_step)
        sums = passes(hidden).sums
        columns_slices = list(slices(vocab, columns_step))
        of_tiles = TileSums(*cutoff.new_empty(3, len(columns_slices), tokens))
        # A gather, since it refuses a target outside the vocabulary on every device and when
        # compiled; no tile would have it, and its log-prob would be a wrong, finite number.
        chosen = cutoff.new_zeros(part.vocabulary if part else vocab).gather(0, targets)
        targets = part.own(targets) if part else targets
        for rows in [*slices(cached_tokens, rows_step), *slices(tokens, rows_step, cached_tokens)]:
            for number, columns in enumerate(columns_slices):
                if rows.stop <= cached_tokens:
                    logits = cached[rows, columns]
                else:
                    logits = _shaped(buffer, rows, columns)
                _logits(logits, hidden[rows], weight[columns], temperature)
                if rule is not None:
                    for block in scratch.blocks(logits):
                        cutoff[moved(block, rows.start)] = clear_cutoff(rule, wide(logits[block]))
                for all_tiles, tile in zip(
                    of_tiles, sums(logits, restriction, rows, columns, scratch), strict=True
                ):
                    all_tiles[number, rows] = tile
                index, inside = target_index(targets[rows], columns)
                found = torch.where(inside, wide(logits.gather(1, index)), chosen[rows, None])
                chosen[rows] = found[:, 0]
        whole = join(of_tiles)
        if part:
            whole, chosen = _join_parts(whole, chosen, part)
        peak, log_mass, entropy = whole
        logprobs = (chosen - peak) - log_mass
        if mask is not None or rule is not None:
            if mask is not None:
                impossible = ~mask.gather(1, targets[:, None])[:, 0]
            else:
                impossible = chosen < cutoff
            logprobs.masked_fill_(impossible, -math.inf)
            # A mask may leave a token nothing at all; the softmax of that means nothing.
            entropy.masked_fill_(peak < NOT_KEPT / 2, 0)
        return logprobs, entropy, peak + log_mass, cutoff, cached

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, targets, mask, rule, ctx.part, ctx.temperature, ctx.entries, _ = inputs
        logprobs, entropy, normalizer, cutoff, cached = output
        ctx.has_rule = rule is not None
        ctx.mark_non_differentiable(normalizer, cutoff, cached)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, targets, mask, logprobs, entropy, normalizer, cutoff, cached
        )

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, mask, logprobs, entropy, normalizer, cutoff, cached = (
            ctx.saved_tensors
        )
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        if mask is not None or ctx.has_rule:
            # Constants: a log-prob of -infinity does not move, nor does the entropy of nothing.
            grad_logprobs = torch.where(logprobs == -math.inf, 0, grad_logprobs)
            if grad_entropy is not None:
                grad_entropy = torch.where(normalizer < NOT_KEPT / 2, 0, grad_entropy)
        # torch leaves `apply` untyped.
        grad_hidden, grad_weight = ChunkedGradients.apply(  # type: ignore[no-untyped-call]
            hidden,
            weight,
            targets,
            mask,
            cutoff if ctx.has_rule else None,
            grad_logprobs,
            grad_entropy,
            logprobs,
            entropy,
            normalizer,
            cached,
            ctx.part,
            ctx.temperature,
            ctx.entries,
            ctx.needs_input_grad[:2],
        )
        return grad_hidden, grad_weight, *(None,) * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        # Kept logits of every member would multiply the memory, so none are kept.
        args = (*args[:-1], 0)
        if in_dims[1] is not None:
            return map_by_loop(ChunkedLogprobs.apply, info.batch_size, in_dims, args)
        hidden, weight, targets, mask, *rest = flatten_members(
            info.batch_size, in_dims, args, (0, 2, 3)
        )
        # torch leaves `apply` untyped.
        *outputs, cached = ChunkedLogprobs.apply(hidden, weight, targets, mask, *rest)  # type: ignore[no-untyped-call]
        return (
            (*(unflatten_members(info.batch_size, output) for output in outputs), cached),
            (0, 0, 0, 0, None),
        )


class ChunkedGradients(torch.autograd.Function):
    """Gradients of `sum(g * logprobs + k * entropy)` with respect to hidden and weight.

    With p = softmax(z), l = log p and entropy H, the gradient with respect to the logits is
    `g (onehot - p) - k p (l + H)`. The saved log-prob, H and log-normalizer are functions of hidden
    and weight; the derivative of this function accounts for that itself, so they get no gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        cutoff: Tensor | None,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        logprobs: Tensor,
        entropy: Tensor,
        normalizer: Tensor,
        cached: Tensor,
        part: VocabularyPart | None,
        temperature: float,
        entries: int,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        needs_hidden, needs_weight = needs
        targets = part.own(targets) if part else targets
        tokens, vocab, cached_tokens = hidden.shape[0], weight.shape[0], cached.shape[0]
        restriction = Restriction(mask, cutoff)
        of_tokens = token_gradients(
            grad_logprobs, grad_entropy, logprobs=logprobs, entropy=entropy, normalizer=normalizer
        )
        rows_step, columns_step = _tile_shape(hidden, vocab, entries)
        buffer = hidden.new_empty(rows_step * columns_step)
        scratch = Scratch(hidden, rows_step * columns_step, columns_step)
        logits_gradient = passes(hidden).logits_gradient
        rows_slices = list(slices(tokens, rows_step))
        columns_slices = list(slices(vocab, columns_step))
        # What is added up over several tiles is so in the wide type: bfloat16 would lose small
        # contributions. That of the weight is needed for one column of tiles at a time.
        grad_hidden = _sum_of(hidden, len(columns_slices)) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        if not tokens and grad_weight is not None:
            grad_weight.zero_()
        for columns in columns_slices:
            here = weight[columns]
            total = None
            if grad_weight is not None:
                total = _sum_of(here, len(rows_slices), out=grad_weight[columns])
            for rows in rows_slices:
                tile = _shaped(buffer, rows, columns)
                known = min(max(0, cached_tokens - rows.start), tile.shape[0])
                if known < tile.shape[0]:
                    fresh = slice(rows.start + known, rows.stop)
                    _logits(tile[known:], hidden[fresh], here, temperature)
                for some, source in (
                    (slice(0, known), cached[rows.start : rows.start + known, columns]),
                    (slice(known, tile.shape[0]), tile[known:]),
                ):
                    logits_gradient(
                        source,
                        restriction,
                        moved(some, rows.start),
                        columns,
                        scratch,
                        of_tokens=of_tokens,
                        out=tile[some],
                    )
                put_targets(tile, targets, rows, columns, of_tokens.of_target)
                scale = 1 / temperature
                if grad_hidden is not None:
                    begun = columns.start > 0
                    add_product(grad_hidden[rows], tile, here, scale=scale, fresh=not begun)
                if total is not None:
                    begun = rows.start > 0
                    add_product(total, tile.T, hidden[rows], scale=scale, fresh=not begun)
            if grad_weight is not None and total is not None and total.dtype != weight.dtype:
                grad_weight[columns] = total
        if grad_hidden is not None and part:
            part.add_up(grad_hidden)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight

    @staticmethod
    # Nothing is saved here; torch passes all three.
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:  # noqa: ARG004
        *saved, _, _, _, _, ctx.part, ctx.temperature, ctx.entries, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(
        ctx: Any, along_hidden: Tensor | None, along_weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.part:
            raise ValueError(
                "log-probs over parts of a vocabulary have no second derivative; pass the whole "
                "output embedding, without part"
            )
        # Ordinary differentiable operations, so that derivatives of every higher order follow.
        hidden, weight, targets, mask, cutoff, g, k = ctx.saved_tensors
        k = torch.zeros_like(g) if k is None else k
        restriction = Restriction(mask, cutoff)
        parts = [
            second_order(
                hidden[rows],
                weight,
                targets[rows],
                restriction=restriction,
                rows=rows,
                g=g[rows],
                k=k[rows],
                along_hidden=None if along_hidden is None else along_hidden[rows],
                along_weight=along_weight,
                temperature=ctx.temperature,
            )
            for rows in slices(hidden.shape[0], max(1, ctx.entries // weight.shape[0]))
        ]
        if not parts:
            return (None,) * 15
        to_hidden, to_weight, to_g, to_k = zip(*parts, strict=True)
        return (
            torch.cat(to_hidden).to(hidden.dtype),
            torch.stack(to_weight).sum(0).to(weight.dtype) if len(parts) > 1 else to_weight[0],
            *(None,) * 3,
            torch.cat(to_g),
            torch.cat(to_k) if ctx.needs_input_grad[6] else None,
            *(None,) * 8,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        needs_weight = args[-1][1]
        if in_dims[0] is None or in_dims[1] is not None or needs_weight:
            return map_by_loop(ChunkedGradients.apply, info.batch_size, in_dims, args)
        token_inputs = (0, 2, 3, 4, 5, 6, 7, 8, 9)
        flat = flatten_members(info.batch_size, in_dims, args, token_inputs)
        # The forward pass was mapped over hidden too, and so has kept no logits.
        flat[10] = args[0].new_empty(0, args[1].shape[0])
        # torch leaves `apply` untyped.
        grad_hidden, _ = ChunkedGradients.apply(*flat)  # type: ignore[no-untyped-call]
        if grad_hidden is None:
            return (None, None), (None, None)
        return (unflatten_members(info.batch_size, grad_hidden), None), (0, None)


def _tile_shape(hidden: Tensor, vocab: int, entries: int) -> tuple[int, int]:
    multiple = 1 if hidden.device.type == "cpu" else _ALIGNED_COLUMNS
    return tile_shape(hidden.shape[0], vocab, entries, multiple)


def _join_parts(
    sums_here: TileSums, chosen: Tensor, part: VocabularyPart
) -> tuple[TileSums, Tensor]:
    """Sums over the whole vocabulary, and the logits of targets: each is in one part, 0 in others.

    Each process joins what all of them have gathered, so that all get the same bits.
    """
    *of_parts, found = part.gather(torch.stack((*sums_here, chosen))).unbind(1)
    return join(TileSums(*of_parts)), found.sum(0)


def _logits(out: Tensor, hidden: Tensor, weight: Tensor, temperature: float) -> None:
    out.addmm_(hidden, weight.T, beta=0.0, alpha=1 / temperature)


def _shaped(flat: Tensor, rows: slice, columns: slice) -> Tensor:
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    return flat[: shape[0] * shape[1]].view(shape)


def _sum_of(like: Tensor, parts: int, *, out: Tensor | None = None) -> Tensor:
    """Buffer to add up this many parts in; `out` itself if its type is exact enough."""
    kind = like.dtype if parts <= 1 else wide_dtype(like.dtype)
    if out is not None and kind == out.dtype:
        return out
    return torch.empty_like(like, dtype=kind)


def flatten_members(
    batch_size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], per_token: tuple[int, ...]
) -> list[Any]:
    """Flatten per-token arguments from `[batch, T, ...]` to `[batch * T, ...]`."""
    flat = list(args)
    for index in per_token:
        if args[index] is not None:
            dim = in_dims[index]
            mapped = args[index][None].expand(batch_size, *args[index].shape)
            flat[index] = (mapped if dim is None else args[index].movedim(dim, 0)).flatten(0, 1)
    return flat


def unflatten_members(batch_size: int, flat: Tensor) -> Tensor:
    """`[batch * T, ...]` as `[batch, T, ...]`."""
    return flat.view(batch_size, flat.shape[0] // batch_size, *flat.shape[1:])


def map_by_loop(
    function: Callable[..., tuple[Tensor | None, ...]],
    batch_size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """vmap by calling once per member, each with separate weights or gradients of weights."""

    def member(index: int) -> list[Any]:
        return [
            arg.select(dim, index) if isinstance(dim, int) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]

    results = [function(*member(index)) for index in range(batch_size)]
    outputs = tuple(
        None if column[0] is None else torch.stack([x for x in column if x is not None])
        for column in zip(*results, strict=True)
    )
    return outputs, tuple(None if output is None else 0 for output in outputs)
