"""What a vision-language model folder says about images, read without torch.

    picture of width x height --resized--> rows x columns of placeholders, `merge` patches a side

Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a prompt has one placeholder token for each `merge * merge`
patches of an image, and the model puts the image's features in their place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VISION_KINDS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` of the models that may have images."""
IMAGE_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""Where a model folder says how images are resized; the first one that is there counts."""
_MOST_ASPECT: Final = 200
_DEFAULTS: Final[Mapping[str, Any]] = {
    "patch_size": 14,
    "merge_size": 2,
    "shortest_edge": 56 * 56,
    "longest_edge": 28 * 28 * 1280,
}
"""Of transformers' image processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFacts:
    """How a model's prompts and its image processor represent an image."""

    image_token: int
    """The placeholder."""
    start_token: int
    """Before the placeholders of an image."""
    end_token: int
    """After them."""
    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Patches a side that one placeholder stands for."""
    min_pixels: int
    """A smaller image is enlarged."""
    max_pixels: int
    """A larger image is made smaller."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of placeholders for an image of this size, in pixels.

        The rule is that of transformers' Qwen2VLImageProcessor (`smart_resize`).

        Raises:
            ValueError: in one line: the image is too narrow.
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
    """Whether the model of a folder may have images in its prompts.

    Raises:
        ValueError: in one line: `config.json` cannot be read.
    """
    return _read(folder / "config.json").get("model_type") in VISION_KINDS


def read_vision_facts(folder: Path) -> VisionFacts | None:
    """Read `config.json` and the image processor's settings; None if the model has no images.

    Raises:
        ValueError: in one line, naming the file that is missing or broken.
    """
    config = _read(folder / "config.json")
    if config.get("model_type") not in VISION_KINDS:
        return None
    settings = image_settings(folder)
    size = settings.get("size") or {}
    numbers = {name: settings.get(name, size.get(name, value)) for name, value in _DEFAULTS.items()}
    vision = config.get("vision_config", {})
    patch, merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
    if (numbers["patch_size"], numbers["merge_size"]) != (patch, merge):
        raise ValueError(
            f"{folder} has patch_size {numbers['patch_size']} and merge_size "
            f"{numbers['merge_size']} in its image processor's settings, but the model has {patch} "
            f"and {merge}; they must be equal"
        )
    try:
        tokens = [config[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")]
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} has no {error}") from error
    return VisionFacts(
        image_token=tokens[0],
        start_token=tokens[1],
        end_token=tokens[2],
        patch=patch,
        merge=merge,
        min_pixels=settings.get("min_pixels") or numbers["shortest_edge"],
        max_pixels=settings.get("max_pixels") or numbers["longest_edge"],
    )


def image_settings(folder: Path) -> dict[str, Any]:
    """The settings of the image processor of a model folder.

    Raises:
        ValueError: in one line: there are none.
    """
    for name in IMAGE_FILES:
        if (folder / name).is_file():
            found = _read(folder / name)
            settings: dict[str, Any] = found.get("image_processor", found)
            return settings
    raise ValueError(
        f"{folder} is a vision-language model without {IMAGE_FILES[0]}, which says how images are "
        "resized; copy that file from the model it was made of"
    )


def placeholder_tokens(config: Any) -> tuple[int, ...]:
    """Tokens that stand for images and videos in prompts; empty if the model has none.

    A policy must not choose them: the model would look for features to put in their place.

    Args:
        config: transformers' configuration of a model.
    """
    if config.model_type not in VISION_KINDS:
        return ()
    names = ("image_token_id", "video_token_id", "vision_token_id")
    found = {getattr(config, name, None) for name in names}
    return tuple(sorted(token for token in found if token is not None))


def read_placeholder_tokens(folder: Path) -> tuple[int, ...]:
    """`placeholder_tokens` of a model folder.

    Raises:
        ValueError: in one line: `config.json` cannot be read.
    """
    return placeholder_tokens(_Fields(_read(folder / "config.json")))


class _Fields:
    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.model_type = fields.get("model_type")
        self.__dict__.update(fields)


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return value
