"""Gradients by lag: they are the trainer's, their noise is subtracted, and the page has them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_lab.functional.staleness.gradient_spread import gradient_spread_by_lag
from areal_lab.training.learner import make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch
from benchmarks.harness import parse
from cosim.load import resolve_cosim
from reproductions.learning import gradients_by_lag
from reproductions.learning.gradients.bias_and_variance import (
    FIRST,
    LAST,
    Point,
    Size,
    points,
    squared_norm,
)
from reproductions.learning.gradients.findings import findings
from reproductions.learning.gradients.old_samples import Samples, Training, tensors_of, train
from reproductions.learning.gradients.per_sample import (
    ANCHOR,
    DECOUPLED,
    IMPORTANCE,
    NAIVE,
    gradients,
    logprobs,
    losses,
    per_sample_gradients,
)
from reproductions.learning.gradients.picture import LOOKS
from reproductions.learning.gradients.pooled import Points, cosine, jackknife
from reproductions.report.results import load
from reproductions.report.show import draw, to_markdown
from simulator.stats.statistics import estimate

SMALL = (
    *("dataset.batch_size=8", "gconfig.n_samples=4", "actor.optimizer.lr=3e-3"),
    *("evaluation.max_problems=0", "actor.optimizer.gradient_clipping=1e9"),
)
OLD, PROXIMAL, NOW = 1, 5, 8
"""Updates of a run of two steps of four minibatches: far enough for clips to matter."""
GROUPS = range(8)


@cache
def trained() -> Training:
    torch.set_num_threads(1)
    return train(SMALL, 2, {OLD, PROXIMAL, NOW})


@cache
def old_rows() -> tuple[Any, ...]:
    return tuple(trained().generate(OLD, GROUPS, "old"))


def old_samples() -> Samples:
    return tensors_of(old_rows(), trained().config)


def known(weights: int, samples: Samples) -> Tensor:
    with torch.no_grad():
        return logprobs(
            trained().model, trained().weights[weights], samples.tokens, samples.mask.shape[1]
        )


def each_of(name: str, samples: Samples, theta: int, proximal: int) -> Tensor:
    tokens = float(samples.mask.sum()) / len(samples.mask)
    found = per_sample_gradients(
        trained().model,
        trained().weights[theta],
        [losses(trained().config)[name]],
        samples,
        known(proximal, samples),
        tokens_per_sample=tokens,
    )
    return found[:, 0]


@pytest.mark.parametrize("name", [NAIVE, DECOUPLED])
def test_they_average_to_the_gradient_of_the_trainer(name: str) -> None:
    config = trained().config.model_copy(deep=True)
    config.actor.use_decoupled_loss = name == DECOUPLED
    config.actor.ppo_n_minibatches = 1
    model = load_policy(resolve_cosim(config).model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(trained().weights[NOW][parameter_name])
    learner = make_learner(model, TrainerSettings(config=config, model_path="", weights_root=""))
    train_batch(learner, TrainBatchRequest(0, tuple(row.trajectory() for row in old_rows())))
    trainers = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    ours = each_of(name, old_samples(), NOW, NOW).mean(0)
    assert float(trainers.norm()) > 0.1
    torch.testing.assert_close(ours, trainers, rtol=1e-4, atol=1e-5 * float(trainers.norm()))


@pytest.mark.parametrize("name", [NAIVE, DECOUPLED, ANCHOR, IMPORTANCE])
def test_blocks_and_variance_are_those_of_the_samples(name: str) -> None:
    samples, one = old_samples(), losses(trained().config)[name]
    each = each_of(name, samples, NOW, PROXIMAL)
    found = gradients(
        trained().model,
        trained().weights[NOW],
        [one],
        samples,
        known(PROXIMAL, samples),
        block=16,
    )
    torch.testing.assert_close(found.blocks[:, 0], each.reshape(2, 16, -1).mean(1))
    spread = gradient_spread_by_lag(each, torch.zeros(len(each), dtype=torch.long), bins=1)
    assert float(found.variance) == pytest.approx(float(spread.variance), rel=1e-4)
    # The same by the loss of the whole batch.
    theta = {n: t.clone().requires_grad_() for n, t in trained().weights[NOW].items()}
    own = logprobs(trained().model, theta, samples.tokens, samples.mask.shape[1])
    advantages = samples.advantages[:, None].expand_as(own)
    result: Any = one(
        own, known(PROXIMAL, samples), samples.behavior_logprobs, advantages, samples.mask
    )
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(result.loss, list(theta.values()))])
    torch.testing.assert_close(found.blocks[:, 0].mean(0), whole, rtol=1e-3, atol=1e-6)
    clips = 0 if name == IMPORTANCE else 0.01
    assert float(found.clipped) >= clips
    assert (name == IMPORTANCE) == (float(found.clipped) == 0)


def test_on_policy_all_losses_have_one_gradient() -> None:
    samples = trained().sample(NOW, GROUPS, "old")
    reference = each_of(IMPORTANCE, samples, NOW, NOW)
    for name in (NAIVE, DECOUPLED, ANCHOR):
        found = each_of(name, samples, NOW, NOW)
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5 * float(reference.max()))
    assert float(each_of(NAIVE, old_samples(), NOW, NOW).sub(reference).norm()) > 1e-3


def test_log_probs_are_those_of_the_sampler() -> None:
    samples = old_samples()
    ours = known(OLD, samples)[samples.mask]
    torch.testing.assert_close(ours, samples.behavior_logprobs[samples.mask], rtol=0, atol=1e-5)


def test_weights_after_the_last_update_are_those_of_the_run(tmp_path: Path) -> None:
    trained().policy.save(tmp_path)
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    for name, tensor in saved.items():
        ours = trained().weights[NOW][name]
        torch.testing.assert_close(ours.to(tensor.dtype), tensor, rtol=0, atol=0)


def test_noise_of_means_is_subtracted_from_their_square() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((50,), 0.2)
    found = [squared_norm(mean + torch.randn(6, 50, generator=generator))[0] for _ in range(2_000)]
    spread = torch.tensor(found)
    error = float(spread.std()) / len(found) ** 0.5
    assert float(spread.mean()) == pytest.approx(float(mean.square().sum()), abs=4 * error)
    assert error < 0.1


def planted(lr: float, seed: int, place: str, lag: int, loss: str) -> Point:
    """Decoupled has no bias and half of naive's variance; half of naive's gradient is missing."""
    naive = loss == NAIVE and lag > 0
    wobble = 0.01 * seed
    return Point(
        lr=lr,
        seed=seed,
        place=place,
        lag=lag,
        loss=loss,
        squared_norm=0.25 if naive else 1.0,
        squared_bias=(0.25 if naive else 0.0) + wobble,
        noise=0.5,
        squared_cut=0.125 if naive else 0.0,
        raw_cosine=0.7,
        ceiling=0.8,
        variance=(4.0 if naive else 2.0) + wobble,
        scale=3.0,
        clipped=0.0825 if naive else 0.0,
        drift=0.01 * lag,
        effective=0.9,
        largest_ratio=1.0 + lag,
        reward=0.5,
    )


def study(seeds: int = 3) -> Points:
    cells = product((3e-4, 1e-4), range(1, seeds + 1), (FIRST, LAST), (0, 1, 8), LOOKS)
    return Points([planted(*cell) for cell in cells])


def test_squared_norms_give_the_cosine() -> None:
    goal, other = torch.eye(2)
    mean = 0.5 * goal + 0.3 * other
    own = replace(
        planted(3e-4, 1, FIRST, 8, NAIVE),
        squared_norm=float(mean.square().sum()),
        squared_bias=float((mean - goal).square().sum()),
    )
    assert own.share == pytest.approx(0.5)
    assert cosine([own]).mean == pytest.approx(float(torch.cosine_similarity(mean, goal, dim=0)))


def test_the_jackknife_of_a_mean_is_the_interval_of_student() -> None:
    values = [0.3, 0.9, 0.4, 0.2]
    ours, expected = jackknife(values, fmean), estimate(values)
    assert (ours.mean, ours.low, ours.high) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )


def test_the_sentences_have_the_numbers() -> None:
    explained, weight, verdict = findings(study())
    assert "that fits naive's loss. One minibatch's gradient is farther" in explained
    assert "at learning rate 0.0003 the cosine is" in weight
    worse = "squared bias (4 of 4), part removed by the clip (4 of 4), variance (4 of 4), minibatch"
    assert f"beyond the intervals in {worse} cosine (4 of 4), and better in nothing." in verdict
    rows = {row.name: row.ours for row in gradients_by_lag.build(stored(study())).rows}
    assert len(rows) == 16
    name = "learning rate 0.0003, before the first minibatch: variance, naive minus decoupled"
    assert rows[name].mean == pytest.approx(2)
    (lines,) = gradients_by_lag.build(stored(study())).tables.values()
    assert (lines[0]["loss"], lines[0]["squared bias"]) == ("naive", "0.27 ± 0.02")
    assert lines[0]["removed by the clip"] == "0.12 ± 0.00"


def stored(numbers: Points) -> dict[str, Any]:
    """As `measure` returns them, by way of JSON."""
    columns: dict[str, Any] = json.loads(json.dumps(numbers.to_columns()))
    return {"points": columns}


def test_equal_losses_cannot_be_told_apart() -> None:
    equal = [
        replace(planted(one.lr, one.seed, one.place, one.lag, DECOUPLED), loss=one.loss)
        for one in study().points
    ]
    told = findings(Points(equal))
    assert "beyond the intervals in nothing, and better in nothing." in told[-1]
    assert "a larger bias of naive is not beyond the intervals everywhere. But with" in told[0]


def test_the_page_and_picture_are_made_from_the_stored_numbers(tmp_path: Path) -> None:
    assert Points.from_columns(stored(study())["points"]).points == study().points
    result = gradients_by_lag.build(stored(study()))
    draw(result, tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").stat().st_size > 10_000
    assert "| 0.0003 | first minibatch | naive |" in to_markdown(result)


def test_the_packaged_result_can_be_shown(tmp_path: Path) -> None:
    result = gradients_by_lag.recorded(parse(None, argv=[]))
    found = Points.from_columns(result.data["points"])
    assert found.lags == list(gradients_by_lag.SIZE.lags)
    assert found.rates == sorted(gradients_by_lag.RATES, reverse=True)
    saved = load("gradients_by_lag")
    assert found.seeds == saved.seeds
    assert saved.command in result.origin
    assert [row.to_json() for row in saved.rows] == [row.to_json() for row in result.rows]
    draw(result, tmp_path / "gradients.png")


@pytest.mark.slow
def test_a_short_measurement() -> None:
    found = points(3e-4, 1, Size(version=3, lags=(0, 2), blocks=2))
    assert len(found) == 2 * 2 * 4
    on_policy = [one for one in found if (one.place, one.lag) == (FIRST, 0)]
    for one in on_policy:
        assert one.drift < 1e-5
        assert one.squared_cut == pytest.approx(0, abs=1e-6)
        assert one.squared_norm == pytest.approx(on_policy[0].squared_norm, rel=1e-3)
        # The second on-policy set is this one.
        assert one.raw_cosine == pytest.approx(one.ceiling, abs=1e-4)
    moved = {one.place: one.drift for one in found if one.lag == 2}
    assert 0 < moved[FIRST] < moved[LAST]
