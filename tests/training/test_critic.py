"""PPO with a critic, and the penalty on KL inside the reward, against separate passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.data.batch import sample_tokens
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.functional.advantages.named import dr_grpo_advantages
from areal_lab.models.locate import ModelNotFound
from areal_lab.training.batch_advantages import KLReward, batch_advantages
from areal_lab.training.checkpoint import load_state, state_of_learner, write_state
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, merged_tensors
from areal_lab.training.model import load_policy, load_value_model
from areal_lab.training.process.output import CRITIC_FOLDER, save
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest, TrainBatchRequest
from areal_lab.training.ranks import ALONE
from areal_lab.training.step import train_batch
from tests.reference import returns as reference
from tests.reference.ppo_step import sequence_logprobs
from tests.training.tiny import (
    gradients,
    learner_for,
    parameters,
    random_batch,
    save_model,
    settings_for,
)

GAE = {"name": "gae", "gamma": 0.9, "lambda_": 0.8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A value model whose output is not zero."""
    start = save_model(tmp_path_factory.mktemp("start") / "model", seed=7)
    model: Any = load_value_model(start)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    folder = tmp_path_factory.mktemp("critic") / "model"
    model.save_pretrained(folder)
    return folder


def cut_off(request: TrainBatchRequest) -> TrainBatchRequest:
    """Every third response was cut off."""
    return dataclasses.replace(
        request,
        trajectories=tuple(
            dataclasses.replace(t, finish_reason="length" if i % 3 == 0 else "stop")
            for i, t in enumerate(request.trajectories)
        ),
    )


def places(trajectory: Trajectory) -> list[int]:
    """Where the tokens of the policy are in the whole sequence."""
    start = len(trajectory.prompt_tokens)
    return [start + i for i, chosen in enumerate(trajectory.response_mask) if chosen]


def slow_values(model: Any, trajectory: Trajectory) -> tuple[Tensor, float]:
    """Values before each token of the policy, and beyond the end, from one plain row."""
    row = torch.tensor([[*trajectory.prompt_tokens, *trajectory.response_tokens]])
    outputs = model.score(model.model(row).last_hidden_state)[0, :, 0]
    where = places(trajectory)
    return outputs[[place - 1 for place in where]], float(outputs[-1].detach())


def plain(load: Any, folder: Path) -> Any:
    model = load(folder)
    model.set_attn_implementation("sdpa")
    return model


