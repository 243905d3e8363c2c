"""Buy a cluster: the answers of the first question, and what its controls change."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import simulator
from simulator.plan.result import Plan

NAME = "05_buy_a_cluster"


@pytest.fixture(scope="module")
def names(notebook: Callable[[str], Any]) -> Mapping[str, Any]:
    defined: Mapping[str, Any] = notebook(NAME)[1]
    return defined


def after(**controls: Any) -> Mapping[str, Any]:
    """The notebook with other values of controls, without its sensitivity."""
    shipped = simulator.load_plan("plan_small", ["search.sensitivity=0"])
    values = {name: SimpleNamespace(value=value) for name, value in controls.items()}
    if "prices" in values:
        values |= {"typical": dict.fromkeys(values["prices"].value)}
        values["prices"].elements = {}
    cache = simulator.shipped_trials("plan_small")
    app = importlib.import_module(f"notebooks.{NAME}").app
    _, defined = app.run(defs={"shipped": shipped, "cache": cache, **values})
    return defined


def test_the_first_answer_comes_without_a_simulation(names: Mapping[str, Any]) -> None:
    assert names["cache"].simulated == 0
    assert names["complete"]
    assert names["settled"]


def test_the_recommendation_is_on_the_front_and_meets_the_limits(names: Mapping[str, Any]) -> None:
    plan: Plan = names["plan"]
    best = plan.best
    assert best is not None
    assert best.dollars is not None
    assert best in plan.front
    assert best.hours.high < plan.config.limits.deadline_h == 24
    assert best.dollars.mean < plan.config.limits.budget_dollars
    assert best.candidate.hardware == "32 H100"
    assert best.dollars.mean == pytest.approx(2058, abs=1)


def test_the_synchronous_answer_is_another_gpu_twice_as_many_and_twice_as_dear(
    names: Mapping[str, Any],
) -> None:
    best, other = names["plan"].best, names["rivals"]["stay synchronous"].best
    assert other.candidate.eta == 0 < best.candidate.eta
    assert other.candidate.hardware == "64 H200"
    assert other.dollars.low > 2 * best.dollars.high
    assert other.hours.mean < 24


def test_the_cheapest_gpu_hours_do_not_make_the_cheapest_run(names: Mapping[str, Any]) -> None:
    best, other = names["plan"].best, names["rivals"]["cheapest GPU-hours"].best
    prices = names["prices"].value
    ours, theirs = best.candidate.config.cluster.gpu, other.candidate.config.cluster.gpu
    assert theirs == min(prices, key=prices.get) == "A100-80"
    assert prices[ours] > 2 * prices[theirs]
    assert other.dollars.low > 1.4 * best.dollars.high


def test_the_lower_bounds_are_below_what_was_simulated(names: Mapping[str, Any]) -> None:
    assert len(names["bounds_s"]) == 3
    for least_s, found_s in names["bounds_s"].values():
        assert 0.5 * found_s < least_s < found_s


def test_the_timeline_is_that_of_the_recommendation(names: Mapping[str, Any]) -> None:
    assert names["chosen"] is names["plan"].best
    rows = names["strip"].table().index
    assert list(rows) == ["trainer", *(f"engine {number}" for number in range(16))]


def test_the_plan_file_is_accepted_and_asks_the_same(
    names: Mapping[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "my_plan.yaml"
    file.write_text(simulator.plan_yaml(names["question"]), encoding="utf-8")
    assert simulator.load_plan(file) == names["question"]


def test_the_table_has_every_candidate(names: Mapping[str, Any]) -> None:
    rows = list(csv.DictReader(StringIO(simulator.plan_csv(names["plan"]))))
    assert len(rows) == len(names["plan"].space.possible) == 45
    assert rows[0]["hardware"] == "32 H100"


def test_a_third_of_the_time_costs_a_third_more() -> None:
    """The first two claims of "Try this"."""
    found = after(deadline=8)
    best = found["plan"].best
    assert best.candidate.gpus == 4 * 32
    assert 1.25 < best.value("dollars") / 2058 < 1.4
    assert found["rivals"]["stay synchronous"].best is None
    assert found["cache"].simulated == 0


@pytest.mark.parametrize(
    ("prices", "wins"),
    [
        ({"A100-80": 1.39, "H100": 5.0, "H200": 3.59}, "H200"),
        ({"A100-80": 0.9, "H100": 2.95, "H200": 3.59}, "H100"),
        ({"A100-80": 0.85, "H100": 2.95, "H200": 3.59}, "A100-80"),
    ],
)
def test_prices_decide_without_a_simulation(prices: dict[str, float], wins: str) -> None:
    """The third claim of "Try this"."""
    found = after(prices=prices)
    assert found["plan"].best.candidate.config.cluster.gpu == wins
    assert found["cache"].simulated == 0


def test_an_overhead_raises_every_bill_by_its_share_without_a_simulation() -> None:
    found = after(overhead=0.5)
    best = found["plan"].best
    assert best.candidate.hardware == "32 H100"
    assert best.value("dollars") == pytest.approx(1.5 * 2058, rel=1e-3)
    assert found["cache"].simulated == 0


def test_without_staleness_the_recommendation_is_the_synchronous_one() -> None:
    found = after(eta=0.0)
    assert found["plan"].best.candidate.hardware == "64 H200"
    assert found["plan"].best.hours == found["rivals"]["stay synchronous"].best.hours


def test_a_budget_that_is_too_small_leaves_no_recommendation_but_a_page() -> None:
    found = after(budget=100.0)
    assert found["plan"].best is None
    assert found["plan"].front


def test_another_batch_is_simulated() -> None:
    shipped = simulator.load_plan("plan_small")
    values = {
        "base.workload.prompts_per_batch": 16,
        "base.workload.samples_per_prompt": 8,
        "base.workload.answers.mean_tokens": 500.0,
        "base.workload.answers.max_tokens": 2000,
        "base.model": "Qwen2.5-1.5B",
        "steps": 10,
    }
    control = SimpleNamespace(value=values, elements={})
    candidates = SimpleNamespace(
        value={"candidates.gpu": ["H100"], "candidates.nodes": [1], "candidates.eta": [0.0, 1.0]},
        elements={},
    )
    app = importlib.import_module(f"notebooks.{NAME}").app
    _, found = app.run(defs={"run": control, "candidates": candidates})
    assert found["cache"].simulated > 0
    assert found["plan"].best.candidate.gpus == 8
    assert found["plan"].config.base.workload.minibatches == shipped.base.workload.minibatches
