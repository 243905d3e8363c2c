r"""Linear recurrence over segments: the basis of all returns and advantages.

    reverse   y_t = a_t * y_{t+1} + b_t    returns and advantages: later tokens count
    forward   y_t = a_t * y_{t-1} + b_t    cumulative sums; the gradient of the reverse one

Time is the last axis, padded `[N, T]` or packed `[T]`. No loop over tokens: on a CPU, blocks of 64
tokens advance side by side and their last values are a recurrence of 1/64 the length; elsewhere,
and under `torch.compile`, log2(T) steps reach twice as far each time.

It never divides by products of a, so factors of 0 and long sequences are no problem.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from areal_lab.functional.checks import (
    check_floating,
    check_range,
    check_same_shape,
    check_token_inputs,
    wide,
    wide_dtype,
)
from areal_lab.functional.segments import Segments, sequence_edges

_BLOCK = 64
"""Tokens of a block: from 16 to 128 a million tokens took 6 to 7 ms on one core, with 256 9 ms."""


def linear_recurrence(
    factors: Float[Tensor, "*shape"] | float,
    inputs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    beyond: Float[Tensor, "*sequences"] | None = None,
    sequences: Segments | None = None,
    reverse: bool = True,
) -> Float[Tensor, "*shape"]:
    r"""Linear recurrence within each sequence, against time by default.

    $$ y_t = a_t\, y_{t+1} + b_t, \qquad y_{|y|+1} = \mathrm{beyond} $$

    A masked step counts as a = 1 and b = 0, whatever its values are, so y is unchanged. To
    restart at some token, give it the factor 0. Gradients of any order go to `factors`,
    `inputs` and `beyond`; the gradient is the same recurrence in the other direction.

    Equal to a loop over tokens up to rounding. An infinite or NaN y reaches everything computed
    from it and, as 0 * inf is NaN, also the sequences beyond it; callers refuse such inputs.

    Args:
        factors: a of each token, or one number for all.
        inputs: b of each token.
        mask: False where a step is left out; None leaves out none.
        beyond: y beyond the last token of each sequence (before the first one when not
            `reverse`), one per sequence; None is 0.
        sequences: sequence of each token; the tokens of a sequence are neighbors. None takes rows.
        reverse: from the last token to the first; otherwise $y_t = a_t y_{t-1} + b_t$.

    Returns:
        y of each token, computed and returned in float32 at least; at a masked token the y that
        is carried past it.

    Source: the scan of doublings: Hillis and Steele, Data parallel algorithms (1986); blocks:
    Blelloch, Prefix sums and their applications (1990).

    Raises:
        ValueError: shapes differ, inputs or factors are not floating, or `beyond` does not have
            one entry per sequence.
    """
    check_floating("inputs", inputs)
    if isinstance(factors, Tensor):
        check_same_shape("factors", factors, "inputs", inputs)
        check_floating("factors", factors)
        dtype = wide_dtype(torch.promote_types(factors.dtype, inputs.dtype))
        factors, inputs = factors.to(dtype), inputs.to(dtype)
    else:
        inputs = wide(inputs)
        factors = torch.full((), factors, dtype=inputs.dtype, device=inputs.device)
    if mask is not None:
        check_token_inputs(mask, inputs=inputs)
        factors = torch.where(mask, factors, 1.0)
        inputs = torch.where(mask, inputs, 0.0)
    edges = sequence_edges(inputs, sequences, last=reverse)
    if beyond is not None:
        per_token = broadcast_to_tokens("beyond", beyond, inputs, sequences)
        # Selected before it is computed with: only at an edge is there something beyond.
        inputs = inputs + factors * torch.where(edges, per_token.to(inputs.dtype), 0.0)
    if inputs.numel() == 0:
        return inputs.clone()
    factors = torch.where(edges, 0.0, factors).expand(inputs.shape)
    if torch.compiler.is_compiling():
        return _double(factors, inputs, reverse)
    # torch leaves `apply` untyped.
    result: Tensor = _Recurrence.apply(factors, inputs, reverse)  # type: ignore[no-untyped-call]
    return result


def next_in_sequence(
    values: Float[Tensor, "*shape"],
    *,
    beyond: Float[Tensor, "*sequences"] | None = None,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    """Value at the next position of the same sequence; at its last position `beyond`, or 0.

    Source: definition.

    Raises:
        ValueError: there is not one entry of `beyond` per sequence, or as `sequence_edges`.
    """
    if values.numel() == 0:
        return values.clone()
    edges = sequence_edges(values, sequences, last=True)
    following = _neighbor(values, reverse=True)
    if beyond is None:
        return torch.where(edges, 0.0, following)
    per_token = broadcast_to_tokens("beyond", beyond, values, sequences)
    return torch.where(edges, per_token.to(values.dtype), following)


def broadcast_to_tokens(
    name: str,
    values: Shaped[Tensor, "*sequences"],
    tokens: Shaped[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> Shaped[Tensor, "*broadcast"]:
    """One value per sequence, in a shape that broadcasts to the tokens.

    Raises:
        ValueError: there is not one value per sequence, or an id is out of range.
    """
    rows = tuple(tokens.shape[:-1]) if sequences is None else (sequences.count,)
    if values.numel() != math.prod(rows):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but must be {rows}: one per sequence"
        )
    values = values.reshape(rows)
    if sequences is None:
        return values.unsqueeze(-1)
    check_range("sequences.ids", sequences.ids, sequences.count, "give a larger count")
    return values[sequences.ids]


class _Recurrence(torch.autograd.Function):
    """Recurrence (a, b) -> y along the last axis; a must be 0 at the edge where it starts."""

    @staticmethod
    def forward(factors: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
        if inputs.device.type != "cpu":
            return _double(factors, inputs, reverse)
        # Rows end to end: the factor 0 at their edges keeps them apart.
        flat = _advance_blocks(factors.reshape(-1), inputs.reshape(-1), reverse)
        return flat.view(inputs.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        factors, _, ctx.reverse = inputs
        ctx.save_for_backward(factors, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        # y_t reaches y_{t-1} with the factor a_{t-1}: the same recurrence the other way.
        factors, y = ctx.saved_tensors
        # torch leaves `apply` untyped.
        reached = _Recurrence.apply(  # type: ignore[no-untyped-call]
            _neighbor(factors, reverse=not ctx.reverse), grad, not ctx.reverse
        )
        needs_factors = ctx.needs_input_grad[0]
        to_factors = reached * _neighbor(y, reverse=ctx.reverse) if needs_factors else None
        return to_factors, reached, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        # A mapped axis is one more axis of rows.
        factors, inputs = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:2], in_dims[:2], strict=True)
        )
        # torch leaves `apply` untyped.
        return _Recurrence.apply(factors, inputs, args[2]), 0  # type: ignore[no-untyped-call]


def _advance_blocks(factors: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
    """Compute y of one flat axis: within blocks step by step, all blocks at once; then between
    blocks.

    block    [b b b b][b b b b][b b b b]     last value and product of factors of each block
    carried         <--------<--------       recurrence of those, 1/64 as long
    block    [y y y y][y y y y][y y y y]     the steps again, from what is carried in
    """
    tokens = inputs.shape[0]
    if tokens <= _BLOCK:
        y = inputs.clone()
        _advance(factors.unbind(), y.unbind(), y.new_zeros(()), reverse)
        return y
    blocks = -(-tokens // _BLOCK)
    spare = (0, blocks * _BLOCK - tokens)
    # Transposed, so that a step of all blocks reads and writes neighbors; a copy, so it may write.
    a, y = (pad(x, spare).view(blocks, _BLOCK).t().contiguous() for x in (factors, inputs))
    steps_a, steps_y = a.unbind(), y.unbind()
    order = range(_BLOCK - 1, -1, -1) if reverse else range(_BLOCK)
    last, product = steps_y[order[0]].clone(), steps_a[order[0]].clone()
    for step in order[1:]:
        torch.addcmul(steps_y[step], steps_a[step], last, out=last)
        product.mul_(steps_a[step])
    carried = _neighbor(_advance_blocks(product, last, reverse), reverse=reverse)
    _advance(steps_a, steps_y, carried, reverse)
    return y.t().reshape(-1)[:tokens]


def _advance(
    factors: tuple[Tensor, ...], inputs: tuple[Tensor, ...], carried: Tensor, reverse: bool
) -> None:
    steps = list(zip(factors, inputs, strict=True))
    for a, y in reversed(steps) if reverse else steps:
        carried = torch.addcmul(y, a, carried, out=y)


def _double(factors: Tensor, inputs: Tensor, reverse: bool) -> Tensor:
    """Compute y by doubling: after step k each y accounts for 2^k inputs (Hillis and Steele's
    scan).
    """
    y, reach = inputs, 1
    while reach < inputs.shape[-1]:
        y = y + factors * _neighbor(y, reverse=reverse, distance=reach)
        factors = factors * _neighbor(factors, reverse=reverse, distance=reach)
        reach *= 2
    return y


def _neighbor(values: Tensor, *, reverse: bool, distance: int = 1) -> Tensor:
    """The value `distance` later (reverse) or earlier along the last axis; 0 beyond its end."""
    kept = values.shape[-1] - distance
    if reverse:
        return pad(values[..., distance:], (0, distance))
    return pad(values[..., :kept], (distance, 0))
