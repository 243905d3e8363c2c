"""Reduce values by integer ids: sequences, groups and turns, padded or packed.

    padded [N, T]        ids               packed [T]              ids
    a b c .              0 0 0 0           a b c d e  cu [0 3 5]   0 0 0 1 1
    d e . .              1 1 1 1

Masked tokens add an exact zero, so both layouts give bit-equal sums on a CPU.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from areal_lab.functional.checks import (
    check_integer,
    check_range,
    check_same_shape,
    check_token_inputs,
    count_known,
    wide_dtype,
)

Reduction: TypeAlias = Literal["sum", "mean", "min", "max"]


_RANGE = "give a larger count, or number the segments from 0 with dense_ids"


class Segments(NamedTuple):
    """Segment of each token, in padded and in packed batches.

    A segment is a set of tokens with the same id: a sequence, a turn, all samples of one prompt.
    """

    ids: Tensor
    """Number of each token's segment, `0 .. count - 1`; of the shape of the tokens."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing here uses
    """Number of segments, those without a token included."""


def sequences_or_rows(mask: Bool[Tensor, "*shape"], sequences: Segments | None = None) -> Segments:
    """The given sequences, or by default the rows along the last axis.

    A single axis is then one sequence, so that a function of one sequence works on a batch
    under `vmap`.

    Source: definition.

    Raises:
        ValueError: the mask has no axis of tokens, the ids are not of its shape or not integers, or
            the count is negative.
    """
    if mask.dim() == 0:
        raise ValueError("mask has shape (), but needs an axis of tokens; pass mask[None]")
    if sequences is None:
        rows = math.prod(mask.shape[:-1])
        ids = torch.arange(rows, device=mask.device).reshape(*mask.shape[:-1], 1)
        return Segments(ids.expand(mask.shape), rows)
    check_segments("sequences", sequences, "mask", mask)
    return sequences


def check_segments(
    name: str, segments: Segments, tokens_name: str, tokens: Shaped[Tensor, "*shape"]
) -> None:
    """Refuse anything but `Segments` of the shape of the tokens.

    Raises:
        TypeError: a tensor of ids, or something else, instead of `Segments`.
        ValueError: the ids are of another shape than the tokens or not integers, or the count is
            negative.
    """
    if not isinstance(segments, Segments):
        raise TypeError(
            f"{name} is a {type(segments).__name__}, but must be Segments; pass Segments(ids, "
            "count), or packed_sequences(cu_seqlens, tokens)"
        )
    check_same_shape(f"{name}.ids", segments.ids, tokens_name, tokens)
    check_integer(f"{name}.ids", segments.ids)
    if segments.count < 0:
        raise ValueError(f"{name}.count is {segments.count}, but must be >= 0")


def packed_sequences(cu_seqlens: Int[Tensor, " boundaries"], tokens: int) -> Segments:
    """The sequences of a packed batch, from their cumulative lengths `[0, |y_1|, ...]`.

    Args:
        cu_seqlens: see `packed_sequence_ids`.
        tokens: length of the packed batch, padding at its end included.

    Source: definition.

    Raises:
        ValueError: as `packed_sequence_ids`.
    """
    return Segments(packed_sequence_ids(cu_seqlens, tokens), cu_seqlens.shape[0] - 1)


def segment_reduce(
    values: Shaped[Tensor, "*shape"],
    ids: Int[Tensor, "*shape"],
    segments: int,
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
    reduce: Reduction = "sum",
) -> Shaped[Tensor, " segments"]:
    """Reduce the values that share an id: `out[k] = reduce of values[i] over ids[i] == k`.

    Args:
        values: one value per token (or sample); any shape, floating or integer.
        ids: id of each value, in `0 .. segments - 1`.
        segments: number of segments, known without looking at the data.
        mask: True where a value counts; None counts all. Masked NaN and infinity do not matter.
        reduce: `sum`, `mean`, `min` or `max`.

    Returns:
        One value per segment. A segment without a value gives 0 for every reduction. Sums and means
        of floating values are added up in float64 and returned in float32 at least: a bfloat16
        cannot count beyond 256, and a million float32 added one by one are 1 % off.

    Source: definition.

    Raises:
        ValueError: shapes differ, ids are not integers or not in `0 .. segments - 1`, or `segments`
            is negative.
    """
    check_same_shape("ids", ids, "values", values)
    check_integer("ids", ids)
    if segments < 0:
        raise ValueError(f"segments is {segments}, but must be >= 0")
    check_range("ids", ids, segments, _RANGE)
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    check_token_inputs(mask, values=values)
    flat_ids, flat_mask = ids.reshape(-1).long(), mask.reshape(-1)
    chosen = torch.where(mask, values, torch.zeros_like(values)).reshape(-1)
    if reduce == "sum":
        total = _scatter_sum(chosen, flat_ids, segments)
        return total.to(wide_dtype(values.dtype)) if values.is_floating_point() else total
    counts = _scatter_sum(flat_mask.to(torch.int64), flat_ids, segments)
    if reduce == "mean":
        means = _scatter_sum(chosen, flat_ids, segments) / counts.clamp(min=1)
        return means.to(wide_dtype(values.dtype))
    neutral = _neutral(values.dtype, reduce)
    contenders = torch.where(flat_mask, chosen, torch.full_like(chosen, neutral))
    start = torch.full((segments,), neutral, dtype=values.dtype, device=values.device)
    extremum = start.scatter_reduce(0, flat_ids, contenders, "amin" if reduce == "min" else "amax")
    return torch.where(counts > 0, extremum, torch.zeros_like(extremum))


