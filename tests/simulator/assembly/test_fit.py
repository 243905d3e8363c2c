"""Defaults follow what is given, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.dump import to_yaml
from areal_lab.config.problem import ConfigError
from simulator.assembly.build import problems
from simulator.assembly.simulate import changes_of, fitted, simulate
from simulator.config.load import load_simulation, presets
from simulator.config.schema import ClusterConfig, SimulationConfig

VALUES: dict[str, list[Any]] = {
    "model": ["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-72B", "Qwen3-30B-A3B"],
    "cluster.gpu": ["H100", "A100", "RTX 4090", "B200"],
    "cluster.gpus": [1, 2, 3, 4, 8, 10, 16, 24, 64, 200, 1024],
    "cluster.placement": ["disaggregated", "colocated"],
    "schedule.name": ["synchronous", "one_step_overlap", "partial_rollout"],
    "schedule.eta": [0, 1, 8],
    "schedule.require_batches": [0, 1, 3],
    "rollout.tensor_parallel": [1, 2, 8],
    "trainer.tensor_parallel": [1, 4],
    "workload.steps": [1, 4, 9, 50],
    "workload.warmup_steps": [0, 2, 12],
    "workload.prompts_per_batch": [1, 3, 64, 2048],
    "workload.samples_per_prompt": [1, 2, 1000],
    "workload.minibatches": [1, 2, 6],
    "workload.turns": [1, 3, 2000],
    "workload.answers.max_tokens": [1, 512, 8192, 60_000],
    "workload.answers.mean_tokens": [1, 300, 40_000],
}
GROUPS = {"rollout", "trainer", "weights", "workload.answers"}
"""What a part of the cost model calls itself, of which some settings were given."""


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_few_settings_simulate_or_the_error_names_them(count: int) -> None:
    rng, simulated = random.Random(5), 0
    for _ in range(count):
        names = rng.sample(list(VALUES), rng.randint(1, 5))
        subset = {name: rng.choice(VALUES[name]) for name in names}
        config = load_simulation(None, subset)
        try:
            found = fitted(config)
        except ConfigError as error:
            for problem in error.problems:
                assert "\n" not in problem.message
                allowed = {*names, "cluster.gpus"} | {one for one in GROUPS if _has(names, one)}
                assert problem.setting in allowed, (problem, subset)
            continue
        simulated += 1
        assert not problems(found)
        assert not changes_of(config, found).keys() & {*names}, "what was given stays"
        if not problems(config):
            assert found is config, "where the defaults do, nothing changes"
    assert simulated > count / 3


def _has(told: list[str], group: str) -> bool:
    return any(one.startswith(group) for one in told)


def test_the_smallest_file_simulates(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{model: Qwen2.5-7B, cluster: {gpu: H100, gpus: 16}, workload: {steps: 2,"
        " prompts_per_batch: 2, samples_per_prompt: 2}}"
    )
    config = load_simulation(file)
    assert config.cluster.rollout_gpus == 12
    assert changes_of(config, fitted(config)) == {
        "trainer.tensor_parallel": 4,
        "workload.warmup_steps": 0,
    }
    assert simulate(config).step_s > 0


def test_the_split_follows_the_gpus_until_it_is_given() -> None:
    assert ClusterConfig(gpus=16).rollout_gpus == 12
    config = SimulationConfig().with_settings({"cluster.gpus": 64})
    assert config.cluster.rollout_gpus == 48
    config.cluster.gpus = 4
    assert config.cluster.rollout_gpus == 3
    config.cluster.rollout_gpus = 1
    config.cluster.gpus = 64
    assert config.cluster.rollout_gpus == 1
    for both in (
        {"cluster.rollout_gpus": 96, "cluster.gpus": 100},
        {"gpus": 100, "rollout_gpus": 96},
    ):
        assert load_simulation(None, both).cluster.rollout_gpus == 96


def test_a_cluster_that_is_too_small_is_refused_with_what_is_needed() -> None:
    small = load_simulation(None, ["model=Qwen2.5-72B", "gpu=H100", "gpus=16"])
    with pytest.raises(ConfigError, match=r"^cluster.gpus is 16, .* for Qwen2.5-72B; it needs 64$"):
        fitted(small)
    fitted(load_simulation(None, ["model=Qwen2.5-72B", "gpu=H100", "gpus=64"]))
    given_too = load_simulation(None, ["model=Qwen2.5-72B", "gpus=64", "rollout.tensor_parallel=1"])
    with pytest.raises(ConfigError, match="does not fit on H800 with tensor_parallel=1"):
        fitted(given_too)


def test_no_preset_changes_and_a_written_config_comes_back(tmp_path: Path) -> None:
    for name in presets():
        config = load_simulation(name)
        if not problems(config):
            assert fitted(config) is config
        file = tmp_path / f"{config.name}.yaml"
        for changed in ({}, {"cluster.gpus": 8}, {"cluster.gpus": 100, "cluster.rollout_gpus": 96}):
            other = config.with_settings({**changed, "seed": 7})
            file.write_text(to_yaml(other))
            assert load_simulation(file) == other
