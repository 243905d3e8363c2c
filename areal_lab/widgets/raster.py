"""Rows of cells as an image, for pictures that are not drawn by a browser; the rules of `strip.js`.

cells [first, last) of each row --> codes per pixel --> RGBA
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from areal_lab.plots.style import GREY

Merge = Literal["most", "highest"]
"""Code of a pixel with several cells: the most frequent code (of two the lower), or the highest."""

PATTERNS: Final = ("/", "\\", "x", "-", "|", "+", ".")
"""Lines or dots of a color on the page's background, as matplotlib's hatches."""
_WIDTH_PX: Final = 1600
_ROW_PX: Final = 44
_TALLEST_PX: Final = 1800
_LINE_PX, _APART_PX = 2, 12


def rasterize(
    rows: Sequence[NDArray[np.uint8]],
    first: float,
    last: float,
    colors: Sequence[str],
    *,
    merge: Merge = "most",
) -> NDArray[np.uint8]:
    """The cells [first, last) of all rows as RGBA of shape (pixels, pixels, 4)."""
    tall = max(3, min(_ROW_PX, _TALLEST_PX // len(rows)))
    palette = np.zeros((len(colors), 4), dtype=np.uint8)
    on = np.ones((len(colors), tall, _WIDTH_PX), dtype=np.bool_)
    y, x = np.mgrid[:tall, :_WIDTH_PX]
    for code, color in enumerate(colors):
        face, pattern = parsed_color(color)
        if face != "none":
            digits = face.removeprefix("#").ljust(8, "f")
            palette[code] = [int(digits[at : at + 2], 16) for at in (0, 2, 4, 6)]
        if pattern:
            on[code] = _drawn(pattern, x, y)
    image = np.zeros((len(rows), tall, _WIDTH_PX, 4), dtype=np.uint8)
    columns = np.arange(_WIDTH_PX)
    for number, row in enumerate(rows):
        codes = codes_of_pixels(row, first, last, codes=len(colors), pixels=_WIDTH_PX, merge=merge)
        shown = on[codes.clip(0), :, columns].T & (codes >= 0)
        image[number] = palette[codes.clip(0)][None] * shown[:, :, None]
        if tall > 4:
            image[number, -1] = 0  # between two rows
    return image.reshape(-1, _WIDTH_PX, 4)


def codes_of_pixels(
    row: NDArray[np.uint8],
    first: float,
    last: float,
    *,
    codes: int,
    pixels: int,
    merge: Merge,
) -> NDArray[np.intp]:
    """Code of each of `pixels` pixels, of `codes` codes; -1 where the row has no cell."""
    per_pixel = (last - first) / pixels
    if per_pixel <= 1:
        cells = np.floor(first + (np.arange(pixels) + 0.5) * per_pixel).astype(np.intp)
        padded = np.append(row.astype(np.intp), -1)
        shown: NDArray[np.intp] = padded[np.minimum(cells, len(row))]
        return shown
    edges = np.floor(first + np.arange(pixels + 1) * per_pixel).astype(np.intp).clip(0, len(row))
    pixel = np.repeat(np.arange(pixels, dtype=np.intp), np.diff(edges))
    counts = np.bincount(pixel * codes + row[edges[0] : edges[-1]], minlength=pixels * codes)
    counts = counts.reshape(pixels, codes)
    weights = (counts > 0) * np.arange(1, codes + 1) if merge == "highest" else counts
    found: NDArray[np.intp] = np.where(counts.any(axis=1), weights.argmax(axis=1), -1)
    return found


def parsed_color(color: str) -> tuple[str, str]:
    """Face and pattern for a picture; the text's color becomes a grey that is visible on any
    background.
    """
    face, _, pattern = color.partition(" ")
    return {"transparent": "none", "currentColor": GREY}.get(face, face), pattern


def _drawn(pattern: str, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of the pixels that belong to the lines of a pattern."""
    rising, falling = (x + y) % _APART_PX < _LINE_PX, (x - y) % _APART_PX < _LINE_PX
    across, upright = y % _APART_PX < _LINE_PX, x % _APART_PX < _LINE_PX
    drawn: dict[str, NDArray[np.bool_]] = {
        "/": rising,
        "\\": falling,
        "x": rising | falling,
        "-": across,
        "|": upright,
        "+": across | upright,
        ".": (x % _APART_PX < 2 * _LINE_PX) & (y % _APART_PX < 2 * _LINE_PX),
    }
    return drawn[pattern]
