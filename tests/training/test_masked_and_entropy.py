"""Responses without a loss, the penalty on long ones, the entropy bonus, components of rewards."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.data.trajectory import Trajectory
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.reference.ppo_step import decoupled_loss, grpo_advantages, sequence_logprobs
from tests.training.tiny import (
    gradients,
    learner_for,
    parameters,
    plain_model,
    random_batch,
    save_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


def cut_off(request: TrainBatchRequest, *samples: int) -> TrainBatchRequest:
    """The batch with these samples of each group cut off."""
    return dataclasses.replace(
        request,
        trajectories=tuple(
            dataclasses.replace(t, finish_reason="length") if t.sample in samples else t
            for t in request.trajectories
        ),
    )


def slow_loss(
    model: Any, trajectories: list[Trajectory], advantages: list[float]
) -> tuple[Tensor, int]:
    """The loss of these responses, and their tokens."""
    with torch.no_grad():
        proximal = [[float(lp) for lp in sequence_logprobs(model, t)] for t in trajectories]
    loss = decoupled_loss(
        model, trajectories, advantages, proximal, clip_epsilon=0.2, weight_cap=5.0
    )
    return loss, sum(t.generated_tokens for t in trajectories)


def entropies(model: Any, trajectory: Trajectory) -> Tensor:
    """Of the distributions that the tokens of the policy were chosen from, from all logits."""
    ids = torch.tensor([[*trajectory.prompt_tokens, *trajectory.response_tokens]])
    logits = model(ids).logits[0, len(trajectory.prompt_tokens) - 1 : -1]
    chosen = torch.tensor(trajectory.response_mask)
    return torch.distributions.Categorical(logits=logits[chosen]).entropy()


def assert_same_gradients(fast: Any, slow: Any) -> None:
    expected = gradients(slow)
    for name, value in gradients(fast).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-4, msg=name)


def test_masked_responses_have_no_loss_and_count_for_the_baseline(folder: Path) -> None:
    request = cut_off(random_batch(), 1, 2)
    learner = learner_for(folder, mask_truncated=True)
    outcome = train_batch(learner, request)
    model = plain_model(folder)
    of_all = grpo_advantages(request.trajectories)
    kept = [i for i, t in enumerate(request.trajectories) if not t.truncated]
    loss, tokens = slow_loss(
        model, [request.trajectories[i] for i in kept], [of_all[i] for i in kept]
    )
    loss.backward()
    assert tokens < sum(t.generated_tokens for t in request.trajectories)
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert outcome.metrics["masked_samples"] == 8
    assert outcome.metrics["trained_samples"] == 16
    assert_same_gradients(learner.model, model)


def test_a_batch_of_masked_responses_changes_nothing(folder: Path) -> None:
    learner = learner_for(folder, mask_truncated=True, ppo_n_minibatches=2)
    before = parameters(learner.model)
    outcome = train_batch(learner, cut_off(random_batch(), 0, 1, 2, 3))
    assert (outcome.metrics["loss"], outcome.metrics["grad_norm"]) == (0.0, 0.0)
    for name, value in parameters(learner.model).items():
        assert torch.equal(value, before[name])


def test_without_the_setting_they_are_trained_on(folder: Path) -> None:
    request = random_batch()
    plain = train_batch(learner_for(folder), request).metrics
    cut = train_batch(learner_for(folder), cut_off(request, 1)).metrics
    assert (cut["loss"], cut["grad_norm"]) == (plain["loss"], plain["grad_norm"])
    assert "masked_samples" not in cut


@pytest.mark.parametrize("coefficient", [0.05, -0.5])
def test_the_entropy_bonus_equals_the_one_from_all_logits(folder: Path, coefficient: float) -> None:
    # Responses of a group without a gradient of the policy loss have one of the bonus.
    request = random_batch(equal_groups=1)
    learner = learner_for(folder, entropy_coeff=coefficient, max_tokens_per_mb=40)
    outcome = train_batch(learner, request)
    assert outcome.metrics["micro_batches"] > 1
    model = plain_model(folder)
    trajectories = list(request.trajectories)
    loss, tokens = slow_loss(model, trajectories, grpo_advantages(request.trajectories))
    entropy = torch.cat([entropies(model, t) for t in trajectories])
    assert len(entropy) == tokens
    loss = loss - coefficient * entropy.mean()
    loss.backward()
    assert outcome.metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert_same_gradients(learner.model, model)


def test_the_bonus_raises_entropy(folder: Path) -> None:
    request = random_batch()
    after = {}
    for coefficient in (0.0, 1.0):
        learner = learner_for(folder, entropy_coeff=coefficient)
        for _ in range(4):
            metrics = train_batch(learner, request).metrics
        after[coefficient] = metrics["entropy"]
    assert after[1.0] > after[0.0] + 0.01


def test_the_mean_penalty_is_a_metric(folder: Path) -> None:
    request = random_batch()
    more = {"gconfig.max_new_tokens": 8}
    metrics = train_batch(
        learner_for(folder, overlong_share=0.5, overlong_penalty_factor=2.0, more=more), request
    ).metrics
    lengths = [t.generated_tokens for t in request.trajectories]
    penalty = [-2.0 * min(max(length - 4, 0), 4) / 4 for length in lengths]  # eq. 13, L_cache = 4
    assert any(penalty)
    assert metrics["overlong_penalty_mean"] == pytest.approx(math.fsum(penalty) / len(penalty))


def test_each_component_has_its_mean(folder: Path) -> None:
    request = random_batch()
    named = tuple(
        dataclasses.replace(t, rewards={"format": float(t.sample), "answer": t.reward})
        if t.group == 10
        else dataclasses.replace(t, rewards={"answer": t.reward})
        for t in request.trajectories
    )
    metrics = train_batch(
        learner_for(folder), dataclasses.replace(request, trajectories=named)
    ).metrics
    assert metrics["reward_format_mean"] == 1.5
    assert metrics["reward_answer_mean"] == metrics["reward_mean"] == 0.5
