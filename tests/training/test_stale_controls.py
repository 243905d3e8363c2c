"""Controls against stale data in real optimizer steps, one setting each, with slow references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.config.schema import OptimizerConfig
from areal_lab.data.trajectory import Trajectory
from areal_lab.training.checkpoint import load_state, state_of_learner, write_state
from areal_lab.training.learner import Learner
from areal_lab.training.ranks import ALONE
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

LOSSES: dict[str, dict[str, Any]] = {
    "sat": {"name": "sat", "quantile": 0.5},
    "kpop": {"name": "kpop", "delta": 0.02},
    "trm": {"name": "trm", "delta": 1.0},
    "mu_grpo": {"name": "mu_grpo", "threshold": 1.5},
    "r2vpo": {"name": "r2vpo", "variance": 0.1, "rate": 0.01},
    "sequence_tis": {"name": "sequence_tis", "cap": 8.0},
    "correct": {"name": "grpo", "correct": {"name": "mask_binary_kl", "delta": 0.02}},
}
CONTROLS: dict[str, dict[str, Any]] = {
    **{name: {"loss": loss} for name, loss in LOSSES.items()},
    "age_half_life": {"age_half_life": 2.0},
    "lr_ess_share": {"lr_ess_share": 1.0},
    "project": {"max_gradient_cosine": 1e-6},
    "skip": {"max_gradient_cosine": 1e-6, "aligned_gradients": "skip"},
    "mask_truncated": {"mask_truncated": True},
}
OFF: dict[str, dict[str, Any]] = {
    "kpop": {"loss": {"name": "kpop", "delta": math.inf}},
    "trm": {"loss": {"name": "trm", "delta": math.inf}},
    "age_half_life": {"age_half_life": 1e9},
    "lr_ess_share": {"lr_ess_share": 1e-6},
    "project": {"max_gradient_cosine": 0.999999},
}
"""Numbers with which a control changes nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


def logprobs_of(model: Any, trajectories: Sequence[Trajectory]) -> list[list[float]]:
    with torch.no_grad():
        return [[float(lp) for lp in sequence_logprobs(model, t)] for t in trajectories]


def same_parameters(one: Learner, other: Learner) -> bool:
    ours, theirs = parameters(one.model), parameters(other.model)
    return all(torch.allclose(ours[name], theirs[name], atol=1e-7) for name in ours)


@pytest.mark.parametrize("control", CONTROLS)
def test_each_control_trains_with_one_setting(folder: Path, control: str) -> None:
    learner = learner_for(folder, **CONTROLS[control])
    before = parameters(learner.model)
    for seed in range(2):
        metrics = train_batch(learner, random_batch(seed)).metrics
        assert all(math.isfinite(value) for value in metrics.values())
    changed = [n for n, value in parameters(learner.model).items() if (value != before[n]).any()]
    assert changed
    assert metrics["weight_deviation"] > 0
    if control in ("kpop", "trm", "mu_grpo", "correct"):
        assert 0 < metrics["dropped_fraction"] < 1


@pytest.mark.parametrize("control", OFF)
def test_without_a_bound_a_control_changes_nothing(folder: Path, control: str) -> None:
    plain = learner_for(folder, loss={"name": "decoupled_ppo"})
    settings = {"loss": {"name": "decoupled_ppo"}, **OFF[control]}
    controlled = learner_for(folder, **settings)
    for seed in range(2):
        expected = train_batch(plain, random_batch(seed)).metrics
        metrics = train_batch(controlled, random_batch(seed)).metrics
        assert metrics["lr"] == expected["lr"]
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert same_parameters(plain, controlled)


