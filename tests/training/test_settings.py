"""Settings cross the process border unchanged, and come from a run's configuration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from areal_lab.config.schema import ActorConfig, GenerationConfig, OptimizerConfig, TrainConfig
from areal_lab.training.settings import TrainerSettings, lr_factor, settings_from_config


def test_json_keeps_every_field_infinity_included() -> None:
    settings = TrainerSettings(
        model_path="here",
        weights_root="there",
        optimizer=OptimizerConfig(lr=0.25, gradient_clipping=math.inf),
        behavior_weight_cap=math.inf,
        minibatches=3,
        temperature=0.7,
    )
    assert TrainerSettings.from_json(settings.to_json()) == settings


def test_every_actor_setting_arrives() -> None:
    config = TrainConfig(
        seed=9,
        total_train_steps=7,
        gconfig=GenerationConfig(temperature=0.5),
        actor=ActorConfig(
            optimizer=OptimizerConfig(lr=0.125, lr_scheduler_type="cosine"),
            eps_clip=0.3,
            use_decoupled_loss=False,
            behav_imp_weight_cap=2.0,
            loss_fn="own:loss",
            adv_norm_std=False,
            ppo_n_minibatches=4,
            max_tokens_per_mb=77,
            dtype="float32",
            gradient_checkpointing=True,
            use_lora=True,
            lora_rank=5,
            lora_alpha=6,
            target_modules=["q_proj"],
        ),
    )
    config.rollout.dtype = "bfloat16"
    settings = settings_from_config(
        config, model_path=Path("/model"), threads=3, weights_root=Path("/weights")
    )
    assert settings == TrainerSettings(
        model_path="/model",
        weights_root="/weights",
        optimizer=OptimizerConfig(lr=0.125, lr_scheduler_type="cosine"),
        optimizer_steps=28,
        clip_epsilon=0.3,
        decoupled=False,
        behavior_weight_cap=2.0,
        loss_fn="own:loss",
        normalize_std=False,
        minibatches=4,
        max_tokens_per_microbatch=77,
        compute_dtype="float32",
        export_dtype="bfloat16",
        temperature=0.5,
        threads=3,
        seed=9,
        gradient_checkpointing=True,
        lora_rank=5,
        lora_alpha=6,
        target_modules=("q_proj",),
    )


def test_threads_of_the_configuration_win_and_greedy_is_scored_at_temperature_1() -> None:
    config = TrainConfig(actor=ActorConfig(threads=2), gconfig=GenerationConfig(temperature=0.0))
    settings = settings_from_config(
        config, model_path=Path("/model"), threads=8, weights_root=Path("/weights")
    )
    assert (settings.threads, settings.temperature) == (2, 1.0)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 3, 20])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.25, 1.0])
def test_the_learning_rate_rises_and_then_falls_as_transformers_has_it(
    kind: str, warmup_steps: int, min_lr_ratio: float
) -> None:
    steps = 12
    optimizer = OptimizerConfig(
        lr_scheduler_type=kind, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio
    )
    factors = [lr_factor(step, optimizer, steps) for step in range(steps)]
    for step, factor in enumerate(factors):
        if step < warmup_steps:
            assert factor == pytest.approx((step + 1) / warmup_steps)
            continue
        share = transformers_share(kind, step, warmup_steps, steps)
        assert factor == pytest.approx(min_lr_ratio + (1 - min_lr_ratio) * share)


def transformers_share(kind: str, step: int, warmup_steps: int, steps: int) -> float:
    """What `transformers.get_scheduler` multiplies the learning rate with."""
    torch_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(kind, torch_optimizer, warmup_steps, steps)
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    return float(schedule.lr_lambdas[0](step))


def test_a_learning_rate_that_falls_needs_to_know_until_when() -> None:
    with pytest.raises(ValueError, match="optimizer_steps is 0"):
        TrainerSettings(
            model_path="here",
            weights_root="there",
            optimizer=OptimizerConfig(lr_scheduler_type="linear"),
        )
