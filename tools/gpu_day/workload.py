"""Random models and batches of known shape: no file travels, and the speed is that of trained ones.

SHAPES --random_model--> a model on the device --learner_for--> a learner
groups x samples of one prompt and response length --random_batch--> TrainBatchRequest
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from areal_lab.config.schema import ActorConfig, OptimizerConfig, TrainConfig
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.models.folder import compute_dtype, read_model_shape
from areal_lab.resolve.memory import Trained, trainer_memory
from areal_lab.training.decoder_layers import enable_checkpointing
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.settings import TrainerSettings

_TINY: Final = "tiny"
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        _TINY: {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "Qwen2.5-0.5B": {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
        "Qwen2.5-1.5B": {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    }
)
"""Values of the models' config.json on Hugging Face."""


def config_of(name: str) -> Qwen2Config:
    """The configuration of a shape."""
    shape: Mapping[str, Any] = SHAPES[name]
    return Qwen2Config(
        **shape,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )


def random_model(
    name: str, *, attention: str, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A model with random weights, made on the device."""
    torch.manual_seed(0)
    with device:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config_of(name), attn_implementation=attention, dtype=dtype
        )
    made.eval()
    return made


def learner_for(model: PreTrainedModel, **actor: Any) -> Learner:
    """Give a model an optimizer and the default loss; `actor` are settings of training."""
    kept = actor.get("gradient_checkpointing", False)
    enable_checkpointing(model, kept)
    model.train(bool(kept))
    optimizer = OptimizerConfig(lr=1e-6, warmup_steps=0)
    config = TrainConfig(actor=ActorConfig(optimizer=optimizer, **actor))
    settings = TrainerSettings(
        config=config, model_path="", weights_root="", device=model.device.type
    )
    return make_learner(model, settings)


def random_batch(
    seed: int,
    *,
    vocabulary: int,
    groups: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: Callable[[random.Random], int],
) -> TrainBatchRequest:
    """Groups of samples with one prompt each; every other sample has the reward 1."""
    draw = random.Random(seed)
    trajectories = []
    for group in range(groups):
        prompt = random_tokens(draw, vocabulary, prompt_tokens)
        for sample in range(samples):
            response = random_tokens(draw, vocabulary, response_tokens(draw))
            trajectories.append(
                Trajectory(
                    group=group,
                    sample=sample,
                    prompt_tokens=prompt,
                    parts=(Segment(response, (-8.0,) * len(response), 0),),
                    finish_reason="stop",
                    reward=float(sample % 2),
                )
            )
    return TrainBatchRequest(0, tuple(trajectories))


def random_tokens(draw: random.Random, vocabulary: int, count: int) -> tuple[int, ...]:
    """Tokens without the first two, which may end or pad a sequence."""
    return tuple(draw.choices(range(2, vocabulary), k=count))


def step_flops(learner: Learner, request: TrainBatchRequest) -> float:
    """FLOPs that a batch needs, forward and backward: each shared prompt once, attention to the
    tokens before and none recomputed. The denominator of MFU is the card's peak.
    """
    cost, config = learner.cost, learner.model.config.get_text_config()
    tokens = pairs = predicted = 0.0
    prompts = {one.prompt_tokens for one in request.trajectories}
    for prompt in prompts:
        tokens += len(prompt)
        pairs += len(prompt) * (len(prompt) + 1) / 2
    for one in request.trajectories:
        before, inputs = len(one.prompt_tokens), len(one.response_tokens) - 1
        tokens += inputs
        pairs += inputs * before + inputs * (inputs + 1) / 2
        predicted += len(one.response_tokens)
    head = 2 * config.vocab_size * config.hidden_size
    forward = tokens * cost.linear_flops_per_token + pairs * cost.attention_flops_per_pair
    return float(3 * (forward + predicted * head))


def estimated_bytes(learner: Learner, name: str) -> int:
    """Bytes of tensors at the peak of a step, as `areal-lab doctor` estimates them."""
    actor, device = learner.settings.actor, learner.device.type
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        shape = read_model_shape(Path(folder))
    assert shape is not None
    size = Trained(parameters=sum(p.numel() for p in learner.model.parameters()))
    parts = trainer_memory(
        shape,
        size,
        actor,
        number_bytes=compute_dtype(actor.dtype, device).itemsize,
        tokens=actor.max_tokens_per_mb,
        cpu=device == "cpu",
    )
    return sum(part.bytes for part in parts)
