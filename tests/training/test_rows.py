"""Samples with several rows and turns: each sampled token counts once, however it is laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_lab.data.batch import compared
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.functional.advantages.group import group_advantages
from areal_lab.training.batch_advantages import batch_advantages
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.training.tiny import learner_for, save_model

PROMPT = (5, 6, 7)


def turn(*tokens: int, version: int = 0) -> Segment:
    return Segment(tokens, tuple(-1.0 - 0.1 * token for token in tokens), version)


def two_turns(group: int, sample: int, reward: float) -> Trajectory:
    """One row: prompt, turn, observation, turn."""
    return Trajectory(
        group=group,
        sample=sample,
        prompt_tokens=PROMPT,
        parts=(
            turn(10 + sample, 11),
            turn(12, version=1),
            Observation((40, 41)),
            turn(13, 14 + group, 15, version=1),
        ),
        finish_reason="stop",
        reward=reward,
    )


def as_rows(one: Trajectory) -> list[Trajectory]:
    """The same sample in two rows: the second has the first turn as context."""
    first, second, observed, last = one.parts
    context = Observation((*first.tokens, *second.tokens, *observed.tokens))
    return [
        replace(one, parts=(first, second)),
        replace(one, row=1, parts=(context, last)),
    ]


REWARDS = ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))
SAMPLES = [
    two_turns(group, sample, reward)
    for group, rewards in enumerate(REWARDS)
    for sample, reward in enumerate(rewards)
]
ROWS = [row for one in SAMPLES for row in as_rows(one)]


def test_a_sample_in_rows_is_trained_on_as_in_one_row(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    models = []
    for trajectories in (SAMPLES, ROWS):
        learner = learner_for(folder)
        outcome = train_batch(learner, TrainBatchRequest(0, tuple(trajectories)))
        models.append((outcome.metrics, [p.detach() for p in learner.policy.parameters()]))
    (one, parameters), (rows, of_rows) = models
    for name in ("loss", "grad_norm", "reward_mean", "reward_std", "trained_samples",
                 "trained_tokens", "response_tokens_mean", "turns_mean", "entropy",
                 "lag_token_mean"):  # fmt: skip
        assert rows[name] == pytest.approx(one[name], rel=1e-4), name
    assert (one["rows_per_sample"], rows["rows_per_sample"]) == (1, 2)
    for left, right in zip(parameters, of_rows, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)


def test_advantages_compare_samples_and_not_rows() -> None:
    # One sample of a group in two rows: as two samples it would move the baseline.
    mixed = [*as_rows(SAMPLES[0]), *SAMPLES[1:]]
    whole = batch_advantages(SAMPLES, group_advantages)
    found = batch_advantages(mixed, group_advantages)
    torch.testing.assert_close(found.of_tokens, whole.of_tokens)
    assert found.of_samples.tolist() == [whole.of_samples[0], *whole.of_samples.tolist()]
    assert not found.differ


def test_turns_with_returns_are_compared_as_turns() -> None:
    returns = [(0.5, 1.0), (0.0, 0.0), (0.25, 0.5), (1.0, 2.0), (0.0, 1.0), (3.0, 0.0)]
    of_turns = [replace(one, turn_returns=own) for one, own in zip(SAMPLES, returns, strict=True)]
    found = batch_advantages(of_turns, group_advantages)
    flat = torch.tensor(returns).flatten()
    groups = torch.tensor([0] * 6 + [1] * 6)
    expected = group_advantages(flat, groups)
    torch.testing.assert_close(found.of_tokens, expected.repeat_interleave(3))  # 3 tokens a turn
    torch.testing.assert_close(found.of_samples, expected.view(-1, 2).mean(1))
    assert found.differ


def test_a_function_of_tokens_sees_rows() -> None:
    seen = {}

    def by_token(rewards, groups, *, mask, sequences):  # type: ignore[no-untyped-def]
        seen.update(rewards=rewards, groups=groups, count=sequences.count)
        return rewards[sequences.ids] * mask

    found = batch_advantages(ROWS, by_token)
    assert seen["count"] == len(ROWS)
    assert seen["rewards"].tolist() == [row.reward for row in ROWS]
    assert found.of_tokens.shape == (sum(row.generated_tokens for row in ROWS),)


def test_what_is_compared_is_checked() -> None:
    with pytest.raises(ValueError, match="1 of 6 trajectories have turn_returns"):
        compared([replace(SAMPLES[0], turn_returns=(1.0, 0.0)), *SAMPLES[1:]])
    with pytest.raises(ValueError, match="row 1 of trajectory 0/0 follows another sample"):
        compared([ROWS[0], ROWS[2], ROWS[1]])
    unscored = [replace(SAMPLES[0], reward=None), *SAMPLES[1:]]
    with pytest.raises(ValueError, match="1 of 6 samples or turns have no reward"):
        compared(unscored)
    unreached = [replace(one, turn_returns=(1.0, None)) for one in SAMPLES]
    with pytest.raises(ValueError, match="6 of 12 samples or turns have no reward"):
        compared(unreached)
    with pytest.raises(ValueError, match="3 turn_returns, but 2 turns"):
        replace(SAMPLES[0], turn_returns=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="all must be finite"):
        replace(SAMPLES[0], turn_returns=(1.0, float("nan")))
