"""Tiny vision-language models with random weights, and what transformers says about sequences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from areal_lab.data.images import EncodedImage, EncodedPrompt, PlacedImage, place_images
from areal_lab.data.images import image_of_picture as image_of
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.models.image_features import ImagePixels
from areal_lab.models.vision import VisionFacts, read_vision_facts

END, IMAGE, VIDEO, START, STOP = 1, 2, 3, 4, 5
"""Tokens with a meaning."""
VOCABULARY: Final = 40
FACTS: Final = VisionFacts(
    image_token=IMAGE,
    start_token=START,
    end_token=STOP,
    patch=14,
    merge=2,
    min_pixels=784,
    max_pixels=784 * 16,
)
"""Of all models here."""
KINDS: Final = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
_VISION: Final[dict[str, dict[str, Any]]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}


def write_vision_model(
    folder: Path, kind: str = "qwen2_vl", *, seed: int = 0, tied: bool = True
) -> Path:
    """Write a random model with the settings of its image processor, and no tokenizer."""
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10_000.0,
        },
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": 0,
        # Large enough that distributions are uneven and depend on the pictures.
        "initializer_range": 0.2,
    }
    if kind == "qwen3_vl":
        text["head_dim"] = 16
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "initializer_range": 0.2,
        **_VISION[kind],
    }
    config_class, model_class = KINDS[kind]
    config = config_class(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    torch.manual_seed(seed)
    model: Any = model_class(config)
    model.save_pretrained(folder)
    settings = {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 784 * 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(seed: int, width: int = 56, height: int = 28) -> EncodedImage:
    """A picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image_of(Image.fromarray(pixels))


def facts_of(folder: Path) -> VisionFacts:
    facts = read_vision_facts(folder)
    assert facts is not None
    return facts


def prompts_with_pictures(facts: VisionFacts) -> list[EncodedPrompt]:
    """Two pictures behind equal tokens; two sizes; both in one prompt; and no picture at all."""
    one, other, large = picture(1), picture(2), picture(3, 84, 56)
    shown = [START, IMAGE, STOP]
    given: list[tuple[list[EncodedImage], list[int]]] = [
        ([one], [7, *shown, 9]),
        ([other], [7, *shown, 9]),
        ([large], [7, *shown, 9]),
        ([one, large], [7, *shown, 8, *shown, 10]),
        ([], [7, 8, 9]),
    ]
    return [place_images(tokens, images, facts) for images, tokens in given]


def batch_with_pictures(facts: VisionFacts, samples: int = 3, *, seed: int = 1) -> list[Trajectory]:
    """Groups with pictures, sizes and repeated responses; one has none."""
    rng = random.Random(seed)
    trajectories = []
    for group, prompt in enumerate(prompts_with_pictures(facts)):
        again = words(rng, 3)
        for sample in range(samples):
            tokens = again if sample < 2 else words(rng, 2)
            trajectories.append(
                Trajectory(
                    group=group,
                    sample=sample,
                    prompt_tokens=prompt.tokens,
                    images=prompt.images,
                    parts=(Segment(tokens, tuple(-3.0 for _ in tokens), 0),),
                    finish_reason="stop",
                    reward=float(sample % 2),
                )
            )
    return trajectories


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    """Tokens that mean nothing."""
    return tuple(rng.randrange(6, VOCABULARY) for _ in range(count))


def plain(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_logits(
    model: Any, pixels: ImagePixels, tokens: tuple[int, ...], images: tuple[PlacedImage, ...]
) -> Tensor:
    """Logits [T, V] of one sequence by transformers' own forward, without placeholders."""
    ids = torch.tensor([tokens])
    shown: dict[str, Tensor] = {}
    if images:
        shown = {
            "pixel_values": torch.cat([pixels.of(i.image, i.rows, i.columns) for i in images]),
            "image_grid_thw": torch.tensor([[1, 2 * i.rows, 2 * i.columns] for i in images]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    model.model.rope_deltas = None  # of the sequence before
    logits: Tensor = model(input_ids=ids, **shown).logits[0]
    never = torch.zeros(VOCABULARY)
    never[[IMAGE, VIDEO]] = -torch.inf
    return logits + never


def transformers_logprobs(
    model: Any, pixels: ImagePixels, prompt: EncodedPrompt, response: tuple[int, ...]
) -> Tensor:
    """Log-probs of the tokens of a response."""
    logits = transformers_logits(model, pixels, prompt.tokens + response, prompt.images)
    of_response = logits[len(prompt.tokens) - 1 : -1].log_softmax(-1)
    return of_response.gather(1, torch.tensor(response)[:, None])[:, 0]
