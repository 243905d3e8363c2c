"""Messages between GPUs: against measured tables, and their properties."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.coefficients import kernel_coefficients
from simulator.costs.communication import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    engine_all_reduce_s,
    point_to_point_s,
)
from simulator.costs.layer_work import Exchanges, exchanges, expert_copies
from simulator.costs.training_layout import groups_of
from tools.kernels.fit import COLLECTIVES
from tools.kernels.points import MessagePoint, read_points

MEASURED = ["H100", "H200", "A100-80"]
SIZES = st.floats(0, 1e10)
NAMES = st.sampled_from(sorted(GPUS))


@pytest.mark.parametrize("name", MEASURED)
def test_collectives_match_the_tables_within_the_stated_error(name: str) -> None:
    links = kernel_coefficients(find_gpu(name)).links
    errors: dict[bool, list[float]] = {True: [], False: []}
    for point in read_points(MessagePoint):
        if point.gpu == name:
            predict = COLLECTIVES[point.operation]
            ratio = predict(point.size_bytes, point.gpus, find_gpu(name)) / point.seconds
            errors[point.operation == "engine_all_reduce"].append(abs(ratio - 1))
    assert len(errors[True]) > 30
    assert len(errors[False]) > 60
    assert np.mean(errors[True]) == pytest.approx(links.error, rel=0.01)
    assert np.mean(errors[False]) == pytest.approx(links.nccl_error, rel=0.01)
    assert links.error < 0.08
    assert links.nccl_error < 0.1


def test_a_gigabyte_runs_at_four_fifths_of_the_links() -> None:
    """Measured: 4.01 ms for 1 GiB on 8 H100 is 468 GB/s, more than their 450 (NVLink SHARP)."""
    gpu = find_gpu("H100")
    ideal_s = 2 * 7 / 8 * 2**30 / gpu.nvlink_bytes_per_s
    assert 0.7 < ideal_s / engine_all_reduce_s(2**30, 8, gpu) < 0.9
    assert 0.7 < ideal_s / all_reduce_s(2**30, 8, gpu) < 0.9


def test_a_graph_launches_a_small_message_in_microseconds() -> None:
    assert engine_all_reduce_s(4096, 4, find_gpu("H100")) == pytest.approx(2.8e-6, rel=0.1)
    assert all_reduce_s(4096, 4, find_gpu("H100")) > 2 * engine_all_reduce_s(
        4096, 4, find_gpu("H100")
    )


@given(NAMES, st.sampled_from([2, 4, 8]), SIZES)
def test_more_bytes_or_slower_links_are_never_faster(name: str, gpus: int, size: float) -> None:
    gpu = find_gpu(name)
    slower = dataclasses.replace(
        gpu,
        nvlink_bytes_per_s=gpu.nvlink_bytes_per_s / 2,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s / 2,
    )
    for predict in COLLECTIVES.values():
        assert predict(size * 1.01, gpus, gpu) >= predict(size, gpus, gpu) > 0
        assert predict(size, gpus, slower) >= predict(size, gpus, gpu)


@given(NAMES, st.integers(2, 64), SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    name: str, gpus: int, size: float
) -> None:
    gpu = find_gpu(name)
    two_s = 2 * all_gather_s(size, gpus, gpu)
    latency_s = kernel_coefficients(gpu).links.nccl_latency_s
    assert all_reduce_s(size, gpus, gpu) == pytest.approx(two_s - latency_s, rel=1e-9)


def test_messages_of_one_gpu_take_no_time() -> None:
    for predict in COLLECTIVES.values():
        assert predict(1e9, 1, find_gpu("H100")) == 0


def test_a_ring_across_nodes_uses_the_adapters_of_all_gpus() -> None:
    gpu = find_gpu("H100")
    size = 10e9
    full, single = all_reduce_s(size, 16, gpu), all_reduce_s(size, 16, gpu, gpus_per_node=1)
    # 8 adapters of 50 GB/s at 72 %, compared with one.
    assert full == pytest.approx(2 * 15 / 16 * size / (8 * 50e9 * 0.72), rel=0.02)
    assert single == pytest.approx(8 * full, rel=0.02)
    assert engine_all_reduce_s(size, 16, gpu) == full
    # An L40S has no NVLink: its PCIe is slower than the adapters of a node.
    slow = find_gpu("L40S")
    assert all_reduce_s(size, 16, slow) > 2 * 15 / 16 * size / slow.pcie_bytes_per_s


def test_a_message_between_two_gpus_takes_as_long_as_measured_on_dgx_h100() -> None:
    """Medians of Vidur's send_recv.csv for 64,880,640 bytes: 0.188 ms in a node, 2.0 ms between."""
    gpu = find_gpu("H100")
    assert point_to_point_s(64_880_640, gpu, across_nodes=False) == pytest.approx(188e-6, rel=0.05)
    assert point_to_point_s(64_880_640, gpu, across_nodes=True) == pytest.approx(2.0e-3, rel=0.1)
    assert point_to_point_s(2048, gpu, across_nodes=True) == pytest.approx(20e-6, rel=0.01)


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_impossible_sizes_are_refused(size: float) -> None:
    for predict in COLLECTIVES.values():
        with pytest.raises(ValueError, match="must be >= 0"):
            predict(size, 2, find_gpu("H100"))
    with pytest.raises(ValueError, match="must be >= 0"):
        point_to_point_s(size, find_gpu("H100"), across_nodes=True)


