"""What a simulation says: intervals, columns, shares, money, and the JSON of it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from areal_lab.control.schedule import asynchronous, synchronous
from simulator.catalogue.gpu import find_gpu
from simulator.config.schema import RolloutConfig
from simulator.costs.weight_sync import WeightSync
from simulator.run.accounting import COLUMNS
from simulator.run.one_seed import run_system
from simulator.run.pools import PoolShares, pool_shares, shared_gpus, split
from simulator.run.result import Replicated, SimulationResult
from simulator.stats.statistics import Estimate, estimate
from tests.simulator.run.toy_system import lognormal, toy_system


def several(schedule: Any = None, seeds: int = 3, **fields: Any) -> Replicated:
    defaults: dict[str, Any] = {
        "lengths": lognormal(100),
        "in_flight": 6,
        "warmup_steps": 4,
        "weights": WeightSync(export_s=1, delay_s=2, load_s=3),
    }
    system = toy_system(schedule or asynchronous(2), **{**defaults, **fields})
    return Replicated(results=tuple(run_system(system, seed) for seed in range(1, seeds + 1)))


# --- intervals -----------------------------------------------------------------------------------


def test_an_interval_equals_a_textbook_example() -> None:
    told = estimate([4.0, 6.0, 8.0])
    assert told.mean == 6
    assert told.half_width == pytest.approx(4.303 * 2 / math.sqrt(3), rel=1e-3)
    assert told.high - told.mean == pytest.approx(told.mean - told.low)


def test_an_interval_covers_the_true_mean_in_95_of_100_studies() -> None:
    generator = np.random.default_rng(1)
    studies = [estimate(generator.normal(3.0, 2.0, 5).tolist()) for _ in range(4000)]
    held = sum(told.low <= 3.0 <= told.high for told in studies) / 4000
    assert held == pytest.approx(0.95, abs=0.012)


def test_one_repetition_has_no_finite_interval_and_none_is_an_error() -> None:
    assert estimate([5.0]) == Estimate(5.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no values to average"):
        estimate([])


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert estimate([2.5, 2.5, 2.5]) == Estimate(2.5, 2.5, 2.5)


# --- averages ------------------------------------------------------------------------------------


def test_averages_exclude_the_warm_up() -> None:
    result = several().results[0]
    steps = result.steps
    assert list(steps.columns) == list(COLUMNS)
    assert steps.index.tolist() == list(range(1, 13))
    after = steps.loc[5:]
    assert result.step_s == pytest.approx(after.step_s.mean())
    assert result.tokens_per_s == pytest.approx(after.tokens.sum() / after.step_s.sum())
    assert result.makespan_s == steps.end_s.iloc[-1]
    assert result.window_s == pytest.approx(steps.end_s.iloc[-1] - steps.end_s.iloc[3])
    assert sum(result.token_lags.values()) == after.tokens.sum()
    assert sum(result.head_lags.values()) == sum(result.tail_lags.values()) == 8 * 4 * 2


def test_columns_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        several(seeds=1).results[0].columns["step_s"][0] = 1.0


def test_generation_time_is_per_step_and_averaged_over_engines() -> None:
    result = run_system(toy_system(synchronous(), engines=4, batch=2), 1)
    # 2 of 4 engines have a group of 100 s.
    assert result.columns["generate_s"].tolist() == [50.0] * 12
    assert result.columns["wait_s"].tolist() == [100.0] * 12
    assert result.columns["train_s"].tolist() == [50.0] * 12


def test_a_ratio_compares_seed_by_seed() -> None:
    fast, slow = several(asynchronous(2)), several(synchronous())
    ratio = fast.ratio(slow, lambda result: result.tokens_per_s)
    pairs = zip(fast.results, slow.results, strict=True)
    assert ratio == estimate([a.tokens_per_s / b.tokens_per_s for a, b in pairs])
    with pytest.raises(ValueError, match=r"seeds \[1, 2, 3\] and \[1, 2\] differ"):
        fast.ratio(several(seeds=2), lambda result: result.step_s)


# --- shares --------------------------------------------------------------------------------------


def test_shares_of_a_pool_are_busy_or_idle() -> None:
    shares = pool_shares(
        8, 100.0, {"decode": 120.0, "load weights": 20.0, "lost": 60.0, "x": 0.0}, ["lost", "x"]
    )
    assert shares == PoolShares(
        gpus=8, seconds=100.0, busy={"decode": 0.6, "load weights": 0.1}, idle={"lost": 0.3}
    )
    assert shares.utilization == 0.6
    assert shares.idle_share == 0.3


def test_seconds_are_split_in_proportion() -> None:
    assert split(10.0, {"decode": 3.0, "prefill": 1.0}) == {"decode": 7.5, "prefill": 2.5}
    assert split(10.0, {"decode": 0.0}) == {"generate": 10.0}


def test_colocated_gpus_are_not_idle_while_they_train() -> None:
    engines = {"decode": 60.0, "waiting for weights": 5.0, "nothing admitted (staleness bound)": 35}
    trainer = {"train": 20.0, "export weights": 1.0, "waiting for a batch": 79.0}
    both = shared_gpus(
        engines,
        trainer,
        ["waiting for weights", "nothing admitted (staleness bound)", "waiting for a batch"],
    )
    assert both == {
        "decode": 60.0,
        "waiting for weights": 5.0,
        "nothing admitted (staleness bound)": 14.0,
        "train": 20.0,
        "export weights": 1.0,
    }


def test_colocated_gpus_are_lost_while_their_trainer_is() -> None:
    engines = {"decode": 60.0, "nothing admitted (staleness bound)": 40.0}
    trainer = {"train": 10.0, "lost": 25.0, "waiting for a batch": 65.0}
    both = shared_gpus(
        engines, trainer, ["lost", "nothing admitted (staleness bound)", "waiting for a batch"]
    )
    assert both == {
        "decode": 60.0,
        "nothing admitted (staleness bound)": 5.0,
        "train": 10.0,
        "lost": 25.0,
    }


# --- money, energy, JSON -------------------------------------------------------------------------


def test_money_and_energy_are_per_step_after_warm_up() -> None:
    gpu = find_gpu("H100")
    result = several(
        seeds=1,
        rollout_gpu=gpu,
        training_gpu=gpu,
        rollout=RolloutConfig(tensor_parallel=3),
        training_gpus=2,
        price_per_gpu_h=3.0,
        overhead=0.5,
    ).results[0]
    hours = 8 * result.step_s / 3600
    assert result.cost.gpu_hours == pytest.approx(hours)
    assert result.cost.dollars == pytest.approx(hours * 3 * 1.5)
    assert result.cost_per_million_tokens.dollars == pytest.approx(
        hours * 3 * 1.5 / (result.mean("tokens") / 1e6)
    )
    watts = sum(
        pool.gpus * (pool.utilization * gpu.power_w + (1 - pool.utilization) * gpu.idle_power_w)
        for pool in result.pools.values()
    )
    assert result.energy.kwh == pytest.approx(watts * result.step_s / 3.6e6)


def test_the_json_has_the_documented_names_each_with_its_interval() -> None:
    gpu = find_gpu("H100")
    told = several(rollout_gpu=gpu, training_gpu=gpu).to_json()
    assert {"step_s", "tokens_per_s", "utilisation", "idle", "lag", "cost", "energy"} <= set(told)
    interval = {"mean", "low", "high"}
    for one in (
        *(told["step_s"], told["tokens_per_s"], told["utilisation"]["rollout"]),
        *(told["idle"]["training"]["waiting for weights"], told["lag"]["token"]["mean"]),
        *(
            told["lag"]["head"]["max"],
            told["lag"]["in_queue"]["p95"],
            told["ledger"]["thrown_away"],
        ),
        *(told["lag"]["head"]["p95"], told["cost"]["dollars_per_step"]["typical"]),
        *(told["cost"]["gpu_hours_per_step"], told["energy"]["kwh_per_step"]),
    ):
        assert set(one) == interval
        assert one["low"] <= one["mean"] <= one["high"]
    shares = told["lag"]["token"]["histogram"].values()
    assert all(set(share) == interval for share in shares)
    assert sum(share["mean"] for share in shares) == pytest.approx(1)
    assert list(told["lag"]["tail"]["histogram"]) == sorted(told["lag"]["tail"]["histogram"])
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_one_seed_gives_plain_numbers_and_an_unknown_price_is_null() -> None:
    result = several(seeds=1).results[0]
    told = result.to_json()
    assert told["step_s"] == result.step_s
    assert told["cost"]["dollars_per_step"] is None
    json.dumps(told, allow_nan=False)


def test_a_result_is_frozen_and_all_its_columns_are_described() -> None:
    result = several(seeds=1).results[0]
    assert dataclasses.is_dataclass(result)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.seed = 3  # type: ignore[misc]
    assert all(COLUMNS.values())
    assert isinstance(result, SimulationResult)
