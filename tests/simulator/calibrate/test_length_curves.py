"""Curves of lengths for pictures, and what the longest response of a batch costs."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.calibrate.lengths import batch_curve, batch_tail, fit_lengths, quantile_curves
from simulator.workload.lengths import ConstantLengths, LogNormalLengths


def test_a_lognormal_is_a_straight_line_up_to_its_cap() -> None:
    fit = fit_lengths("deepseek_r1_client66")
    rows = [row for row in quantile_curves(fit) if row["family"] == "lognormal"]
    below = [row for row in rows if row["tokens"] < fit.max_tokens]
    slopes = np.diff(np.log([row["tokens"] for row in below])) / np.diff(
        [row["score"] for row in below]
    )
    assert slopes == pytest.approx(np.full(len(slopes), fit.sigma), rel=1e-6)
    assert rows[-1]["tokens"] == fit.max_tokens
    assert rows[len(rows) // 2]["share"] == pytest.approx(0.5)


@pytest.mark.parametrize("answers", [1, 2, 10, 1000])
def test_curves_end_where_the_responses_do(answers: int) -> None:
    fit = fit_lengths([*range(1, answers + 1)])
    rows = [row for row in quantile_curves(fit) if row["family"] == "trace"]
    tokens = [row["tokens"] for row in rows]
    assert tokens == sorted(tokens)
    if answers in {10, 1000}:
        assert (tokens[0], tokens[-1]) == (1, answers)


def test_a_batch_of_equal_responses_waits_for_nothing() -> None:
    equal = ConstantLengths(tokens=50, max_tokens=100)
    tail = batch_tail(equal, 4, 2)
    assert (tail.longest_tokens.mean, tail.waiting.mean, tail.done_at_half.mean) == (50, 0, 0)
    curve = batch_curve(equal, 4, 2)
    assert [row["running"] for row in curve[:-1]] == [1.0] * (len(curve) - 1)
    assert curve[-1] == {"tokens": 50.0, "running": 0.0}


def test_the_area_under_the_curve_is_the_mean() -> None:
    lengths = LogNormalLengths(wanted_mean_tokens=500, sigma=0.8, max_tokens=4000)
    curve = batch_curve(lengths, 64, 16, seed=3, points=2000)
    tokens = lengths.draw(np.random.default_rng(3), 64, 16)
    area = np.trapezoid([row["running"] for row in curve], [row["tokens"] for row in curve])
    assert area == pytest.approx(tokens.mean(), rel=0.01)
    assert curve[-1]["tokens"] == tokens.max()


def test_the_longest_of_uniform_lengths_is_known() -> None:
    # The largest of n uniform numbers is n / (n + 1) of the range on average.
    fit = fit_lengths(list(range(1, 10_001)))
    tail = batch_tail(fit.model("trace"), 9, 1, batches=2000)
    assert tail.longest_tokens.low < 10_000 * 9 / 10 < tail.longest_tokens.high + 20
    assert tail.mean_tokens.mean == pytest.approx(5000, rel=0.02)
    assert tail.done_at_half.mean == pytest.approx(4 / 9, abs=0.02)


def test_correlated_responses_have_a_shorter_longest_one() -> None:
    fit = fit_lengths("deepseek_r1_client66")
    alone, alike = (
        batch_tail(fit.model("trace", group_correlation=correlation), 64, 16)
        for correlation in (0.0, 0.9)
    )
    assert alike.longest_tokens.high < alone.longest_tokens.low


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 0 prompts x 16 responses is empty"):
        batch_curve(ConstantLengths(tokens=5, max_tokens=9), 0, 16)
