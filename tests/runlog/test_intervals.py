"""Student's t and the intervals made with it."""

from __future__ import annotations

import math
import random

import pytest

from areal_lab.runlog.intervals import MeanInterval, mean_interval, student_t


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
