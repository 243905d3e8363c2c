"""Charts of one run: what they say about its steps, and that their axes stay."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from areal_lab.control.coordinator import Limits
from areal_lab.control.events import EtaRequested, PauseRequested, ResumeRequested
from areal_lab.control.schedule import asynchronous, partial_rollout
from areal_lab.runlog.activity import BEFORE, idle_by_cause, label
from areal_lab.runlog.incidents import in_words
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import Log
from areal_lab.runlog.time_cells import BLANK
from areal_lab.widgets.run_charts import (
    MEAN_OVER,
    SHOWN_STEPS,
    idle_chart,
    lag_chart,
    recent_lags,
    reward_chart,
    steps_of,
)
from tests.pipeline.fake_run import write_fake_run

ASKED = (
    (20.0, EtaRequested(0)),
    (40.0, EtaRequested(math.inf)),
    (50.0, PauseRequested()),
    (55.0, ResumeRequested()),
    (60.0, PauseRequested()),
    (60.1, ResumeRequested()),
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    limits = Limits(batch_groups=3, max_in_flight=9, train_steps=15, schedule=asynchronous(3))
    folder = tmp_path_factory.mktemp("runs") / "run"
    # Training is the slower side, so that generation runs ahead.
    return read_events(write_fake_run(folder, limits, requests=ASKED, train_s=6.0, engines=2))


def told(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()  # checked against the schema
    return spec


def rows(layer: dict[str, Any]) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = json.loads(layer["values"])
    return values


def layers(spec: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    """The layers with this kind of mark, each with its data, which share a table of the chart."""
    found = []
    for layer in spec["layer"]:
        kind = layer["mark"]["type"] if isinstance(layer["mark"], dict) else layer["mark"]
        data = layer.get("data") or spec["data"]
        if kind == mark:
            found.append({**layer, "values": spec["datasets"][data["name"]]})
    return found


def test_a_step_has_the_reward_the_lags_and_the_eta_of_its_batch(log: Log) -> None:
    steps, batches = steps_of(log), list(trained_batches(log))
    groups = {group.group: group for group in log.groups}
    assert [step.step for step in steps] == [batch.version for batch in batches] == [*range(1, 16)]
    for step, batch in zip(steps, batches, strict=True):
        assert step.reward == pytest.approx(
            fmean(r for g in batch.groups for r in groups[g].rewards)
        )
        lags = list(batch.token_lags.elements())
        assert (step.lag_min, step.lag_max) == (min(lags), max(lags))
        assert step.lag_mean == pytest.approx(fmean(lags))
        assert step.done_s == batch.done_s
    for number, step in enumerate(steps, 1):
        known = [one.reward for one in steps[max(0, number - MEAN_OVER) : number]]
        assert step.running_mean == pytest.approx(fmean(r for r in known if r is not None))
    etas = [step.eta for step in steps]
    assert etas == sorted(etas, key=[3.0, 0.0, math.inf].index)
    assert set(etas) == {3.0, 0.0, math.inf}


@pytest.mark.parametrize("batches", [1, 4, 99])
def test_recent_lags_are_the_shares_of_the_last_batches(log: Log, batches: int) -> None:
    latest = [batch.token_lags for batch in trained_batches(log)][-batches:]
    tokens = [lag for lags in latest for lag in lags.elements()]
    shares = recent_lags(log, batches=batches)
    assert list(shares) == sorted(set(tokens))
    assert sum(share.mean for share in shares.values()) == pytest.approx(1)
    for lag, share in shares.items():
        assert share.mean == pytest.approx(tokens.count(lag) / len(tokens))
        of_batches = [lags[lag] / lags.total() for lags in latest]
        assert (share.low, share.high) == pytest.approx((min(of_batches), max(of_batches)))
    assert recent_lags(log.until(0.0)) == {}


def test_what_is_beyond_eta_is_red_and_nothing_else(log: Log) -> None:
    spec = told(lag_chart(log))
    line = layers(spec, "rule")
    within, beyond = line[-2:]
    assert beyond["mark"]["color"] != within["mark"]["color"]
    steps = {step.step: step for step in steps_of(log)}
    assert any(step.lag_max > step.eta for step in steps.values())  # or this would show nothing
    for row in rows(beyond):
        step = steps[row["step"]]
        assert (row["high"] > row["split"]) == (step.lag_max > step.eta)
        assert (row["split"] > row["low"]) == (step.lag_min <= step.eta)
        assert row["low"] < row["high"]
        assert row["eta"] == (step.eta if math.isfinite(step.eta) else None)


def test_axes_stay_until_there_are_more_steps_than_they_show(log: Log) -> None:
    domains = [
        told(chart(log.until(t_s)))["layer"][-1]["encoding"]["x"]["scale"]["domain"]
        for t_s in (0.0, 30.0, log.end_s)
        for chart in (lag_chart, reward_chart)
    ]
    assert domains == [[0, SHOWN_STEPS]] * 6


def test_requests_stand_where_they_were_made_and_together_where_no_step_ended(log: Log) -> None:
    steps, began_s = steps_of(log), trained_start(log)
    expected: dict[float, list[str]] = {}
    for asked_s, request in ASKED:
        done = sum(step.done_s <= began_s + asked_s for step in steps)
        expected.setdefault(done + 0.5, []).append(in_words(request))
    assert ["resume", "pause", "resume"] in expected.values()
    for chart in (lag_chart, reward_chart):
        (words,) = layers(told(chart(log)), "text")
        assert {row["step"]: row["asked"].split(", ") for row in rows(words)} == expected


def trained_start(log: Log) -> float:
    return next(record.t_s for record in log.events)


def test_idle_bars_are_the_shares_of_the_whole_run_and_of_its_end(log: Log) -> None:
    (_, dark) = layers(told(idle_chart(log)), "bar")
    whole = {
        f"{process}: {label(cause)}": 100 * seconds / use.total_s
        for process, use in idle_by_cause(log).items()
        for cause, seconds in use.idle_s.items()
        if cause not in BLANK
    }
    shown = {row["what"]: row["run"] for row in rows(dark)}
    assert shown == pytest.approx({what: whole[what] for what in shown})
    assert all(share < 0.5 for what, share in whole.items() if what not in shown)
    assert "trainer: paused by hand" in shown
    assert not any(BEFORE in what for what in shown)
    # Over the time of the pause alone, everything was paused, but for the step that ended in it.
    during = log.until(trained_start(log) + 54.9)
    ((_, last),) = [layers(told(idle_chart(during, last_s=1.0)), "bar")]
    now = {row["what"]: row["now"] for row in rows(last)}
    assert now["engine 0: paused by hand"] == now["engine 1: paused by hand"] == 100


def test_a_run_that_has_not_begun_has_empty_charts(log: Log) -> None:
    nothing = log.until(0.0)
    assert steps_of(nothing) == []
    for chart in (lag_chart(nothing), reward_chart(nothing), idle_chart(nothing)):
        assert told(chart)["layer"]


def test_an_infinite_eta_has_no_line_and_failed_rewards_do_not_count(tmp_path: Path) -> None:
    limits = Limits(batch_groups=2, max_in_flight=5, train_steps=3, schedule=partial_rollout())
    folder = write_fake_run(tmp_path / "run", limits)
    text = (folder / "events.jsonl").read_text()
    failed = text.replace('"rewards":[1.0', '"rewards":["nan"')
    (folder / "events.jsonl").write_text(failed)
    log = read_events(folder)
    assert {step.eta for step in steps_of(log)} == {math.inf}
    assert all(row["eta"] is None for row in rows(layers(told(lag_chart(log)), "line")[0]))
    assert all(step.reward is not None and step.reward <= 1 for step in steps_of(log))
    counts = [0, *(step.done_s for step in steps_of(log))]
    assert all(before < after for before, after in pairwise(counts))
