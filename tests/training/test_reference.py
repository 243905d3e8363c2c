"""Frozen models: a reference (its own copy, another model, adapters off), and a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.data.trajectory import Trajectory
from areal_lab.models.locate import ModelNotFound
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.reference import without_adapters
from areal_lab.training.step import train_batch
from tests.reference.ppo_step import decoupled_loss, grpo_advantages, sequence_logprobs
from tests.training import tiny
from tests.training.tiny import (
    gradients,
    learner_for,
    parameters,
    plain_model,
    random_batch,
    save_model,
    settings_for,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other") / "model", seed=5)


def slow_k3(model: Any, reference: Any, trajectories: list[Trajectory]) -> Tensor:
    """k3 of each chosen token, from separate forward passes."""
    kl = []
    for trajectory in trajectories:
        ours, theirs = (torch.stack(sequence_logprobs(m, trajectory)) for m in (model, reference))
        log_ratio = ours - theirs.detach()
        kl.append(torch.exp(-log_ratio) - 1 + log_ratio)
    return torch.cat(kl)


def with_adapters(folder: Path, **actor: Any) -> Learner:
    settings = settings_for(folder, use_lora=True, lora_rank=4, **actor)
    model = load_policy(folder)
    targets = target_modules(model, ["all-linear"])
    add_lora(model, rank=4, alpha=8, targets=targets, merged=True)
    return make_learner(model, settings)


def test_the_penalty_equals_the_one_of_separate_passes(folder: Path, other: Path) -> None:
    # Responses of a group without a gradient of the policy loss have one of the penalty.
    request = random_batch(equal_groups=1)
    learner = learner_for(
        folder, kl_loss_coef=0.3, max_tokens_per_mb=40, more={"ref.path": str(other)}
    )
    outcome = train_batch(learner, request)
    assert outcome.metrics["micro_batches"] > 1
    model, trajectories = plain_model(folder), list(request.trajectories)
    with torch.no_grad():
        proximal = [[float(lp) for lp in sequence_logprobs(model, t)] for t in trajectories]
    policy_loss = decoupled_loss(
        model,
        trajectories,
        grpo_advantages(request.trajectories),
        proximal,
        clip_epsilon=0.2,
        weight_cap=5.0,
    )
    kl = slow_k3(model, plain_model(other), trajectories)
    loss = policy_loss + 0.3 * kl.mean()
    loss.backward()
    assert outcome.metrics["reference_kl_mean"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    expected = gradients(model)
    for name, value in gradients(learner.model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [learner_for, with_adapters])
@pytest.mark.parametrize("estimator", ["k2", "k3", "straight_through"])
def test_a_run_starts_at_its_reference(folder: Path, make: Any, estimator: str) -> None:
    learner = make(folder, kl_loss_coef=0.5, kl_estimator=estimator)
    request = random_batch()
    first = train_batch(learner, request)
    without = train_batch(make(folder), request)
    assert first.metrics["reference_kl_mean"] == 0.0
    assert first.metrics["loss"] == pytest.approx(without.metrics["loss"], abs=1e-6)
    assert train_batch(learner, request).metrics["reference_kl_mean"] > 0.0


@pytest.mark.parametrize("make", [learner_for, with_adapters])
def test_a_large_coefficient_holds_the_policy_at_its_reference(folder: Path, make: Any) -> None:
    request = random_batch()

    def moved(coefficient: float) -> float:
        learner = make(folder, kl_loss_coef=coefficient)
        for _ in range(6):
            metrics = train_batch(learner, request).metrics
        return metrics["reference_kl_mean"]

    assert moved(100.0) < 0.2 * moved(1e-6)


def test_the_reference_does_not_change_and_has_no_gradient(folder: Path) -> None:
    learner = learner_for(folder, kl_loss_coef=0.5)
    assert learner.reference is not None
    frozen = learner.reference.policy.model
    before = parameters(frozen)
    train_batch(learner, random_batch())
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())
    assert all(torch.equal(value, before[name]) for name, value in parameters(frozen).items())


def test_adapters_are_their_own_reference_and_come_back(folder: Path) -> None:
    learner = with_adapters(folder, kl_loss_coef=0.5)
    assert learner.reference is not None
    assert learner.reference.policy is learner.policy
    train_batch(learner, random_batch())
    packed = tiny_packed(random_batch())
    with torch.no_grad():
        adapted = learner.policy(packed).logprobs
        with without_adapters(learner.model):
            frozen = learner.policy(packed).logprobs
        again = learner.policy(packed).logprobs
        original = learner_for(folder).policy(packed).logprobs
    assert torch.equal(frozen, original)
    assert torch.equal(adapted, again)
    assert not torch.equal(adapted, frozen)
    assert all(p.requires_grad for name, p in learner.model.named_parameters() if "lora_" in name)


def tiny_packed(request: TrainBatchRequest) -> Any:
    from areal_lab.data.batch import input_tokens, pack
    from areal_lab.data.prefix_tree import ForwardCost, grow_trees

    rows = [input_tokens(t) for t in request.trajectories]
    cost = ForwardCost(linear_flops_per_token=1, attention_flops_per_pair=1)
    return pack(request.trajectories, grow_trees(rows, cost, max_tokens=10_000))


def test_without_a_coefficient_there_is_no_second_model(folder: Path) -> None:
    assert learner_for(folder).reference is None


def test_a_reference_with_another_vocabulary_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.SHAPE, "vocab_size", 50)
    small = save_model(tmp_path / "small")
    with pytest.raises(ModelNotFound, match=r"vocabulary of 50 tokens, but the model .* has 97"):
        learner_for(folder, kl_loss_coef=0.1, more={"ref.path": str(small)})


# --- a teacher -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rl_weight", [0.0, 0.5])
def test_the_distance_from_a_teacher_equals_that_of_separate_passes(
    folder: Path, other: Path, rl_weight: float
) -> None:
    request = random_batch(equal_groups=1)
    more = {
        "teacher.path": str(other),
        "teacher.rl_loss_weight": rl_weight,
        "teacher.distill_loss_weight": 0.3,
    }
    learner = learner_for(folder, max_tokens_per_mb=40, more=more)
    outcome = train_batch(learner, request)
    model, teacher, trajectories = (
        plain_model(folder),
        plain_model(other),
        list(request.trajectories),
    )
    terms, distances = [], []
    for trajectory in trajectories:
        ours, theirs = (torch.stack(sequence_logprobs(m, trajectory)) for m in (model, teacher))
        behavior = torch.tensor([lp for s in trajectory.segments for lp in s.logprobs])
        distance = (ours - theirs).detach()
        terms.append((ours - behavior).exp() * distance)
        distances.append(distance)
    loss = 0.3 * torch.cat(terms).mean()
    if rl_weight:
        with torch.no_grad():
            proximal = [[float(lp) for lp in sequence_logprobs(model, t)] for t in trajectories]
        loss = loss + rl_weight * decoupled_loss(
            model,
            trajectories,
            grpo_advantages(request.trajectories),
            proximal,
            clip_epsilon=0.2,
            weight_cap=5.0,
        )
    loss.backward()
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    mean = torch.cat(distances).mean().item()
    assert outcome.metrics["teacher_kl_mean"] == pytest.approx(mean, rel=1e-4)
    expected = gradients(model)
    for name, gradient in gradients(learner.model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)


def test_a_teacher_of_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    smaller = tiny.LlamaConfig(**{**tiny.SHAPE, "vocab_size": 50})
    tiny.LlamaForCausalLM(smaller).save_pretrained(tmp_path / "smaller")
    with pytest.raises(ModelNotFound, match=r"teacher.path .* 50 tokens, but .* has 97"):
        learner_for(folder, more={"teacher.path": str(tmp_path / "smaller")})
