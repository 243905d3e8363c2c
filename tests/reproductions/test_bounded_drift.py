"""Reward at equal hours, bounds and regret of planted runs; the packaged result; a real study."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from areal_lab.plots.style import save_picture
from reproductions import bounded_drift
from reproductions.learning import bounded
from reproductions.learning.bounded import (
    BOUNDED,
    CONTROLS,
    UNTRUNCATED,
    advised,
    evidence_of,
)
from reproductions.learning.equal_hours import (
    at_equal_hours,
    by_bound,
    by_eta,
    gain_of_bound,
    left_out,
    reward_at_hours,
)
from reproductions.learning.staleness.cells import cells_of
from reproductions.report.harness import main
from reproductions.report.results import load
from tests.reproductions.planted import BEFORE, run

SEEDS = (1, 2, 3)


def cells(drift: dict[str, float], final: dict[str, float], hours: dict[str, float]) -> Any:
    return {
        eta: {seed: run(seed, final[eta], hours=hours[eta], drift=drift[eta]) for seed in SEEDS}
        for eta in drift
    }


def two_settings() -> list[Any]:
    """Staleness doubles the speed of both, and harms the second one only."""
    hours = {"0": 20.0, "1": 10.0, "4": 10.0}
    return [
        at_equal_hours(
            "calm", cells({"0": 0.01, "1": 0.02, "4": 0.05}, {"0": 0.8, "1": 0.79, "4": 0.8}, hours)
        ),
        at_equal_hours(
            "wild", cells({"0": 0.03, "1": 0.2, "4": 0.4}, {"0": 0.8, "1": 0.5, "4": 0.4}, hours)
        ),
    ]


def test_the_reward_at_some_hours_is_a_time_average() -> None:
    one = run(1, BEFORE + 0.09, hours=10.0)  # 0.001 a step, 10 steps an hour
    # From 6 to 8 hours, in the middle of a line: that at 7 hours.
    assert reward_at_hours(one, 8.0) == pytest.approx(BEFORE + 0.07, abs=1e-6)
    assert reward_at_hours(one, 1e6) == pytest.approx(one.curve[-1][2])


def test_cells_are_compared_at_the_hours_of_the_shortest() -> None:
    calm, wild = two_settings()
    assert calm.hours == 10.0
    assert calm.speed == pytest.approx({"0": 1, "1": 2, "4": 2})
    # The synchronous run has done half of its steps.
    assert calm.mean("0") < calm.mean("4") - 0.1
    assert (calm.best, wild.best) == ("4", "0")
    with pytest.raises(ValueError, match="no runs with eta 0"):
        at_equal_hours("x", {"1": {1: run(1, 0.8)}})


def test_a_bound_permits_the_largest_eta_before_the_first_beyond_it() -> None:
    calm, wild = two_settings()
    assert [calm.permitted(value) for value in (0.001, 0.01, 0.02, 0.049, 1)] == list("00114")
    bumpy = at_equal_hours(
        "bumpy",
        cells(
            {"0": 0.01, "1": 0.2, "4": 0.05}, dict.fromkeys("014", 0.8), dict.fromkeys("014", 10.0)
        ),
    )
    assert bumpy.permitted(0.1) == "0"
    assert wild.permitted(0.1) == "0"


def test_one_bound_can_be_best_in_both_where_no_eta_is() -> None:
    settings = two_settings()
    rule = by_bound(settings, 0.1)
    assert (list(rule.chosen), rule.regret) == (["4", "0"], 0)
    assert rule.speed == pytest.approx(1.5)
    assert min(by_eta(settings, eta).regret for eta in "014") > 0.02
    gain = gain_of_bound(settings, 0.1, "4")
    assert gain.mean == pytest.approx((settings[1].mean("0") - settings[1].mean("4")) / 2)
    assert gain.low == pytest.approx(gain.high)  # planted seeds are alike
    bound, eta = left_out(settings)
    assert bound >= 0
    assert eta > 0.02


def record(arm: str, seed: int, reward: float, drift: float, rate: str = "3e-4") -> dict[str, Any]:
    one = run(seed, reward + 0.001 * seed, hours=10.0, drift=drift, arm=arm, rate=rate)
    return {"run": one.to_json(), "drift": [drift] * 4, "truncated": 0.1 if arm == "eta 0" else 0.3}


def planted(
    arms: dict[str, tuple[float, float]], task: str = "addition", rates: tuple[str, ...] = ("3e-4",)
) -> Any:
    """Evidence of runs with these rewards and drifts by arm, in every cell."""
    records = [
        record(arm, seed, *found, rate)
        for rate in rates
        for arm, found in arms.items()
        for seed in SEEDS
    ]
    packaged = load("table_2").data, load("where_staleness_hurts").data
    return evidence_of({"tasks": {task: records}}, *packaged)


@pytest.mark.parametrize(("schedule", "verdict"), [(0.9, "; 3 seeds"), (0.5, "(below; 3 seeds)")])
def test_the_schedule_is_told_as_it_is(schedule: float, verdict: str) -> None:
    found = planted({BOUNDED: (schedule, 0.07), "eta 0": (0.6, 0.01), "eta 4": (0.8, 0.3)})
    (first, *_) = bounded.schedule(found)
    assert "addition, 3e-4" in first
    assert "against eta 4" in first
    assert verdict in first
    assert ("(above" in first) == (schedule > 0.8)
    (share,) = bounded.within(found)
    assert "bounded drift 100%, eta 0 100%, eta 4 0%" in share
    (row,) = bounded.tables(found)["The schedule in every cell"]
    assert (row["best eta"], row["runs that get there"]) == ("4", f"{3 * (schedule > 0.6)} of 3")
    assert list(bounded.controls(found)) == ["(c) No control was run."]
    assert "was not run" in next(bounded.truncation(found))


def test_hours_are_those_to_the_reward_of_the_synchronous_runs() -> None:
    # Rewards rise in a line from 0.5: three times the slope gets there in a third of the hours.
    found = planted({BOUNDED: (0.8, 0.07), "eta 0": (0.6, 0.01), "eta 4": (0.7, 0.3)})
    (told,) = bounded.hours(found)
    ratios = re.findall(r"([\d.]+) on average", told)
    slopes = [fmean(reward + 0.001 * seed for seed in SEEDS) - BEFORE for reward in (0.6, 0.7, 0.8)]
    assert float(ratios[0]) == pytest.approx(slopes[2] / slopes[0], rel=0.03)
    assert float(ratios[1]) == pytest.approx(slopes[2] / slopes[1], rel=0.03)
    assert "above 1 in 1, below 1 in 0 of 1 cell" in told
    worse = planted({BOUNDED: (0.8, 0.07), "eta 0": (0.4, 0.01), "eta 4": (0.7, 0.3)})
    assert list(bounded.hours(worse)) == []
    (row,) = bounded.tables(worse)["The schedule in every cell"]
    assert row["hours of eta 0 over its"] == row["runs that get there"] == ""


def test_controls_are_compared_with_none_their_start_and_eta_0() -> None:
    rewards = {BOUNDED: 0.7, "eta 0": 0.8, "eta 16": 0.4, CONTROLS[0]: 0.95, CONTROLS[1]: 0.3}
    arms = {arm: (reward, 0.2) for arm, reward in rewards.items()}
    found = planted(arms, rates=("1e-4", "3e-4"))
    first, best, worst, missing = bounded.controls(found)
    assert "below eta 0 at equal hours in 2 cells of 2" in first
    assert "above its own start in 0" in first
    assert best.startswith(f"{CONTROLS[0]}, eta 16: +")
    assert "above none in 2, below in 0; above its own start in 2; below eta 0 in 0" in best
    assert worst.startswith(f"{CONTROLS[1]}, eta 16: -")
    assert "above none in 0, below in 2; above its own start in 0; below eta 0 in 2" in worst
    assert missing == f"Not run: {', '.join(CONTROLS[2:])}."
    gained = {row.name: row.ours.mean for row in bounded.rows(found)}
    # The slope of a line to the reward after nine tenths of the hours, at seven eighths of them.
    assert gained[f"eta 16, 2 cells: {CONTROLS[0]} minus none"] == pytest.approx(
        (0.95 - 0.4) * 0.875 / 0.9, abs=1e-3
    )


def test_truncation_is_told_by_rate() -> None:
    arms = {BOUNDED: 0.7, "eta 0": 0.8, "eta 16": 0.4, UNTRUNCATED: 0.6}
    found = planted({arm: (reward, 0.2) for arm, reward in arms.items()}, task="truncated")
    (told,) = bounded.truncation(found)
    assert "rate 3e-4: eta 16 has -0.389" in told
    assert "+0.194 ± 0.000 against a loss on all (above)" in told
    assert "truncated are 10% of the responses at eta 0, 30% at eta 16" in told


def test_advice_is_counted_over_other_cells_of_the_same_setting() -> None:
    runs = [
        run(seed, 0.8 - loss, drift=drift, objective="decoupled", staleness=eta, rate="1e-4")
        for eta, loss, drift in (("0", 0.0, 0.01), ("1", 0.0, 0.03), ("4", 0.1, 0.3))
        for seed in SEEDS
    ]
    # Both cells have a mean lag of 1: what permits less than it says that the other one loses.
    found = advised(cells_of(runs), "decoupled", 0.08)
    assert (found.cells, found.misses, found.false_alarms) == (2, 1, 1)
    assert advised(cells_of(runs), "naive", 0.08).cells == 0


def test_the_packaged_result_names_its_grid_and_is_what_is_told(tmp_path: Path) -> None:
    saved = load("bounded_drift")
    found = bounded_drift.recorded(None)  # type: ignore[arg-type] # recorded results have none
    text = " ".join(found.findings)
    for part in ("(a)", "(b)", "(c)", "(d)", "(e)", "of the 153 arms of the grid"):
        assert part in text
    assert found.origin == saved.origin
    assert all(math.isfinite(row.ours.mean) for row in found.rows)
    assert save_picture(found.figure(), tmp_path / "b.png").stat().st_size > 10_000


def test_the_studies_have_one_grid_with_every_control() -> None:
    grids = [bounded_drift.study_of(task).axes for task in bounded_drift.TASKS]
    assert math.prod(len(axis.values) for axis in grids[0]) == 51 * 5
    assert {tuple(axis.values for axis in grid) for grid in grids} == {
        tuple(axis.values for axis in grids[0])
    }
    assert set(CONTROLS) | {BOUNDED} <= {name for axis in grids[0] for name in axis.values}


@pytest.mark.slow
def test_quick_runs_the_schedule_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(bounded_drift.reproduce, "doc", ["--quick", "--repeats", "1"], seeds=5)
        assert "2 runs of 4 steps" in capsys.readouterr().out
    assert len(list(tmp_path.glob("sweeps/quick/bounded_drift/cells/*"))) == 2