def test_impossible_numbers_of_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus is 0, but must be >= 1"):
        all_reduce_s(1.0, 0, find_gpu("H100"))
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=f"gpus_per_node is {wrong}, but must be from 1 to 8"):
            all_reduce_s(1.0, 16, find_gpu("H100"), gpus_per_node=wrong)


@pytest.mark.parametrize(
    ("name", "gpus", "low_bytes_per_s", "high_bytes_per_s"),
    [
        # DeepEP's README: NVLink of H800s (2025-02), and of eight SM100 GPUs (2026).
        ("H800", 8, 153e9, 158e9),
        ("B200", 8, 643e9, 740e9),
        # Between nodes it counts what adapters send and what stays in the node: 43 to 47 GB/s
        # with 16 and 32 H800s (2025-02), 61 to 90 in 2026.
        ("H800", 16, 43e9, 90e9),
        ("H800", 32, 43e9, 61e9),
    ],
)
def test_all_to_alls_are_as_fast_as_published(
    name: str, gpus: int, low_bytes_per_s: float, high_bytes_per_s: float
) -> None:
    gpu = find_gpu(name)
    size = 4096 * 7168 * 2 * 8
    seconds = all_to_all_s(size, gpus, gpu)
    leaves = size if gpus > 8 else size * 7 / 8
    assert 0.9 * low_bytes_per_s < leaves / seconds < 1.1 * high_bytes_per_s


def test_an_all_to_all_waits_for_its_slower_way() -> None:
    gpu = find_gpu("H100")
    near, far = 1e9, 1e8
    start = all_to_all_s(0, 16, gpu)
    by_links = all_to_all_s(near, 16, gpu, far_bytes=0) - start
    by_network = all_to_all_s(0, 16, gpu, far_bytes=far) - start
    both = all_to_all_s(near, 16, gpu, far_bytes=far) - start
    assert both == pytest.approx(max(by_links, by_network))
    assert all_to_all_s(1e9, 1, gpu) == 0


H100 = find_gpu("H100")
DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")
TOKENS = 8192


def sent(model=MIXTURE, gpus: int = 32, tokens: float = TOKENS, **layout: int) -> Exchanges:
    config = TrainerConfig(**layout)
    return exchanges(
        np.array([[tokens]]),
        np.array([[True]]),
        model=model,
        gpu=H100,
        groups=groups_of(config, model, gpus),
        full_tokens=TOKENS,
        ulysses=config.sequence_parallel,
    )


