"""The candidates of a plan as points of a chart."""

from __future__ import annotations

from functools import cache

import pytest

from simulator.plan.points import TOOLTIPS, in_dollars, outcome_at, plan_points
from simulator.plan.result import Plan
from simulator.plan.schema import load_plan
from simulator.plan.search import PlanSearch, find_plan


@cache
def solved(*overrides: str) -> Plan:
    return find_plan(
        load_plan(
            None,
            [
                *("simulation=small", "objective=dollars", "steps=100", "search.sensitivity=0"),
                *("candidates.gpus=[2, 3, 4, 5, 6, 8]", "candidates.eta=[0, 1, 2]"),
                *("base.trainer.step_s=null", "base.trainer.mfu=0.0016", "search.seeds=2"),
                *("candidates.rollout_share=[0.2, 0.5, 0.8]", *overrides),
            ],
        )
    )


def test_every_candidate_has_a_point_with_its_level() -> None:
    plan = solved()
    points = {point["number"]: point for point in plan_points(plan)}
    assert set(points) == {one.number for one in plan.space.possible}
    levels = [point["level"] for point in points.values()]
    assert levels.count("front") == len(plan.front)
    assert levels.count("excluded") == plan.bounded > 0
    assert plan.best is not None
    assert [point["number"] for point in points.values() if point["best"]] == [
        plan.best.candidate.number
    ]
    assert points[plan.best.candidate.number]["y"] == plan.best.hours.mean
    for point in points.values():
        assert point["x"] > 0 < point["y"]
        assert all(isinstance(point[key], str) for key in TOOLTIPS)
        assert (point["kind"] == "synchronous") is (point["schedule"] == "synchronous")


def test_a_point_is_where_its_candidate_was_simulated_or_at_its_bound() -> None:
    plan = solved()
    for point in plan_points(plan):
        one = outcome_at(plan, point["number"])
        if one is None:
            assert point["y"] == plan.least_hours[point["number"]]
            assert point["told_hours"].startswith("at least ")
        else:
            assert one.dollars is not None
            assert (point["x"], point["y"]) == (one.dollars.mean, one.hours.mean)


def test_outcomes_of_other_plans_are_shown_by_their_label() -> None:
    plan, other = solved(), solved("limits.eta=0")
    evaluated = {one.candidate.number for one in plan.outcomes}
    shown = next(one for one in other.outcomes if one.candidate.number not in evaluated)
    points = plan_points(plan, {"synchronous": shown})
    (named,) = [point for point in points if point["named"]]
    assert named["label"] == "synchronous"
    assert named["kind"] == "synchronous"
    assert named["y"] == shown.hours.mean
    assert named["told_status"] == "simulated with 2 seeds"
    assert outcome_at(plan, named["number"], [shown]) is shown
    assert outcome_at(plan, named["number"]) is not shown
    assert len(points) == len(plan.space.possible)


def test_without_a_price_the_money_is_gpu_hours() -> None:
    plan = solved("candidates.gpu=[H800]", "objective=hours")
    assert in_dollars(solved())
    assert not in_dollars(plan)
    for point in plan_points(plan):
        if point["level"] != "excluded":
            assert point["x"] == pytest.approx(point["y"] * point["gpus"])


def test_candidates_that_were_not_reached_have_no_point() -> None:
    search = PlanSearch(solved().config)
    assert plan_points(search.plan) == []
    for step in search:
        if step.stage == "screening" and step.done == 2:
            break
    assert len(plan_points(search.plan)) == 2