def slow_estimate(
    model: Any, request: TrainBatchRequest, penalties: list[list[float]] | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages, whitened, and returns of each token: sums of the paper, sample by sample."""
    advantages, returns = [], []
    for index, trajectory in enumerate(request.trajectories):
        with torch.no_grad():
            values, beyond = slow_values(model, trajectory)
        count = len(values)
        rewards = [0.0] * count if penalties is None else list(penalties[index])
        rewards[-1] += trajectory.reward
        found = reference.gae(
            rewards,
            values.tolist(),
            [True] * count,
            gammas=[0.9] * count,
            lambdas=[0.8] * count,
            bootstrap=beyond if trajectory.truncated else 0.0,
        )
        advantages.append(found)
        returns.append([a + v for a, v in zip(found, values.tolist(), strict=True)])
    everything = torch.tensor([a for one in advantages for a in one], dtype=torch.float64)
    mean, scale = everything.mean(), everything.std()
    return [[float((a - mean) / scale) for a in one] for one in advantages], returns


def learner_with(folder: Path, critic: Path | str, *more: Any, **actor: Any) -> Learner:
    settings: dict[str, Any] = {
        "critic.path": str(critic),
        "critic.optimizer.lr": 1e-3,
        "critic.optimizer.warmup_steps": 0,
        "critic.optimizer.gradient_clipping": float("inf"),
        **dict(more),
    }
    return learner_for(folder, more=settings, **{"advantage": GAE, **actor})


def test_a_step_of_both_models_equals_separate_passes(folder: Path, critic: Path) -> None:
    request = cut_off(random_batch())
    learner = learner_with(folder, critic, max_tokens_per_mb=40, use_decoupled_loss=False)
    outcome = train_batch(learner, request)
    assert outcome.metrics["micro_batches"] > 1

    advantages, returns = slow_estimate(plain(load_value_model, critic), request)
    policy, values_model = plain(load_policy, folder), plain(load_value_model, critic)
    policy_terms, value_terms = [], []
    for trajectory, own, targets in zip(request.trajectories, advantages, returns, strict=True):
        logprobs = torch.stack(sequence_logprobs(policy, trajectory))
        behavior = torch.tensor([lp for s in trajectory.segments for lp in s.logprobs])
        ratio, weight = (logprobs - behavior).exp(), torch.tensor(own)
        policy_terms.append(-torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight))
        values, _ = slow_values(values_model, trajectory)
        # In the first minibatch the values are the old ones, so nothing is clipped.
        value_terms.append((values - torch.tensor(targets)).square() / 2)
    loss, value_loss = torch.cat(policy_terms).mean(), torch.cat(value_terms).mean()
    loss.backward()
    value_loss.backward()
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert outcome.metrics["critic_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert learner.critic is not None
    for ours, theirs in ((learner.model, policy), (learner.critic.values.model, values_model)):
        expected = gradients(theirs)
        for name, gradient in gradients(ours).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)
    flat = [a for one in returns for a in one]
    assert outcome.metrics["return_mean"] == pytest.approx(sum(flat) / len(flat), rel=1e-4)
    assert outcome.metrics["explained_variance"] < 1


def test_values_are_clipped_around_those_of_the_batch(folder: Path, critic: Path) -> None:
    def second_loss(clip: float) -> dict[str, float]:
        more = (("critic.eps_clip", clip), ("critic.optimizer.lr", 0.05))
        learner = learner_with(folder, critic, *more, ppo_n_minibatches=2)
        return train_batch(learner, random_batch()).metrics

    assert second_loss(float("inf"))["value_clip_fraction"] == 0
    tight = second_loss(1e-4)
    assert 0 < tight["value_clip_fraction"] < 1
    assert tight["critic_loss"] > second_loss(float("inf"))["critic_loss"]


@pytest.mark.parametrize("budget", [1, 30])
def test_cutting_into_micro_batches_changes_nothing(
    folder: Path, critic: Path, budget: int
) -> None:
    found = []
    for tokens in (budget, 10_000):
        learner = learner_with(
            folder, critic, max_tokens_per_mb=tokens, kl_ctl=0.1, kl_loss_coef=0.2
        )
        train_batch(learner, cut_off(random_batch()))
        metrics = train_batch(learner, cut_off(random_batch(1))).metrics
        assert learner.critic is not None
        found.append((metrics, parameters(learner.model), parameters(learner.critic.values.model)))
    (cut, *ours), (whole, *theirs) = found
    for name in ("loss", "critic_loss", "grad_norm", "critic_grad_norm", "reference_kl_mean"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4), name
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-4)


def test_a_critic_learns_to_predict_the_reward(folder: Path) -> None:
    more = {"critic.optimizer.lr": 3e-3, "critic.optimizer.warmup_steps": 0}
    learner = learner_for(folder, more=more, advantage="gae")
    first, *_, last = (train_batch(learner, random_batch()).metrics for _ in range(30))
    assert first["value_mean"] == 0
    # Values of 0 and rewards of 0 and 1: half the square is half the mean.
    assert first["critic_loss"] == pytest.approx(first["return_mean"] / 2)
    assert last["critic_loss"] < first["critic_loss"] / 2
    assert last["explained_variance"] > 0.2


def test_masked_responses_teach_the_critic_nothing(folder: Path, critic: Path) -> None:
    request = cut_off(random_batch())
    kept = tuple(t for t in request.trajectories if not t.truncated)
    masked = learner_with(folder, critic, mask_truncated=True)
    without = learner_with(folder, critic, mask_truncated=True)
    ours = train_batch(masked, request).metrics
    theirs = train_batch(without, dataclasses.replace(request, trajectories=kept)).metrics
    for name in ("loss", "critic_loss", "grad_norm", "return_mean", "explained_variance"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_the_bootstrap_can_be_left_out(folder: Path, critic: Path) -> None:
    request = cut_off(random_batch())
    ended = dataclasses.replace(
        request,
        trajectories=tuple(
            dataclasses.replace(t, finish_reason="stop") for t in request.trajectories
        ),
    )
    off = learner_with(folder, critic, ("critic.bootstrap_truncated", False))
    ours = train_batch(off, request).metrics["return_mean"]
    theirs = train_batch(learner_with(folder, critic), ended).metrics["return_mean"]
    other = train_batch(learner_with(folder, critic), request).metrics["return_mean"]
    assert ours == pytest.approx(theirs)
    assert ours != pytest.approx(other, rel=1e-3)


# --- values from the policy's body -------------------------------------------------------------


def sharing(folder: Path, *more: Any, output: Tensor | None = None, **actor: Any) -> Learner:
    """A policy with an output for values, whose weights are `output` if given."""
    settings = {"critic.share_body": True, "critic.optimizer.lr": 1e-2, **dict(more)}
    learner = learner_for(folder, more=settings, **{"advantage": GAE, **actor})
    if output is not None:
        with torch.no_grad():
            learner.model.get_submodule("score").weight.copy_(output)
    return learner


def test_a_shared_body_learns_from_both_losses(folder: Path) -> None:
    torch.manual_seed(2)
    output = 0.3 * torch.randn(1, 32)
    request = cut_off(random_batch())
    learner = sharing(
        folder,
        ("critic.loss_coef", 0.3),
        output=output,
        max_tokens_per_mb=40,
        use_decoupled_loss=False,
    )
    outcome = train_batch(learner, request)
    assert outcome.metrics["micro_batches"] > 1

    model = plain(load_policy, folder)
    model.score = torch.nn.Linear(32, 1, bias=False)
    with torch.no_grad():
        model.score.weight.copy_(output)
    advantages, returns = slow_estimate(model, request)
    policy_terms, value_terms = [], []
    for trajectory, own, targets in zip(request.trajectories, advantages, returns, strict=True):
        logprobs = torch.stack(sequence_logprobs(model, trajectory))
        behavior = torch.tensor([lp for s in trajectory.segments for lp in s.logprobs])
        ratio, weight = (logprobs - behavior).exp(), torch.tensor(own)
        policy_terms.append(-torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight))
        values, _ = slow_values(model, trajectory)
        value_terms.append((values - torch.tensor(targets)).square() / 2)
    value_loss = torch.cat(value_terms).mean()
    loss = torch.cat(policy_terms).mean() + 0.3 * value_loss
    loss.backward()
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert outcome.metrics["critic_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert outcome.metrics["value_clip_fraction"] == 0
    expected = gradients(model)
    assert "score.weight" in expected
    for name, gradient in gradients(learner.model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)


def test_a_shared_critic_learns_to_predict_the_reward(folder: Path) -> None:
    learner = sharing(folder, ("critic.loss_coef", 1.0))
    first, *_, last = (train_batch(learner, random_batch()).metrics for _ in range(30))
    assert first["value_mean"] == 0
    assert last["critic_loss"] < 0.7 * first["critic_loss"]
    assert last["explained_variance"] > 0 == first["explained_variance"]


def test_the_output_for_values_has_a_learning_rate_of_its_own(folder: Path) -> None:
    before = parameters(sharing(folder).model)
    learner = sharing(folder, ("critic.optimizer.lr", 0.25))
    train_batch(learner, random_batch())
    after = parameters(learner.model)
    moved = {name: float((after[name] - value).abs().max()) for name, value in before.items()}
    # The first step of Adam is the learning rate.
    assert moved.pop("score.weight") == pytest.approx(0.25, rel=1e-3)
    assert max(moved.values()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("lora", [False, True])
def test_engines_and_folders_do_not_get_the_output_for_values(
    folder: Path, tmp_path: Path, lora: bool
) -> None:
    model = load_policy(folder)
    if lora:
        add_lora(model, rank=4, alpha=8, targets=("q_proj",), merged=True)
    more = {"critic.share_body": True}
    settings = settings_for(folder, more=more, advantage="gae", use_lora=lora)
    learner = make_learner(model, settings)
    train_batch(learner, random_batch())
    assert merged_tensors(learner.model).keys() == merged_tensors(load_policy(folder)).keys()
    save(learner, SaveRequest(tmp_path / "saved", state=True))
    assert not (tmp_path / "saved" / CRITIC_FOLDER).exists()
    load_policy(tmp_path / "saved")
    again = load_policy(folder)
    if lora:
        add_lora(again, rank=4, alpha=8, targets=("q_proj",), merged=True)
    resumed = make_learner(again, settings)
    load_state(resumed, tmp_path / "saved" / STATE_FOLDER)
    assert torch.equal(
        resumed.model.get_submodule("score").weight, learner.model.get_submodule("score").weight
    )
    ours, theirs = (train_batch(one, random_batch(1)).metrics for one in (resumed, learner))
    assert ours["loss"] == theirs["loss"]


# --- KL in the reward ----------------------------------------------------------------------------


def slow_kl(folder: Path, request: TrainBatchRequest) -> list[list[float]]:
    """log pi_behav - log pi_ref of each token, from separate passes."""
    model = plain(load_policy, folder)
    found = []
    for trajectory in request.trajectories:
        with torch.no_grad():
            theirs = torch.stack(sequence_logprobs(model, trajectory)).tolist()
        behavior = [lp for s in trajectory.segments for lp in s.logprobs]
        found.append([b - t for b, t in zip(behavior, theirs, strict=True)])
    return found


def test_kl_in_the_reward_is_charged_at_each_token(folder: Path, critic: Path) -> None:
    request = random_batch()
    learner = learner_with(folder, critic, kl_ctl=0.3)
    outcome = train_batch(learner, request)
    kl = slow_kl(folder, request)
    flat = [value for one in kl for value in one]
    assert outcome.metrics["reward_kl_mean"] == pytest.approx(sum(flat) / len(flat), rel=1e-4)
    assert outcome.metrics["kl_coefficient"] == 0.3
    penalties = [[-0.3 * value for value in one] for one in kl]
    _, returns = slow_estimate(plain(load_value_model, critic), request, penalties)
    flat = [value for one in returns for value in one]
    assert outcome.metrics["return_mean"] == pytest.approx(sum(flat) / len(flat), rel=1e-4)


def test_advantages_of_samples_get_the_sum_of_the_penalties(folder: Path) -> None:
    request = random_batch()
    learner = learner_for(folder, advantage="dr_grpo", kl_ctl=0.3, kl_ctl_estimator="k1")
    assert learner.critic is None
    advantages = train_batch(learner, request).advantages
    sums = torch.tensor([sum(one) for one in slow_kl(folder, request)])
    rewards = torch.tensor([t.reward for t in request.trajectories]) - 0.3 * sums
    expected = dr_grpo_advantages(rewards, torch.tensor([t.group for t in request.trajectories]))
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)


def test_the_coefficient_is_adapted_to_the_target(folder: Path) -> None:
    actor = {"advantage": "reinforce_plus_plus", "kl_ctl": 0.3, "kl_ctl_horizon": 64.0}
    learner = learner_for(folder, kl_ctl_target=1e3, **actor)
    first, second = (train_batch(learner, random_batch()).metrics for _ in range(2))
    # 16 samples / 64, of an error that is cut at -0.2.
    assert second["kl_coefficient"] == pytest.approx(first["kl_coefficient"] * (1 - 0.25 * 0.2))
    fixed = learner_for(folder, **actor)
    for _ in range(2):
        assert train_batch(fixed, random_batch()).metrics["kl_coefficient"] == 0.3


def test_tokens_have_advantages_of_their_own(folder: Path) -> None:
    request = random_batch()
    learner = learner_for(folder, advantage={"name": "reinforce_plus_plus", "gamma": 0.5})
    outcome = train_batch(learner, request)
    (record, *_) = outcome.records
    taken = record.diagnostics["advantage"]
    per_sample = [taken[record.sequence_ids == i] for i in record.sequence_ids.unique()]
    assert any(len(one.unique()) > 1 for one in per_sample)
    assert "advantage_mean" in outcome.metrics


def test_rows_of_a_sample_are_found_in_any_packing() -> None:
    request = random_batch()
    tokens = sample_tokens(request.trajectories)
    found = batch_advantages(request.trajectories, lambda rewards, groups: rewards + groups)
    assert torch.equal(found.of_tokens, found.of_samples[tokens.ids()])
    assert found.nonzero() == [True] * len(request.trajectories)


def test_a_penalty_of_nothing_charges_nothing() -> None:
    reward = KLReward(0.5, lambda log_ratio: log_ratio, 0.0, 1.0)
    one = Trajectory(
        group=0,
        sample=0,
        prompt_tokens=(1,),
        parts=(Segment((2, 3), (-1.0, -2.0), 0),),
        finish_reason="stop",
        reward=1.0,
    )
    same = torch.tensor([-1.0, -2.0])
    found = batch_advantages([one], lambda r, _: r, reference_logprobs=same, kl_reward=reward)
    assert found.of_samples.tolist() == [1.0]


# --- state and folders ---------------------------------------------------------------------------


def test_training_continues_bit_by_bit(folder: Path, critic: Path, tmp_path: Path) -> None:
    def learner() -> Learner:
        return learner_with(folder, critic, kl_ctl=0.3, kl_ctl_target=0.1, kl_ctl_horizon=32.0)

    def steps(of: Learner, *seeds: int) -> list[dict[str, float]]:
        found = [train_batch(of, random_batch(seed)).metrics for seed in seeds]
        return [{k: v for k, v in one.items() if not k.endswith("_bytes")} for one in found]

    whole, first, second = learner(), learner(), learner()
    expected = steps(whole, 0, 1, 2, 3)
    before = steps(first, 0, 1)
    write_state(state_of_learner(first), tmp_path / "state", ALONE)
    load_state(second, tmp_path / "state")
    assert before + steps(second, 2, 3) == expected
    assert whole.critic is not None
    assert second.critic is not None
    ours = parameters(second.critic.values.model)
    for name, value in parameters(whole.critic.values.model).items():
        assert torch.equal(value, ours[name]), name


def test_a_saved_critic_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    learner = learner_for(folder, advantage="gae", more={"critic.optimizer.warmup_steps": 0})
    train_batch(learner, random_batch())
    save(learner, SaveRequest(tmp_path / "saved"))
    assert learner.critic is not None
    again = learner_with(folder, tmp_path / "saved" / CRITIC_FOLDER)
    assert again.critic is not None
    ours = parameters(again.critic.values.model)
    for name, value in parameters(learner.critic.values.model).items():
        assert torch.equal(value, ours[name]), name


def test_a_critic_of_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.training.tiny import SHAPE

    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 50})).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelNotFound, match=r"critic.path .* 50 tokens, but .* has 97"):
        learner_with(folder, tmp_path / "other")
