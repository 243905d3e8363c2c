"""Image settings of a vision-language model folder, read without torch.

    picture of width x height --resized--> rows x columns of placeholders, `merge` patches a side

Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a prompt has one placeholder token for each `merge * merge`
patches of an image, and the model replaces it by the image's features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.models.files import read_object

VISION_KINDS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` of the models that may have images."""
IMAGE_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""Files of a model folder with the image size settings; the first existing one counts."""
_MOST_ASPECT: Final = 200
_MOST_PIXELS: Final = 1 << 40
_DEFAULTS: Final[Mapping[str, Any]] = {
    "patch_size": 14,
    "merge_size": 2,
    "shortest_edge": 56 * 56,
    "longest_edge": 28 * 28 * 1280,
}
"""Defaults of transformers' image processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFacts:
    """Representation of an image in a model's prompts and image processor."""

    image_token: int
    """Placeholder token."""
    start_token: int
    """Token before the placeholders of an image."""
    end_token: int
    """Token after them."""
    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Patches per side of one placeholder."""
    min_pixels: int
    """Smaller images are enlarged."""
    max_pixels: int
    """Larger images are reduced."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of placeholders for an image of this size, in pixels.

        The rule is that of transformers' Qwen2VLImageProcessor (`smart_resize`).
        """
        if max(width, height) > _MOST_ASPECT * min(width, height):
            raise ValueError(
                f"an image has {width} x {height} pixels, but its sides may differ by a factor of "
                f"{_MOST_ASPECT} at most; crop it"
            )
        factor = self.patch * self.merge
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor * factor > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif rows * columns * factor * factor < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows, columns


def is_vision_model(folder: Path) -> bool:
    """Return whether the model of a folder may have images in its prompts."""
    return read_object(folder / "config.json").get("model_type") in VISION_KINDS


def read_vision_facts(folder: Path) -> VisionFacts | None:
    """Read `config.json` and the image processor's settings; None if the model has no images."""
    config = read_object(folder / "config.json")
    if config.get("model_type") not in VISION_KINDS:
        return None
    settings = image_settings(folder)
    size, vision = settings.get("size"), config.get("vision_config")
    size, vision = (one if isinstance(one, dict) else {} for one in (size, vision))
    numbers = {name: settings.get(name, size.get(name, value)) for name, value in _DEFAULTS.items()}
    for name, pixels in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        numbers[name] = settings.get(name) or numbers[pixels]
    for name, number in numbers.items():
        if type(number) is not int or not 0 < number < _MOST_PIXELS:
            raise ValueError(
                f"{folder}: {name} of its image processor is {number!r:.80}, but must be a whole "
                f"number from 1 to {_MOST_PIXELS - 1}"
            )
    patch, merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
    if (numbers["patch_size"], numbers["merge_size"]) != (patch, merge):
        raise ValueError(
            f"{folder} has patch_size {numbers['patch_size']} and merge_size "
            f"{numbers['merge_size']} in its image processor's settings, but the model has "
            f"{patch!r:.80} and {merge!r:.80}; they must be equal"
        )
    names = [f"{name}_token_id" for name in ("image", "vision_start", "vision_end")]
    tokens: list[Any] = [config.get(name) for name in names]
    for name, token in zip(names, tokens, strict=True):
        if type(token) is not int or token < 0:
            raise ValueError(
                f"{folder / 'config.json'}: {name} is {token!r:.80}, but must be a token id"
            )
    return VisionFacts(
        image_token=tokens[0],
        start_token=tokens[1],
        end_token=tokens[2],
        patch=patch,
        merge=merge,
        min_pixels=numbers["min_pixels"],
        max_pixels=numbers["max_pixels"],
    )


def image_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor of a model folder."""
    for name in IMAGE_FILES:
        if (folder / name).is_file():
            found = read_object(folder / name)
            settings: Any = found.get("image_processor", found)
            if not isinstance(settings, dict):
                raise ValueError(f"{folder / name}: image_processor must be an object")
            return settings
    raise ValueError(
        f"{folder} is a vision-language model without {IMAGE_FILES[0]}, which says how images are "
        "resized; copy that file from the model it was made of"
    )


def placeholder_tokens(config: Any) -> tuple[int, ...]:
    """Placeholder tokens of images and videos; empty if the model has none.

    A policy must not sample them: the model would look for features to replace them.
    """
    if config.model_type not in VISION_KINDS:
        return ()
    names = ("image_token_id", "video_token_id", "vision_token_id")
    found = [getattr(config, name, None) for name in names]
    return tuple(sorted({token for token in found if type(token) is int}))


def read_placeholder_tokens(folder: Path) -> tuple[int, ...]:
    """`placeholder_tokens` of a model folder."""
    return placeholder_tokens(_Fields(read_object(folder / "config.json")))


class _Fields:
    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.model_type = fields.get("model_type")
        self.__dict__.update(fields)
