"""Attention of packed tokens against pages: decode in one call for all rows, prompts one by one.

    tokens of a step:  | d0 d1 .. dn | c0 c0 c0 | c1 c1 |      as in `attention`
                         one call of   a call each, over the pages of its row, gathered;
                         `decode`      a prompt from its first token has all its keys at hand

Decoding takes the Triton kernel on a GPU and `gathered_attention` elsewhere.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_lab.engines.embedded.attention import Chunk


class DecodeAttention(Protocol):
    """Attention of one query token per row; `decode_kernel.decode_attention` describes it."""

    def __call__(
        self,
        query: Float[Tensor, "R Hq D"],
        keys: Float[Tensor, "P H C D"],
        values: Float[Tensor, "P H C D"],
        table: Int[Tensor, "R W"],
        lengths: Int[Tensor, " R"],
        *,
        scale: float,
    ) -> Float[Tensor, "R Hq D"]:
        """Attend."""
        ...


def decode_function(device: torch.device) -> DecodeAttention | None:
    """The kernel for this device; None, with a warning on a GPU, if triton is missing."""
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        print(
            "warning: triton is not installed, so the engine decodes without its kernel, "
            "several times slower; install the triton of this torch build",
            file=sys.stderr,
            flush=True,
        )
        return None
    from areal_lab.engines.embedded.decode_kernel import decode_attention

    return decode_attention


def gathered_attention(
    query: Float[Tensor, "R Hq D"],
    keys: Float[Tensor, "P H C D"],
    values: Float[Tensor, "P H C D"],
    table: Int[Tensor, "R W"],
    lengths: Int[Tensor, " R"],
    *,
    scale: float,
) -> Float[Tensor, "R Hq D"]:
    """`DecodeAttention` in torch: every row is padded to the width of the table."""
    _, kv_heads, page_tokens, head_dim = keys.shape
    rows, width = table.shape
    grouped = query.unflatten(1, (kv_heads, -1))
    seen = torch.arange(width * page_tokens, device=query.device) < lengths[:, None]
    # Slots beyond the end may have anything, NaN included, which a weight of 0 would spread.
    own_keys, own_values = (
        torch.where(
            seen[:, None, :, None],
            pages[table].transpose(1, 2).reshape(rows, kv_heads, width * page_tokens, head_dim),
            0,
        )
        for pages in (keys, values)
    )
    # A row of length 0 sees its first slot, which is 0: no token at all would give NaN.
    seen[:, 0] = True
    attended = scaled_dot_product_attention(
        grouped, own_keys, own_values, attn_mask=seen[:, None, None], scale=scale
    )
    return attended.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class TailCopy:
    """Rows get the first slots of a page from the page of another row."""

    source: int
    targets: Int[Tensor, " N"]
    slots: int


@dataclass(frozen=True, slots=True)
class PagedPack:
    """The work of one forward pass over pages, the same for every layer."""

    layers: Float[Tensor, "L 2 P H C D"]
    decode: DecodeAttention
    table: Int[Tensor, "R W"]
    """Pages of the rows that decode."""
    lengths: Int[Tensor, " R"]
    """Their tokens, the new one included."""
    pages: Int[Tensor, " T"]
    """Page that gets the key and value of each token of the pass."""
    slots: Int[Tensor, " T"]
    """Place of each token in its page."""
    chunks: Sequence[Chunk] = ()
    chunk_pages: Sequence[Int[Tensor, " W"]] = ()
    """Pages of the row of each chunk."""
    tails: Sequence[TailCopy] = ()
    """Ordered so that every source is complete before it is copied."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 Hq T D"],
        key: Float[Tensor, "1 H T D"],
        value: Float[Tensor, "1 H T D"],
        scaling: float,
    ) -> Float[Tensor, "1 T Hq D"]:
        """Store the new keys and values of a layer and attend to its pages."""
        stored = self.layers[layer]
        tokens = query[0].transpose(0, 1)
        stored[:, self.pages, :, self.slots] = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
        for tail in self.tails:
            whole = stored[:, tail.source, :, : tail.slots]
            stored[:, tail.targets, :, : tail.slots] = whole.unsqueeze(1).expand(
                -1, len(tail.targets), -1, -1, -1
            )
        decoding = self.lengths.shape[0]
        parts = []
        if decoding:
            parts.append(
                self.decode(
                    tokens[:decoding],
                    stored[0],
                    stored[1],
                    self.table,
                    self.lengths,
                    scale=scaling,
                )
            )
        for chunk, pages in zip(self.chunks, self.chunk_pages, strict=True):
            new = slice(chunk.offset, chunk.offset + chunk.count)
            if chunk.start == 0:
                keys, values = key[0, :, new], value[0, :, new]
            else:
                row = stored[:, pages].transpose(1, 2).flatten(2, 3)
                keys, values = row[:, :, : chunk.end].unbind(0)
            parts.append(_chunk_attention(chunk, query[0, :, new], keys, values, scaling))
        return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None]


def _chunk_attention(
    chunk: Chunk,
    query: Float[Tensor, "Hq T D"],
    keys: Float[Tensor, "H L D"],
    values: Float[Tensor, "H L D"],
    scaling: float,
) -> Float[Tensor, "T Hq D"]:
    grouped = query.unflatten(0, (keys.shape[0], -1))
    group = (-1, grouped.shape[1], -1, -1)
    attended = scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(1).expand(group),
        values.unsqueeze(1).expand(group),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)