def vars_of(one: Exchanges) -> list[float]:
    return [float(part[0, 0]) for part in (one.tensor_s, one.ring_s, one.heads_s, one.experts_s)]


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_copies_of_a_token_are_those_of_drawn_routes(gpus: int) -> None:
    """The experts of a token lie on independent GPUs; 8 GPUs make a node."""
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, gpus, (20_000, MIXTURE.active_experts))
    nodes = chosen // 8
    copies = (chosen != 0).sum(axis=1).mean(), (nodes != 0).sum(axis=1).mean()
    near, far = expert_copies(MIXTURE, gpus, 8, "copies")
    assert near + far == pytest.approx(copies[0], rel=0.02)
    assert far == pytest.approx(copies[1], rel=0.02)

    def elsewhere(places: np.ndarray, count: int) -> float:
        return sum(float((places == one).any(axis=1).mean()) for one in range(1, count))

    near, far = expert_copies(MIXTURE, gpus, 8, "ranks")
    assert near == pytest.approx(elsewhere(chosen, gpus), rel=0.02)
    assert far == pytest.approx(elsewhere(nodes, gpus // 8), rel=0.02, abs=1e-9)


def test_a_model_on_one_gpu_exchanges_nothing() -> None:
    assert vars_of(sent()) == [0, 0, 0, 0]


def test_tensor_parallelism_reduces_the_hidden_vectors_twice_per_layer() -> None:
    size = TOKENS * DENSE.hidden * 2
    by_hand = 2 * DENSE.layers * all_reduce_s(size, 4, H100)
    whole = sent(DENSE, tensor_parallel=4)
    assert float(whole.tensor_s[0, 0]) == pytest.approx(by_hand)
    staged = sent(DENSE, tensor_parallel=4, pipeline_parallel=4)
    assert float(staged.tensor_s[0, 0]) == pytest.approx(by_hand / 4)
    shared = sent(DENSE, tensor_parallel=4, context_parallel=2)
    half = 2 * DENSE.layers * all_reduce_s(size / 2, 4, H100)
    assert float(shared.tensor_s[0, 0]) == pytest.approx(half)


def test_tokens_go_to_experts_and_back_in_every_layer_that_has_some() -> None:
    size = TOKENS * MIXTURE.hidden * 2 * 8 * 7 / 8
    by_hand = 2 * MIXTURE.moe_layers * all_to_all_s(size, 8, H100, far_bytes=0)
    near = float(sent(expert_parallel=8).experts_s[0, 0])
    assert near == pytest.approx(by_hand)
    # A quarter of the tokens per GPU, as with tensor and sequence parallelism.
    assert float(sent(expert_parallel=8, tensor_parallel=4).experts_s[0, 0]) < near / 3
    across = float(sent(expert_parallel=16).experts_s[0, 0])
    assert across > 4 * near


def test_ulysses_inside_a_node_sends_less_than_it_would_over_the_network() -> None:
    inside = float(sent(DENSE, sequence_parallel=8).heads_s[0, 0])
    across = float(sent(DENSE, sequence_parallel=8, tensor_parallel=4).heads_s[0, 0])
    # Four times fewer heads per GPU, but six of eight partners are in other nodes.
    assert across > inside
    ring = float(sent(DENSE, context_parallel=8).ring_s[0, 0])
    # Keys and values of 8 of 64 heads, but of all tokens instead of an eighth.
    assert ring == pytest.approx(inside, rel=0.6)


def test_half_a_micro_batch_takes_about_half_of_the_time() -> None:
    for layout in ({"tensor_parallel": 4}, {"expert_parallel": 8}, {"sequence_parallel": 4}):
        whole, half = (sum(vars_of(sent(tokens=n, **layout))) for n in (TOKENS, TOKENS / 2))
        assert 0.5 <= half / whole < 0.6
