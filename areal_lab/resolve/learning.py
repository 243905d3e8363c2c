"""Settings under which a run trains and learns nothing: refused, or reported before the start.

Only settings are looked at here; losses and advantages that vanish are found by calling them once
(`areal_lab.training.objective.trial_call`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import OptimizerConfig, TrainConfig

_LEAST_TEMPERATURE: Final = 0.01
"""Two tokens whose logits differ by 0.25 differ by e^25 in probability: greedy decoding."""
_LOW_TEMPERATURE: Final = 0.2
_LEAST_TOP_P: Final = 0.01
"""Of a vocabulary, the most likely token alone has more than that in nearly every step."""
_LOW_TOP_P: Final = 0.2
_LEAST_LR: Final = 1e-10
"""An AdamW step changes a weight by about the learning rate. Next to a weight of 0.01, float32 has
no number closer than 9e-10."""
_LONG_WARMUP: Final = 10
"""Times the steps of a run, after which the learning rate reaches a tenth."""
_BINARY_REWARDS: Final = "areal_lab.rewards."
"""Functions of this package have rewards from 0 to 1."""


def cannot_learn(config: TrainConfig) -> Iterator[Problem]:
    """Settings with which all advantages, all updates or the whole loss are 0."""
    sampling = config.gconfig
    same = (
        "so that the responses to a prompt are all equal, their advantages are 0 and nothing is "
        "trained"
    )
    if sampling.temperature < _LEAST_TEMPERATURE:
        yield _wrong(
            "gconfig.temperature",
            f"gconfig.temperature is {sampling.temperature:g}, {same}; set it to 1.0 (at least "
            f"{_LEAST_TEMPERATURE:g}); greedy evaluation is evaluation.temperature=0",
        )
    if sampling.top_k == 1:
        yield _wrong(
            "gconfig.top_k",
            f"gconfig.top_k is 1, {same}; set it to -1, or at least 2",
        )
    if sampling.top_p < _LEAST_TOP_P:
        yield _wrong(
            "gconfig.top_p",
            f"gconfig.top_p is {sampling.top_p:g}, which keeps the most likely token alone, "
            f"{same}; set it to 1.0, or at least {_LEAST_TOP_P:g}",
        )
    teacher = config.teacher
    if teacher.path and not (teacher.rl_loss_weight or teacher.distill_loss_weight):
        yield _wrong(
            "teacher.distill_loss_weight",
            "teacher.distill_loss_weight and teacher.rl_loss_weight are both 0, so that the loss "
            "is 0 and nothing is trained; raise one of them",
        )
    if config.actor.use_lora and not config.actor.target_modules:
        yield _wrong(
            "actor.target_modules",
            "actor.target_modules is [], so that no layer gets an adapter and nothing is trained; "
            "set it to [all-linear]",
        )
    sampled, reward = config.rollout.dynamic_sampling, config.reward
    binary = reward.fn.startswith(_BINARY_REWARDS) and not (reward.weights or reward.kwargs)
    if sampled.enabled and sampled.tolerance >= 1 and binary:
        yield _wrong(
            "rollout.dynamic_sampling.tolerance",
            f"rollout.dynamic_sampling.tolerance is {sampled.tolerance:g}, but the rewards of "
            f"{reward.fn} are from 0 to 1, so that every group counts as equal and is filtered; "
            "set it below 1",
        )
    yield from rates_without_effect("actor.optimizer", config.actor.optimizer)


def rates_without_effect(setting: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Numbers of an optimizer with which its steps change no weight, or remove all of them."""
    if optimizer.lr < _LEAST_LR:
        yield _wrong(
            f"{setting}.lr",
            f"{setting}.lr is {optimizer.lr:g}, but float32 weights do not change by steps that "
            f"small; set it to at least {_LEAST_LR:g} (1e-6 to 1e-3 are usual)",
        )
    if optimizer.lr * optimizer.weight_decay >= 1:
        yield _wrong(
            f"{setting}.weight_decay",
            f"{setting}.weight_decay is {optimizer.weight_decay:g}, which times "
            f"lr={optimizer.lr:g} removes the weights in one step; set it below "
            f"{1 / optimizer.lr:g} (0 to 0.1 are usual)",
        )


def unlikely_to_learn(config: TrainConfig) -> list[str]:
    """Warn of settings with which hardly anything is learned, or only what few tasks need."""
    lines, sampling = [], config.gconfig
    if _LEAST_TEMPERATURE <= sampling.temperature < _LOW_TEMPERATURE:
        lines.append(
            f"gconfig.temperature={sampling.temperature:g} makes most responses to a prompt equal, "
            "and equal rewards train nothing; 1.0 is usual"
        )
    if _LEAST_TOP_P <= sampling.top_p < _LOW_TOP_P:
        lines.append(
            f"gconfig.top_p={sampling.top_p:g} makes most responses to a prompt equal, and equal "
            "rewards train nothing; 1.0 is usual"
        )
    if sampling.max_new_tokens == 1:
        lines.append("gconfig.max_new_tokens=1 ends each response after its first token")
    if config.reward.weights and not any(config.reward.weights.values()):
        lines.append(
            "reward.weights are all 0: the reward is 0 but for components without a weight"
        )
    if config.teacher.path and not config.teacher.distill_loss_weight:
        lines.append("teacher.path has no effect with teacher.distill_loss_weight=0")
    steps = config.total_train_steps * config.actor.ppo_n_minibatches
    return [*lines, *slow_rates("actor.optimizer", config.actor.optimizer, steps)]


def slow_rates(setting: str, optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    """Warn of an optimizer whose steps stay far below its learning rate.

    Args:
        setting: the group of its settings.
        optimizer: its numbers.
        steps: optimizer steps of the run.
    """
    if optimizer.warmup_steps > _LONG_WARMUP * steps:
        yield (
            f"{setting}.warmup_steps={optimizer.warmup_steps} is more than the {steps} optimizer "
            f"steps of the run, so that the learning rate only reaches "
            f"{steps / optimizer.warmup_steps:.1%} of lr"
        )
    if optimizer.gradient_clipping <= 10 * optimizer.eps:
        most = optimizer.gradient_clipping / (optimizer.gradient_clipping + optimizer.eps)
        yield (
            f"{setting}.gradient_clipping={optimizer.gradient_clipping:g} is not large against "
            f"eps={optimizer.eps:g}, so that steps are at most {most:.2g} of lr"
        )


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)
