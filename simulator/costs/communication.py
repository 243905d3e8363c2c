"""Duration of messages between GPUs, by the bytes that one GPU contributes.

    inside a node    NVLink, or PCIe where there is none
    between nodes    one adapter per GPU; rings of a collective use those of all its GPUs in a node

Inside a node: fitted to measured tables (`coefficients`). Between nodes: the peak rate times the
efficiency that one pair of nodes reached, because no table of a common cluster is published.
"""

from __future__ import annotations

import math

from simulator.catalogue.gpu import GPU
from simulator.costs.coefficients import LinkCoefficients, kernel_coefficients

NODE_PAIR_LATENCY_S = 20e-6
NODE_PAIR_EFFICIENCY = 0.72
"""Share of the data sheet's rate between two DGX H100: 36.1 of 50 GB/s, and the latency above.
Within one: 362 of 450, and 8 us.

Straight lines through the medians of Vidur's `data/profiling/network/h100_dgx/send_recv.csv`
(microsoft/vidur 7d47513, 2024), messages over 1 MB, mean error 4 % between nodes and 2 % within.
"""
NVLINK_PAIR_LATENCY_S = 8.1e-6
NVLINK_PAIR_EFFICIENCY = 0.80


def engine_all_reduce_s(
    size_bytes: float, gpus: int, gpu: GPU, *, links: LinkCoefficients | None = None
) -> float:
    """All-reduce of an inference engine: its own kernel, launched by a CUDA graph.

    The faster of two ways: every GPU reads the whole tensor of every other (small messages), or a
    ring of 2 (n - 1) / n passes over the message. Across nodes it is NCCL's.

    Args:
        size_bytes: of the tensor that every GPU holds.
        gpus: number of GPUs; 1 takes no time.
        links: custom coefficients; None uses the GPU's.
    """
    _check(size_bytes, gpus)
    if gpus == 1:
        return 0.0
    if gpus > gpu.node_gpus:
        return all_reduce_s(size_bytes, gpus, gpu, links=links)
    links = links or kernel_coefficients(gpu).links
    hops, link = gpus - 1, gpu.link_bytes_per_s
    one_shot = (
        links.latency_s
        + links.hop_s * hops
        + hops * size_bytes / (link * links.one_shot_efficiency)
    )
    ring = (
        links.ring_latency_s
        + links.ring_hop_s * hops
        + 2 * hops / gpus * size_bytes / (link * links.ring_efficiency)
    )
    return min(one_shot, ring)


def all_reduce_s(
    size_bytes: float,
    gpus: int,
    gpu: GPU,
    *,
    gpus_per_node: int | None = None,
    links: LinkCoefficients | None = None,
) -> float:
    """NCCL's all-reduce, as training uses it: two passes around the ring.

    Args:
        size_bytes: of the tensor that every GPU holds.
        gpus: number of GPUs; 1 takes no time.
        gpus_per_node: how many of them are in one node; None fills nodes.
        links: custom coefficients; None uses the GPU's.
    """
    return _collective_s(size_bytes, gpus, gpu, passes=2, gpus_per_node=gpus_per_node, links=links)


def all_gather_s(
    size_bytes: float,
    gpus: int,
    gpu: GPU,
    *,
    gpus_per_node: int | None = None,
    links: LinkCoefficients | None = None,
) -> float:
    """NCCL's all-gather or reduce-scatter: one pass; `size_bytes` is the whole tensor, which is
    gathered or scattered. See `all_reduce_s`."""
    return _collective_s(size_bytes, gpus, gpu, passes=1, gpus_per_node=gpus_per_node, links=links)


