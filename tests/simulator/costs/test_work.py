"""Work of a stage: what layouts divide, grouped products, fp8, uneven experts."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.microbatch import balanced_parts, dynamic_batches
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig, TrainerKind
from simulator.costs.coefficients import kernel_coefficients
from simulator.costs.layer_work import GROUPED_SHARE, forward_work
from simulator.costs.micro_batching import (
    FEWEST_LANES,
    balanced_ranks,
    cut_within_budget,
    lane_batches,
)
from simulator.costs.trainers import (
    AREAL,
    ELSEWHERE,
    MEGATRON,
    PRIME_RL,
    RECKONED,
    ROUTED_IMBALANCE,
    SPEEDS,
    expert_imbalance,
    measured_on,
    speed_error,
    trainer_error,
)
from simulator.costs.training_layout import groups_of
from simulator.costs.training_speed import pass_s

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


LENGTHS = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=60),
    st.lists(st.integers(400, 512), min_size=1, max_size=60),
    st.lists(st.sampled_from([1, 2, 250, 256, 257, 511, 512]), min_size=1, max_size=50),
)


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 9))
@settings(max_examples=200)
def test_ranks_equal_those_of_balanced_parts(minibatches: list[list[int]], ranks: int) -> None:
    fewest = min(map(len, minibatches))
    minibatches, ranks = [sorted(one[:fewest])[::-1] for one in minibatches], min(ranks, fewest)
    rank_of_each = balanced_ranks(np.array(minibatches), ranks)
    for mine, lengths in zip(rank_of_each, minibatches, strict=True):
        parts = [np.flatnonzero(mine == rank).tolist() for rank in range(ranks)]
        assert parts == balanced_parts(lengths, ranks)


@given(
    st.lists(LENGTHS, min_size=1, max_size=8),
    st.integers(0, 100),
    st.integers(1, 9),
    st.sampled_from([1, 1 << 23]),  # so large numbers do not fit in 32 bits
)
@settings(max_examples=200)
def test_micro_batches_equal_those_of_each_lane_alone(
    lanes: list[list[int]], spare: int, min_batches: int, unit: int
) -> None:
    max_tokens = (max(map(max, lanes)) + spare) * unit
    lanes = [sorted([length * unit for length in lane], reverse=True) for lane in lanes]
    table = np.zeros((max(map(len, lanes)), len(lanes)), np.int64)
    for place, lane in enumerate(lanes):
        table[: len(lane), place] = lane
    batches = lane_batches(table, max_tokens=max_tokens, min_batches=min_batches)
    for place, lane in enumerate(lanes):
        mine = batches[: len(lane), place]
        members = [np.flatnonzero(mine == one).tolist() for one in range(mine.max() + 1)]
        assert members == dynamic_batches(lane, max_tokens=max_tokens, min_batches=min_batches)


@pytest.mark.parametrize("ranks", [1, FEWEST_LANES // 2, FEWEST_LANES])
def test_a_batch_is_cut_equally_with_many_lanes_and_with_few(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(5).integers(100, 20_000, 40 * ranks + 3)
    cuts = []
    for fewest in (1, 1_000):
        monkeypatch.setattr("simulator.costs.micro_batching.FEWEST_LANES", fewest)
        cut = cut_within_budget(lengths, ranks=ranks, minibatches=2, max_tokens=32768, least=2)
        cuts.append(cut.parts())
    assert cuts[0] == cuts[1]


NAMED_H100, H20 = find_gpu("H100"), find_gpu("H20")


def test_every_kind_has_a_speed_with_a_source_and_an_error() -> None:
    assert set(SPEEDS) == set(get_args(TrainerKind))
    for speed in SPEEDS.values():
        assert speed.provenance
        assert 0 < speed.error < (0.5 if speed.provenance.startswith(RECKONED) else 0.2)


def test_the_own_trainer_is_reckoned_and_says_so() -> None:
    """1.09 MB a token and layer and 64 bytes a logit of the 1.5B model, over three passes."""
    config = TrainerConfig(kind="areal_lab")
    counted = 1.09e6 + 64 * 151936 / 28
    assert SPEEDS["areal_lab"].hidden_traffic == pytest.approx(counted / (3 * 2 * 1536), abs=0.05)
    found = trainer_error(config, NAMED_H100, DENSE)
    assert not measured_on("areal_lab", NAMED_H100)
    assert found.error == found.span == 0.4
    assert "reckoned from operation counts, not measured" in found.source


def test_the_default_is_areals_with_its_two_fewest_micro_batches_per_stage() -> None:
    assert SPEEDS[TrainerConfig().kind] is AREAL
    assert AREAL.pipeline_micro_batches == 2
    assert not AREAL.gathers
    assert trainer_error(TrainerConfig(), H20, DENSE) == speed_error(H20)


def test_only_fsdp_gathers_parameters_for_each_pass() -> None:
    gathering = {kind for kind, speed in SPEEDS.items() if speed.gathers}
    assert gathering == {"fsdp2", "prime_rl", "torchtitan", "areal_lab"}


def test_a_mixture_has_the_error_of_mixtures() -> None:
    config = TrainerConfig(kind="megatron")
    assert trainer_error(config, NAMED_H100, DENSE).error == MEGATRON.error
    assert trainer_error(config, NAMED_H100, MIXTURE).error == MEGATRON.mixture_error
    # prime-rl's own fit has mixtures among its points.
    assert (
        trainer_error(TrainerConfig(kind="prime_rl"), NAMED_H100, MIXTURE).error == PRIME_RL.error
    )


@pytest.mark.parametrize("kind", [kind for kind in SPEEDS if not kind.startswith("areal")])
def test_a_gpu_without_measurements_adds_its_own_error(kind: TrainerKind) -> None:
    found = trainer_error(TrainerConfig(kind=kind), H20, DENSE)
    assert not measured_on(kind, H20)
    assert found.error == pytest.approx(math.hypot(SPEEDS[kind].error, ELSEWHERE))
    assert "other GPUs" in found.source


def test_experts_are_uneven_unless_told_otherwise() -> None:
    assert expert_imbalance(TrainerConfig()) == ROUTED_IMBALANCE
    assert expert_imbalance(TrainerConfig(expert_imbalance=1.0)) == 1.0
    with pytest.raises(ValueError, match=r"expert_imbalance is 0.5"):
        TrainerConfig(expert_imbalance=0.5)


def test_impossible_shares_are_refused() -> None:
    for wrong in ({"fp8_speedup": 2.5}, {"fp8_speedup": 0.5}, {"exchange_share": 1.5}):
        with pytest.raises(ValueError, match="must be in"):
            dataclasses.replace(MEGATRON, **wrong)
