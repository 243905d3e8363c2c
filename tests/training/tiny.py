"""Tiny random models and batches for the training tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_lab.config.schema import ActorConfig, OptimizerConfig, TrainConfig
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.settings import TrainerSettings

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that log-probs differ from uniform and gradients from zero.
    "initializer_range": 0.3,
}

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def save_model(
    folder: Path, *, kind: str = "llama", tied: bool = True, seed: int = 0, **shape: Any
) -> Path:
    """Write a random model to a Hugging Face folder; `shape` changes `SHAPE`."""
    torch.manual_seed(seed)
    config, model_class = ARCHITECTURES[kind]
    model: Any = model_class(config(**{**SHAPE, **shape}, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    return folder


def settings_for(
    folder: Path,
    *,
    weights_root: Path | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
    **actor: Any,
) -> TrainerSettings:
    """Settings that are gentle enough for tiny models; `more` are those outside of `actor`."""
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0, gradient_clipping=float("inf"))
    actor = {"optimizer": optimizer, "dtype": "float32", **actor}
    return TrainerSettings(
        config=TrainConfig(actor=ActorConfig(**actor)).with_settings(
            {"rollout.dtype": "float32", **more}
        ),
        model_path=str(folder),
        weights_root=str(weights_root or folder.parent / "weights"),
    )


def learner_for(folder: Path, **changes: Any) -> Learner:
    """Load the model and give it an optimizer."""
    return make_learner(load_policy(folder), settings_for(folder, **changes))


def plain_model(folder: Path) -> Any:
    """Load the model with the attention of transformers."""
    model = load_policy(folder)
    model.set_attn_implementation("sdpa")
    return model


def random_batch(
    seed: int = 0, *, groups: int = 4, samples: int = 4, version: int = 3, equal_groups: int = 0
) -> TrainBatchRequest:
    """Groups with a common prefix, repeated responses, several versions and observations.

    The rewards of the first `equal_groups` groups are all the same.
    """
    draw = random.Random(seed)

    def token() -> int:
        return draw.randrange(VOCABULARY)

    shared = tuple(token() for _ in range(5))
    trajectories = []
    for group in range(groups):
        prompt = shared + tuple(token() for _ in range(draw.randint(1, 3)))
        answers = [tuple(token() for _ in range(draw.randint(1, 4))) for _ in range(2)]
        for sample in range(samples):
            parts: list[Segment | Observation] = []
            for answer in draw.choices(answers, k=draw.randint(1, 2)):
                behavior = tuple(-draw.uniform(3.0, 6.0) for _ in answer)
                parts.append(Segment(answer, behavior, draw.randint(version - 2, version)))
                if draw.random() < 0.3:
                    parts.append(Observation((token(), token())))
            reward = 1.0 if group < equal_groups else float(sample % 2)
            trajectories.append(
                Trajectory(
                    group=group + 10,
                    sample=sample,
                    prompt_tokens=prompt,
                    parts=tuple(parts),
                    finish_reason="stop",
                    reward=reward,
                )
            )
    return TrainBatchRequest(version, tuple(trajectories))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters' gradients."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
