"""Named trainers: sources, errors, and the structure that tells them apart."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig, TrainerKind
from simulator.costs.trainer_speeds import AREAL, ELSEWHERE, PRIME_RL, speed_error
from simulator.costs.trainers.named import (
    MEGATRON,
    ROUTED_IMBALANCE,
    SPEEDS,
    expert_imbalance,
    measured_on,
    trainer_error,
)

H100, H20 = find_gpu("H100"), find_gpu("H20")
DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")


def test_every_kind_has_a_speed_with_a_source_and_an_error() -> None:
    assert set(SPEEDS) == set(get_args(TrainerKind))
    for speed in SPEEDS.values():
        assert speed.provenance
        assert 0 < speed.error < 0.2


def test_the_default_is_areals_with_its_two_fewest_micro_batches_per_stage() -> None:
    assert SPEEDS[TrainerConfig().kind] is AREAL
    assert AREAL.pipeline_micro_batches == 2
    assert not AREAL.gathers
    assert trainer_error(TrainerConfig(), H20, DENSE) == speed_error(H20)


def test_only_fsdp_gathers_parameters_for_each_pass() -> None:
    gathering = {kind for kind, speed in SPEEDS.items() if speed.gathers}
    assert gathering == {"fsdp2", "prime_rl", "torchtitan"}


def test_a_mixture_has_the_error_of_mixtures() -> None:
    config = TrainerConfig(kind="megatron")
    assert trainer_error(config, H100, DENSE).error == MEGATRON.error
    assert trainer_error(config, H100, MIXTURE).error == MEGATRON.mixture_error
    # prime-rl's own fit has mixtures among its points.
    assert trainer_error(TrainerConfig(kind="prime_rl"), H100, MIXTURE).error == PRIME_RL.error


@pytest.mark.parametrize("kind", [kind for kind in SPEEDS if kind != "areal"])
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
