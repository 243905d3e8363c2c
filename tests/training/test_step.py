"""One optimizer batch: equal to the slow reference, and unmoved by what must not matter."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from areal_lab.config.schema import OptimizerConfig
from areal_lab.data.trajectory import Segment
from areal_lab.functional import (
    Segments,
    anchored_at_behavior,
    decoupled_ppo,
    group_advantages,
    importance_surrogate,
    mean_of_others,
    no_scale,
    policy_loss,
    ppo,
    prompt_mean,
    segment_ratio,
    sequence_mean,
    token_mean,
)
from areal_lab.training import step as step_module
from areal_lab.training.batch_advantages import batch_advantages
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.learner import Learner
from areal_lab.training.minibatch import split_by_group
from areal_lab.training.objective.advantages import choose_advantages
from areal_lab.training.objective.loss import requested_facts
from areal_lab.training.optimizer import NonFiniteStep, Optimizer
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import score, train_batch
from tests.reference.ppo_step import decoupled_loss, grpo_advantages, sequence_logprobs
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


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=atol, rtol=1e-4, msg=name)


def reference_proximal(model: Any, request: TrainBatchRequest) -> list[list[float]]:
    with torch.no_grad():
        return [[float(lp) for lp in sequence_logprobs(model, t)] for t in request.trajectories]


def test_one_step_equals_the_slow_reference(folder: Path) -> None:
    request = random_batch()
    model = plain_model(folder)
    advantages = grpo_advantages(request.trajectories)
    loss = decoupled_loss(
        model,
        request.trajectories,
        advantages,
        reference_proximal(model, request),
        clip_epsilon=0.2,
        weight_cap=1.5,
    )
    loss.backward()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    optimizer.step()

    learner = learner_for(folder, behav_imp_weight_cap=1.5)
    outcome = train_batch(learner, request)

    assert outcome.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(model).values()))
    assert outcome.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_same(gradients(learner.model), gradients(model))
    # Adam's first step is a sign: where the gradient is rounding noise, so is the sign.
    for name, value in parameters(learner.model).items():
        clear = gradients(model)[name].abs() > 1e-5
        torch.testing.assert_close(value[clear], parameters(model)[name][clear], atol=1e-5, rtol=0)


def test_minibatches_share_the_proximal_policy_of_the_batch(folder: Path) -> None:
    request = random_batch(groups=6)
    model = plain_model(folder)
    advantages = grpo_advantages(request.trajectories)
    proximal = reference_proximal(model, request)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for members in split_by_group(request.trajectories, 3):
        optimizer.zero_grad()
        decoupled_loss(
            model,
            [request.trajectories[i] for i in members],
            [advantages[i] for i in members],
            [proximal[i] for i in members],
            clip_epsilon=0.2,
            weight_cap=5.0,
        ).backward()
        optimizer.step()

    learner = with_sgd(learner_for(folder, ppo_n_minibatches=3), lr=0.02)
    outcome = train_batch(learner, request)

    assert_same(parameters(learner.model), parameters(model))
    assert outcome.metrics["ratio_mean"] != 1.0
    assert outcome.metrics["optimizer_steps"] == 3


def with_sgd(learner: Learner, lr: float) -> Learner:
    """Plain gradient descent: parameters then differ by gradients, not by their signs."""
    optimizer = torch.optim.SGD(learner.model.parameters(), lr=lr)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return dataclasses.replace(
        learner, optimizer=Optimizer(optimizer, constant, float("inf"), learner.ranks)
    )


def with_loss(learner: Learner, function: Any) -> Learner:
    """A learner with another loss function, otherwise unchanged."""
    return dataclasses.replace(learner, loss=dataclasses.replace(learner.loss, function=function))


def test_first_minibatch_gives_the_proximal_logprobs_of_a_separate_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    scored: list[Tensor] = []

    def spy(logprobs: Tensor, proximal_logprobs: Tensor, *rest: Any, **numbers: Any) -> Any:
        seen.append((logprobs.detach(), proximal_logprobs))
        return original(logprobs, proximal_logprobs, *rest, **numbers)

    def counting(learner: Learner, packed: Any) -> Tensor:
        scored.append(score(learner, packed))
        return scored[-1]

    learner = learner_for(folder, ppo_n_minibatches=2, max_tokens_per_mb=30)
    original = learner.loss.function
    untouched = copy.deepcopy(learner.model)
    monkeypatch.setattr(step_module, "score", counting)
    outcome = train_batch(with_loss(learner, spy), random_batch())

    first = int(outcome.metrics["micro_batches"]) - len(scored)
    assert 0 < first < outcome.metrics["micro_batches"]
    assert all(torch.equal(logprobs, proximal) for logprobs, proximal in seen[:first])
    assert all(torch.equal(s, p) for s, (_, p) in zip(scored, seen[first:], strict=True))
    assert not any(torch.equal(logprobs, proximal) for logprobs, proximal in seen[first:])
    # And a separate pass before everything would have given the same numbers.
    naive: list[Tensor] = []

    def naive_spy(logprobs: Tensor, *rest: Any, **numbers: Any) -> Any:
        naive.append(logprobs.detach())
        return original(logprobs, *rest, **numbers)

    frozen = dataclasses.replace(with_loss(learner, naive_spy), policy=PackedPolicy(untouched))
    frozen = with_sgd(frozen, lr=0.0)
    train_batch(frozen, random_batch())
    for (_, proximal), separate in zip(seen, naive, strict=True):
        torch.testing.assert_close(proximal, separate, atol=1e-6, rtol=0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_leaving_out_zero_advantages_changes_nothing(folder: Path, minibatches: int) -> None:
    request = random_batch(groups=4, equal_groups=2)
    learners = []
    for omit in (True, False):
        learner = learner_for(folder, ppo_n_minibatches=minibatches)
        if not omit:
            keeping = dataclasses.replace(learner.loss, vanishes_without_advantage=False)
            learner = dataclasses.replace(learner, loss=keeping)
        outcome = train_batch(with_sgd(learner, 0.1), request)
        learners.append((learner, outcome))
    (left, omitted), (right, kept) = learners
    assert_same(parameters(left.model), parameters(right.model))
    assert omitted.metrics["packed_tokens"] < kept.metrics["packed_tokens"]
    assert omitted.metrics["zero_advantage_samples"] == 8
    assert omitted.metrics["loss"] == pytest.approx(kept.metrics["loss"], abs=1e-7)
    assert omitted.metrics["trained_tokens"] == kept.metrics["trained_tokens"]
    assert omitted.metrics["reward_mean"] == pytest.approx(0.75)


def test_a_batch_of_equal_rewards_moves_parameters_by_momentum_only(folder: Path) -> None:
    learner, reference = learner_for(folder), learner_for(folder)
    train_batch(learner, random_batch())
    outcome = train_batch(learner, random_batch(equal_groups=4))
    train_batch(reference, random_batch())
    for parameter in reference.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reference.optimizer.step(torch.zeros(()))
    assert_same(parameters(learner.model), parameters(reference.model), atol=0)
    assert outcome.metrics["grad_norm"] == 0
    assert outcome.metrics["micro_batches"] == 0
    assert "entropy" not in outcome.metrics


def test_moments_exist_before_the_first_step_and_are_those_of_the_library(folder: Path) -> None:
    learner, lazy = learner_for(folder), learner_for(folder)
    made = learner.optimizer.adamw.state
    assert made.keys() == {p for p in learner.model.parameters() if p.requires_grad}
    places = [one["exp_avg"].data_ptr() for one in made.values()]
    lazy.optimizer.adamw.state.clear()
    train_batch(learner, random_batch())
    train_batch(lazy, random_batch())
    assert_same(parameters(learner.model), parameters(lazy.model), atol=0)
    for one, other in zip(made.values(), lazy.optimizer.adamw.state.values(), strict=True):
        assert {name: (x.dtype, x.shape, x.stride()) for name, x in one.items()} == {
            name: (x.dtype, x.shape, x.stride()) for name, x in other.items()
        }
    assert places == [one["exp_avg"].data_ptr() for one in made.values()]


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_cutting_into_micro_batches_changes_nothing(folder: Path, budget: int) -> None:
    results = []
    for tokens in (4096, budget):
        learner = learner_for(folder, max_tokens_per_mb=tokens)
        outcome = train_batch(learner, random_batch())
        results.append((outcome.metrics, gradients(learner.model)))
    (whole, whole_gradients), (cut, cut_gradients) = results
    assert whole["micro_batches"] == 1
    assert cut["micro_batches"] > 1
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert_same(cut_gradients, whole_gradients)
    for name in ("entropy", "ratio_mean", "behavior_weight_max", "effective_sample_size"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5)


def test_order_of_trajectories_does_not_matter(folder: Path) -> None:
    request = random_batch()
    shuffled = dataclasses.replace(request, trajectories=request.trajectories[::-1])
    results = []
    for batch in (request, shuffled):
        learner = learner_for(folder)
        results.append((train_batch(learner, batch).metrics["loss"], gradients(learner.model)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same(results[0][1], results[1][1])


def test_warmup_is_linear_and_counts_minibatches(folder: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=4)
    learner = learner_for(folder, optimizer=optimizer, ppo_n_minibatches=2)
    rates = [train_batch(learner, random_batch(seed)).metrics["lr"] for seed in range(3)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_a_learning_rate_falls_until_the_last_minibatch_of_the_run(folder: Path) -> None:
    optimizer = OptimizerConfig(
        lr=1e-3, warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2
    )
    learner = learner_for(
        folder, optimizer=optimizer, ppo_n_minibatches=2, more={"total_train_steps": 3}
    )
    rates = [train_batch(learner, random_batch(seed)).metrics["lr"] for seed in range(4)]
    # The last minibatch of steps 1, 2 and 3; a step more than were planned stays at the bound.
    assert rates == pytest.approx([1e-3, 0.8e-3, 0.4e-3, 0.2e-3])


def test_clipping_scales_the_gradient_to_the_bound(folder: Path) -> None:
    free = learner_for(folder)
    train_batch(free, random_batch())
    optimizer = OptimizerConfig(gradient_clipping=0.01)
    bounded = learner_for(folder, optimizer=optimizer)
    outcome = train_batch(bounded, random_batch())
    norm = outcome.metrics["grad_norm"]
    assert norm > 0.01
    scaled = {name: g * (0.01 / norm) for name, g in gradients(free.model).items()}
    assert_same(gradients(bounded.model), scaled, atol=1e-7)


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights(folder: Path) -> None:
    learner = learner_for(folder)
    before = parameters(learner.model)

    def broken(logprobs: Tensor, *_: Any, **__: Any) -> Any:
        return Plain(loss=(logprobs * math.inf).sum())

    with pytest.raises(NonFiniteStep, match="optimizer step 1 has loss"):
        train_batch(with_loss(learner, broken), random_batch())
    assert_same(parameters(learner.model), before, atol=0)


class Plain(NamedTuple):
    """Result of a custom loss with one diagnostic."""

    loss: Tensor
    surprise: Tensor | None = None


def own_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    token_count: int | None = None,
) -> Plain:
    """REINFORCE, found by its import path."""
    del proximal_logprobs, behavior_logprobs
    assert token_count is not None
    return Plain(-(advantages * logprobs)[mask].sum() / token_count, -logprobs)


def test_custom_loss_by_import_path_sees_every_sample(folder: Path) -> None:
    learner = learner_for(folder, loss_fn=f"{__name__}:own_loss")
    request = random_batch(equal_groups=1)
    outcome = train_batch(learner, request)
    model = plain_model(folder)
    total = torch.zeros(())
    for advantage, trajectory in zip(
        grpo_advantages(request.trajectories), request.trajectories, strict=True
    ):
        total = total - advantage * sum(sequence_logprobs(model, trajectory), torch.zeros(()))
    expected = total.item() / sum(t.generated_tokens for t in request.trajectories)
    assert outcome.metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert outcome.metrics["surprise_mean"] > 0
    assert "clip_fraction" not in outcome.metrics


def five_lines(
    logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor,
    mask: Tensor,
) -> Plain:  # fmt: skip
    """A mean over its tokens that knows nothing of the rest of the batch."""
    weight = torch.exp(proximal_logprobs - behavior_logprobs)
    return Plain(-(weight * advantages * logprobs)[mask].mean())


def of_sequences(
    logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor,
    mask: Tensor, *, sequences: Segments, sequence_count: int, groups: Segments,
    group_count: int, versions: Tensor, trainer_version: int,
) -> Plain:  # fmt: skip
    """Asks for everything that a trainer can tell."""
    del proximal_logprobs, behavior_logprobs
    assert groups.ids.shape == mask.shape
    assert len(set(groups.ids.tolist())) <= group_count == 4
    values = (trainer_version - versions + 1) * advantages * logprobs
    return Plain(-sequence_mean(values, mask, sequences, sequence_count=sequence_count))


def of_prompts(
    logprobs: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor,
    mask: Tensor, *, groups: Segments, group_count: int, group_tokens: Tensor,
) -> Plain:  # fmt: skip
    """A mean over prompts, whose samples may be in several micro-batches."""
    del proximal_logprobs, behavior_logprobs
    values = advantages * logprobs
    numbers = {"groups": groups, "group_count": group_count, "group_tokens": group_tokens}
    return Plain(-prompt_mean(values, mask, **numbers))


def of_turns(*tensors: Tensor, token_count: int, sequences: Segments, turns: Segments) -> Any:
    """A ratio over turns, which the trainer must pass: packed tokens have no gaps between turns."""
    length = torch.bincount(turns.ids, minlength=turns.count)
    assert turns.ids.shape == sequences.ids.shape
    assert len(length) == turns.count
    assert length.min() > 0
    TURNS.append((turns.count, len(sequences.ids.unique())))
    return policy_loss(
        *tensors,
        surrogate=importance_surrogate,
        ratio=partial(segment_ratio, turns=turns),
        aggregate=partial(token_mean, token_count=token_count),
        sequences=sequences,
    )


TURNS: list[tuple[int, int]] = []
"""Turns and sequences of each micro-batch that `of_turns` saw."""


def test_a_loss_over_turns_gets_them(folder: Path) -> None:
    TURNS.clear()
    request = random_batch()
    learner = learner_for(folder, loss_fn=f"{__name__}:of_turns")
    train_batch(learner, request)
    expected = sum(
        now and not before
        for t in request.trajectories
        for before, now in zip([False, *t.response_mask], t.response_mask, strict=False)
    )
    turns, sequences = (sum(column) for column in zip(*TURNS, strict=True))
    assert turns == expected > sequences == len(request.trajectories)


OWN_LOSSES = [f"{__name__}:{f.__name__}" for f in (five_lines, of_sequences, of_prompts, of_turns)]
NAMED = [
    f"areal_lab.functional:{name}"
    for name in ("grpo", "dapo", "gspo", "gmpo", "cispo", "icepop", "a3po", "kimi")
]


@pytest.mark.parametrize("path", [*OWN_LOSSES, *NAMED])
def test_losses_by_import_path_do_not_change_with_micro_batches(folder: Path, path: str) -> None:
    results = []
    for tokens in (4096, 30):
        learner = learner_for(folder, max_tokens_per_mb=tokens, loss_fn=path)
        outcome = train_batch(learner, random_batch())
        results.append((outcome.metrics, gradients(learner.model)))
    (whole, whole_gradients), (cut, cut_gradients) = results
    assert cut["micro_batches"] > 1
    bound = 1e-6 if path in OWN_LOSSES else 1e-5
    assert cut["loss"] == pytest.approx(whole["loss"], abs=bound)
    assert_same(cut_gradients, whole_gradients, atol=bound)


def test_bound_keywords_are_the_callers() -> None:
    assert requested_facts(of_sequences) == [
        "sequences", "sequence_count", "groups", "group_count", "versions", "trainer_version",
    ]  # fmt: skip
    assert requested_facts(partial(decoupled_ppo, token_count=7)) == ["sequences"]
    assert requested_facts(decoupled_ppo) == ["token_count", "sequences"]
    assert requested_facts(five_lines) == []
    assert requested_facts(anchored_at_behavior(ppo, clip_epsilon=0.1)) == ["token_count"]
    assert requested_facts(anchored_at_behavior(ppo, token_count=3)) == []


def of_four(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Plain:
    """Lacks one tensor of five."""
    return Plain((logprobs - old_logprobs)[mask].sum() + advantages.sum())


def of_references(*tensors: Tensor, reference_logprobs: Tensor) -> Plain:
    """Wants what no trainer has."""
    return Plain(tensors[0].sum() + reference_logprobs.sum())


@pytest.mark.parametrize(
    ("function", "reason"),
    [(of_four, "too many positional arguments"), (of_references, "'reference_logprobs'")],
)
def test_a_loss_that_cannot_be_called_is_refused(folder: Path, function: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be called as a policy loss: .*{reason}"):
        learner_for(folder, loss_fn=f"{__name__}:{function.__name__}")


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO by its import path."""
    return group_advantages(rewards, groups, baseline=mean_of_others, scale=no_scale)


