"""Advantages of a batch, and what its settings on long responses and on KL did to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.data.batch import SampleTokens, compared, sample_tokens
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.functional.advantages.gae import AdvantagesAndReturns
from areal_lab.functional.advantages.kl_rewards import adaptive_kl_coefficient
from areal_lab.functional.divergences.kl import KLEstimator, k1, k2, k3, kl_penalty
from areal_lab.functional.segments import Segments, segment_reduce
from areal_lab.training.objective.advantages import (
    AdvantageFacts,
    Advantages,
    asked_facts,
    asked_of,
    check_advantages,
    choose_length_penalty,
)
from areal_lab.training.settings import TrainerSettings

_ESTIMATORS: Final[dict[str, KLEstimator]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(slots=True)
class KLReward:
    """The penalty on the reward for the distance from the reference: how much a nat costs now.

    The policy that is charged is the one that sampled (pi_behav): its rewards are what a policy
    gradient is the gradient of.
    """

    coefficient: float
    """beta; changes from batch to batch if there is a target."""
    estimator: KLEstimator
    target: float
    """Target KL of a response, in nats; 0 keeps the coefficient constant."""
    horizon_samples: float

    def adapt(self, kl_of_response: float, samples: int) -> None:
        """The coefficient for the next batch (arXiv:1909.08593, section 2.2)."""
        if self.target:
            self.coefficient = float(
                adaptive_kl_coefficient(
                    self.coefficient,
                    kl_of_response,
                    target_kl=self.target,
                    gain=samples / self.horizon_samples,
                )
            )


def choose_kl_reward(settings: TrainerSettings) -> KLReward | None:
    """The penalty that the settings ask for; None if it is off."""
    actor = settings.actor
    if not actor.kl_ctl:
        return None
    return KLReward(
        coefficient=actor.kl_ctl,
        estimator=_ESTIMATORS[actor.kl_ctl_estimator],
        target=actor.kl_ctl_target,
        horizon_samples=actor.kl_ctl_horizon,
    )


class BatchAdvantages(NamedTuple):
    """Advantages of `N` trajectories with `T` tokens that the policy chose, without gradient."""

    of_samples: Float[Tensor, " N"]
    """Advantage of each trajectory; the mean if its tokens have separate ones."""
    of_tokens: Float[Tensor, " T"]
    tokens: SampleTokens
    returns: Float[Tensor, " T"] | None = None
    """Targets of the values; None without a critic."""
    differ: bool = False
    """True if the tokens of a trajectory have separate advantages."""
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed

    def nonzero(self) -> list[bool]:
        """Return whether any token of a sample has an advantage."""
        size = len(self.of_samples)
        largest = segment_reduce(self.of_tokens.abs(), self.tokens.ids(), size, reduce="max")
        return (largest > 0).tolist()


def batch_advantages(
    trajectories: Sequence[Trajectory],
    function: Advantages,
    *,
    kept: Sequence[int] | None = None,
    values: Float[Tensor, " T"] | None = None,
    bootstrap_values: Float[Tensor, " N"] | None = None,
    reference_logprobs: Float[Tensor, " T"] | None = None,
    kl_reward: KLReward | None = None,
) -> BatchAdvantages:
    """Advantages of a batch from its rewards, by token where the function asks for tokens.

    A function of samples gets one reward per sample, whatever number of rows it has, or one return
    per turn. One that asks for the mask of tokens gets rows as samples.

    Args:
        kept: indices of the samples that are trained on; None is all.
        kl_reward: charges each token; a function of samples gets the sum in the reward.
    """
    tokens = sample_tokens(trajectories)
    rows = tokens.ids()
    follows_tokens = "mask" in asked_facts(function)
    units = compared(trajectories, rows_apart=follows_tokens)
    rewards, ids = units.rewards, units.ids()
    mask = _mask_of(kept, len(trajectories))[rows]
    metrics: dict[str, float] = {}
    charged = None
    if kl_reward is not None and reference_logprobs is not None:
        kl = _kl(trajectories, reference_logprobs, mask, kl_reward)
        charged = -kl_reward.coefficient * kl
        metrics = _kl_metrics(kl, mask, kl_reward, len(trajectories) if kept is None else len(kept))
        if "token_rewards" not in asked_facts(function):
            rewards = rewards + segment_reduce(charged, ids, len(rewards))
    facts = AdvantageFacts(
        length_tokens=units.lengths,
        mask=mask,
        sequences=Segments(ids, len(rewards)),
        token_rewards=charged,
        values=values,
        bootstrap_values=bootstrap_values,
    )
    found = function(rewards, units.groups, **asked_of(function, facts))
    check_advantages(found, samples=len(rewards), tokens=len(ids))
    returns = found.returns.detach() if isinstance(found, AdvantagesAndReturns) else None
    if values is not None and returns is None:
        raise ValueError(
            "advantages that are made from values must be returned as AdvantagesAndReturns: the "
            "critic learns from the returns"
        )
    advantages = found.advantages if isinstance(found, AdvantagesAndReturns) else found
    advantages = advantages.detach()
    # With a token per sample both are the same.
    of_units = advantages.shape == rewards.shape and not follows_tokens
    of_tokens = advantages[ids] if of_units else advantages
    if of_units and len(rewards) == len(trajectories):
        return BatchAdvantages(advantages, of_tokens, tokens, returns, metrics=metrics)
    mean = segment_reduce(of_tokens, rows, len(trajectories), reduce="mean")
    if values is not None and returns is not None:
        metrics |= _value_metrics(values[mask], returns[mask])
    differ = not of_units or any(trajectory.turn_returns for trajectory in trajectories)
    return BatchAdvantages(mean, of_tokens, tokens, returns, differ=differ, metrics=metrics)


def _mask_of(kept: Sequence[int] | None, samples: int) -> Bool[Tensor, " N"]:
    mask = torch.ones(samples, dtype=torch.bool)
    if kept is not None:
        mask[:] = False
        mask[list(kept)] = True
    return mask


def _kl(
    trajectories: Sequence[Trajectory],
    reference_logprobs: Tensor,
    mask: Tensor,
    kl_reward: KLReward,
) -> Float[Tensor, " T"]:
    sampled = torch.tensor(
        [
            logprob
            for trajectory in trajectories
            for part in trajectory.parts
            if isinstance(part, Segment)
            for logprob in part.logprobs
        ]
    )
    return kl_penalty(sampled, reference_logprobs, mask, estimator=kl_reward.estimator)


def _kl_metrics(kl: Tensor, mask: Tensor, kl_reward: KLReward, samples: int) -> dict[str, float]:
    """Metrics of the KL penalty of this batch, from which the next coefficient follows."""
    of_token = float(kl[mask].double().mean()) if mask.any() else 0.0
    of_response = float(kl.double().sum()) / max(1, samples)
    metrics = {
        "reward_kl_mean": of_token,
        "reward_kl_of_response": of_response,
        "kl_coefficient": kl_reward.coefficient,
    }
    kl_reward.adapt(of_response, samples)
    return metrics


def _value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Share of the variance of the returns that the critic predicted."""
    if not len(returns):
        return {}
    values, returns = values.double(), returns.double()
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    spread = float(returns.var(correction=0))
    if spread > 0:
        unexplained = float((returns - values).var(correction=0))
        metrics["explained_variance"] = 1.0 - unexplained / spread
    return metrics


def overlong_metrics(
    settings: TrainerSettings, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Masked samples and the mean penalty, if the settings mask or penalize long responses."""
    metrics = {}
    if settings.actor.mask_truncated:
        metrics["masked_samples"] = float(sum(t.truncated for t in trajectories))
    if (penalty := choose_length_penalty(settings)) is not None:
        lengths = torch.tensor([t.generated_tokens for t in trajectories])
        metrics["overlong_penalty_mean"] = float(penalty(lengths).mean())
    return metrics
