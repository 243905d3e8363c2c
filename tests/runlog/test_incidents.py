"""What went wrong is counted from the log alone."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.events import EngineJoined, EngineLost, Event
from areal_lab.runlog.held_out import HeldOutReward, Measured, append_held_out, read_held_out
from areal_lab.runlog.incidents import COUNTED, Incidents, incidents
from areal_lab.runlog.intervals import MeanInterval, mean_interval, student_t
from areal_lab.runlog.records import PIPELINE, EventRecord, Log, MetricRecord, RunHeader


def log_of(*records: Event | tuple[str, int]) -> Log:
    """Events, and counts that the pipeline noted, in order."""
    made = [
        MetricRecord(process=PIPELINE, name=one[0], t_s=float(at), value=float(one[1]))
        if isinstance(one, tuple)
        else EventRecord(float(at), one)
        for at, one in enumerate(records)
    ]
    header = RunHeader(mode="train", started_at=0.0, limits={}, processes=("trainer",))
    return Log(header, tuple(made))


def test_a_quiet_run_has_none() -> None:
    assert incidents(log_of()) == Incidents()


def test_the_newest_count_of_each_name_holds() -> None:
    noted = [(name, n) for n in (1, 5) for name in COUNTED]
    assert incidents(log_of(*noted, ("interruptions", 9))) == Incidents(**dict.fromkeys(COUNTED, 5))


def test_losses_are_counted_from_events_where_a_run_was_cut_before_it_noted_them() -> None:
    returns, for_good = EngineLost(0, returns=True), EngineLost(0)
    found = incidents(log_of(returns, EngineJoined(0), returns, for_good, EngineLost(1)))
    assert (found.engine_losses, found.engine_restarts) == (3, 1)


def test_incidents_outside_training_count_too() -> None:
    found = incidents(log_of(("engine_losses", 2), EngineLost(0), ("engine_restarts", 1)))
    assert (found.engine_losses, found.engine_restarts) == (2, 1)


def test_an_engine_that_joins_without_a_loss_is_no_return() -> None:
    assert incidents(log_of(EngineJoined(2))).engine_restarts == 0


@given(st.dictionaries(st.integers(20, 30), st.integers(1, 50), min_size=1))
def test_tokens_of_later_versions_are_counted(tokens: dict[int, int]) -> None:
    measured = HeldOutReward([0.5, 1.0], tokens=tokens).measured(20)
    assert measured is not None
    each = [version for version, count in tokens.items() for _ in range(count)]
    assert measured.versions == (min(each), max(each))
    assert measured.later_tokens == pytest.approx(sum(v > 20 for v in each) / len(each))
    assert measured.mean_version == pytest.approx(sum(each) / len(each))
    assert measured.exact == (set(each) == {20})
    assert ("of the tokens" in str(measured)) == (not measured.exact)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    mixed = HeldOutReward(
        [0.0, 1.0], tokens={4: 30, 5: 10}, unscored=1, pass_at={"1": 0.5, "4": 1.0}
    ).measured(4)
    append_held_out(tmp_path, mixed)
    append_held_out(tmp_path, HeldOutReward([]).measured(9))  # nothing was scored
    assert read_held_out(tmp_path) == [mixed]
    assert str(mixed).endswith("n = 2; 25% of the tokens by version 5; 1 samples without a reward)")


def test_lines_of_older_runs_and_metrics_of_steps_are_read(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(
        '{"version": 0, "reward": 0.25, "ci95": 0.1, "problems": 8}\n'
    )
    metrics = [{"step": 1, "loss": 0.5}, {"step": 2, "held_out_reward": 0.75}]
    assert read_held_out(tmp_path, metrics) == [Measured(0, 0.25, 0.1, 8), Measured(2, 0.75)]


def test_a_version_has_one_score_and_the_exact_one_counts(tmp_path: Path) -> None:
    mixed, exact = (
        HeldOutReward([r], tokens=t).measured(4) for r, t in ((0.9, {4: 1, 5: 1}), (0.5, {4: 2}))
    )
    for one in (mixed, exact):
        append_held_out(tmp_path, one)
    assert read_held_out(tmp_path) == [exact]
    append_held_out(tmp_path, mixed)
    assert read_held_out(tmp_path) == [exact]


@pytest.mark.parametrize(
    ("degrees", "t"),
    # Every table of Student's distribution, two-sided 95 %.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_students_t_is_that_of_the_tables(degrees: int, t: float) -> None:
    assert student_t(degrees) == pytest.approx(t, abs=5e-4)


@pytest.mark.parametrize(("degrees", "t"), [(1, 6.314), (6, 1.943), (30, 1.697)])
def test_other_shares_are_those_of_the_tables(degrees: int, t: float) -> None:
    assert student_t(degrees, 0.9) == pytest.approx(t, abs=5e-4)


def test_without_a_degree_of_freedom_there_is_no_t() -> None:
    with pytest.raises(ValueError, match="degrees is 0"):
        student_t(0)
    with pytest.raises(ValueError, match="share is 1"):
        student_t(3, 1.0)


def test_the_interval_of_five_numbers_is_that_of_a_table():
    # mean 3, s = sqrt(2.5), t(0.975, 4) = 2.776445: half width t * sqrt(2.5 / 5)
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.n == 5
    assert interval.ci95 == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-6)


def test_a_mean_of_one_still_has_an_interval_about_that_of_wilson():
    # Wilson's interval for 64 of 64 is [0.943, 1]: half width 0.028.
    assert mean_interval([1.0] * 64).ci95 == pytest.approx(0.031, abs=0.001)
    assert mean_interval([1.0] * 256).ci95 == pytest.approx(0.0077, abs=0.0001)


def test_a_single_problem_has_no_interval_and_none_is_an_error():
    assert mean_interval([0.5]) == MeanInterval(mean=0.5, n=1, ci95=None)
    with pytest.raises(ValueError, match="at least one problem"):
        mean_interval([])


def test_the_interval_covers_the_truth_as_often_as_it_says():
    chance = random.Random(0)
    covered = 0
    for _ in range(400):
        skills = [chance.betavariate(2, 1) for _ in range(40)]
        means = [sum(chance.random() < skill for _ in range(8)) / 8 for skill in skills]
        interval = mean_interval(means)
        covered += abs(interval.mean - 2 / 3) <= interval.ci95
    assert 0.92 <= covered / 400 <= 0.98
