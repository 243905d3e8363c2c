"""Learning curves of cells and what goes with a loss, of runs whose rewards are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from reproductions.learning.charts import curves_of, learning_curves, legend, loss_charts
from reproductions.learning.curves import (
    Cost,
    beginning,
    costs,
    extent,
    points,
    rank_correlations,
    reward_at,
    step_at,
)
from reproductions.learning.runs import Run, run_of
from reproductions.learning.setting import Setting, settings_of
from simulator.stats.statistics import Estimate
from tests.reproductions.planted import BEFORE, grid, run


def reward(eta: str, objective: str) -> float:
    return 0.8 if eta == "0" else 0.6 if objective == "naive" else 0.7


def planted(**choice: tuple[int, ...]) -> Setting:
    (setting,) = settings_of({"tasks": {"addition": grid(reward, **choice)}})  # type: ignore[arg-type]
    return setting


def test_a_curve_has_the_means_and_intervals_of_its_seeds() -> None:
    curve = points({1: run(1, 0.9), 2: run(2, 0.7, hours=20.0)})
    assert [one.step for one in curve] == list(range(0, 101, 10))
    assert curve[9].hours == pytest.approx(13.5)
    assert curve[9].reward.mean == pytest.approx(0.8)
    # t of one degree of freedom: 12.706
    assert curve[9].reward.half_width == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert points({1: run(1, 0.9)})[5].reward.half_width == math.inf


def test_reward_and_step_are_read_between_measurements() -> None:
    runs = {1: run(1, 0.9, hours=10.0), 2: run(2, 0.7, hours=10.0)}
    assert reward_at(runs, 0.0).mean == BEFORE
    assert reward_at(runs, 4.5).mean == pytest.approx(BEFORE + 0.15)
    assert step_at(runs, 4.5) == pytest.approx(45.0)
    assert step_at(runs, 99.0) == 100
    assert reward_at(runs, 99.0).mean == reward_at(runs, 10.0).mean


def test_every_mean_curve_has_room() -> None:
    setting = planted()
    room = extent([setting])
    assert (room.steps, room.hours) == (100, 30.0)
    highest = max(one.reward.mean for one in points(setting.of("naive", "0")))
    assert room.reward[0] < BEFORE < highest < room.reward[1]


def test_short_runs_are_drawn_on_the_beginning_of_the_axes() -> None:
    room = extent([planted()])
    found = beginning(room, [run(1, 0.1)], 50)
    assert (found.steps, found.hours) == (50, room.hours / 2)
    assert found.reward == (pytest.approx(BEFORE - 0.4 / 90 * 100), room.reward[1])
    assert beginning(room, [run(1, 0.7)], 50).reward == room.reward


def test_costs_are_of_every_cell_but_the_synchronous_ones() -> None:
    found = costs([planted()])
    assert {(one.eta, one.objective) for one in found} == {
        (eta, objective) for eta in ("4", "8", "inf") for objective in ("naive", "decoupled")
    }
    for one in found:
        lost = -0.2 if one.objective == "naive" else -0.1
        assert one.loss.mean == pytest.approx(lost, abs=0.01)
        assert (one.lag, one.drift) == (1.0, pytest.approx(0.1))


def test_the_rank_correlation_is_that_of_orders() -> None:
    lost = [0.0, 0.1, 0.2, 0.9]
    cells = [
        Cost("one", "8", "naive", Estimate(-loss, -1, 1), drift=loss**3, lag=lag)
        for loss, lag in zip(lost, [4.0, 3.0, 2.0, 1.0], strict=True)
    ]
    assert rank_correlations(cells) == (pytest.approx(1.0), pytest.approx(-1.0))


def test_bands_are_drawn_of_several_seeds_only() -> None:
    several, single = planted(), planted(seeds=(1,))
    for setting, has_bands in ((several, True), (single, False)):
        charts = learning_curves(
            curves_of(setting, "8"),
            extent([setting]),
            past=[curves_of(setting, "4")],
            mark_hours=10.0,
        )
        for chart in charts:
            text = chart.to_json()
            assert "Infinity" not in text
            assert ('\\"low\\"' in text) == has_bands


def test_the_chosen_cells_have_rings_and_the_legend_has_all_names() -> None:
    setting = planted()
    for chart in loss_charts(costs([setting]), chosen=(setting.name, "8")):
        assert chart.to_json().count('\\"chosen\\": true') == 2
    text = legend(["naive", "decoupled"], [setting.name])
    assert all(name in text for name in ("naive", "decoupled", "addition, 1e-4"))


def test_a_step_without_a_gradient_has_no_drift(tmp_path: Path) -> None:
    common = {"simulated_hours": 1.0, "lag_token_mean": 2.0, "reward_mean": 0.0}
    moved = {"drift": 0.5, "clip_fraction": 0.1}
    lines = [
        {"step": 1, **common, **moved, "held_out_reward": 0.4},
        {"step": 2, **common, **moved},
        {"step": 3, **common},
        {"step": 4, **common, "held_out_reward": 0.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = {"reward_before": {"mean": 0.5}, "simulated_hours": 4.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "env.json").write_text('{"cpu_s": 1.0}')
    found = run_of(tmp_path, {"objective": "naive"}, 3)
    assert (found.drift, found.clip_fraction, found.lag) == (0.0, 0.0, 2.0)
    assert found.curve == [(0, 0.0, 0.5), (1, 1.0, 0.4), (4, 1.0, 0.0)]
    assert Run.from_json(found.to_json()) == found


def test_a_reward_that_it_began_with_takes_no_hours() -> None:
    setting = planted()
    runs = [
        run(one.seed, 0.45, staleness="8", objective="naive", rate="1e-4")
        if (one.choice["staleness"], one.choice["objective"]) == ("8", "naive")
        else one
        for one in setting.runs
    ]
    forgets = Setting("addition", "1e-4", runs)
    assert forgets.hours_gained("naive", "8").mean == 0
    assert forgets.hours_gained("decoupled", "8").mean > 1
