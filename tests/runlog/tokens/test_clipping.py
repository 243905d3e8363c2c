"""Tokens outside of the clip range, around the proximal policy and around the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areal_lab.runlog.tokens.clipping import outside_clip_range
from areal_lab.runlog.tokens.columns import Tokens


def tokens_with(rows: list[tuple[int, float, float]]) -> Tokens:
    """Tokens of one sample from (lag, pi_prox / pi_behav, pi_theta / pi_prox)."""
    lag, weight, ratio = (np.array(column) for column in zip(*rows, strict=True))
    behavior = np.full(len(rows), -1.0)
    proximal = behavior + np.log(weight)
    columns = {
        "lag": lag,
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "logprobs": proximal + np.log(ratio),
    }
    return Tokens(columns, np.array([0, len(rows)]), ("",), {})


def test_an_old_token_is_far_from_its_sampler_and_not_clipped() -> None:
    tokens = tokens_with(
        [(0, 1.0, 1.0), (0, 1.0, 1.3), (2, 1.5, 1.0), (2, 1.1, 1.15), (2, 1.5, 0.7), (2, 1.0, 1.0)]
    )
    by_lag = outside_clip_range(tokens)
    assert list(by_lag.index) == [0, 2]
    assert list(by_lag["tokens"]) == [2, 4]
    assert list(by_lag["around_proximal"]) == [0.5, 0.25]
    # 1.5 and 1.1 * 1.15 = 1.265 are outside; 1.5 * 0.7 = 1.05 went out and came back.
    assert list(by_lag["around_behavior"]) == [0.5, 0.5]
    expected = [0.0, (2 * math.log(1.5) + math.log(1.1)) / 4]
    assert list(by_lag["weight_change"]) == pytest.approx(expected)
    assert list(outside_clip_range(tokens, clip_epsilon=0.4)["around_behavior"]) == [0.0, 0.25]


def test_tokens_without_fields_are_not_counted() -> None:
    tokens = tokens_with([(0, 1.0, 1.0), (1, 2.0, 2.0)])
    tokens["logprobs"][1] = np.nan
    assert list(outside_clip_range(tokens).index) == [0]


def test_what_cannot_be_counted_is_refused() -> None:
    tokens = tokens_with([(0, 1.0, 1.0)])
    with pytest.raises(ValueError, match="clip_epsilon is 0, but must be > 0"):
        outside_clip_range(tokens, clip_epsilon=0)
    plain = Tokens({"lag": tokens["lag"]}, tokens.starts, ("",), {})
    with pytest.raises(ValueError, match="token_fields=true"):
        outside_clip_range(plain)
