"""The mask of prefix trees for FlexAttention, from the ends of subtrees, without a square matrix.

    query block i, key block j, of 128 tokens each; end = subtree_end, i's tokens are a .. b
    j > i   empty                      j == i   partial
    j < i   full if every end > b, partial if some end > a, else empty

A token sees a key if `key <= query < subtree_end[key]`, across all trees of a packed row. Axes: `P`
packed tokens, `B` blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

BLOCK_TOKENS = 128
"""Of torch's kernels."""


def tree_block_mask(
    subtree_end: Int[Tensor, " P"], *, block_tokens: int = BLOCK_TOKENS
) -> BlockMask:
    """The mask of a packed row, on the device of `subtree_end`; the host does not wait for it."""
    tokens = len(subtree_end)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_end[key])

    partial, full = _blocks(subtree_end, block_tokens)
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=block_tokens,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _blocks(
    subtree_end: Int[Tensor, " P"], block_tokens: int
) -> tuple[Bool[Tensor, "B B"], Bool[Tensor, "B B"]]:
    """Which blocks have keys that are seen, by some of their queries and by all."""
    tokens = len(subtree_end)
    count = -(-tokens // block_tokens)
    missing = count * block_tokens - tokens
    # What stands for the missing keys changes neither the most nor the least of a block.
    ends = pad(subtree_end, (0, missing), value=0).view(count, block_tokens).amax(1)
    least = pad(subtree_end, (0, missing), value=tokens).view(count, block_tokens).amin(1)
    index = torch.arange(count, device=subtree_end.device)
    first = index * block_tokens
    last = first + block_tokens - 1
    earlier = index[:, None] > index[None, :]
    # Never where queries are missing: no end is greater than the number of tokens.
    full = earlier & (least[None, :] > last[:, None])
    some = earlier & (ends[None, :] > first[:, None]) | (index[:, None] == index[None, :])
    return some & ~full, full


def _listed(
    blocks: Bool[Tensor, "B B"],
) -> tuple[Int[Tensor, "1 1 B"], Int[Tensor, "1 1 B B"]]:
    """For each query block how many key blocks there are, and their indices, which come first."""
    dense = blocks.to(torch.int32)
    order = torch.argsort(dense, dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
