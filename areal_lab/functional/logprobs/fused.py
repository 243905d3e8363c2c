r"""Passes over a tile of logits on a GPU: one Triton kernel each, with the signatures of `tiles`.

    sums              logits [r, c] --> peak, log mass, entropy [r]    reads each logit once
    logits_gradient   logits [r, c] --> their gradient, in place       reads and writes each once

In bfloat16 these move 2 and 4 bytes per logit; the operations of `tiles` move 36 and 28. A program
of `sums` has one row and keeps the peak m and two sums over the blocks so far:

$$ s = \sum_v e^{z_v - m}, \quad q = \sum_v (z_v - m) e^{z_v - m} $$

A block that raises the peak by d turns them into $s e^{-d}$ and $(q - d s) e^{-d}$. All arithmetic
is in float32. `chunked` imports this module for tensors on a GPU, so it needs Triton only there.

Source: running sums of a softmax: Milakov and Gimelshein (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from areal_lab.functional.logprobs.cutoff import NOT_KEPT
from areal_lab.functional.logprobs.tiles import Restriction, Scratch, TileSums, TokenGradients

BLOCK_COLUMNS: Final = 4096
"""Logits that a program holds at a time: 16 in each thread."""
WARPS: Final = 8

# A kernel can read globals only if they are of this type.
_NOT_KEPT = tl.constexpr(NOT_KEPT)
_LOWEST = tl.constexpr(2 * NOT_KEPT)  # peak of no logits, below that of logits that are not kept


@triton.jit
def load_logits(  # noqa: PLR0917 - Triton's compiler takes arguments by position
    logits: tl.tensor,
    mask: tl.tensor,
    cutoff: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    logits_stride: tl.tensor,
    mask_row_stride: tl.tensor,
    mask_column_stride: tl.tensor,
    masked: tl.constexpr,
    cut: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logits of a row at these columns, and which of them are kept."""
    z = tl.load(logits + row * logits_stride + at, mask=inside, other=0.0).to(tl.float32)
    kept = inside
    if masked:
        places = mask + row * mask_row_stride + at.to(tl.int64) * mask_column_stride
        kept = tl.load(places, mask=inside, other=0) != 0
    if cut:
        kept = z >= tl.load(cutoff + row)
    return z, kept


@triton.jit
def sums_kernel(  # noqa: PLR0917
    logits: tl.tensor,
    mask: tl.tensor,
    cutoff: tl.tensor,
    peaks: tl.tensor,
    log_masses: tl.tensor,
    entropies: tl.tensor,
    columns: tl.tensor,
    logits_stride: tl.tensor,
    mask_row_stride: tl.tensor,
    mask_column_stride: tl.tensor,
    block_columns: tl.constexpr,
    masked: tl.constexpr,
    cut: tl.constexpr,
) -> None:
    """Program `r` computes the sums of row `r`."""
    row = tl.program_id(0).to(tl.int64)
    peak = _LOWEST
    mass = 0.0
    moment = 0.0
    for start in range(0, columns, block_columns):
        at = start + tl.arange(0, block_columns)
        inside = at < columns
        z, kept = load_logits(
            logits,
            mask,
            cutoff,
            row,
            at,
            inside,
            logits_stride,
            mask_row_stride,
            mask_column_stride,
            masked,
            cut,
        )
        z = tl.where(kept, z, _NOT_KEPT)
        # Where nothing is kept, columns beyond the row would count as those in it do.
        new_peak = tl.maximum(peak, tl.max(tl.where(inside, z, _LOWEST), axis=0))
        above = z - new_peak
        p = tl.where(inside, tl.exp(above), 0.0)
        rise = new_peak - peak
        fading = tl.exp(-rise)
        moment = (moment - rise * mass) * fading + tl.sum(above * p, axis=0)
        mass = mass * fading + tl.sum(p, axis=0)
        peak = new_peak
    log_mass = tl.log(mass)
    tl.store(peaks + row, peak)
    tl.store(log_masses + row, log_mass)
    tl.store(entropies + row, log_mass - moment / mass)


@triton.jit
def gradient_kernel(  # noqa: PLR0917
    logits: tl.tensor,
    mask: tl.tensor,
    cutoff: tl.tensor,
    normalizers: tl.tensor,
    factors: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    logits_stride: tl.tensor,
    mask_row_stride: tl.tensor,
    mask_column_stride: tl.tensor,
    out_stride: tl.tensor,
    block_columns: tl.constexpr,
    masked: tl.constexpr,
    cut: tl.constexpr,
    with_entropy: tl.constexpr,
) -> None:
    """Program `(r, b)` computes block `b` of row `r`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    z, kept = load_logits(
        logits,
        mask,
        cutoff,
        row,
        at,
        inside,
        logits_stride,
        mask_row_stride,
        mask_column_stride,
        masked,
        cut,
    )
    log_p = tl.where(kept, z - tl.load(normalizers + row), _NOT_KEPT)
    slope = -tl.load(offsets + row)
    if with_entropy:
        slope = log_p * tl.load(factors + row) + slope
    gradient = slope * tl.exp(log_p)
    tl.store(out + row * out_stride + at, gradient.to(out.dtype.element_ty), mask=inside)


def sums(
    logits: Tensor, restriction: Restriction, rows: slice, columns: slice, scratch: Scratch
) -> TileSums:
    """As `tiles.sums`, of float32 or 16 bits; `scratch` is not used."""
    del scratch
    out = torch.empty(3, logits.shape[0], dtype=torch.float32, device=logits.device)
    mask, cutoff, strides = _restriction(logits, restriction, rows, columns)
    with torch.cuda.device_of(logits):
        sums_kernel[(logits.shape[0],)](
            logits,
            mask,
            cutoff,
            *out,
            logits.shape[1],
            logits.stride(0),
            *strides,
            block_columns=_block(logits.shape[1]),
            masked=mask is not None,
            cut=cutoff is not None,
            num_warps=WARPS,
        )
    return TileSums(*out)


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
    """As `tiles.logits_gradient`, of float32 or 16 bits; `scratch` is not used."""
    del scratch
    if not logits.shape[0]:
        return
    mask, cutoff, strides = _restriction(logits, restriction, rows, columns)
    factor = of_tokens.factor
    block = _block(logits.shape[1])
    with torch.cuda.device_of(logits):
        gradient_kernel[(logits.shape[0], triton.cdiv(logits.shape[1], block))](
            logits,
            mask,
            cutoff,
            _rows(of_tokens.normalizer, rows),
            None if factor is None else _rows(factor, rows),
            _rows(of_tokens.offset, rows),
            out,
            logits.shape[1],
            logits.stride(0),
            *strides,
            out.stride(0),
            block_columns=block,
            masked=mask is not None,
            cut=cutoff is not None,
            with_entropy=factor is not None,
            num_warps=WARPS,
        )


def _restriction(
    logits: Tensor, restriction: Restriction, rows: slice, columns: slice
) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """Mask and threshold of a tile, and the strides of the mask."""
    assert logits.stride(1) == 1, f"logits have strides {logits.stride()}"
    if restriction.mask is not None:
        mask = restriction.mask[rows, columns]
        return mask, None, (mask.stride(0), mask.stride(1))
    cutoff = None if restriction.cutoff is None else restriction.cutoff[rows]
    return None, cutoff, (0, 0)


def _rows(of_tokens: Tensor, rows: slice) -> Tensor:
    # The gradient of a sum is one number, expanded.
    return of_tokens[rows, 0].contiguous()


def _block(columns: int) -> int:
    return min(BLOCK_COLUMNS, int(triton.next_power_of_2(columns)))
