"""Training fields of tokens: equal to a slow recomputation, and what the file keeps of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from areal_lab.data.trajectory import Trajectory
from areal_lab.functional import PlainLoss
from areal_lab.runlog.folder import RunFolder, SampleText
from areal_lab.runlog.token_columns import fields_path, read_fields, write_fields
from areal_lab.runlog.token_files import read_samples
from areal_lab.training.metrics import token_fields
from areal_lab.training.minibatch import split_by_group
from areal_lab.training.process.serve import train
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.reference.ppo_step import decoupled_loss, grpo_advantages, sequence_logprobs
from tests.training.test_step import with_loss, with_sgd
from tests.training.tiny import learner_for, plain_model, random_batch, save_model

FLOAT16 = 2.0**-11
"""Relative error of a float16."""
CAP = 1.5


class Heavy(NamedTuple):
    """The result of a loss with one field per token."""

    loss: torch.Tensor
    weight: torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


class Slow:
    """Fields of one batch: sequence by sequence, token by token."""

    def __init__(self, model: Any, request: TrainBatchRequest, minibatches: int, lr: float) -> None:
        self.advantages = grpo_advantages(request.trajectories)
        self.proximal = [self._logprobs(model, one) for one in request.trajectories]
        self.entropy: list[list[float]] = [[] for _ in request.trajectories]
        self.logprobs: list[list[float]] = [[] for _ in request.trajectories]
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for members in split_by_group(request.trajectories, minibatches):
            for i in members:
                self.logprobs[i] = self._logprobs(model, request.trajectories[i])
                self.entropy[i] = self._entropy(model, request.trajectories[i])
            optimizer.zero_grad()
            decoupled_loss(
                model,
                [request.trajectories[i] for i in members],
                [self.advantages[i] for i in members],
                [self.proximal[i] for i in members],
                clip_epsilon=0.2,
                weight_cap=CAP,
            ).backward()
            optimizer.step()

    @staticmethod
    def _logprobs(model: Any, trajectory: Trajectory) -> list[float]:
        with torch.no_grad():
            return [float(value) for value in sequence_logprobs(model, trajectory)]

    @staticmethod
    def _entropy(model: Any, trajectory: Trajectory) -> list[float]:
        tokens = torch.tensor([[*trajectory.prompt_tokens, *trajectory.response_tokens]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        before_first = len(trajectory.prompt_tokens) - 1
        mask = trajectory.response_mask
        return [float(entropy[before_first + i]) for i, chosen in enumerate(mask) if chosen]


def behavior(trajectories: tuple[Trajectory, ...]) -> list[list[float]]:
    return [[lp for segment in t.segments for lp in segment.logprobs] for t in trajectories]


@pytest.mark.parametrize("max_tokens", [30, 4096])
def test_fields_equal_a_slow_recomputation(folder: Path, max_tokens: int) -> None:
    request = random_batch(groups=6, equal_groups=1)
    slow = Slow(plain_model(folder), request, minibatches=2, lr=0.02)
    learner = with_sgd(
        learner_for(
            folder, ppo_n_minibatches=2, behav_imp_weight_cap=CAP, max_tokens_per_mb=max_tokens
        ),
        lr=0.02,
    )
    outcome = train_batch(learner, request)
    fields = token_fields(outcome.advantages, outcome.records)

    assert fields.advantages.tolist() == pytest.approx(slow.advantages, abs=1e-5)
    trained = [i for i, advantage in enumerate(slow.advantages) if advantage != 0]
    assert fields.samples.tolist() == trained
    assert len(trained) < len(request.trajectories)
    assert fields.tokens.tolist() == [request.trajectories[i].generated_tokens for i in trained]

    def flat(rows: list[list[float]]) -> np.ndarray[Any, Any]:
        return np.array(list(chain.from_iterable(rows[i] for i in trained)))

    proximal, logprobs = flat(slow.proximal), flat(slow.logprobs)
    gap = proximal - flat(behavior(request.trajectories))
    move = logprobs - proximal
    assert fields.proximal_minus_behavior == pytest.approx(gap, abs=1e-4)
    assert fields.logprob_minus_proximal == pytest.approx(move, abs=1e-4)
    assert np.abs(move).max() > 1e-3  # the second minibatch is behind the first update
    assert fields.entropy == pytest.approx(flat(slow.entropy), abs=1e-4)
    weight = np.minimum(np.exp(gap), CAP)
    assert fields.loss["behavior_weight"] == pytest.approx(weight, abs=1e-4)
    ratio = np.exp(move)
    assert fields.loss["ratio"] == pytest.approx(ratio, abs=1e-4)
    clear = np.abs(np.abs(ratio - 1) - 0.2) > 1e-4
    assert fields.loss["clipped"].dtype == np.bool_
    clipped = np.abs(ratio - 1) > 0.2
    assert (fields.loss["clipped"] == clipped)[clear].all()


def test_the_file_keeps_the_fields_within_the_error_of_float16(
    folder: Path, tmp_path: Path
) -> None:
    outcome = train_batch(learner_for(folder, ppo_n_minibatches=2), random_batch())
    fields = token_fields(outcome.advantages, outcome.records)
    write_fields(tmp_path / "step.npz", fields)
    read = read_fields(tmp_path / "step.npz")
    for name in ("proximal_minus_behavior", "logprob_minus_proximal", "entropy"):
        exact, kept = getattr(fields, name), getattr(read, name)
        assert kept.dtype == np.float32
        assert np.abs(kept - exact).max() <= FLOAT16 * np.abs(exact).max()
        assert (np.abs(kept - exact) <= FLOAT16 * np.abs(exact) + 2.0**-25).all()
    assert (read.loss["clipped"] == fields.loss["clipped"]).all()
    assert (read.advantages == fields.advantages).all()
    assert [*tmp_path.iterdir()] == [tmp_path / "step.npz"]


def test_a_number_that_float16_cannot_hold_is_kept(folder: Path, tmp_path: Path) -> None:
    def heavy(logprobs: torch.Tensor, *rest: Any, **facts: Any) -> Heavy:
        del rest, facts
        return Heavy(logprobs.mean(), torch.full_like(logprobs, 1e6))

    outcome = train_batch(with_loss(learner_for(folder), heavy), random_batch())
    write_fields(tmp_path / "a.npz", token_fields(outcome.advantages, outcome.records))
    assert (read_fields(tmp_path / "a.npz").loss["weight"] == 1e6).all()


def test_a_loss_without_diagnostics_and_a_batch_without_gradient_have_fields(
    folder: Path, tmp_path: Path
) -> None:
    plain = train_batch(
        with_loss(learner_for(folder), lambda lp, *_, **__: PlainLoss(lp.mean())), random_batch()
    )
    assert token_fields(plain.advantages, plain.records).loss == {}
    equal = train_batch(learner_for(folder), random_batch(groups=2, equal_groups=2))
    write_fields(tmp_path / "a.npz", token_fields(equal.advantages, equal.records))
    read = read_fields(tmp_path / "a.npz")
    assert len(read.samples) == len(read.entropy) == 0
    assert read.advantages.tolist() == [0.0] * 8


def save_batch(run: Path, step: int, request: TrainBatchRequest) -> None:
    (run / "trajectories").mkdir(exist_ok=True)
    texts = [SampleText("p", "", None)] * len(request.trajectories)
    RunFolder(run).write_trajectories(step, request.trajectories, texts, special={})


def test_the_trainer_writes_them_only_if_asked(folder: Path, tmp_path: Path) -> None:
    request = random_batch(version=3)
    train(learner_for(folder), request, 3)
    assert not [*tmp_path.iterdir()]
    learner = learner_for(folder)
    settings = replace(learner.settings, fields_folder=str(tmp_path))
    result = train(replace(learner, settings=settings), request, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00004.npz"]
    assert result.spans[-1].name == "token fields"


def test_tokens_have_them_where_they_were_trained_on(folder: Path, tmp_path: Path) -> None:
    request = random_batch(groups=3, equal_groups=1, version=3)
    save_batch(tmp_path, 4, request)
    outcome = train_batch(learner_for(folder), request)
    fields = token_fields(outcome.advantages, outcome.records)
    before = read_samples(tmp_path)
    assert "entropy" not in before.tokens
    assert np.isnan(before.advantages).all()
    write_fields(fields_path(tmp_path / "trajectories", 4), fields)
    samples = read_samples(tmp_path, before)
    tokens = samples.tokens
    assert samples.advantages.tolist() == pytest.approx(fields.advantages.tolist())
    generated = tokens["versions"] >= 0
    omitted = np.isin(tokens["sample"], np.flatnonzero(fields.advantages == 0))
    assert omitted.any()
    assert (~generated).any()
    assert (np.isnan(tokens["entropy"]) == (omitted | ~generated)).all()
    trained = generated & ~omitted
    assert tokens["entropy"][trained] == pytest.approx(fields.entropy, rel=FLOAT16)
    assert tokens["clipped"][trained].tolist() == fields.loss["clipped"].tolist()
    gap = tokens["proximal_logprobs"] - tokens["behavior_logprobs"]
    assert gap[trained] == pytest.approx(fields.proximal_minus_behavior, rel=FLOAT16, abs=1e-6)
    assert tokens["advantages"][generated] == pytest.approx(
        fields.advantages[tokens["sample"][generated]]
    )
    mean = tokens.mean("entropy")
    assert math.isnan(mean[0])
    assert np.isfinite(mean[4:]).all()


def test_a_step_that_was_killed_before_its_fields_is_read_without_them(
    folder: Path, tmp_path: Path
) -> None:
    requests = [random_batch(seed, version=seed) for seed in (2, 3)]
    for request in requests:
        save_batch(tmp_path, request.version + 1, request)
    outcome = train_batch(learner_for(folder), requests[0])
    path = fields_path(tmp_path / "trajectories", 3)
    write_fields(path, token_fields(outcome.advantages, outcome.records))
    (path.parent / ".step-00004.npz.tmp").write_bytes(path.read_bytes()[:99])
    samples = read_samples(tmp_path)
    known = np.isfinite(samples.tokens["advantages"])
    steps = np.array([row.step for row in samples.rows])[samples.tokens["sample"]]
    assert set(steps[known]) == {3}
    assert not known[steps == 4].any()


def test_fields_of_other_samples_are_refused(folder: Path, tmp_path: Path) -> None:
    save_batch(tmp_path, 4, random_batch(1))
    outcome = train_batch(learner_for(folder), random_batch(2))
    path = fields_path(tmp_path / "trajectories", 4)
    write_fields(path, token_fields(outcome.advantages, outcome.records))
    with pytest.raises(ValueError, match=r"step-00004.npz has .* not those of step-00004.jsonl"):
        read_samples(tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"step-00004.npz cannot be read"):
        read_samples(tmp_path)
