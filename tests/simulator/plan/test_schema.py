"""A plan as a file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.load import load_simulation
from simulator.plan.schema import PlanConfig, PriceEntry, load_plan, plan_yaml

SHARE = st.floats(0.01, 0.99)
AMOUNT = st.floats(0, 1e6, exclude_min=True)
ETA = st.sampled_from([0.0, 1.0, 4.0, math.inf])
PRICES = st.lists(
    st.builds(
        PriceEntry,
        gpu=st.sampled_from(["H100", "H800", "A100-80"]),
        typical=st.floats(2, 3),
        low=st.none() | st.floats(1, 2),
        high=st.none() | st.floats(3, 9),
        reserved=st.none() | st.floats(0, 2),
        spot=st.none() | st.floats(0, 2),
        restart_s=st.none() | st.floats(0, 900),
    ),
    max_size=2,
)
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda t: "?" not in t)


@st.composite
def plans(draw: st.DrawFn) -> PlanConfig:
    start = PlanConfig(simulation=draw(st.sampled_from(["", "small", "table_7"])))
    if start.simulation:
        start.base = load_simulation(start.simulation)
    choose = {
        "name": NAME,
        "objective": st.sampled_from(["gpus", "dollars", "hours"]),
        "steps": st.integers(1, 10**6),
        "limits.eta": ETA,
        "limits.deadline_h": AMOUNT | st.just(math.inf),
        "limits.gpus": st.just(math.inf) | st.integers(1, 9).map(float),
        "candidates.gpu": st.lists(st.sampled_from(["H100", "L40S", "h200"]), max_size=3),
        "candidates.rollout_gpu": st.lists(st.sampled_from(["", "H20"]), max_size=2),
        "candidates.node_range": st.sampled_from([[], [1, 2], [4, 16, 4]]),
        "candidates.eta": st.lists(ETA, max_size=3),
        "candidates.rollout_share": st.lists(SHARE, max_size=3),
        "candidates.placement": st.lists(st.sampled_from(["colocated", "disaggregated"])),
        "prices": PRICES,
        "search.near": st.floats(0, 1),
        "search.sensitivity": st.integers(0, 9),
        "base.model": st.sampled_from(["Qwen2.5-7B", "R1-Distill-Qwen-1.5B"]),
        "base.name": NAME,
        "base.workload.answers.sigma": st.floats(0.01, 3),
        "base.trainer.mfu": st.none() | SHARE,
        "base.rollout.engine_overhead_s": st.none() | st.floats(0, 0.1),
        "base.schedule.eta": ETA,
        "base.cluster.price_per_gpu_h": st.none() | st.floats(0, 9),
    }
    names = draw(st.sets(st.sampled_from(sorted(choose)), max_size=6))
    return start.with_settings({name: draw(choose[name]) for name in names})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan") / "written.yaml"


@given(plan=plans())
def test_a_written_plan_is_read_back_as_it_was(file: Path, plan: PlanConfig) -> None:
    file.write_text(plan_yaml(plan), encoding="utf-8", newline="")
    assert load_plan(file) == plan


def test_the_shipped_example_is_written_in_as_few_lines_as_by_hand() -> None:
    text = plan_yaml(load_plan("plan_example"))
    assert "\nsimulation: table_1_7b_asynchronous\n" in text
    assert "\n  deadline_h: 96.0  # hours\n" in text
    assert "base:" not in text
    assert "search:" not in text


def test_a_plan_of_a_simulation_that_is_not_there_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="unknown preset 'nosuch'"):
        plan_yaml(PlanConfig(simulation="nosuch"))
