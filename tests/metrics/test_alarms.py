"""Planted series raise each alarm when they should; healthy records raise none."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from areal_lab.config.watching import AlarmsConfig
from areal_lab.metrics.alarm import Bounds, Facts
from areal_lab.metrics.alarms import alarms_of, changes_of
from areal_lab.metrics.rules import RULES
from areal_lab.runlog.alarm_log import bounds_of

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "reward_mean": 0.5,
    "ratio_mean": 1.0,
    "behavior_weight_mean": 1.0,
    "drift": 0.05,
    "entropy": 1.0,
    "truncated_share": 0.1,
    "lag_token_mean": 2.0,
    "sampler_gap_mean": 1e-6,
    "zero_advantage_samples": 10.0,
    "trained_samples": 100.0,
}
PLANTED = {
    "ratio": {"ratio_mean": 1.2},
    "drift": {"drift": 0.5},
    "entropy": {"entropy": 0.09},
    "truncated": {"truncated_share": 0.6},
    "stale_weights": {"lag_token_mean": 5.5},
    "sampler_gap": {"sampler_gap_mean": 0.06},
    "equal_rewards": {"zero_advantage_samples": 95.0},
    "reward_drop": {"reward_mean": 0.1},
}
WHEN = {"reward_drop": 33}
"""Step that raises it, if it is not the fifth one; steps 26 to 33 have a mean of 20 below 0.44."""


def line(step: int, **changed: float) -> dict[str, float]:
    return {**HEALTHY, **changed, "step": step}


def series(name: str, begin: int = 26, end: int = 60, total: int = 100) -> list[dict[str, float]]:
    return [line(n, **(PLANTED[name] if begin <= n < end else {})) for n in range(1, total + 1)]


@pytest.mark.parametrize("name", RULES)
def test_a_planted_series_raises_its_alarm_once_and_ends_it(name: str) -> None:
    changes = changes_of(series(name), Facts(eta=4))
    assert [(one.kind, one.alarm.name) for one in changes] == [("begun", name), ("ended", name)]
    begun, ended = changes[0].alarm, changes[1].alarm
    if name != "reward_drop":  # whose mean is over 20 steps
        assert (begun.since_step, begun.raised_step) == (26, 30)
        assert (ended.since_step, ended.ended_step) == (26, 64)
    assert begun.cause
    assert begun.remedy
    assert name.replace("_", " ") in str(changes[0])


@pytest.mark.parametrize("name", [one for one in RULES if one != "reward_drop"])
def test_steps_that_are_not_in_a_row_raise_nothing(name: str) -> None:
    lines = [line(n, **(PLANTED[name] if n > 10 and n % 5 else {})) for n in range(1, 60)]
    assert changes_of(lines, Facts(eta=4)) == []


def test_the_mean_reward_of_20_steps_decides() -> None:
    lines = series("reward_drop")
    (begun, _) = changes_of(lines, Facts(eta=4))
    # Four steps of 0.1 among 16 of 0.5 have a mean of 0.42, the first one below 0.44.
    assert (begun.alarm.since_step, begun.alarm.raised_step) == (29, 33)


def test_an_alarm_can_be_switched_off_and_its_bound_changed() -> None:
    lines = series("drift")
    assert changes_of(lines, Facts(eta=4), off=["drift"]) == []
    assert changes_of(lines, Facts(eta=4), Bounds(drift=0.6)) == []
    soon = changes_of(lines, Facts(eta=4), Bounds(steps=1))
    assert soon[0].alarm.raised_step == 26


@pytest.mark.parametrize("name", ["entropy", "truncated", "equal_rewards"])
def test_a_solved_task_raises_none_of_these(name: str) -> None:
    solved = [{**one, "reward_mean": 0.95} for one in series(name)]
    assert changes_of(solved, Facts(eta=4)) == []


def test_missing_metrics_and_nan() -> None:
    assert changes_of([{"step": n} for n in range(1, 50)], Facts(eta=4)) == []
    lines = [line(n, ratio_mean=math.nan) for n in range(1, 10)]
    assert [one.alarm.name for one in changes_of(lines, Facts(eta=4))] == ["ratio"]


def test_an_infinite_eta_allows_16_versions() -> None:
    def names(lag: float) -> list[str]:
        lines = [line(n, lag_token_mean=lag) for n in range(1, 10)]
        return [one.alarm.name for one in changes_of(lines, Facts(eta=math.inf))]

    assert names(16.0) == []
    assert names(17.0) == ["stale_weights"]


def test_the_settings_are_the_bounds() -> None:
    assert bounds_of(AlarmsConfig()) == Bounds()


@pytest.mark.parametrize("name", ["haiku-eta0", "haiku-eta4"])
def test_recorded_runs_raise_none(name: str) -> None:
    with gzip.open(ROOT / "notebooks" / "data" / name / "metrics.jsonl.gz", "rt") as file:
        lines = [json.loads(one) for one in file]
    assert alarms_of(changes_of(lines, Facts(eta=float(name[-1])))) == []
