"""Settings cross the process border unchanged, and come from a run's configuration."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from areal_lab.config.schema import GenerationConfig, OptimizerConfig, RolloutConfig, TrainConfig
from areal_lab.training.process.output import export_dtype
from areal_lab.training.settings import TrainerSettings, lr_factor


def test_json_keeps_every_setting_infinity_included() -> None:
    config = TrainConfig(total_train_steps=7).with_settings(
        {
            "rollout.max_head_offpolicyness": math.inf,
            "actor.optimizer.gradient_clipping": math.inf,
            "actor.ppo_n_minibatches": 4,
            "actor.target_modules": ["q_proj"],
            "rollout.max_engine_restarts": 1,
        }
    )
    settings = TrainerSettings(config=config, model_path="here", weights_root="there", threads=3)
    assert TrainerSettings.from_json(settings.to_json()) == settings
    assert (settings.optimizer_steps, settings.kept_versions) == (28, 2)


def test_greedy_samples_are_scored_at_temperature_1() -> None:
    for temperature, expected in ((0.0, 1.0), (0.5, 0.5)):
        config = TrainConfig(gconfig=GenerationConfig(temperature=temperature))
        settings = TrainerSettings(config=config, model_path="here", weights_root="there")
        assert settings.temperature == expected


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


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_weights_are_exported_in_the_type_of_the_engines_device(
    monkeypatch: pytest.MonkeyPatch, dtype: str, device: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr("areal_lab.models.folder.fast_bfloat16", lambda: False)
    settings = TrainerSettings(
        config=TrainConfig(rollout=RolloutConfig(dtype=dtype)),  # type: ignore[arg-type]
        model_path="",
        weights_root="",
        engine_device=device,
    )
    assert export_dtype(settings) == expected
