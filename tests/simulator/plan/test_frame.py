"""The candidates of a plan as a table."""

from __future__ import annotations

import csv
import dataclasses
import math
import subprocess
import sys
from functools import cache
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from areal_lab.extras import MissingExtra
from simulator.plan.frame import (
    TOOLTIPS,
    in_dollars,
    outcome_at,
    plan_csv,
    plan_frame,
    plan_points,
    plan_rows,
)
from simulator.plan.plots import draw_front, draw_plan, draw_tornado, tornado_content
from simulator.plan.result import Plan
from simulator.plan.schema import load_plan
from simulator.plan.search import PlanSearch, find_plan
from simulator.plan.sensitivity import measure
from simulator.plan.trial import Job, run_job


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
    assert first["cost_low_dollars"] == best.predicted_dollars.low < first["cost_dollars"]
    assert first["duration_high_h"] == best.predicted_hours.high > first["duration_h"]
    assert first["cost_seeds_low_dollars"] > 0
    assert first["gpu_hours"] == pytest.approx(first["gpus"] * first["duration_h"])
    assert first["generating_gpus"] + first["training_gpus"] == first["gpus"]
    assert first["bottleneck"] == best.limit
    assert first["seeds"] == 2


def test_rows_have_the_lag_of_their_simulations_and_synchronous_ones_none(plan: Plan) -> None:
    rows = {row["candidate"]: row for row in plan_rows(plan) if row["seeds"]}
    for one in (*plan.screened, *plan.outcomes):
        row = rows[one.candidate.number]
        parts = [row[f"lag_{part}_queue_mean_versions"] for part in ("before", "in")]
        assert row["lag_mean_versions"] == pytest.approx(sum(parts))
        assert (row["lag_p95_versions"] > 0) is one.candidate.stale
        assert row["thrown_away_share"] == 0  # nothing is dropped: late groups are waited for
    best = plan.best
    assert best is not None
    system = run_job(Job(config=best.candidate.config, seed=1)).staleness
    assert set(best.staleness) == set(system)


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


@cache
def solved_points(*overrides: str) -> Plan:
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
    plan = solved_points()
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
    plan = solved_points()
    for point in plan_points(plan):
        one = outcome_at(plan, point["number"])
        if one is None:
            assert point["y"] == plan.least_hours[point["number"]]
            assert point["told_hours"].startswith("at least ")
        else:
            assert one.dollars is not None
            assert (point["x"], point["y"]) == (one.dollars.mean, one.hours.mean)


def test_outcomes_of_other_plans_are_shown_by_their_label() -> None:
    plan, other = solved_points(), solved_points("limits.eta=0")
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
    plan = solved_points("candidates.gpu=[H800]", "objective=hours")
    assert in_dollars(solved_points())
    assert not in_dollars(plan)
    for point in plan_points(plan):
        if point["level"] != "excluded":
            assert point["x"] == pytest.approx(point["y"] * point["gpus"])


def test_candidates_that_were_not_reached_have_no_point() -> None:
    search = PlanSearch(solved_points().config)
    assert plan_points(search.plan) == []
    for step in search:
        if step.stage == "screening" and step.done == 2:
            break
    assert len(plan_points(search.plan)) == 2


def solved_small() -> Plan:
    settings = ("simulation=small", "steps=100", "search.sensitivity=1", "candidates.gpus=[4]")
    return find_plan(load_plan(None, settings))


def test_the_values_of_an_input_at_its_ends_stand_side_by_side() -> None:
    """Also if one end changes nothing, or both change the result in the same direction."""
    plan = solved_small()
    assert plan.sensitivity is not None
    own, inputs = plan.sensitivity.base, plan.sensitivity.inputs
    length = next(one for one in inputs if one.name == "mean length")
    nothing = dataclasses.replace(length.high, outcomes=(own,))
    rows = [
        length,
        dataclasses.replace(length, low=nothing),
        dataclasses.replace(length, high=nothing),
        dataclasses.replace(length, low=nothing, high=nothing),
        dataclasses.replace(length, low=length.high),
        dataclasses.replace(length, high=length.low),
    ]
    sensitivity = dataclasses.replace(plan.sensitivity, inputs=tuple(rows))
    figure = draw_tornado(dataclasses.replace(plan, sensitivity=sensitivity))
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 2 * len(rows)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("width", [6.0, 7.0, 12.0])
def test_pictures_are_finished_with_title_description_and_letters_that_can_be_read(
    width: float,
) -> None:
    plan = solved_small()
    assert plan.best is not None
    front, tornado = draw_front(plan, width=width), draw_tornado(plan, width=width, title="Mine")
    for picture in (front, tornado):
        FigureCanvasAgg(picture).draw()
        assert picture.get_figwidth() == width
        assert picture.get_suptitle()
        shown = [one for one in picture.findobj(Text) if one.get_text() and one.get_visible()]
        assert min(one.get_fontsize() for one in shown) >= 9
    assert tornado.get_suptitle() == "Mine"
    assert plan.best.candidate.hardware in front.alt
    assert "matters most" in tornado.alt


def test_a_plan_without_candidates_or_sensitivity_is_drawn_as_such(tmp_path: Path) -> None:
    none = find_plan(load_plan(None, ["simulation=small", "candidates.gpus=[1]"]))
    assert draw_front(none).alt == "No candidate to show."
    assert draw_tornado(none).alt == "No sensitivity."
    assert draw_plan(none, tmp_path / "plan.png").stat().st_size > 0


def test_plans_with_equal_tornado_contents_have_the_same_picture() -> None:
    plan = solved_small()
    assert plan.sensitivity is not None
    content = tornado_content(plan)
    assert hash(content) == hash(tornado_content(dataclasses.replace(plan)))
    # Another deadline is not in a picture of dollars; another budget, or another input, is.
    config = plan.config
    own = measure(config.objective)
    other = {"dollars": "limits.deadline_h", "hours": "limits.budget_dollars"}[own]
    elsewhere = dataclasses.replace(plan, config=config.with_settings({other: 12_345}))
    assert tornado_content(elsewhere) == content
    assert drawn_of(elsewhere) == drawn_of(plan)
    limit = {"hours": "limits.deadline_h", "dollars": "limits.budget_dollars"}[own]
    shifted = dataclasses.replace(plan, config=config.with_settings({limit: 12_345}))
    assert tornado_content(shifted) != content
    fewer = dataclasses.replace(plan.sensitivity, inputs=plan.sensitivity.inputs[1:])
    assert tornado_content(dataclasses.replace(plan, sensitivity=fewer)) != content
    assert tornado_content(dataclasses.replace(plan, sensitivity=None)) != content


def drawn_of(plan: Plan) -> list[Any]:
    """All texts of its tornado, with their places."""
    (axes,) = draw_tornado(plan).axes
    return [(one.get_text(), one.xy) for one in axes.findobj(Annotation)]
