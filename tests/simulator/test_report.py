"""The JSON object of a simulation, its tables, and what they warn of."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from simulator.comparison import show_comparison
from simulator.config import SimulationConfig
from simulator.load import load_simulation
from simulator.quantities import duration, number, quantity
from simulator.report import comparison, report
from simulator.result import Replicated
from simulator.simulation import replicate
from simulator.sources import cost_parts, warnings
from simulator.tables import show_report


@cache
def small(*overrides: str) -> tuple[SimulationConfig, Replicated]:
    config = load_simulation("small", ["seeds=3", *overrides])
    return config, replicate(config, processes=1)


def told(*overrides: str) -> dict[str, Any]:
    config, results = small(*overrides)
    return report(results, config)


def printed(*overrides: str) -> str:
    text = StringIO()
    show_report(Console(file=text, width=100), told(*overrides))
    return text.getvalue()


def compared(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    text = StringIO()
    ratio = comparison(small(*first)[1], small(*second)[1])
    console = Console(file=text, width=100)
    show_comparison(console, told(*first), told(*second), ratio)
    return text.getvalue()


def intervals(value: Any) -> list[dict[str, Any]]:
    """Every `{mean, low, high}` in an object."""
    if not isinstance(value, dict):
        return []
    if value.keys() == {"mean", "low", "high"}:
        return [value]
    return [found for inner in value.values() for found in intervals(inner)]


# --- the object ----------------------------------------------------------------------------------


def test_every_number_of_the_contract_has_its_interval() -> None:
    found = json.loads(json.dumps(told(), allow_nan=False))
    for name in ("step_s", "tokens_per_s", "utilisation", "idle", "lag", "cost", "energy"):
        inside = intervals(found[name]) or intervals({"": found[name]})
        assert inside, name
        assert all(one["low"] <= one["mean"] <= one["high"] for one in inside), name
    assert found["name"] == "small"
    assert found["seeds"] == [1, 2, 3]
    assert found["config"]["schedule"]["eta"] == 1
    assert found["config"]["trainer"]["step_s"] == 2
    assert set(found["utilisation"]) == {"rollout", "training"}


def test_the_shares_of_a_pool_add_up_to_all_of_its_time() -> None:
    for overrides in ((), ("schedule.name=synchronous", "cluster.placement=colocated")):
        found = told(*overrides)
        for pool in found["utilisation"]:
            shares = [*found["busy"][pool].values(), *found["idle"][pool].values()]
            assert sum(share["mean"] for share in shares) == pytest.approx(1, abs=1e-9)


def test_throughput_per_gpu_times_the_gpus_is_the_throughput() -> None:
    found = told()
    for name in ("mean", "low", "high"):
        per_gpu = found["tokens_per_s_per_gpu"][name]
        assert 4 * per_gpu == pytest.approx(found["tokens_per_s"][name])


def test_a_single_seed_has_no_interval_and_says_so() -> None:
    config = load_simulation("small", ["seeds=1"])
    found = json.loads(json.dumps(report(replicate(config), config), allow_nan=False))
    assert all(one["low"] is one["high"] is None for one in intervals(found))
    assert found["warnings"][-1].startswith("1 seed: no intervals")


def test_infinite_eta_is_valid_json() -> None:
    config = load_simulation("small", ["seeds=1", "eta=inf"])
    assert '"eta": "inf"' in json.dumps(report(replicate(config), config), allow_nan=False)


def test_a_comparison_divides_seed_by_seed() -> None:
    first, second = small(), small("schedule.name=synchronous")
    ratio = comparison(first[1], second[1])
    quotients = [
        b.tokens_per_s / a.tokens_per_s
        for a, b in zip(first[1].results, second[1].results, strict=True)
    ]
    assert ratio["tokens_per_s"]["mean"] == pytest.approx(sum(quotients) / 3)
    assert ratio["tokens_per_s"]["high"] < 1


# --- sources and warnings ------------------------------------------------------------------------


def test_what_was_given_is_known_and_what_was_fitted_has_its_error() -> None:
    parts = {part.name: part for part in cost_parts(load_simulation("small"))}
    assert [parts[name].error for name in ("decode", "training", "weight update")] == [0, 0, 0]
    parts = {part.name: part for part in cost_parts(load_simulation(None))}
    for name in ("decode", "prefill", "training"):
        error = parts[name].error
        assert error is not None
        assert 0 < error < 0.15
    assert parts["engine CPU"].error is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.gpu=H800"], ["H800: not checked", "H800: nobody publishes a price"]),
        (["cluster.gpu=H800", "cluster.price_per_gpu_h=2"], ["H800: not checked"]),
        (["cluster.gpu=H100"], []),
        (["cluster.gpu=H100", "cluster.rollout_gpu=MI300X"], ["decode: ", "prefill: ", "MI300X: "]),
        (["cluster.gpu=H100", "seeds=2"], ["2 seeds: wide intervals"]),
    ],
)
def test_warnings_name_what_is_uncertain(overrides: list[str], expected: list[str]) -> None:
    config = load_simulation(None, overrides)
    found = warnings(config)
    for beginning in expected:
        assert any(line.startswith(beginning) for line in found), (beginning, found)
    assert all(any(line.startswith(one) for one in expected) for line in found), found


def test_a_given_step_of_what_no_memory_would_hold_is_warned_of() -> None:
    def told(*overrides: str) -> list[str]:
        found = warnings(load_simulation("small", ["rollout.tensor_parallel=2", *overrides]))
        return [line for line in found if line.startswith("training: its step is given")]

    (line,) = told("model=Qwen2.5-72B", "trainer.tensor_parallel=2")
    # 18 bytes for each of 72.7 billion parameters, on two GPUs.
    assert line.endswith("take 609.4 GiB on each of 2 GPUs, but H100 has 80.0")
    assert told() == told("model=Qwen2.5-7B", "gpus=6") == []


def test_a_price_of_ones_own_silences_the_warning_of_an_unverified_one() -> None:
    unverified = load_simulation(None, ["cluster.gpu=A100-40"])
    assert any("its price is" in line for line in warnings(unverified))
    own = dataclasses.replace(unverified.cluster, price_per_gpu_h=1.0)
    assert not any(
        "price" in line for line in warnings(dataclasses.replace(unverified, cluster=own))
    )


# --- tables --------------------------------------------------------------------------------------


def test_the_report_says_what_a_reader_asks_first() -> None:
    text = printed()
    for part in (
        "2 generate (2 engines of TP 1), 2 train",
        "asynchronous, eta 1",
        "step time",
        "tokens/s",
        "idle: waiting for a batch",
        "utilization",
        "samples, first token",
        "GPU-hours",
        "kWh",
        "a step of 2 s, given",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_lags_beyond_eta_are_explained_and_others_are_not() -> None:
    assert "More than eta (1): it bounds how many prompts are started" in " ".join(
        printed().split()
    )
    assert "More than eta" not in printed("schedule.batch_order=strict_start_order")
    assert "More than eta" not in printed("schedule.name=synchronous")


def test_the_side_that_limits_is_named() -> None:
    assert "Training limits this run" in printed("trainer.step_s=30")
    assert "Generation limits this run" in printed("trainer.step_s=0.1", "weights.update_s=0.01")
    assert "Both sides wait" in printed("schedule.name=synchronous")
    assert "limits this run" not in printed(
        "schedule.name=synchronous", "cluster.placement=colocated"
    )


def test_a_missing_price_is_no_number() -> None:
    assert "no price known" in printed("cluster.gpu=H800")


def test_a_comparison_says_which_is_faster_and_by_how_much() -> None:
    text = compared((), ("schedule.name=synchronous",))
    assert "A trains" in text
    assert "times as fast as B" in text
    assert "GPU-hours." not in text
    backwards = compared(("schedule.name=synchronous",), ())
    assert "B trains" in backwards


def test_a_comparison_with_itself_finds_no_difference() -> None:
    assert "B trains as fast as A" in compared((), ())


def test_fewer_gpus_for_the_same_speed_are_said_to_be_cheaper() -> None:
    many = ("trainer.step_s=60", "gpus=6", "rollout_gpus=4")
    few = ("trainer.step_s=60",)
    text = " ".join(compared(many, few).split())
    assert "B takes 0.667 times the GPU-hours" in text


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "half", "shown"),
    [
        (213.14159, 1.234, "213.1 ± 1.2 s"),
        (213.14159, 12.34, "213 ± 12 s"),
        (213.14159, 0.0, "213.1 s"),
        (213.14159, 1e-12, "213.1 s"),
        (356612.3, 1234.5, "356,612 ± 1,234 s"),
        (0.5, 0.0, "0.5 s"),
        (0.0, 0.0, "0 s"),
        (0.0012345, 0.00012, "0.00123 ± 0.00012 s"),
        (1234567.0, 0.0, "1,235,000 s"),
    ],
)
def test_numbers_have_as_many_digits_as_mean_something(
    mean: float, half: float, shown: str
) -> None:
    assert quantity({"mean": mean, "low": mean - half, "high": mean + half}, "s") == shown


def test_one_seed_shows_the_mean_alone() -> None:
    assert quantity({"mean": 2.5, "low": None, "high": None}, "s") == "2.5 s"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(40.1, "40.1 s"), (179, "179 s"), (600, "10 min"), (53280, "14.8 h"), (864000, "10 days")],
)
def test_durations_have_the_unit_that_one_would_say(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_what_is_no_number_is_shown_as_it_is() -> None:
    assert number(math.inf) == "inf"
