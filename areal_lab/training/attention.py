"""Attention over prefix trees, for every transformers model that uses the attention interface.

    tree 1      tree 2     tree 3          one call per tree: causal for a chain, a boolean mask
    [ dense ]   [ causal ] [ dense ]       of ancestors for a tree that branches

Llama, Qwen2 and Qwen3 (and others without sliding windows) call it when they are loaded with
`attn_implementation=TREE_ATTENTION`; the layout travels as the keyword argument `tree_layout`
through the model's forward. Where processes divide the tokens of a row, each one attends with some
of the heads, and over all tokens. Axes: `H` query heads, `K` key heads, `P` packed tokens (of this
process), `D` head size.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from areal_lab.data.batch import PackedBatch, TreeSpan, ancestor_mask
from areal_lab.data.sequence_part import WHOLE, SequencePart

TREE_ATTENTION: Final = "areal_lab_tree"


class TreeLayout(NamedTuple):
    """Tree spans and masks of a packed batch; computed once, used by every layer."""

    spans: tuple[TreeSpan, ...]
    masks: tuple[Tensor | None, ...]
    """Boolean ancestor mask of each span; `None` where attention is causal."""
    part: SequencePart = WHOLE
    """Which of the tokens a layer is called with."""


def tree_layout(packed: PackedBatch, part: SequencePart = WHOLE) -> TreeLayout:
    """Masks of the branching trees of a batch."""
    masks = tuple(ancestor_mask(packed, span) if span.branching else None for span in packed.trees)
    return TreeLayout(packed.trees, masks, part)


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
        module: the attention layer that calls.
        query: (1, H, P, D).
        key: (1, K, P, D); `K` divides `H` (grouped queries).
        value: (1, K, P, D).
        attention_mask: ignored; transformers passes none to custom implementations.
        tree_layout: spans and masks of the packed row.
        scaling: factor on the scores; `None` is 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        sliding_window: of the layer; must be at least as long as every tree.
        unsupported: other arguments of attention layers; `softcap`, `s_aux` and `position_bias`
            must be unset.

    Returns:
        (1, P, H, D), and no attention weights.

    Raises:
        ValueError: if the model was called without a layout or needs an unsupported feature.
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
    part = tree_layout.part
    if part.count > 1:
        query, key, value = part.to_heads(query, key, value)
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for span, mask in zip(tree_layout.spans, tree_layout.masks, strict=True):
        at = slice(span.start, span.end)
        keys, values = key[:, :, at], value[:, :, at]
        if mask is not None and groups > 1:
            # With a mask, CUDA has no fast kernel for grouped queries; CPUs lose nothing by this.
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, at],
                keys,
                values,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=mask is None and groups > 1,
            )
        )
    padding = query.shape[2] - tree_layout.spans[-1].end
    if padding:
        outputs.append(torch.zeros_like(query[:, :, :padding]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    if part.count > 1:
        joined = part.to_tokens(joined)
    return joined.transpose(1, 2), None


transformers.AttentionInterface.register(TREE_ATTENTION, tree_attention)