def test_the_weight_of_age_scales_the_loss_of_each_sample(folder: Path) -> None:
    request, half_life = random_batch(), 1.5
    learner = learner_for(folder, age_half_life=half_life)
    outcome = train_batch(learner, request)
    trajectories = list(request.trajectories)
    lags = [
        sum((request.version - s.version) * len(s.tokens) for s in t.segments) / t.generated_tokens
        for t in trajectories
    ]
    assert len(set(lags)) > 2
    weights = [2 ** (-lag / half_life) for lag in lags]
    advantages = [a * w for a, w in zip(grpo_advantages(trajectories), weights, strict=True)]
    model = plain_model(folder)
    proximal = logprobs_of(model, trajectories)
    loss = decoupled_loss(
        model, trajectories, advantages, proximal, clip_epsilon=0.2, weight_cap=5.0
    )
    loss.backward()
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert outcome.metrics["age_weight_mean"] == pytest.approx(sum(weights) / len(weights))
    expected = gradients(model)
    for name, value in gradients(learner.model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("on_policy_share", [1.0, 0.3])
@pytest.mark.parametrize("max_tokens", [4096, 20])
def test_the_learning_rate_follows_the_effective_sample_size(
    folder: Path, on_policy_share: float, max_tokens: int
) -> None:
    request = random_batch(equal_groups=1)  # of which no response is in the forward pass
    settings = {"lr_ess_share": on_policy_share, "max_tokens_per_mb": max_tokens}
    learner, plain = learner_for(folder, **settings), learner_for(folder)
    metrics = train_batch(learner, request).metrics
    rate = train_batch(plain, request).metrics["lr"]
    trained = [t for t in request.trajectories if t.group != 10]
    sampled = [[lp for segment in t.segments for lp in segment.logprobs] for t in trained]
    now = logprobs_of(plain_model(folder), trained)
    weights = [math.exp(sum(p) - sum(b)) for p, b in zip(now, sampled, strict=True)]
    share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert 0 < share < 0.9
    assert metrics["sequence_effective_share"] == pytest.approx(share, rel=1e-3)
    factor = math.sqrt(min(1.0, share / on_policy_share))
    assert metrics["lr"] == pytest.approx(rate * factor, rel=1e-3)
    # AdamW's first step is the learning rate times the sign of the gradient.
    start = parameters(learner_for(folder).model)
    ended = parameters(learner.model)
    moved = max(float((ended[name] - start[name]).abs().max()) for name in ended)
    assert moved == pytest.approx(rate * factor, rel=1e-2)
    assert all(group["lr"] == pytest.approx(rate) for group in learner.optimizer.adamw.param_groups)


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[name].flatten() for name in sorted(values)]).double()


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def test_an_aligned_gradient_loses_its_part_along_the_last_one(folder: Path) -> None:
    """The same batch twice has nearly the same gradient: nearly all of it is taken off."""
    learner, plain = (learner_for(folder, **one) for one in ({"max_gradient_cosine": 0.5}, {}))
    first = train_batch(learner, random_batch()).metrics
    assert (first["gradient_cosine"], first["aligned_steps"]) == (0.0, 0.0)
    train_batch(plain, random_batch())
    assert same_parameters(learner, plain)
    last = flat(gradients(plain.model))
    second = train_batch(learner, random_batch()).metrics
    raw = train_batch(plain, random_batch()).metrics
    whole = flat(gradients(plain.model))
    assert second["gradient_cosine"] == pytest.approx(cosine(whole, last), rel=1e-4)
    assert second["gradient_cosine"] > 0.5
    assert second["aligned_steps"] == 1.0
    assert second["grad_norm"] == pytest.approx(raw["grad_norm"], rel=1e-5)
    left = flat(gradients(learner.model))
    assert abs(cosine(left, last)) < 1e-4
    assert left @ whole > 0
    expected = whole - (whole @ last) / (last @ last) * last
    torch.testing.assert_close(left, expected, atol=1e-6, rtol=1e-3)
    # The last gradient is kept as it was before the projection.
    assert learner.optimizer.alignment is not None
    kept = flat(dict(learner.optimizer.alignment.previous))
    torch.testing.assert_close(kept, whole, atol=1e-6, rtol=1e-3)


def test_a_skipped_step_leaves_parameters_and_moments(folder: Path) -> None:
    learner = learner_for(folder, max_gradient_cosine=0.5, aligned_gradients="skip")
    train_batch(learner, random_batch())
    before = parameters(learner.model)
    moments = [state["exp_avg"].clone() for state in learner.optimizer.adamw.state.values()]
    metrics = train_batch(learner, random_batch()).metrics
    assert metrics["aligned_steps"] == 1.0
    for name, value in parameters(learner.model).items():
        assert torch.equal(value, before[name]), name
    now = [state["exp_avg"] for state in learner.optimizer.adamw.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, now, strict=True))


def test_the_projected_gradient_is_clipped_by_its_own_norm(folder: Path) -> None:
    bound = OptimizerConfig(lr=1e-3, warmup_steps=0, gradient_clipping=1e-3)
    learner = learner_for(folder, max_gradient_cosine=0.5, optimizer=bound)
    for _ in range(2):
        train_batch(learner, random_batch())
        assert flat(gradients(learner.model)).norm() == pytest.approx(1e-3, rel=1e-2)


def test_the_dual_variable_rises_while_the_variance_exceeds_its_bound(folder: Path) -> None:
    loss = {"name": "r2vpo", "variance": 0.01, "rate": 0.1}
    learner = learner_for(folder, loss=loss, ppo_n_minibatches=2, max_tokens_per_mb=30)
    first = train_batch(learner, random_batch()).metrics
    second = train_batch(learner, random_batch(1)).metrics
    assert 0 < first["dual_variable"] < second["dual_variable"]
    calm = learner_for(folder, loss={**loss, "variance": 1e9})
    assert train_batch(calm, random_batch()).metrics["dual_variable"] == 0.0


def test_controls_continue_from_a_checkpoint_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    settings = {
        "loss": LOSSES["r2vpo"],
        "max_gradient_cosine": 1e-6,
        "lr_ess_share": 0.5,
        "age_half_life": 3.0,
    }

    def steps(learner: Learner, *seeds: int) -> list[dict[str, float]]:
        return [train_batch(learner, random_batch(seed)).metrics for seed in seeds]

    whole, first = (learner_for(folder, **settings) for _ in range(2))
    expected = steps(whole, 0, 1, 2, 3)
    assert any(one["aligned_steps"] for one in expected[2:])
    before = steps(first, 0, 1)
    write_state(state_of_learner(first), tmp_path / "state", ALONE)
    second = learner_for(folder, **settings)
    load_state(second, tmp_path / "state")
    assert before + steps(second, 2, 3) == expected
    for name, value in parameters(whole.model).items():
        assert torch.equal(value, parameters(second.model)[name]), name
