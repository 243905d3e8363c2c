"""What each setting may be: one of some names, or a number between bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from areal_lab.config.load import nearest, settings
from areal_lab.config.schema import TrainConfig
from areal_lab.control.order import ORDERS
from areal_lab.control.routing import ROUTINGS
from areal_lab.control.schedule import SCHEDULES
from areal_lab.data.sources import DATASET_TYPES
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer

CHOICES: dict[str, tuple[str, ...]] = {
    "dataset.type": DATASET_TYPES,
    "rollout.schedule": SCHEDULES,
    "rollout.batch_order": ORDERS,
    "rollout.routing": tuple(ROUTINGS),
    "rollout.pause_mode": tuple(mode.value for mode in PauseMode),
    "rollout.transfer": tuple(transfer.value for transfer in Transfer),
    "rollout.dtype": ("auto", "float32", "bfloat16"),
    "actor.dtype": ("auto", "float32", "bfloat16"),
    "actor.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
}
"""Settings that name one of several things."""

BOUNDS: tuple[tuple[str, Sequence[str], Callable[[float], bool]], ...] = (
    (
        "an integer >= 1",
        (
            "total_train_steps", "dataset.batch_size", "gconfig.n_samples",
            "gconfig.max_new_tokens", "rollout.engines", "rollout.max_running_requests",
            "actor.ppo_n_minibatches", "actor.max_tokens_per_mb", "actor.lora_rank",
            "actor.lora_alpha", "reward.workers", "evaluation.samples_per_problem",
        ),
        lambda value: value >= 1,
    ),
    (
        "an integer >= 0",
        (
            "save_every_steps", "evaluation.max_problems", "dataset.eval_size", "dataset.few_shot",
            "rollout.threads", "rollout.max_concurrent_rollouts", "actor.threads",
            "actor.optimizer.warmup_steps", "rollout.max_engine_restarts",
        ),
        lambda value: value >= 0,
    ),
    (
        "a finite number > 0",
        (
            "actor.optimizer.lr", "actor.optimizer.eps", "actor.eps_clip",
            "rollout.request_timeout_s", "reward.timeout_s", "rollout.ready_timeout_s",
            "rollout.health_interval_s", "rollout.health_timeout_s", "rollout.stall_timeout_s",
            "rollout.transfer_timeout_s",
        ),
        lambda value: 0 < value < math.inf,
    ),
    (
        "a finite number >= 0",
        ("gconfig.temperature", "actor.optimizer.weight_decay"),
        lambda value: 0 <= value < math.inf,
    ),
    ("a number >= 0", ("rollout.max_lag",), lambda value: value >= 0),
    (
        "> 0 (infinity switches it off)",
        ("actor.optimizer.gradient_clipping", "actor.behav_imp_weight_cap"),
        lambda value: value > 0,
    ),
    (
        "in [0, 1)",
        ("actor.optimizer.beta1", "actor.optimizer.beta2"),
        lambda value: 0 <= value < 1,
    ),
    (
        "in [0, 1]",
        ("actor.optimizer.min_lr_ratio", "reward.max_error_rate"),
        lambda value: 0 <= value <= 1,
    ),
    ("in (0, 1]", ("gconfig.top_p",), lambda value: 0 < value <= 1),
    ("-1 (the whole vocabulary) or >= 1", ("gconfig.top_k",), lambda v: v == -1 or v >= 1),
    ("in 0 (any free one) to 65535", ("rollout.port",), lambda value: 0 <= value <= 65535),
)  # fmt: skip
"""What numbers must be: words, settings, test. NaN passes no test."""


def check_choices(config: TrainConfig) -> None:
    """Settings that name something name something known.

    Raises:
        ValueError: with the names there are, and the nearest of them.
    """
    for name, known in CHOICES.items():
        value = value_of(config, name)
        if value not in known:
            hint = nearest(value, known)
            raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(known)}{hint}")


def check_numbers(config: TrainConfig) -> None:
    """Numbers lie within their bounds.

    Raises:
        ValueError: with the bound and the default.
    """
    for words, names, holds in BOUNDS:
        for name in names:
            value = value_of(config, name)
            if not holds(value):
                raise ValueError(f"{name} is {value}, but must be {words}{_default(name)}")


def value_of(config: TrainConfig, name: str) -> Any:
    """The value of a setting by its dotted path."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _default(name: str) -> str:
    default = next(setting.default for setting in settings() if setting.name == name)
    return f"; the default is {default}"
