"""Attention of packed tokens against the cache: one call per layer and step, for all requests.

    tokens of a step:  | d0 d1 .. dn | c0 c0 c0 | c1 c1 |      [1, heads, T, head_dim]
                       one per row     new prompts (chunks)

Row i decodes token di. A chunk holds the tokens of a new row that no other row has; shared ones are
copied, inside the layer, from the row that has them, even if that row is itself a chunk of the same
step. Query heads of one KV head share its keys without repeating them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from areal_lab.engines.embedded.cache import KVCache, PrefixCopy
from areal_lab.models.copies import to_device

IMPLEMENTATION = "areal_lab_packed"
"""Name under which transformers finds `attend`."""

SPLIT_COST_TOKENS = 90
"""Cost of one more attention call, in keys read by one row: measured on one AVX512 core with 3 KV
heads of size 64 (30 us per call, 0.33 us per key). Affects speed only."""
SPLIT_COST_ON_A_GPU_TOKENS = 90_000
"""The same on a GPU without triton, computed and not measured: four launches take about 30 us of
the host, and a key and value of 2 KV heads of size 128 in bfloat16 (1 KiB) 0.34 ns at 3 TB/s."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one row."""

    row: int
    start: int
    """Position of the first token; earlier ones are in the cache."""
    count: int
    offset: int
    """Index of the first token among the packed tokens."""
    mask: Bool[Tensor, "T L"] | None
    """The keys that each token sees; `None` is causal from 0."""

    @property
    def end(self) -> int:
        """Tokens in the row afterwards."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """Adjacent rows that share one attention call."""

    first: int
    end: int
    longest: int
    mask: Bool[Tensor, "R 1 1 L"] | None
    """`None` if all rows have the same length."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The work of one forward pass, the same for every layer."""

    cache: KVCache
    decode_rows: Int[Tensor, " R"]
    decode_positions: Int[Tensor, " R"]
    blocks: tuple[DecodeBlock, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[PrefixCopy, ...]
    """Ordered so that every source is complete before it is copied."""


class OtherPack(Protocol):
    """The work of a pass over another cache: `paged_attention.PagedPack`."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 Hq T D"],
        key: Float[Tensor, "1 H T D"],
        value: Float[Tensor, "1 H T D"],
        scaling: float,
    ) -> Float[Tensor, "1 T Hq D"]:
        """Store the new keys and values of a layer and attend."""
        ...


def attend(
    module: torch.nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Float[Tensor, "1 H T D"],
    value: Float[Tensor, "1 H T D"],
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' calling convention
    *,
    scaling: float,
    pack: Pack | OtherPack,
    **_others: object,
) -> tuple[Float[Tensor, "1 T Hq D"], None]:
    """Store the new keys and values of a layer and attend to the cache.

    Called by transformers for each layer, with `pack` as it was given to the model's forward.
    """
    if not isinstance(pack, Pack):
        return pack.attend(cast(int, module.layer_idx), query, key, value, scaling), None
    layer = pack.cache.layers[cast(int, module.layer_idx)]
    _, query_heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query[0].view(kv_heads, query_heads // kv_heads, tokens, head_dim)
    new = torch.stack((key[0], value[0]))
    out = query.new_empty(tokens, kv_heads, query_heads // kv_heads, head_dim)
    decoding = pack.decode_rows.shape[0]

    if decoding:
        layer[:, pack.decode_rows, :, pack.decode_positions] = new[:, :, :decoding].permute(
            2, 0, 1, 3
        )
    for chunk in pack.chunks:
        stop = chunk.offset + chunk.count
        layer[:, chunk.row, :, chunk.start : chunk.end] = new[:, :, chunk.offset : stop]
    for copy in pack.copies:
        target = layer[:, copy.first : copy.last + 1, :, : copy.tokens]
        target.copy_(layer[:, copy.source, :, : copy.tokens].unsqueeze(1))

    for block in pack.blocks:
        keys, values = layer[:, block.first : block.end, :, : block.longest].unbind(0)
        # The query heads of a KV head replace query positions.
        queries = grouped[:, :, block.first : block.end].permute(2, 0, 1, 3)
        out[block.first : block.end] = scaled_dot_product_attention(
            queries, keys, values, attn_mask=block.mask, scale=scaling
        )
    for chunk in pack.chunks:
        stop = chunk.offset + chunk.count
        keys, values = layer[:, chunk.row, :, : chunk.end].unsqueeze(2).unbind(0)
        group = (-1, grouped.shape[1], -1, -1)
        attended = scaled_dot_product_attention(
            grouped[:, :, chunk.offset : stop],
            keys.expand(group),
            values.expand(group),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
        )
        out[chunk.offset : stop] = attended.permute(2, 0, 1, 3)
    return out.view(1, tokens, query_heads, head_dim), None


def decode_blocks(lengths: Sequence[int], device: torch.device) -> tuple[DecodeBlock, ...]:
    """Cut rows of these lengths (new token included) into blocks of adjacent, similar rows."""
    cost = SPLIT_COST_TOKENS if device.type == "cpu" else SPLIT_COST_ON_A_GPU_TOKENS
    return tuple(_block(rows, lengths, device) for rows in similar_rows(lengths, cost))


def similar_rows(lengths: Sequence[int], split_cost_tokens: int) -> Iterator[range]:
    """Divide adjacent rows into blocks, each of which reads `rows * longest` keys.

    A new block starts where padding would cost more than another call.
    """
    first = 0
    for index in range(1, len(lengths) + 1):
        if index < len(lengths):
            longest = max(lengths[first:index])
            apart = (index - first) * longest + lengths[index]
            together = (index - first + 1) * max(longest, lengths[index])
            if together - apart <= split_cost_tokens:
                continue
        yield range(first, index)
        first = index


def chunk_mask(start: int, count: int, device: torch.device) -> Bool[Tensor, "T L"] | None:
    """Token `start + t` sees the keys 0 .. `start + t`."""
    if start == 0:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)


def _block(rows: range, all_lengths: Sequence[int], device: torch.device) -> DecodeBlock:
    lengths = all_lengths[rows.start : rows.stop]
    longest = max(lengths)
    mask = None
    if min(lengths) < longest:
        ends = to_device(torch.tensor(lengths), device)[:, None, None, None]
        mask = torch.arange(longest, device=device) < ends
    return DecodeBlock(first=rows.start, end=rows.stop, longest=longest, mask=mask)


AttentionInterface.register(IMPLEMENTATION, attend)
