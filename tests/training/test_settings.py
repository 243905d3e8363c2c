"""Settings cross the process border unchanged, and come from a run's configuration."""

from __future__ import annotations

import math
from pathlib import Path

from areal_lab.config import ActorConfig, GenerationConfig, OptimizerConfig, TrainConfig
from areal_lab.training.settings import TrainerSettings, settings_from_config


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
        gconfig=GenerationConfig(temperature=0.5),
        actor=ActorConfig(
            optimizer=OptimizerConfig(lr=0.125),
            eps_clip=0.3,
            use_decoupled_loss=False,
            behav_imp_weight_cap=2.0,
            loss_fn="own:loss",
            adv_norm_std=False,
            ppo_n_minibatches=4,
            max_tokens_per_mb=77,
            dtype="float32",
            gradient_checkpointing=True,
        ),
    )
    config.rollout.dtype = "bfloat16"
    settings = settings_from_config(
        config, model_path=Path("/model"), threads=3, weights_root=Path("/weights")
    )
    assert settings == TrainerSettings(
        model_path="/model",
        weights_root="/weights",
        optimizer=OptimizerConfig(lr=0.125),
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
    )


def test_threads_of_the_configuration_win_and_greedy_is_scored_at_temperature_1() -> None:
    config = TrainConfig(actor=ActorConfig(threads=2), gconfig=GenerationConfig(temperature=0.0))
    settings = settings_from_config(
        config, model_path=Path("/model"), threads=8, weights_root=Path("/weights")
    )
    assert (settings.threads, settings.temperature) == (2, 1.0)
