"""Tokens that the clip drops, around the proximal policy and around the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areal_lab.functional import anchored_at_behavior, decoupled_ppo, ppo
from areal_lab.runlog.tokens.clipping import clipped_by_lag
from areal_lab.runlog.tokens.columns import Tokens


def tokens_with(rows: list[tuple[int, float, float, float]]) -> Tokens:
    """Tokens of one sample from (lag, pi_prox / pi_behav, pi_theta / pi_prox, advantage)."""
    lag, weight, ratio, advantages = (np.array(column) for column in zip(*rows, strict=True))
    behavior = np.full(len(rows), -1.0)
    proximal = behavior + np.log(weight)
    columns = {
        "lag": lag,
        "advantages": advantages,
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "logprobs": proximal + np.log(ratio),
    }
    return Tokens(columns, np.array([0, len(rows)]), ("",), {})


def test_an_old_token_is_dropped_by_standard_ppo_only() -> None:
    tokens = tokens_with(
        [
            (0, 1.0, 1.0, 1.0),
            (0, 1.0, 1.3, 1.0),  # both drop it
            (2, 1.5, 1.0, 1.0),  # far from its sampler before the step began
            (2, 1.5, 1.0, -1.0),  # as far, but its advantage pushes it back
            (2, 1.5, 0.7, -1.0),  # came back on the whole, went down in this step
            (2, 1.1, 1.15, 1.0),  # 1.265 in all
        ]
    )
    by_lag = clipped_by_lag(tokens)
    assert list(by_lag.index) == [0, 2]
    assert list(by_lag["tokens"]) == [2, 4]
    assert list(by_lag["decoupled_ppo"]) == [0.5, 0.25]
    assert list(by_lag["standard_ppo"]) == [0.5, 0.5]
    expected = [0.0, (3 * math.log(1.5) + math.log(1.1)) / 4]
    assert list(by_lag["weight_change"]) == pytest.approx(expected)
    assert list(clipped_by_lag(tokens, clip_epsilon=0.4)["standard_ppo"]) == [0.0, 0.25]


def test_the_losses_drop_the_same_tokens() -> None:
    draw = np.random.default_rng(1)
    count = 500
    rows = list(
        zip(
            draw.integers(0, 4, count),
            draw.lognormal(0, 0.3, count),
            draw.lognormal(0, 0.2, count),
            draw.normal(size=count),
            strict=True,
        )
    )
    tokens = tokens_with(rows)
    tensors = [
        torch.tensor(tokens[name])[None]
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
    ]
    by_lag = clipped_by_lag(tokens, clip_epsilon=0.2)
    for loss, column in (
        (decoupled_ppo, "decoupled_ppo"),
        (anchored_at_behavior(ppo, clip_epsilon=0.2), "standard_ppo"),
    ):
        clipped = loss(*tensors, torch.ones(1, count, dtype=torch.bool)).clipped[0].numpy()
        for lag in range(4):
            assert by_lag[column][lag] == pytest.approx(clipped[tokens["lag"] == lag].mean())
        assert clipped.any()


def test_tokens_without_fields_are_not_counted() -> None:
    tokens = tokens_with([(0, 1.0, 1.0, 1.0), (1, 2.0, 2.0, 1.0)])
    tokens["logprobs"][1] = np.nan
    assert list(clipped_by_lag(tokens).index) == [0]


def test_what_cannot_be_counted_is_refused() -> None:
    tokens = tokens_with([(0, 1.0, 1.0, 1.0)])
    with pytest.raises(ValueError, match="clip_epsilon is 0, but must be > 0"):
        clipped_by_lag(tokens, clip_epsilon=0)
    plain = Tokens({"lag": tokens["lag"]}, tokens.starts, ("",), {})
    with pytest.raises(ValueError, match="token_fields=true"):
        clipped_by_lag(plain)
