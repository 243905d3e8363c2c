"""What a config asks of machines: processes by its allocation, memory by its model."""

from __future__ import annotations

import pytest

from areal_lab.cluster.deploy.shape import GIB
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.models.folder import read_model_facts
from areal_lab.models.locate import resolve_model_path
from areal_lab.resolve.needs import asks_for_gpus, needs_of

PARAMETERS = read_model_facts(resolve_model_path("Adder-75K")).parameters


def test_processes_are_those_of_the_allocation() -> None:
    config = load_config("tiny", ["allocation_mode=sglang:d6t2+fsdp:d4", "cluster.spare_nodes=1"])
    needs = needs_of(config, gpu=True)
    found = (needs.backend, needs.servers, needs.tensor_parallel, needs.trainer_ranks)
    assert found == ("sglang", 6, 2, 4)
    assert (needs.shared, needs.gpus, needs.spare_nodes) == (False, 16, 1)


def test_devices_in_turns_are_counted_once() -> None:
    needs = needs_of(load_config("tiny", ["allocation_mode=sglang:d4|fsdp:d4"]), gpu=True)
    assert (needs.shared, needs.gpus) == (True, 4)


def test_a_run_that_attaches_to_servers_starts_none() -> None:
    config = load_config("tiny", ["rollout.addresses=['http://a:1']", "rollout.backend=sglang"])
    assert not asks_for_gpus(config)
    assert needs_of(config, gpu=False).servers == 0


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ([], False),
        (["rollout.backend=sglang"], True),
        (["rollout.backend=vllm:d2"], True),
        (["actor.device=cuda"], True),
        (["rollout.device=cuda"], True),
        (["actor.device=cpu", "rollout.engines=4"], False),
    ],
)
def test_engines_and_devices_say_whether_a_run_is_for_gpus(changes: list[str], gpus: bool) -> None:
    assert asks_for_gpus(load_config("tiny", changes)) is gpus


def test_memory_is_estimated_from_a_model_that_is_here() -> None:
    needs = needs_of(load_config("tiny"), gpu=False)
    assert not needs.guess
    assert needs.version_bytes == 4 * PARAMETERS  # float32, as the config says
    assert GIB < needs.server_bytes < 1.01 * GIB
    assert 375 << 20 < needs.trainer_bytes < 2 * GIB


def test_the_memory_of_a_model_that_is_not_here_is_a_guess() -> None:
    needs = needs_of(load_config("tiny", ["actor.path=elsewhere"]), gpu=True)
    assert needs.guess == "elsewhere is not here"
    assert needs.server_bytes == needs.trainer_bytes == 32 * GIB


@pytest.mark.parametrize(
    "mode", ["megatron:p2", "sglang:d1+fsdp:p2", "sglang:d2+megatron:d2", "sglang:d2+archon:e2"]
)
def test_trainers_that_are_not_supported_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="allocation_mode"):
        needs_of(load_config("tiny", [f"allocation_mode={mode}"]), gpu=True)
