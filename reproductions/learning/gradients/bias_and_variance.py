r"""Bias and variance of the gradients of old samples, by lag and loss, free of sampling noise.

    blocks of old samples  m_b [B, P]        their mean m, whose squared norm holds noise:
    blocks on policy       g_b [B, P]        |mean|^2 - trace(Cov of a block) / B  is unbiased

The blocks are minibatches of the trainer, and those of one number have the same prompts. Of m, of
the on-policy gradient g and of m - g the squared norms give the bias, the share of g that is in m
and the cosine between them, as many samples would show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.functional.losses.policy import PolicyLoss
from areal_lab.functional.losses.reinforce import importance_sampling
from areal_lab.functional.staleness.diagnostics import off_policy_diagnostics
from areal_lab.functional.staleness.gradient_spread import gradient_spread_by_lag
from reproductions.learning.gradients.old_samples import Samples, Training, train
from reproductions.learning.gradients.per_sample import (
    IMPORTANCE,
    Gradients,
    gradients,
    logprobs,
    losses,
)

FIRST, LAST = "first minibatch", "last minibatch"
_REFERENCES: Final = 4
"""Times as many samples for the on-policy gradient as for a lag."""
_MINIBATCHES: Final = 4
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One loss on samples of one lag; squares are relative to that of the on-policy gradient."""

    lr: float
    seed: int
    place: str
    """The weights that the gradients are taken at: before the `FIRST` or the `LAST` minibatch."""
    lag: int
    """Versions between the samples and the weights before the first minibatch."""
    loss: str
    squared_norm: float
    """Of the mean gradient; sampling noise is subtracted, so that it may be negative."""
    squared_bias: float
    """Of the mean gradient minus the on-policy one; may be negative, too."""
    noise: float
    """What was subtracted from the squared bias."""
    squared_cut: float
    """Of the mean gradient minus that of importance sampling on the same samples: what a clip, a
    cap or a missing weight changes. It has little noise, which is subtracted."""
    raw_cosine: float
    """Cosine of the two means with their noise."""
    ceiling: float
    """The same of a second on-policy set with as many samples as the lag has."""
    variance: float
    """Trace of the covariance of a sample's gradient over that of an on-policy sample."""
    scale: float
    """Trace of the covariance of a minibatch's gradient over the squared on-policy norm."""
    clipped: float
    """Share of tokens with an advantage that the clip leaves without a gradient."""
    drift: float
    """Mean |log pi_theta - log pi_behav| over tokens."""
    effective: float
    """Effective sample size of the token ratios pi_theta / pi_behav over the tokens."""
    largest_ratio: float
    """Largest pi_theta / pi_behav of a token."""
    reward: float
    """Mean of the samples."""

    @property
    def share(self) -> float:
        """Length of the mean gradient along the on-policy one, over the length of that."""
        return (self.squared_norm + 1 - self.squared_bias) / 2

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with four digits."""
        return {
            name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is sampled."""

    version: int
    """Training steps before the gradients are taken."""
    lags: tuple[int, ...]
    """Each below `version`."""
    blocks: int
    """Minibatches sampled for each lag."""


