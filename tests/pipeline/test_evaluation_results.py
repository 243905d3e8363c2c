"""Results of an evaluation, by hand."""

from __future__ import annotations

import math

import pytest

from areal_lab.pipeline.evaluation_results import SampleResult, results


def sample(reward: float, tokens: int = 10, *, truncated: bool = False) -> SampleResult:
    return SampleResult("ok", reward, tokens, truncated)


FAILED = SampleResult("error", math.nan, 10, False, "Traceback: boom")


def test_pass_at_k_is_averaged_over_problems() -> None:
    found = results([[sample(1), sample(0)], [sample(0), sample(0)]], (1, 2))
    assert found["pass_at"]["1"]["mean"] == pytest.approx(0.25)
    assert found["pass_at"]["2"]["mean"] == pytest.approx(0.5)
    assert found["pass_at"]["2"]["n"] == 2
    assert found["pass_at"]["2"]["ci95"] > 0


def test_a_partial_reward_is_no_pass() -> None:
    found = results([[sample(0.9)], [sample(1)]], (1,))
    assert found["pass_at"]["1"]["mean"] == 0.5
    assert found["reward"]["mean"] == pytest.approx(0.95)


def test_failed_rewards_are_counted_and_not_zero() -> None:
    found = results([[sample(1), FAILED], [FAILED, FAILED]], (1, 2))
    assert found["rewards"] == {"ok": 1, "error": 3}
    assert found["first_failure"] == "Traceback: boom"
    assert found["pass_at"]["1"] == {"mean": 1.0, "n": 1, "ci95": None}
    assert found["pass_at"]["2"] is None
    assert found["reward"]["mean"] == 1.0


def test_lengths_are_of_all_samples() -> None:
    found = results([[sample(1, 4), sample(0, 8, truncated=True)]], (1,))
    assert found["mean_tokens"] == 6
    assert found["truncated_share"] == 0.5
