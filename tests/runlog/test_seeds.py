"""Curves and intervals over seeds."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev

import pytest

from areal_lab.runlog.intervals import interval_of_runs
from areal_lab.runlog.seeds import RECORDED, SeedResults, SeedRun, load_seed_results


def run(loss: str, seed: int, rewards: tuple[float, ...], after: float | None = None, **more: str):
    return SeedRun(
        loss=loss,
        seed=seed,
        status=more.pop("status", "complete"),
        rewards=rewards,
        held_out_before=0.25,
        held_out_after=after,
        **more,
    )


RESULTS = SeedResults(
    (
        run("ppo", 1, (0.2, 0.4, 0.6), 0.6),
        run("mine", 1, (0.2, 0.2, 0.2), 0.5),
        run("ppo", 2, (0.4, 0.6, 0.8), 0.8),
        run("mine", 2, (0.4, 0.4, 0.4), 0.75),
        run("ppo", 3, (0.9,), status="failed", error="out of memory"),
        run("never", 1, (), status="stopped"),
    )
)


def test_a_curve_is_the_mean_over_complete_runs_with_an_interval_of_students_t() -> None:
    curve = RESULTS.curves(window=1)["ppo"]
    assert curve.steps == (1, 2, 3)
    assert curve.seeds == 2
    assert curve.mean == pytest.approx((0.3, 0.5, 0.7))
    width = 12.706 * stdev([0.2, 0.4]) / math.sqrt(2)
    assert curve.high[0] - curve.mean[0] == pytest.approx(width, rel=1e-4)
    assert curve.mean[0] - curve.low[0] == pytest.approx(width, rel=1e-4)
    assert list(RESULTS.curves()) == ["ppo", "mine"]  # nothing of the loss without a complete run


def test_each_run_is_smoothed_before_runs_are_averaged() -> None:
    smooth = RESULTS.curves(window=2)["ppo"]
    assert smooth.mean == pytest.approx((0.3, 0.4, 0.6))
    assert RESULTS.curves(window=100)["mine"].mean == pytest.approx((0.3, 0.3, 0.3))
    with pytest.raises(ValueError, match="window is 0, but must be >= 1"):
        RESULTS.curves(window=0)


def test_differences_are_taken_seed_by_seed() -> None:
    (difference,) = RESULTS.differences("ppo").values()
    assert difference.mean == pytest.approx(-0.075)  # of -0.1 and -0.05
    assert difference.ci95 == pytest.approx(interval_of_runs([-0.1, -0.05]).ci95)
    two_means = interval_of_runs([0.5, 0.75]).ci95
    assert two_means is not None
    assert difference.ci95 < two_means / 4
    assert RESULTS.differences("never") == {}
    with pytest.raises(KeyError, match="no run of 'gspo'"):
        RESULTS.differences("gspo")


def test_one_seed_has_no_interval() -> None:
    results = SeedResults((run("ppo", 1, (0.2, 0.4), 0.6),))
    assert results.final_rewards()["ppo"].ci95 is None
    curve = results.curves(window=1)["ppo"]
    assert curve.low == curve.mean == curve.high


def test_what_was_not_held_out_is_taken_from_the_end_of_training() -> None:
    rewards = (0.0, 0.0, 0.4, 0.4, 0.4, 0.4, 0.9)
    results = SeedResults((run("ppo", 1, rewards),))
    assert results.final_rewards()["ppo"].mean == pytest.approx(0.5)


def test_the_start_counts_each_seed_once() -> None:
    start = RESULTS.start_reward()
    assert start is not None
    assert (start.mean, start.n) == (0.25, 3)
    assert SeedResults(()).start_reward() is None


def test_a_choice_of_losses_keeps_their_order() -> None:
    assert RESULTS.of("mine", "ppo").losses == ["mine", "ppo"]
    with pytest.raises(KeyError, match="no run of 'gspo'; there are ppo, mine, never"):
        RESULTS.of("gspo")


def test_results_survive_their_file(tmp_path: Path) -> None:
    about = {"made_by": "a test"}
    SeedResults(RESULTS.runs, about).save(tmp_path / "seeds.json")
    read = load_seed_results(tmp_path / "seeds.json")
    assert read == SeedResults(RESULTS.runs, about)
    lines = (tmp_path / "seeds.json").read_text().splitlines()
    assert sum('"seed": 2' in line for line in lines) == 2  # a line for each run


@pytest.mark.parametrize("text", ["[]", "{}", '{"runs": [{"loss": 1}]}', "nothing"])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json has no results of seeds"):
        load_seed_results(tmp_path / "other.json")


def test_the_frame_has_a_row_for_each_step() -> None:
    frame = RESULTS.frame()
    assert list(frame.columns) == ["loss", "seed", "step", "reward"]
    assert len(frame) == 13
    assert frame.query("loss == 'ppo' and seed == 2").reward.tolist() == [0.4, 0.6, 0.8]


def test_an_interval_needs_a_run() -> None:
    with pytest.raises(ValueError, match="needs at least one run"):
        interval_of_runs([])


def test_the_recorded_results_say_how_they_were_made() -> None:
    results = load_seed_results(RECORDED)
    assert {run.status for run in results.runs} == {"complete"}
    assert len({run.seed for run in results.runs}) >= 5
    assert results.about["made_by"] == "python -m tools.loss_seeds"
    assert results.about.keys() >= {"versions", "machine", "made_at", "load_before_and_after"}
    assert results.losses == list(results.about["losses"])
