"""Work of one GPU for a micro-batch, and the exchanges between GPUs inside its layers.

seconds of a forward pass through a stage = (products + attention + traffic) / GPUs that share
                                            them + launches of the stage's layers

experts, `layer`     part of the above; the time of a layer's experts is divided by their shards
experts, `grouped`   a smooth maximum of computing and of reading all experts held here: with
                     few tokens per expert, products are bound by memory

Exchanges between GPUs inside the layers of a pass: which bytes, how often, how long.

    tensor parallel     2 all-reduces per layer, or as many gathers and scatters
    context parallel    keys and values go around a ring while attention computes
    Ulysses             tokens for heads before attention, and back after it: 2 all-to-alls
    experts             tokens to their experts, and back: 2 all-to-alls per layer with experts

All are seconds of a forward pass through one pipeline stage; a backward pass has as many exchanges,
of the gradients of what the forward pass sent.

Collectives of the GPUs that hold the same part of a model: gradients out, parameters in.

distributed optimizer   gradients are scattered, each GPU updates its share, bf16 gathered
fully sharded           every pass gathers, and gradients are scattered; groups of shards that
                        hold copies (HSDP) also reduce what a GPU holds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import kernel_coefficients, pair_flops
from simulator.costs.communication import all_gather_s, all_reduce_s, all_to_all_s
from simulator.costs.training_layout import Groups
from simulator.costs.training_speed import BYTES_PER_NUMBER, Dispatch, TrainerSpeed, pass_s

GROUPED_SHARPNESS: Final = 1.34
"""Sharpness of the knee between reading and computing in grouped products, and..."""
GROUPED_SHARE: Final = 0.927
"""...their rate with many tokens, relative to large products. Fitted to 53 published times on H20
and H800 (`data/grouped_products.csv`: 32 to 32,768 tokens per expert), mean error 4 %; a test
repeats the fit."""

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Work(NamedTuple):
    """Seconds of each micro-batch on one GPU of a stage, [R, M]."""

    seconds: Values
    """All of it."""
    attention_s: Values
    """The part of attention."""
    gradients_s: Values
    """Seconds of a backward pass for the gradients of the matrices: their products, and reading
    their inputs and the gradients of their outputs."""


def forward_work(
    tokens: Values,
    pairs: Values,
    present: Flags,
    *,
    model: ModelShape,
    gpu: GPU,
    speed: TrainerSpeed,
    groups: Groups,
    fp8: bool = False,
    imbalance: float = 1.0,
    adapter_bytes: float = 0.0,
) -> Work:
    """Work of a forward pass, without exchanges.

    Args:
        tokens: of each micro-batch, before it is shared, [R, M].
        pairs: (token, attended token) pairs of each micro-batch, [R, M].
        present: which micro-batches exist.
        fp8: whether the products of the layers are in fp8.
        imbalance: tokens of the busiest GPU's experts, relative to the mean.
        adapter_bytes: that low-rank adapters move per token.
    """
    shared_s, launches_s = pass_s(tokens, pairs, model, gpu, speed)
    if adapter_bytes:
        shared_s = shared_s + speed.slowdown * adapter_bytes * tokens / gpu.memory_bytes_per_s
    attended = pair_flops(model, tokens, pairs)
    attention_s = attended / (speed.attention_efficiency * gpu.flops_per_s)
    attention_s = speed.slowdown * attention_s / groups.cuts
    products_s = speed.slowdown / (speed.matrix_efficiency * gpu.flops_per_s) * tokens
    expert_flops = 2.0 * model.moe_layers * model.active_experts * model.expert_parameters
    if fp8:
        head_flops = 2.0 * model.embedding_parameters
        layer_flops = model.linear_flops_per_token() - head_flops
        shared_s = shared_s - (1 - 1 / speed.fp8_speedup) * layer_flops * products_s
        expert_flops /= speed.fp8_speedup
    seconds = shared_s / groups.cuts + present * (launches_s / groups.pipeline)
    if not speed.head_is_shared:
        # The last stage has the head as well, and the others wait for it.
        head_s = 2.0 * model.embedding_parameters * products_s
        seconds = seconds + (groups.pipeline - 1) / groups.cuts * head_s
    linear_flops = model.linear_flops_per_token()
    if fp8:
        head_flops = 2.0 * model.embedding_parameters
        linear_flops = (linear_flops - head_flops) / speed.fp8_speedup + head_flops
    traffic = model.layers * speed.hidden_traffic
    traffic += model.moe_layers * model.active_experts * speed.expert_traffic
    moved_s = traffic * model.hidden * BYTES_PER_NUMBER * tokens / gpu.memory_bytes_per_s
    gradients_s = (linear_flops * products_s + speed.slowdown * moved_s) / groups.cuts
    if not model.experts:
        return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))
    own_s = expert_flops * products_s / groups.cuts
    if speed.experts == "layer":
        cut = 1 - 1 / groups.expert_shards
        fixed_s = speed.slowdown * model.moe_layers * speed.expert_layer_s * cut
        seconds = seconds - present * (fixed_s / groups.pipeline)
        seconds = seconds + (imbalance - 1) * own_s
        return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))
    at = kernel_coefficients(gpu)
    held = groups.held_parameters(model)[1]
    size = BYTES_PER_NUMBER / (2 if fp8 else 1)
    reading_s = held * size * at.weight_reading / gpu.memory_bytes_per_s
    read_s = np.where(present, reading_s, 0.0)
    together_s = grouped_s(np.asarray(imbalance * own_s), read_s)
    seconds = seconds - own_s + together_s
    return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))


def grouped_s(computing_s: Values, reading_s: Values) -> Values:
    """Seconds of the products of several experts, one after the other in one kernel.

    A smooth maximum, softer than that of one large product, because each expert has its own ragged
    end. See `data/grouped_products.csv`.
    """
    first = computing_s / GROUPED_SHARE
    both = first**GROUPED_SHARPNESS + reading_s**GROUPED_SHARPNESS
    return np.asarray(both ** (1 / GROUPED_SHARPNESS))


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
    """
    chosen = model.active_experts
    nodes = gpus / gpus_per_node
    if dispatch == "copies":
        return chosen * (gpus_per_node - 1) / gpus, chosen * (gpus - gpus_per_node) / gpus
    taken = 1 - (1 - 1 / gpus) ** chosen
    return (gpus - 1) * taken, (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)