def all_to_all_s(
    size_bytes: float,
    gpus: int,
    gpu: GPU,
    *,
    gpus_per_node: int | None = None,
    far_bytes: float | None = None,
    links: LinkCoefficients | None = None,
) -> float:
    """Every GPU sends other data to every other: tokens to experts, or heads.

    Both ways at the same time: over the links of the node, and over each GPU's own adapter.
    Measured with H800s: 153 to 158 GB/s inside a node, 43 to 47 between 2 and 4 nodes (DeepEP's
    README, 2025-02; its newer kernels reach 61 to 90 with 4 and 2 nodes, 2026).

    Args:
        size_bytes: that a GPU exchanges with all, its own share included; with `far_bytes`, what
            leaves it over the links of the node.
        gpus: number of GPUs; 1 takes no time.
        gpus_per_node: how many of them are in one node; None fills nodes.
        far_bytes: what leaves a GPU over the network; None takes an equal part for every GPU.
        links: custom coefficients; None uses the GPU's.
    """
    _check(size_bytes, gpus)
    if gpus == 1:
        return 0.0
    per_node = _per_node(gpus, gpu, gpus_per_node)
    links = links or kernel_coefficients(gpu).links
    near_bytes = size_bytes
    if far_bytes is None:
        near_bytes, far_bytes = (
            size_bytes * (per_node - 1) / gpus,
            size_bytes * (gpus - per_node) / gpus,
        )
    nodes = math.ceil(gpus / per_node)
    near_s = near_bytes / (gpu.link_bytes_per_s * links.nccl_efficiency)
    far_s = far_bytes / (gpu.network_bytes_per_s * NODE_PAIR_EFFICIENCY)
    start_s = links.nccl_latency_s + NODE_PAIR_LATENCY_S * (nodes > 1)
    return start_s + max(near_s, far_s)


def point_to_point_s(size_bytes: float, gpu: GPU, *, across_nodes: bool) -> float:
    """One message from a GPU to another, as between the stages of a pipeline."""
    _check(size_bytes, 2)
    if across_nodes:
        rate = gpu.network_bytes_per_s * NODE_PAIR_EFFICIENCY
        return NODE_PAIR_LATENCY_S + size_bytes / rate
    return NVLINK_PAIR_LATENCY_S + size_bytes / (gpu.link_bytes_per_s * NVLINK_PAIR_EFFICIENCY)


def _collective_s(
    size_bytes: float,
    gpus: int,
    gpu: GPU,
    *,
    passes: int,
    gpus_per_node: int | None,
    links: LinkCoefficients | None,
) -> float:
    _check(size_bytes, gpus)
    if gpus == 1:
        return 0.0
    per_node = _per_node(gpus, gpu, gpus_per_node)
    links = links or kernel_coefficients(gpu).links
    nodes = math.ceil(gpus / per_node)
    rate = gpu.link_bytes_per_s * links.nccl_efficiency
    if nodes > 1:
        across = per_node * gpu.network_bytes_per_s * NODE_PAIR_EFFICIENCY
        rate = across if per_node == 1 else min(rate, across)
    hops_s = links.nccl_hop_s * (per_node - 1) + NODE_PAIR_LATENCY_S * (nodes - 1)
    ramp_s = links.nccl_ramp_s * size_bytes / (size_bytes + links.nccl_ramp_bytes)
    return links.nccl_latency_s + passes * (hops_s + ramp_s + (gpus - 1) / gpus * size_bytes / rate)


def _per_node(gpus: int, gpu: GPU, gpus_per_node: int | None) -> int:
    per_node = min(gpus, gpu.node_gpus if gpus_per_node is None else gpus_per_node)
    if not 1 <= per_node <= gpu.node_gpus:
        raise ValueError(
            f"gpus_per_node is {gpus_per_node}, but must be from 1 to {gpu.node_gpus}, "
            f"the GPUs of a node of {gpu.name}"
        )
    return per_node


def _check(size_bytes: float, gpus: int) -> None:
    if not math.isfinite(size_bytes) or size_bytes < 0:
        raise ValueError(f"size_bytes is {size_bytes}, but must be >= 0 and finite")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, but must be >= 1")