def test_custom_advantages_by_import_path(folder: Path) -> None:
    request = random_batch()
    learner = learner_for(folder, advantage_fn=f"{__name__}:leave_one_out")
    ours = batch_advantages(request.trajectories, learner.advantages).of_samples
    rewards = [t.reward for t in request.trajectories]
    for i, own in enumerate(request.trajectories):
        others = [
            t.reward for j, t in enumerate(request.trajectories) if t.group == own.group and j != i
        ]
        assert ours[i].item() == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-6)
    with pytest.raises(ValueError, match="one number per sample, shape"):
        batch_advantages(request.trajectories, lambda rewards, _: rewards.mean())


@pytest.mark.parametrize("path", ["nowhere", "no_such_module:loss", "math:no_such", "math:pi"])
def test_an_import_path_that_leads_nowhere_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(ValueError, match="loss_fn"):
        learner_for(folder, loss_fn=path)


def test_standard_ppo_is_anchored_at_the_behavior_policy(folder: Path) -> None:
    request = random_batch()
    model = plain_model(folder)
    behavior = [[lp for s in t.segments for lp in s.logprobs] for t in request.trajectories]
    expected = decoupled_loss(
        model,
        request.trajectories,
        grpo_advantages(request.trajectories),
        behavior,
        clip_epsilon=0.2,
        weight_cap=math.inf,
    )
    outcome = train_batch(learner_for(folder, use_decoupled_loss=False), request)
    assert outcome.metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert 0 < outcome.metrics["clip_fraction"] < 1