def points(lr: float, seed: int, size: Size) -> list[Point]:
    """Train, sample, and measure all losses at all lags, before the first and last minibatch."""
    now, minibatches = _MINIBATCHES * size.version, f"actor.ppo_n_minibatches={_MINIBATCHES}"
    places = {FIRST: now, LAST: now + _MINIBATCHES - 1}
    updates = {lag: _MINIBATCHES * (size.version - lag) for lag in size.lags}
    settings = [f"actor.optimizer.lr={lr}", f"seed={seed}", minibatches]
    training = train(settings, size.version + 1, {*updates.values(), *places.values()})
    groups = range(size.blocks * training.config.dataset.batch_size // _MINIBATCHES)
    old = {lag: training.sample(updates[lag], groups, "old") for lag in size.lags}
    found = []
    for place, theta in places.items():
        reference = _Reference.measured(training, theta, groups)
        for lag, samples in old.items():
            fields = {"lr": lr, "seed": seed, "place": place, "lag": lag}
            found += _points(training, (now, theta), samples, reference, fields)
    return found


class _Reference(NamedTuple):
    """The on-policy gradient at some weights."""

    blocks: Float[Tensor, "B P"]
    """Each of several times as many samples as a lag has in a block."""
    second: Float[Tensor, " P"]
    """The mean gradient of a set of its own, with as many samples as a lag has."""
    squared_norm: float
    variance: float
    """Trace of the covariance of one sample's gradient."""

    @classmethod
    def measured(cls, training: Training, theta: int, groups: range) -> _Reference:
        """Sample the prompts again, under the weights themselves."""
        draws = [f"on policy {number}" for number in range(_REFERENCES)]
        own = [
            _gradients(training, (theta, theta), training.sample(theta, groups, draw))
            for draw in ("old", *draws)
        ]
        # With the random numbers of the old samples: at lag 0 and the first minibatch, these.
        second, *others = (one.blocks[:, 0] for one in own)
        blocks = torch.stack(others).mean(0)
        variance = float(torch.stack([one.variance for one in own]).mean())
        return cls(blocks, second.mean(0), squared_norm(blocks)[0], variance)


def _points(
    training: Training,
    weights: tuple[int, int],
    samples: Samples,
    reference: _Reference,
    fields: dict[str, Any],
) -> list[Point]:
    """All losses on the samples of one lag."""
    functions = losses(training.config)
    own = _gradients(training, weights, samples, tuple(functions.values()))
    with torch.no_grad():
        now = logprobs(
            training.model, training.weights[weights[1]], samples.tokens, samples.mask.shape[1]
        )
    moved = off_policy_diagnostics(now, samples.behavior_logprobs, samples.mask, quantiles=(1.0,))
    unit = reference.squared_norm
    unclipped = own.blocks[:, list(functions).index(IMPORTANCE)]
    found = []
    for number, loss in enumerate(functions):
        blocks = own.blocks[:, number]
        square, noise_of_square = squared_norm(blocks)
        bias, noise = squared_norm(blocks - reference.blocks)
        mean, goal = blocks.mean(0), reference.blocks.mean(0)
        found.append(
            Point(
                **fields,
                loss=loss,
                squared_norm=square / unit,
                squared_bias=bias / unit,
                noise=noise / unit,
                squared_cut=squared_norm(blocks - unclipped)[0] / unit,
                raw_cosine=float(torch.cosine_similarity(mean, goal, dim=0)),
                ceiling=float(torch.cosine_similarity(reference.second, goal, dim=0)),
                variance=float(own.variance[number]) / reference.variance,
                scale=noise_of_square * len(blocks) / unit,
                clipped=float(own.clipped[number]),
                drift=float(moved.mean_absolute_log_ratio),
                effective=float(moved.effective_sample_share),
                largest_ratio=float(moved.weight_quantiles[0]),
                reward=float(samples.rewards.mean()),
            )
        )
    return found


def _gradients(
    training: Training,
    weights: tuple[int, int],
    samples: Samples,
    functions: Sequence[PolicyLoss] = (importance_sampling,),
) -> Gradients:
    """Gradients at the weights of the second number; those of the first are proximal."""
    proximal, theta = (training.weights[number] for number in weights)
    model, count = training.model, samples.mask.shape[1]
    with torch.no_grad():
        known = logprobs(model, proximal, samples.tokens, count)
    config = training.config
    block = config.dataset.batch_size // _MINIBATCHES * config.gconfig.n_samples
    return gradients(model, theta, functions, samples, known, block=block)


def squared_norm(blocks: Float[Tensor, "B P"]) -> tuple[float, float]:
    """Squared norm of the mean without its noise, and that noise."""
    together = torch.zeros(len(blocks), dtype=torch.long)
    spread = gradient_spread_by_lag(blocks, together, bins=1)
    noise = float(spread.variance) / len(blocks)
    return float(spread.norm) ** 2 - noise, noise