def _key_value_bytes(model: ModelShape) -> float:
    if model.latent is None:
        return 2 * model.kv_heads * model.head_dim * BYTES_PER_NUMBER
    wide = model.head_dim + model.latent.rope_head_dim + model.latent.value_head_dim
    return model.heads * wide * BYTES_PER_NUMBER


def _attention_bytes(model: ModelShape) -> float:
    return 2 * model.heads * model.head_dim * BYTES_PER_NUMBER + _key_value_bytes(model)


def gradients_s(
    groups: Groups,
    model: ModelShape,
    gpu: GPU,
    gradient_bytes: int,
    *,
    fully_sharded: bool,
    trained_share: float = 1.0,
) -> float:
    """Reduce-scatter of gradients, all-gather of bf16 parameters (distributed optimizer).

    If fully sharded, the next pass gathers instead.

    Args:
        trained_share: share of the parameters that has gradients.
    """
    trained_bytes = gradient_bytes * trained_share
    if not fully_sharded:
        scattered_s = over_copies_s(groups, model, gpu, trained_bytes)
        return scattered_s + over_copies_s(groups, model, gpu, BYTES_PER_NUMBER * trained_share)
    shards, copies = groups.shard_gpus, groups.copies()[0] // groups.shard_gpus
    scattered_s = over_copies_s(groups, model, gpu, trained_bytes, most=shards)
    if copies == 1:
        return scattered_s
    size = trained_bytes * model.parameters / (groups.tensor * groups.pipeline * shards)
    return scattered_s + all_reduce_s(size, copies, gpu, gpus_per_node=1)


def gathered_s(groups: Groups, model: ModelShape, gpu: GPU) -> float:
    """Seconds to gather the parameters of a stage for one pass, if fully sharded."""
    return over_copies_s(groups, model, gpu, BYTES_PER_NUMBER, most=groups.shard_gpus)


def over_copies_s(
    groups: Groups, model: ModelShape, gpu: GPU, parameter_bytes: float, *, most: int | None = None
) -> float:
    """One gather or scatter among the GPUs that hold the same parameters or gradients.

    Args:
        parameter_bytes: of each parameter.
        most: GPUs that share one copy; None takes all that hold the same part.
    """
    dense, experts = groups.held_parameters(model)
    if groups.expert == 1:
        dense, experts = dense + experts, 0.0
    dense_ranks, expert_ranks = groups.copies()
    if most is not None:
        dense_ranks = min(dense_ranks, most)
        expert_ranks = min(expert_ranks, max(1, most // groups.expert))
    near_dense = max(1, gpu.node_gpus // groups.tensor)
    near_experts = max(1, gpu.node_gpus // groups.expert)
    seconds = 0.0
    for held, ranks, near in (
        (dense, dense_ranks, near_dense),
        (experts, expert_ranks, near_experts),
    ):
        if ranks > 1 and held:
            size = parameter_bytes * held
            seconds += all_gather_s(size, ranks, gpu, gpus_per_node=min(ranks, near))
    return seconds
