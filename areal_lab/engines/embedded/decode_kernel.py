"""Decode attention over pages as a Triton kernel: one query token per row, rows of any length.

    row of 5 pages, 2 a split:   | p p | p p | p |     a program for each row, KV head and split
                                   sum of the splits   a program for each row and query head

A program reads each key and value of its split once, for all query heads of the KV head
(FlashDecoding: Dao, Haziza, Massa, Sizov 2023; online softmax: Milakov and Gimelshein,
arXiv:1805.02867). Programs beyond the end of a row return at once, so the grid depends on the size
of the page table only and a CUDA graph can replay it for other lengths.

Imports triton, so import this module only where it is needed (`paged_attention.decode_function`).
"""

# ruff: noqa: N803, PLR0917 - constants and pointers of a kernel, as Triton writes them

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

LEAST_ROWS_OF_A_PRODUCT = 16
"""`tl.dot` multiplies tiles of at least 16 x 16; smaller groups of query heads are padded."""
REDUCED_SPLITS = tl.constexpr(16)
"""Splits that the second pass loads at a time."""
_PROGRAMS = 512
"""Programs to aim for: about four for each of an H100's 132 multiprocessors."""
_MOST_PAGES_PER_SPLIT = 8
"""One long row among many short ones is divided, too: it would run alone at the end."""
MOST_SPLITS = 128
"""Splits of one row, a power of two; a single row of 4,096 tokens has half as many."""


def decode_attention(
    query: Float[Tensor, "R Hq D"],
    keys: Float[Tensor, "P H C D"],
    values: Float[Tensor, "P H C D"],
    table: Int[Tensor, "R W"],
    lengths: Int[Tensor, " R"],
    *,
    scale: float,
) -> Float[Tensor, "R Hq D"]:
    """Attention of one query token per row to the first `lengths` tokens of its pages.

    Args:
        query: may have any strides but the last, which must be 1; so may the table.
        keys: pages of C tokens. Pages and heads may have any strides; tokens must be adjacent.
        values: laid out as the keys.
        table: page numbers of each row; those beyond a row's length are not read.
        lengths: tokens of each row, the query's included, with any stride; a row of length 0 gives
            0.
        scale: factor of the products of queries and keys.
    """
    rows, query_heads, head_dim = query.shape
    _, kv_heads, page_tokens, _ = keys.shape
    width = table.shape[1]
    group = query_heads // kv_heads
    split_pages = pages_per_split(rows, kv_heads, width)
    splits = triton.cdiv(width, split_pages)
    partial = query.new_empty(rows, query_heads, splits, head_dim, dtype=torch.float32)
    masses = query.new_empty(rows, query_heads, splits, dtype=torch.float32)
    out = query.new_empty(rows, query_heads, head_dim)
    head_pad = max(triton.next_power_of_2(head_dim), LEAST_ROWS_OF_A_PRODUCT)
    attend_split[(rows, kv_heads, splits)](
        query, keys, values, table, lengths, partial, masses,
        scale * math.log2(math.e),
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), table.stride(0),
        lengths.stride(0), split_pages, splits,
        GROUP=group,
        GROUP_PAD=max(triton.next_power_of_2(group), LEAST_ROWS_OF_A_PRODUCT),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        PAGE_TOKENS=page_tokens,
        **launch_options(keys.dtype),
    )  # fmt: skip
    add_splits[(rows, query_heads)](
        partial, masses, lengths, out,
        lengths.stride(0), split_pages * page_tokens, splits,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        SPLITS_PAD=MOST_SPLITS,
    )  # fmt: skip
    return out


def pages_per_split(rows: int, kv_heads: int, width: int) -> int:
    """Pages that one program reads, a power of two: few where few rows must fill the GPU."""
    splits = max(1, _PROGRAMS // (rows * kv_heads))
    wanted = triton.next_power_of_2(triton.cdiv(width, splits))
    least = triton.next_power_of_2(triton.cdiv(width, MOST_SPLITS))
    pages: int = max(min(wanted, _MOST_PAGES_PER_SPLIT), least)
    return pages


def launch_options(dtype: torch.dtype) -> dict[str, int]:
    """Warps and pipeline stages with which the first pass needs no memory for registers.

    Exact float32 products do not use tensor cores: the tiles are in registers, so they need more
    warps. `tests/engines/embedded/test_decode_kernel.py` compiles both for an H100.
    """
    if dtype == torch.float32:
        return {"num_warps": 16, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 2}


# Numbers that depend on the batch must not compile another variant in the middle of a run.
@triton.jit(do_not_specialize=["table_stride", "length_stride", "split_pages", "splits"])
def attend_split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    masses: tl.tensor,
    scale_log2: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    length_stride: tl.tensor,
    split_pages: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
) -> None:
    """First pass: the softmax of a split and its mass, as a logarithm to base 2."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row * length_stride)
    first_page = split * split_pages
    if first_page * PAGE_TOKENS >= length:
        return
    end_page = tl.minimum(first_page + split_pages, tl.cdiv(length, PAGE_TOKENS))
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    slot = tl.arange(0, PAGE_TOKENS)
    of_group = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query_head = head * GROUP + member
    queries = tl.load(
        query + row * query_row_stride + query_head[:, None] * query_head_stride + dim[None, :],
        mask=of_group,
        other=0.0,
    )
    largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for index in range(first_page, end_page):
        page = tl.load(table + row * table_stride + index).to(tl.int64)
        start = page * page_stride + head * head_stride
        seen = index * PAGE_TOKENS + slot < length
        # Slots beyond the end may have anything, NaN included, and 0 * NaN is NaN: not loaded.
        key = tl.load(
            keys + start + slot[None, :] * HEAD_DIM + dim[:, None],
            mask=seen[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        value = tl.load(
            values + start + slot[:, None] * HEAD_DIM + dim[None, :],
            mask=seen[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        rescale = tl.exp2(largest - larger)
        mass = mass * rescale + tl.sum(weights, 1)
        total = total * rescale[:, None]
        total += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = larger
    at = (row * tl.num_programs(1) * GROUP + query_head) * splits + split
    tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], total / mass[:, None], mask=of_group)
    tl.store(masses + at, largest + tl.log2(mass), mask=member < GROUP)


@triton.jit(do_not_specialize=["length_stride", "split_tokens", "splits"])
def add_splits(
    partial: tl.tensor,
    masses: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    length_stride: tl.tensor,
    split_tokens: tl.tensor,
    splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    """Second pass: the results of a row's splits, weighted by their masses."""
    row = tl.program_id(0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    own = tl.cdiv(tl.load(lengths + row * length_stride), split_tokens)
    dim = tl.arange(0, HEAD_PAD)
    every = tl.arange(0, SPLITS_PAD)
    mass = tl.load(masses + at * splits + every, mask=every < own, other=float("-inf"))
    largest = tl.max(mass, 0)
    # A row of length 0 has no splits; its sum is 0.
    largest = tl.where(own > 0, largest, 0.0)
    total = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, own, REDUCED_SPLITS):
        split = start + tl.arange(0, REDUCED_SPLITS)
        there = split < own
        share = tl.load(masses + at * splits + split, mask=there, other=float("-inf"))
        results = tl.load(
            partial + (at * splits + split)[:, None] * HEAD_DIM + dim[None, :],
            mask=there[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total += tl.sum(tl.exp2(share - largest)[:, None] * results, 0)
    whole = tl.sum(tl.exp2(mass - largest), 0)
    result = total / tl.where(own > 0, whole, 1.0)
    tl.store(out + at * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
