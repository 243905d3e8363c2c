"""Work of a stage: what layouts divide, grouped products, fp8, uneven experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.layers.groups import groups_of
from simulator.costs.layers.work import GROUPED_SHARE, forward_work
from simulator.costs.trainer_speeds import PRIME_RL
from simulator.costs.trainers.named import MEGATRON
from simulator.costs.training_speed import pass_s
from simulator.costs.typical_coefficients import kernel_coefficients

H100 = find_gpu("H100")
DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")


def work(tokens: float, model=MIXTURE, speed=MEGATRON, gpus: int = 8, **more: float) -> float:
    layout = {name: int(more.pop(name)) for name in list(more) if name.endswith("_parallel")}
    return float(
        forward_work(
            np.array([[tokens]]),
            np.array([[tokens * 2048.0]]),
            np.array([[True]]),
            model=model,
            gpu=H100,
            speed=speed,
            groups=groups_of(TrainerConfig(**layout), model, gpus),
            **more,
        ).seconds[0, 0]
    )


def test_a_dense_pass_is_divided_by_all_that_share_it() -> None:
    shared, launches = pass_s(8192, 8192 * 2048, DENSE, H100, PRIME_RL)
    for layout in ({}, {"tensor_parallel": 4}, {"pipeline_parallel": 4}, {"context_parallel": 4}):
        cut = 4 if layout else 1
        stages = layout.get("pipeline_parallel", 1)
        even = shared / cut + launches / stages
        divided = dataclasses.replace(PRIME_RL, head_is_shared=True)
        assert work(8192, DENSE, divided, **layout) == pytest.approx(even)
        head = 2 * DENSE.embedding_parameters * 8192 / (0.77 * H100.flops_per_s)
        last = even + (1 - 1 / stages) * head
        assert work(8192, DENSE, PRIME_RL, **layout) == pytest.approx(last)


def test_the_fixed_time_of_gathered_experts_is_divided_by_their_shards() -> None:
    """At no tokens only launches remain: those of dense layers, and of experts."""
    dense = PRIME_RL.layer_s * MIXTURE.layers
    experts = PRIME_RL.expert_layer_s * MIXTURE.moe_layers
    assert work(0, speed=PRIME_RL) == pytest.approx(dense + experts)
    assert work(0, speed=PRIME_RL, expert_parallel=8) == pytest.approx(dense + experts / 8)
    assert work(0, speed=PRIME_RL, tensor_parallel=4) == pytest.approx(dense + experts / 4)
    staged = work(0, speed=PRIME_RL, pipeline_parallel=2, expert_parallel=4)
    assert staged == pytest.approx((dense + experts / 4) / 2)


def test_few_tokens_per_expert_cost_as_much_as_reading_the_experts() -> None:
    at = kernel_coefficients(H100)
    experts = MIXTURE.moe_layers * MIXTURE.experts * MIXTURE.expert_parameters
    read = 2 * experts * at.weight_reading / H100.memory_bytes_per_s
    launches = MEGATRON.expert_layer_s * MIXTURE.moe_layers
    assert work(0) == pytest.approx(launches + read)
    assert work(0, expert_parallel=8) == pytest.approx(launches + read / 8)


def test_grouped_products_approach_the_efficiency_of_large_ones() -> None:
    """64 tokens per expert are bound by memory, 16,384 by computing."""
    nothing = dataclasses.replace(MEGATRON, expert_layer_s=0)

    def per_token(tokens: int) -> float:
        shared, _ = pass_s(tokens, tokens * 2048, MIXTURE, H100, nothing)
        return work(tokens, speed=nothing) / float(shared)

    ratios = [per_token(1024 * 4**one) for one in range(5)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.5
    assert 1 < ratios[-1] < 1 / GROUPED_SHARE


@pytest.mark.parametrize("speed", [MEGATRON, PRIME_RL], ids=["grouped", "layer"])
def test_the_busiest_gpu_computes_more_for_its_experts_and_nothing_else(speed) -> None:
    even, uneven = (
        work(65_536, speed=speed, expert_parallel=8, imbalance=one) for one in (1.0, 1.5)
    )
    flops = 2 * MIXTURE.moe_layers * MIXTURE.active_experts * MIXTURE.expert_parameters
    extra = 0.5 * flops * 65_536 / (speed.matrix_efficiency * H100.flops_per_s)
    share = GROUPED_SHARE if speed.experts == "grouped" else 1
    assert uneven - even == pytest.approx(extra / share, rel=0.02)


def test_fp8_speeds_up_the_products_of_layers_but_not_the_head_or_attention() -> None:
    bf16, fp8 = (work(8192, DENSE, fp8=one) for one in (False, True))
    layers = DENSE.linear_flops_per_token() - 2 * DENSE.embedding_parameters
    saved = layers * 8192 / (MEGATRON.matrix_efficiency * H100.flops_per_s)
    assert bf16 - fp8 == pytest.approx(saved * (1 - 1 / MEGATRON.fp8_speedup))
