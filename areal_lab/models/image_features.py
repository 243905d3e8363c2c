"""Inputs of vision-language models: pixel values, and features at placeholders.

    PNG --ImagePixels--> pixel values [patches, numbers] --vision tower--> features [tokens, hidden]
                                                   rows of them --> placeholders of a forward pass

The image processor is transformers' on PIL, which needs no torchvision.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.models.copies import to_device
from areal_lab.models.vision import VISION_KINDS, image_settings

_KEPT_BYTES: Final = 256 << 20
"""Size of the cache of pixel values, which each pass over an image needs again."""
_OF_A_CLASS: Final = (
    "image_processor_type",
    "processor_class",
    "auto_map",
    "feature_extractor_type",
)


class Png(Protocol):
    """An image as a PNG file."""

    @property
    def digest(self) -> str:
        """Equal only for equal files."""
        ...

    @property
    def png(self) -> bytes:
        """Content of the file."""
        ...


class ImageInputs(NamedTuple):
    """Inputs of the vision tower, and the features that a pass needs."""

    pixels: Float[Tensor, "patches numbers"]
    """Pixel values of all images, concatenated."""
    grids: Int[Tensor, "images 3"]
    """Frames (1), rows and columns of patches of each image."""
    rows: Int[Tensor, " placeholders"]
    """Index of the features of each placeholder of the pass, in the order of its tokens."""


class ImagePixels:
    """Pixel values of images, with an LRU cache. Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        """Read the settings of a model folder's image processor."""
        # Its package first imports the torchvision variant, and reports that as missing.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        settings = {k: v for k, v in image_settings(folder).items() if k not in _OF_A_CLASS}
        self._processor: Any = Qwen2VLImageProcessorPil(**settings)
        self._kept: OrderedDict[str, Float[Tensor, "patches numbers"]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def merge(self) -> int:
        """Patches per side of one placeholder."""
        return int(self._processor.merge_size)

    def of(self, image: Png, rows: int, columns: int) -> Float[Tensor, "patches numbers"]:
        """The pixel values of an image."""
        with self._lock:
            if (found := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
        pixels = self._made(image) if found is None else found
        patches = rows * columns * self.merge**2
        if len(pixels) != patches:
            raise ValueError(
                f"image {image.digest[:12]} has {len(pixels)} patches, but {rows} x {columns} "
                f"placeholders stand for {patches}; take the preprocessor_config.json of the model "
                "that the prompt was made for"
            )
        return pixels

    def inputs(
        self,
        images: Sequence[tuple[Png, int, int]],
        rows: Int[Tensor, " placeholders"],
        device: torch.device,
    ) -> ImageInputs:
        """The images of a pass, on `device`."""
        pixels = torch.cat([self.of(*one) for one in images])
        merge = self.merge
        grids = torch.tensor([[1, rows_ * merge, columns * merge] for _, rows_, columns in images])
        return ImageInputs(to_device(pixels, device), to_device(grids, device), rows)

    def none(self, device: torch.device) -> ImageInputs:
        """An unused image for a pass without one: a sharded tower computes in every pass, on
        every rank.
        """
        processor, merge = self._processor, self.merge
        numbers = 3 * processor.temporal_patch_size * processor.patch_size**2
        return ImageInputs(
            torch.zeros(merge**2, numbers, device=device),
            torch.tensor([[1, merge, merge]], device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
        )

    def _made(self, image: Png) -> Float[Tensor, "patches numbers"]:
        from PIL import Image

        with Image.open(io.BytesIO(image.png)) as opened:
            values = self._processor(images=opened.convert("RGB"))["pixel_values"]
        pixels = torch.from_numpy(np.asarray(values, dtype=np.float32))
        with self._lock:
            if image.digest not in self._kept:
                self._bytes += pixels.numel() * pixels.element_size()
                self._kept[image.digest] = pixels
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.numel() * oldest.element_size()
        return pixels


def sees(model: PreTrainedModel) -> bool:
    """Return whether a model may have images in its prompts."""
    return model.config.model_type in VISION_KINDS


def with_features(model: PreTrainedModel, images: ImageInputs | None) -> dict[str, Any]:
    """Keywords of a forward pass that put features at its placeholders; empty without images.

    Each image is computed once, however many sequences have it.
    """
    if images is None:
        return {}
    body: Any = model.get_submodule(model.base_model_prefix)
    found = body.get_image_features(images.pixels, images.grids, return_dict=True)
    found.pooler_output = _rows(found.pooler_output, images.rows)
    if getattr(found, "deepstack_features", None) is not None:  # of Qwen3-VL, one for each layer
        found.deepstack_features = [_rows(one, images.rows) for one in found.deepstack_features]
    return {"mm_encoder_outputs": {"image": found}}


def _rows(of_images: Sequence[Tensor], rows: Tensor) -> tuple[Tensor]:
    return (torch.cat(tuple(of_images))[rows],)