def test_lag_is_counted_on_chosen_tokens_of_all_trajectories(folder: Path) -> None:
    base = random_batch(groups=1, samples=2).trajectories[0]

    def sample(index: int, parts: tuple[Segment, ...]) -> Any:
        return dataclasses.replace(base, sample=index, parts=parts, reward=float(index))

    old, new = Segment((1, 2, 3), (-1.0,) * 3, 3), Segment((4,), (-1.0,), 5)
    request = TrainBatchRequest(5, (sample(0, (old, new)), sample(1, (new,))))
    metrics = train_batch(learner_for(folder), request).metrics
    assert (metrics["lag_head_mean"], metrics["lag_head_max"]) == (1, 2)
    assert (metrics["lag_tail_mean"], metrics["lag_tail_max"]) == (0, 0)
    assert metrics["lag_token_mean"] == pytest.approx(6 / 5)
    assert metrics["sampler_gap_tokens"] == 2
    assert metrics["response_tokens_mean"] == 2.5


def test_sampler_gap_is_left_out_when_every_token_lags(folder: Path) -> None:
    request = dataclasses.replace(random_batch(), version=9)
    metrics = train_batch(learner_for(folder), request).metrics
    assert metrics["sampler_gap_tokens"] == 0
    assert "sampler_gap_mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_trainers_own_samples_have_no_gap_and_weight_one(folder: Path) -> None:
    model = plain_model(folder)

    def resampled(trajectory: Any) -> Any:
        with torch.no_grad():
            values = iter([float(lp) for lp in sequence_logprobs(model, trajectory)])
        parts = tuple(
            Segment(p.tokens, tuple(next(values) for _ in p.tokens), 3)
            if isinstance(p, Segment)
            else p
            for p in trajectory.parts
        )
        return dataclasses.replace(trajectory, parts=parts)

    request = random_batch()
    request = TrainBatchRequest(3, tuple(resampled(t) for t in request.trajectories))
    metrics = train_batch(learner_for(folder), request).metrics
    assert metrics["sampler_gap_max"] < 1e-5
    assert metrics["behavior_weight_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["effective_sample_size"] == pytest.approx(metrics["sampler_gap_tokens"])


def test_spans_are_in_order_and_named(folder: Path) -> None:
    outcome = train_batch(learner_for(folder, ppo_n_minibatches=2), random_batch())
    names = [span.name for span in outcome.spans]
    assert names == [
        "advantages and packing",
        "proximal log-probs",
        *("forward/backward", "optimizer") * 2,
    ]
    ends = [span.end_s for span in outcome.spans]
    assert ends == sorted(ends)
    assert all(span.start_s <= span.end_s for span in outcome.spans)


def test_dr_grpo_advantages_are_not_divided_by_the_deviation(tmp_path: Path) -> None:
    request = random_batch()
    function = choose_advantages(settings_for(tmp_path, adv_norm_std=False))
    assert batch_advantages(request.trajectories, function).of_samples.tolist() == [-0.5, 0.5] * 8


def test_minibatches_are_whole_groups_in_equal_number() -> None:
    trajectories = random_batch(groups=5, samples=2).trajectories
    split = split_by_group(trajectories, 2)
    assert split == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="must be <= 5"):
        split_by_group(trajectories, 6)
