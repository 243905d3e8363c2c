"""Attention of all requests of a batch in one call, instead of SGLang's loop over requests.

    one forward pass:  lengths of the requests --plan--> parts: requests of similar length, padded
    each layer:        keys and values of a part --> one scaled_dot_product_attention --> output

SGLang's `torch_native` attention calls `scaled_dot_product_attention` once per request and layer,
over the whole sequence even if only its last tokens are new. Within a part no length is more than
twice another, so padding at most doubles the new tokens and the context.

Sliding windows, cross-attention and encoders stay with SGLang's own loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Requests of similar length; R of them, with at most Q new tokens and K tokens in total."""

    queries: torch.Tensor
    """[R, Q] index of each new token among those of the batch; 0 where a request has fewer."""
    real: torch.Tensor
    """[R, Q] whether this token exists."""
    slots: torch.Tensor
    """[R, K] place of each token in the cache; any place beyond the end of a request."""
    visible: torch.Tensor
    """[R, Q, K] whether a new token attends to this one."""


def plan(
    new: torch.Tensor, lengths: torch.Tensor, requests: torch.Tensor, req_to_token: torch.Tensor
) -> list[Part]:
    """Divide a batch into parts.

    `new` [B] has the number of new tokens of each request (its last ones, at least one), `lengths`
    [B] all tokens of each, and `requests` [B] its row in `req_to_token`.
    """
    members = defaultdict(list)
    sizes = zip(new.tolist(), lengths.tolist(), strict=True)
    for row, (some, all_of_it) in enumerate(sizes):
        # Between two powers of two: no more than twice as long.
        members[some.bit_length(), all_of_it.bit_length()].append(row)
    first = new.cumsum(0) - new
    parts = []
    for rows in members.values():
        chosen = torch.tensor(rows)
        column = torch.arange(int(new[chosen].max()))
        position = torch.arange(int(lengths[chosen].max()))
        real = column < new[chosen, None]
        of_query = (lengths - new)[chosen, None] + column
        parts.append(
            Part(
                queries=(first[chosen, None] + column).where(real, 0),
                real=real,
                slots=req_to_token[requests[chosen], : len(position)].long(),
                visible=position <= of_query[..., None],
            )
        )
    return parts


def attend(
    parts: list[Part],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """Write the attention of every new token to `output`.

    One key head of `k_cache` [places, key heads, size] serves several query heads. `scaling`
    multiplies the products of queries and keys; None divides them by the root of their size.
    """
    heads_of_keys = k_cache.shape[1]
    for part in parts:
        rows, length = part.queries.shape
        # The heads that share keys become more queries of one head: [R, shared, heads * Q, size].
        asked = query[part.queries].view(rows, length, heads_of_keys, -1, query.shape[-1])
        shared = asked.shape[3]
        asked = asked.permute(0, 2, 3, 1, 4).flatten(2, 3)
        visible = part.visible[:, None].expand(-1, shared, -1, -1).flatten(1, 2)
        result = scaled_dot_product_attention(
            asked,
            k_cache[part.slots].to(query.dtype).transpose(1, 2),
            v_cache[part.slots].to(query.dtype).transpose(1, 2),
            attn_mask=visible[:, None],
            scale=scaling,
        )
        result = result.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        output[part.queries[part.real]] = result[part.real]
    return output


def replace_loops(module: ModuleType) -> None:
    """Make the attention of SGLang's `torch_native_backend` module use `plan` and `attend`."""
    backend = module.TorchNativeAttnBackend
    prepare = backend.init_forward_metadata

    def init_forward_metadata(self: Any, batch: Any) -> None:
        prepare(self, batch)
        self.parts = None
        new = batch.extend_seq_lens
        if batch.forward_mode.is_decode():
            new = torch.ones_like(batch.seq_lens)
        if new is not None and batch.encoder_lens is None:
            table = self.req_to_token_pool.req_to_token
            self.parts = plan(new, batch.seq_lens, batch.req_pool_indices, table)

    def batched(loop: Callable[..., torch.Tensor], *, always_causal: bool) -> Any:
        def run(self: Any, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            whole = options["sliding_window_size"] is None and not options["is_cross_attn"]
            if self.parts is None or not whole or not (always_causal or options["causal"]):
                return loop(self, *tensors, **options)
            query, output, k_cache, v_cache, *_ = tensors
            return attend(self.parts, query, output, k_cache, v_cache, scaling=options["scaling"])

        return run

    backend.init_forward_metadata = init_forward_metadata
    for name, always_causal in (("extend", False), ("decode", True)):
        loop = getattr(backend, f"_run_sdpa_forward_{name}")
        replaced = batched(loop, always_causal=always_causal)
        setattr(backend, f"_run_sdpa_forward_{name}", replaced)
