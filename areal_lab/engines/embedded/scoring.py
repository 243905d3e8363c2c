"""Log-probs of given tokens: forward passes without a cache, between two steps of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from areal_lab.engines.protocol import Ranked
from areal_lab.models.copies import to_device

_MOST_LOGITS: Final = 2**28
"""Logits of one pass (1 GiB in float32); more positions take further passes."""
_ROWS: Final = 256
"""Places whose log-probs are computed together in float32."""


@dataclass(frozen=True, slots=True)
class CausalPass:
    """Causal attention among the tokens of one pass (`attention.OtherPack`)."""

    def attend(
        self,
        _layer: int,
        query: Float[Tensor, "1 Hq T D"],
        key: Float[Tensor, "1 H T D"],
        value: Float[Tensor, "1 H T D"],
        scaling: float,
    ) -> Float[Tensor, "1 T Hq D"]:
        """Attend to the tokens up to each one."""
        shared = query.shape[1] // key.shape[1]
        attended = scaled_dot_product_attention(
            query,
            key.repeat_interleave(shared, dim=1),
            value.repeat_interleave(shared, dim=1),
            is_causal=True,
            scale=scaling,
        )
        return attended.transpose(1, 2)


class Scores(NamedTuple):
    """Log-probs of tokens, and the most likely ones at the same places (`ScoredTokens`)."""

    logprobs: tuple[float | None, ...]
    top: tuple[Ranked, ...]


@torch.inference_mode()
def score_tokens(
    model: PreTrainedModel,
    tokens: Sequence[int],
    *,
    start: int,
    top: int,
    most_logits: int = _MOST_LOGITS,
) -> Scores:
    """Log-softmax of the model's logits, in float32 at temperature 1.

    Args:
        model: text model with our attention.
        tokens: the sequence, at least one token.
        start: index of the first token to score; token 0 follows nothing and has no log-prob.
        top: most likely tokens to report at each place.
        most_logits: logits of one pass.
    """
    ids = to_device(torch.tensor(tokens), model.device)
    # Logits at place i are of token i + 1.
    places = range(max(start, 1) - 1, len(tokens) - 1)
    step = max(1, most_logits // int(model.config.get_text_config().vocab_size))
    logprobs: list[float | None] = [None] if start == 0 else []
    ranked: list[Ranked] = [()] if start == 0 else []
    for first in range(places.start, places.stop, step):
        there = range(first, min(first + step, places.stop))
        logits = model(
            input_ids=ids[None],
            position_ids=torch.arange(len(tokens), device=ids.device)[None],
            use_cache=False,
            logits_to_keep=torch.arange(there.start, there.stop, device=ids.device),
            pack=CausalPass(),
        ).logits[0]
        for rows in range(0, len(there), _ROWS):
            part = logits[rows : rows + _ROWS].float().log_softmax(dim=-1)
            after = ids[there.start + rows + 1 : there.start + rows + 1 + len(part)]
            logprobs += part.gather(1, after[:, None])[:, 0].tolist()
            best = part.topk(min(top, part.shape[1]), dim=-1)
            ranked += [
                tuple(zip(which, values, strict=True))
                for which, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
    if not all(value is None or math.isfinite(value) for value in logprobs):
        raise FloatingPointError("log-probs are not finite; check the weights for NaN and infinity")
    return Scores(tuple(logprobs), tuple(ranked))