def value_of_segment(
    values: Shaped[Tensor, " segments"], ids: Int[Tensor, "*shape"]
) -> Shaped[Tensor, "*shape"]:
    """Value of each token's segment. The gradient, a sum over tokens, is added up in float64.

    Raises:
        ValueError: an id is negative, or as large as the number of segments or larger.
    """
    check_range("ids", ids, values.shape[0], _RANGE)
    return values.double()[ids].to(values.dtype)


def _scatter_sum(values: Tensor, ids: Tensor, segments: int) -> Tensor:
    """Sum of the values of each id, in float64 for floating values."""
    if values.is_floating_point():
        values = values.double()
    start = torch.zeros(segments, dtype=values.dtype, device=values.device)
    return start.scatter_add(0, ids, values)


def _neutral(dtype: torch.dtype, reduce: Reduction) -> int | float:
    """Value that changes no extremum; infinity among floats, so that infinite values survive."""
    if dtype.is_floating_point:
        return math.inf if reduce == "min" else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if reduce == "min" else limits.min


def padded_sequence_ids(mask: Bool[Tensor, "N T"]) -> Int[Tensor, "N T"]:
    """Id of the sequence (row) that each position of a padded batch belongs to.

    Source: definition.

    Raises:
        ValueError: the mask has no axis of tokens.
    """
    return sequences_or_rows(mask).ids


def packed_sequence_ids(
    cu_seqlens: Int[Tensor, " boundaries"], tokens: int
) -> Int[Tensor, " tokens"]:
    """Sequence id of each token of a packed batch.

    Tokens beyond the last boundary are padding: they get the id of the last sequence, and the mask
    must be False there.

    Args:
        cu_seqlens: cumulative lengths `[0, |y_1|, |y_1| + |y_2|, ...]`; empty sequences are fine.
        tokens: length of the packed batch: the last entry of `cu_seqlens`, or more with padding.

    Source: definition; the `cu_seqlens` of FlashAttention.

    Raises:
        ValueError: the boundaries are not integers on one axis, do not begin with 0, fall, or end
            beyond the tokens; or there are tokens, but no sequence.
    """
    check_integer("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < (2 if tokens else 1):
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} for {tokens} tokens, but must be one "
            "axis of boundaries, one more than there are sequences: [0, |y_1|, |y_1| + |y_2|, ...]"
        )
    wrong = (cu_seqlens[1:] < cu_seqlens[:-1]).sum() + (cu_seqlens[0] != 0)
    if count_known(wrong + (cu_seqlens[-1] > tokens)):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.tolist()} for {tokens} tokens, but must begin with 0, "
            "never fall, and end at the number of tokens (before it, if padding follows); prepend "
            "a 0 to lengths.cumsum(0)"
        )
    positions = torch.arange(tokens, device=cu_seqlens.device)
    ids = torch.searchsorted(cu_seqlens[1:].contiguous().long(), positions, right=True)
    return ids.clamp(max=max(0, cu_seqlens.shape[0] - 2))


def dense_ids(ids: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Renumber arbitrary integer ids from 0, in ascending order.

    The same as the inverse of `torch.unique`, with static shapes (vmap, compile). There are at
    most N different ids, so N is always a large enough number of segments.

    Source: definition.

    Raises:
        ValueError: the ids are not integers.
    """
    check_integer("ids", ids)
    ordered, order = torch.sort(ids, stable=True)
    is_new = torch.ones_like(ordered)
    is_new = torch.cat([is_new[:1] * 0, (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    numbers = torch.cumsum(is_new, 0)
    return torch.zeros_like(numbers).scatter(0, order, numbers)


def sequence_edges(
    tokens: Shaped[Tensor, "*shape"], sequences: Segments | None = None, *, last: bool
) -> Bool[Tensor, "*shape"]:
    """True at the last (or the first) position of each sequence; without sequences, of each row.

    Args:
        tokens: any tensor of one entry per token, such as the mask; only its shape matters.
        sequences: sequence of each token, the tokens of each being neighbors; None takes rows.
        last: the last position, or the first.

    Source: definition.

    Raises:
        ValueError: there is no axis of tokens, or the ids are not of the shape of the tokens or
            not integers.
    """
    if tokens.dim() == 0:
        raise ValueError("tokens have shape (), but need an axis; pass tokens[None]")
    width = tokens.shape[-1]
    if sequences is None:
        positions = torch.arange(width, device=tokens.device)
        return (positions == (width - 1 if last else 0)).expand(tokens.shape)
    check_segments("sequences", sequences, "tokens", tokens)
    if width == 0:
        return torch.zeros_like(sequences.ids, dtype=torch.bool)
    changes = sequences.ids[..., 1:] != sequences.ids[..., :-1]
    return pad(changes, (0, 1) if last else (1, 0), value=True)


def unmasked_runs(mask: Bool[Tensor, "*shape"], sequences: Segments | None = None) -> Segments:
    """Number the runs of neighboring unmasked tokens, the turns of a response by default.

    Masked tokens get the number of the run before them. The count is an upper bound, so that it
    does not depend on the data.

    Source: definition; the segments of ROLL's `ratio_type=segment`.

    Raises:
        ValueError: as `sequences_or_rows`.
    """
    first = sequence_edges(mask, sequences, last=False)
    before = pad(mask[..., :-1], (1, 0)) if mask.numel() else mask
    return numbered(mask & (first | ~before))


def numbered(starts: Bool[Tensor, "*shape"]) -> Segments:
    """Segments that start where `starts` is True."""
    ids = torch.cumsum(starts.reshape(-1), 0).reshape(starts.shape)
    return Segments(ids, starts.numel() + 1)
