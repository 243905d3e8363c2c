"""The candidates of a plan as a table."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from io import StringIO

import pytest

from areal_lab.extras import MissingExtra
from simulator.plan.frame import plan_csv, plan_frame, plan_rows
from simulator.plan.result import Plan
from simulator.plan.schema import load_plan
from simulator.plan.search import PlanSearch, find_plan


def solved(*overrides: str) -> Plan:
    return find_plan(
        load_plan(
            None,
            [
                *("simulation=small", "objective=dollars", "steps=100", "search.sensitivity=0"),
                *(
                    "candidates.gpus=[2, 3, 4, 5, 6, 8]",
                    "candidates.eta=[0, 1, 2]",
                    "search.seeds=2",
                ),
                *("base.trainer.step_s=null", "base.trainer.mfu=0.0016"),
                *("candidates.rollout_share=[0.2, 0.5, 0.8]", *overrides),
            ],
        )
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solved()


def test_every_possible_candidate_has_one_row(plan: Plan) -> None:
    rows = plan_rows(plan)
    assert sorted(row["candidate"] for row in rows) == [one.number for one in plan.space.possible]
    assert sum(row["status"] == "excluded by its lower bound" for row in rows) == plan.bounded > 0
    assert sum(row["on_front"] for row in rows) == len(plan.front)
    for row in rows:
        if row["seeds"]:
            assert row["duration_h"] > 0
            assert row["cost_dollars"] > 0
        else:
            assert row["duration_h"] is None
            assert row["least_duration_h"] > 0


def test_the_first_row_is_the_recommendation_with_the_numbers_of_its_outcome(plan: Plan) -> None:
    best, first = plan.best, plan_rows(plan)[0]
    assert best is not None
    assert best.dollars is not None
    assert [row["recommended"] for row in plan_rows(plan)] == [True] + [False] * (
        len(plan.space.possible) - 1
    )
    assert first["duration_h"] == best.hours.mean
    assert first["duration_h"] == pytest.approx(first["step_s"] * 100 / 3600)
    assert first["cost_seeds_low_dollars"] == best.dollars.low <= first["cost_dollars"]
    assert best.predicted_dollars is not None
    assert first["cost_low_dollars"] == best.predicted_dollars.low <= max(0, best.dollars.low)
    assert first["duration_high_h"] == best.predicted_hours.high >= first["duration_seeds_high_h"]
    assert first["gpu_hours"] == pytest.approx(first["gpus"] * first["duration_h"])
    assert first["generating_gpus"] + first["training_gpus"] == first["gpus"]
    assert first["bottleneck"] == best.limit
    assert first["seeds"] == 2


def test_rows_are_sorted_by_the_objective(plan: Plan) -> None:
    costs = [row["cost_dollars"] for row in plan_rows(plan) if row["seeds"]]
    assert costs == sorted(costs)
    least = [row["least_duration_h"] for row in plan_rows(plan) if not row["seeds"]]
    assert least == sorted(least)


def test_a_price_that_is_unknown_leaves_money_empty() -> None:
    found = solved("candidates.gpu=[H800]", "objective=hours", "candidates.gpus=[4]")
    for row in plan_rows(found):
        assert row["cost_dollars"] is None
    lines = list(csv.DictReader(StringIO(plan_csv(found))))
    assert {line["cost_dollars"] for line in lines} == {""}
    assert plan_frame(found)["cost_dollars"].isna().all()


def test_candidates_that_a_stopped_search_did_not_reach_are_marked() -> None:
    search = PlanSearch(solved().config)
    for step in search:
        if step.stage == "screening" and step.done == 2:
            break
    status = [row["status"] for row in plan_rows(search.plan)]
    assert status.count("simulated once") == 2
    assert status.count("not reached") == len(search.plan.waiting) == len(status) - 2


def test_the_frame_and_the_csv_file_have_the_rows(plan: Plan) -> None:
    frame, rows = plan_frame(plan), plan_rows(plan)
    assert list(frame.index) == [row["candidate"] for row in rows]
    assert list(frame.reset_index().columns) == list(rows[0])
    lines = list(csv.DictReader(StringIO(plan_csv(plan))))
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line["hardware"] == row["hardware"]
        if row["seeds"]:
            assert math.isclose(float(line["cost_dollars"]), row["cost_dollars"])


def test_units_are_in_the_names(plan: Plan) -> None:
    units = ("_h", "_dollars", "_s", "_kwh", "_share", "_tokens", "_hours", "_versions")
    for name, value in plan_rows(plan)[0].items():
        if isinstance(value, float):
            assert name.endswith(units), name


def test_without_pandas_the_frame_names_what_to_install(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lab.extras.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"plan_frame needs .*pandas.*areal_lab\[notebooks\]"):
        plan_frame(plan)
    assert plan_csv(plan).startswith("candidate,status,")


def test_rows_and_csv_load_no_pandas() -> None:
    script = (
        "import sys, simulator as s; p = s.find_plan(s.load_plan(None, ['simulation=small', "
        "'steps=4', 'search.sensitivity=0', 'candidates.gpus=[4]'])); s.plan_csv(p); "
        "print(sorted({'pandas', 'matplotlib', 'altair'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"
