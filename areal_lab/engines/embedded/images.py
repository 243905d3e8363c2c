"""Images of requests: their part of a forward pass, and the comparison of prefixes with images.

    tokens         5  [] [] [] []  6  7        positions of M-RoPE, by token
    compared as    5  n  n  n  n   6  7        n: number of the image, beyond all tokens

Keys and values are shared only where these numbers are equal, so an image never takes those of
another image behind the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Final

import numpy as np
import torch

from areal_lab.data.images import PlacedImage, rope_positions
from areal_lab.models.copies import to_device
from areal_lab.models.image_features import ImageInputs, ImagePixels

_FIRST_NUMBER: Final = 1 << 31


@dataclass(slots=True)
class ImageNumbers:
    """Numbers of images that replace their tokens. An image keeps its number until `forget`; a
    number is never reused.
    """

    _of: dict[str, int] = field(default_factory=dict)
    _next: count[int] = field(default_factory=lambda: count(_FIRST_NUMBER))

    def in_place(self, tokens: np.ndarray, images: Sequence[PlacedImage]) -> np.ndarray:
        """Replace the placeholders of images among the tokens by their numbers."""
        if not images:
            return tokens
        compared = tokens.copy()
        for placed in images:
            digest = placed.image.digest
            if digest not in self._of:
                self._of[digest] = next(self._next)
            compared[placed.start : placed.end] = self._of[digest]
        return compared

    def forget(self) -> None:
        """Stop sharing anything computed so far."""
        self._of.clear()


class PromptPositions:
    """Positions of a request's tokens; one number each without images."""

    def __init__(self, prompt_tokens: int, images: Sequence[PlacedImage]) -> None:
        """Compute the positions of a prompt with these images."""
        self._of_prompt = np.array(rope_positions(prompt_tokens, images), dtype=np.int64)
        # The text behind the prompt has the same number three times.
        self._shift = int(self._of_prompt.max()) + 1 - prompt_tokens

    def of(self, start: int, end: int) -> np.ndarray:
        """Positions [3, n] of the tokens from `start` up to `end` of prompt and response."""
        known = self._of_prompt[:, start:end]
        behind = np.arange(max(start, self._of_prompt.shape[1]), end) + self._shift
        return np.concatenate((known, np.broadcast_to(behind, (3, len(behind)))), axis=1)


@dataclass(slots=True)
class PassImages:
    """Images of one forward pass, each once, however many requests have it."""

    _placed: dict[str, PlacedImage] = field(default_factory=dict)
    _wanted: list[tuple[str, int]] = field(default_factory=list)
    """For each placeholder among the tokens of the pass: its image, and its index there."""

    def add(self, images: Iterable[PlacedImage], start: int, end: int) -> None:
        """Compute the tokens from `start` up to `end` of a prompt with these images next."""
        for placed in images:
            for index in range(max(start, placed.start), min(end, placed.end)):
                self._placed.setdefault(placed.image.digest, placed)
                self._wanted.append((placed.image.digest, index - placed.start))

    def inputs(self, pixels: ImagePixels | None, device: torch.device) -> ImageInputs | None:
        """Inputs of the vision tower; None if no image is computed."""
        if not self._wanted:
            return None
        assert pixels is not None, "see Batcher.check"
        starts = accumulate((placed.tokens for placed in self._placed.values()), initial=0)
        first = dict(zip(self._placed, starts, strict=False))
        rows = torch.tensor([first[digest] + index for digest, index in self._wanted])
        images = [(one.image, one.rows, one.columns) for one in self._placed.values()]
        return pixels.inputs(images, to_device(rows, device), device)
