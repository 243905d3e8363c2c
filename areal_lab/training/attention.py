"""Attention over prefix trees, for every transformers model that uses the attention interface.

    tree 1      tree 2     tree 3          sdpa     one call per tree: causal for a chain, a boolean
    [ dense ]   [ causal ] [ dense ]                mask of ancestors for a tree that branches
                                           varlen   one call for all trees, which are chains
                                           flex     one call for all trees, compiled

Llama, Qwen2 and Qwen3 (and others without sliding windows) call it when they are loaded with
`attn_implementation=TREE_ATTENTION`; the layout travels as the keyword argument `tree_layout`
through the model's forward. Where processes divide the tokens of a row, each one attends with some
of the heads, and over all tokens. Axes: `H` query heads, `K` key heads, `P` packed tokens (of this
process), `D` head size.

Mask of prefix trees for FlexAttention, from the ends of subtrees, without a square matrix.

    query block i, key block j, of 128 tokens each; end = subtree_end, i's tokens are a .. b
    j > i   empty                      j == i   partial
    j < i   full if every end > b, partial if some end > a, else empty

A token sees a key if `key <= query < subtree_end[key]`, across all trees of a packed row. Axes: `P`
packed tokens, `B` blocks.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from areal_lab.data.batch import WHOLE, PackedBatch, SequencePart, TreeSpan, ancestor_mask
from areal_lab.host.machine import find_compiler
from areal_lab.models.copies import to_device
from areal_lab.training.versions import attend_in_rows, compile_function

TREE_ATTENTION: Final = "areal_lab_tree"
Kernel = Literal["sdpa", "varlen", "flex"]
"""Implementation of attention for a packed row."""
_FLASH_TYPES: Final = (torch.bfloat16, torch.float16)


class TreeLayout(NamedTuple):
    """Tree spans and masks of a packed batch; computed once, used by every layer."""

    spans: tuple[TreeSpan, ...]
    masks: tuple[Tensor | None, ...] = ()
    """Boolean ancestor mask of each span, for `sdpa`; `None` where attention is causal."""
    kernel: Kernel = "sdpa"
    starts: Int[Tensor, " trees+1"] | None = None
    """First token of each tree, and the end of the last one, for `varlen`."""
    block_mask: flex.BlockMask | None = None
    """Ancestor mask of all trees, for `flex`."""
    part: SequencePart = WHOLE
    """Tokens with which a layer is called."""


def tree_layout(
    packed: PackedBatch,
    *,
    asked: str = "auto",
    dtype: torch.dtype = torch.float32,
    part: SequencePart = WHOLE,
) -> TreeLayout:
    """Return the layout of a batch for every layer."""
    spans, device = packed.trees, packed.tokens.device
    kernel = choose_kernel(
        asked,
        device=device.type,
        dtype=dtype,
        branching=any(span.branching for span in spans),
        compiles=_compiles(),
    )
    if kernel == "varlen":
        ends = accumulate((span.end - span.start for span in spans), initial=0)
        starts = to_device(torch.tensor([*ends], dtype=torch.int32), device)
        return TreeLayout(spans, kernel=kernel, starts=starts, part=part)
    if kernel == "flex":
        mask = tree_block_mask(packed.subtree_end)
        return TreeLayout(spans, kernel=kernel, block_mask=mask, part=part)
    masks = tuple(ancestor_mask(packed, span) if span.branching else None for span in spans)
    return TreeLayout(spans, masks, part=part)


def choose_kernel(
    asked: str, *, device: str, dtype: torch.dtype, branching: bool, compiles: bool
) -> Kernel:
    """Return the kernel for a packed row.

    Args:
        asked: `sdpa`; `varlen`, which takes `sdpa` for rows that branch; `flex`; or `auto`: on a
            GPU and in 16 bits `varlen` for rows without branches, `flex` for others, else `sdpa`.
        device: type of the device. Only GPUs have kernels of `varlen`, and of `flex` for training.
        compiles: True with a C compiler, without which `auto` does not choose `flex`.
    """
    if asked == "auto":
        if device != "cuda" or dtype not in _FLASH_TYPES:
            return "sdpa"
        if branching:
            return "flex" if compiles else "sdpa"
        return "varlen"
    if asked == "flex":
        return "flex"
    return "varlen" if asked == "varlen" and not branching else "sdpa"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_layout: TreeLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unsupported: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention inside each tree; the signature is transformers'.

    Args:
        attention_mask: ignored; transformers passes none to custom implementations.
        scaling: factor on the scores; `None` is 1 / sqrt(D).
        sliding_window: of the layer; must be at least as long as every tree.
        unsupported: other arguments of attention layers; `softcap`, `s_aux` and `position_bias`
            must be unset.

    Returns:
        (1, P, H, D), and no attention weights.
    """
    del attention_mask
    if tree_layout is None:
        raise ValueError(
            f"a model with {TREE_ATTENTION} attention takes packed batches only; for padded rows "
            'call model.set_attn_implementation("sdpa") first'
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if unsupported.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} needs {name}, which packed training does not support"
            )
    if sliding_window is not None and any(
        span.end - span.start > sliding_window for span in tree_layout.spans
    ):
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens; packed "
            "training supports full attention only"
        )
    part, tokens = tree_layout.part, tree_layout.spans[-1].end
    if part.count > 1:
        query, key, value = part.to_heads(query, key, value)
    padding = query.shape[2] - tokens
    if padding:
        query, key, value = (x[:, :, :tokens] for x in (query, key, value))
    output = _attend(query, key, value, tree_layout, scaling=scaling, dropout=dropout)
    if padding:
        output = functional.pad(output, (0, 0, 0, padding))
    if part.count > 1:
        output = part.to_tokens(output)
    return output.transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if layout.kernel == "sdpa":
        return _sdpa(query, key, value, layout, scaling=scaling, dropout=dropout)
    if dropout:
        raise ValueError(f"{layout.kernel} attention has no dropout, but it is {dropout}")
    # Neither is on autocast's list, and rotated queries and keys are in float32.
    device = query.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        query, key, value = query.to(low), key.to(low), value.to(low)
    if layout.kernel == "varlen":
        return _varlen(query, key, value, layout, scaling)
    computed: Tensor = _flex(device)(
        query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=True
    )
    return computed


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scaling: float | None
) -> Tensor:
    longest = max(span.end - span.start for span in layout.spans)
    starts = layout.starts
    assert starts is not None
    out = attend_in_rows(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        starts,
        longest=longest,
        scale=scaling,
    )
    return out.transpose(0, 1)[None]


@cache
def _compiles() -> bool:
    return find_compiler("c") is not None


@cache
def _flex(device: str) -> Any:
    """FlexAttention: compiled on a GPU, where the plain form would make a matrix of all scores."""
    if device != "cuda":
        return flex.flex_attention
    # Once for the first length and once for all others, with and without gradient, for each shape
    # of heads.
    return compile_function(flex.flex_attention)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for span, mask in zip(layout.spans, layout.masks, strict=True):
        part = slice(span.start, span.end)
        keys, values = key[:, :, part], value[:, :, part]
        if mask is not None and groups > 1:
            # With a mask, CUDA has no fast kernel for grouped queries; CPUs lose nothing by this.
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, part],
                keys,
                values,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=mask is None and groups > 1,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


BLOCK_TOKENS = 128
"""Block size of torch's kernels."""


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
    """Masks of blocks with keys that are seen by some of their queries, and by all."""
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
    """Number of key blocks of each query block, and their indices, which come first."""
    dense = blocks.to(torch.int32)
    order = torch.argsort(dense, dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


transformers.AttentionInterface.register(TREE_ATTENTION, tree_attention)
