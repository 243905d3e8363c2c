"""Exchanges between GPUs inside the layers of a pass: which bytes, how often, how long.

    tensor parallel     2 all-reduces per layer, or as many gathers and scatters
    context parallel    keys and values go around a ring while attention computes
    Ulysses             tokens for heads before attention, and back after it: 2 all-to-alls
    experts             tokens to their experts, and back: 2 all-to-alls per layer with experts

All are seconds of a forward pass through one pipeline stage; a backward pass has as many exchanges,
of the gradients of what the forward pass sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.communication import all_gather_s, all_reduce_s, all_to_all_s
from simulator.costs.layers.groups import Groups
from simulator.costs.training_speed import BYTES_PER_NUMBER, Dispatch

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Seconds of each micro-batch, [R, M]."""

    tensor_s: Values
    ring_s: Values
    """Keys and values; attention may hide it."""
    heads_s: Values
    experts_s: Values


def exchanges(
    tokens: Values,
    present: Flags,
    *,
    model: ModelShape,
    gpu: GPU,
    groups: Groups,
    full_tokens: int,
    ulysses: int = 1,
    dispatch: Dispatch = "copies",
) -> Exchanges:
    """Exchanges of a forward pass through one stage.

    Nearly linear in the bytes: a line through an empty and a full micro-batch.

    Args:
        tokens: of each micro-batch, before it is shared, [R, M].
        present: which micro-batches exist.
        full_tokens: of a full micro-batch.
        ulysses: how many of the GPUs that share a micro-batch exchange tokens for heads.
    """
    layers = model.layers / groups.pipeline
    near = max(1, gpu.node_gpus // groups.tensor)
    ring = groups.sequence // ulysses

    def line(seconds: Callable[[float], float], times: float) -> Values:
        if times == 0:
            return np.zeros_like(tokens)
        start_s = seconds(0)
        per_token_s = (seconds(full_tokens) - start_s) / full_tokens
        return np.asarray(times * (present * start_s + tokens * per_token_s))

    def reduced(count: float) -> float:
        size = count / groups.sequence * model.hidden * BYTES_PER_NUMBER
        return all_reduce_s(size, groups.tensor, gpu)

    def around(count: float) -> float:
        # With Ulysses inside the ring, every GPU passes on keys of its own heads.
        size = count * _key_value_bytes(model) / (groups.tensor * ulysses)
        return all_gather_s(size, ring, gpu, gpus_per_node=min(ring, max(1, near // ulysses)))

    def for_heads(count: float) -> float:
        # Queries, keys and values go out, and as many outputs as queries come back.
        size = count / groups.sequence * _attention_bytes(model) / groups.tensor
        return all_to_all_s(size, ulysses, gpu, gpus_per_node=min(ulysses, near))

    def to_experts(count: float) -> float:
        own = count / (groups.tensor * groups.sequence)
        local = min(groups.expert, gpu.node_gpus)
        near_copies, far_copies = expert_copies(model, groups.expert, local, dispatch)
        token_bytes = model.hidden * BYTES_PER_NUMBER
        size = own * token_bytes
        return all_to_all_s(
            near_copies * size,
            groups.expert,
            gpu,
            gpus_per_node=local,
            far_bytes=far_copies * size,
        )

    return Exchanges(
        tensor_s=line(reduced, 2 * layers * (groups.tensor > 1)),
        ring_s=line(around, layers * (ring > 1)),
        heads_s=line(for_heads, layers * (ulysses > 1)),
        experts_s=line(to_experts, 2 * model.moe_layers / groups.pipeline * (groups.expert > 1)),
    )


def expert_copies(
    model: ModelShape, gpus: int, gpus_per_node: int, dispatch: Dispatch
) -> tuple[float, float]:
    r"""Copies of a token that leave its GPU: over the node's links, and over the network.

    With `copies`, one per expert elsewhere: $k (n - 1) / n$, of which $(n - m) / n$ cross nodes.
    With `ranks`, one per GPU that has at least one of its experts,
    $(n - 1) (1 - (1 - 1/n)^k)$; across nodes, one per node, which then hands it on by its links.

    Args:
        gpus: n, that share the experts.
        gpus_per_node: m of them in a node.
    """
    chosen = model.active_experts
    nodes = gpus / gpus_per_node
    if dispatch == "copies":
        return chosen * (gpus_per_node - 1) / gpus, chosen * (gpus - gpus_per_node) / gpus
    taken = 1 - (1 - 1 / gpus) ** chosen
    return (gpus - 1) * taken, (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)


def _key_value_bytes(model: ModelShape) -> float:
    """Bytes of a token's keys and values in one layer, as attention reads them."""
    if model.latent is None:
        return 2 * model.kv_heads * model.head_dim * BYTES_PER_NUMBER
    wide = model.head_dim + model.latent.rope_head_dim + model.latent.value_head_dim
    return model.heads * wide * BYTES_PER_NUMBER


def _attention_bytes(model: ModelShape) -> float:
    """Bytes of a token's queries, keys, values and outputs in one layer."""
    return 2 * model.heads * model.head_dim * BYTES_PER_NUMBER + _key_value_bytes(model)
