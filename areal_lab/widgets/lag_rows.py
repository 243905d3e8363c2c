"""Trained samples as rows of tokens for a strip, colored by lag: blue within eta, orange beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from areal_lab.capacity import check_eta
from areal_lab.runlog.trained_samples import TrainedSample

_WITHIN: Final = ("#B3D4EE", "#2165A3")
_BEYOND: Final = ("#F2A33A", "#B5390A")
"""Colors of the newest and the oldest; all can be seen on white and on dark."""


class LagRows(TypedDict):
    """Arguments of `Strip`, and of `Strip.show` for a strip that exists."""

    rows: list[NDArray[np.uint8]]
    names: list[str]
    colors: list[str]
    labels: list[str]


def lag_rows(samples: Sequence[TrainedSample], *, eta: float) -> LagRows:
    """A row per sample, a cell per token; the code of a cell is the token's lag.

    Show them with `merge="highest"`: of several tokens in a pixel the oldest is seen.

    Args:
        samples: in the order of the rows.
        eta: staleness bound in versions; tokens with a larger lag have other colors.

    Raises:
        ValueError: eta is negative or NaN.
    """
    check_eta(eta)
    rows = [one.lags for one in samples]
    largest = max((int(row.max()) for row in rows if len(row)), default=0)
    within = min(largest, math.floor(min(eta, largest)))
    colors = [*_between(*_WITHIN, within + 1), *_between(*_BEYOND, largest - within)]
    labels = [
        f"lag {lag}" + (", older than eta" if lag > eta else "") for lag in range(largest + 1)
    ]
    return LagRows(rows=rows, names=[one.name for one in samples], colors=colors, labels=labels)


def _between(first: str, last: str, count: int) -> list[str]:
    """Colors from the first to the last in equal steps; a single one is the last."""
    ends = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in (first, last)]
    colors = []
    for number in range(count):
        part = 1.0 if count == 1 else number / (count - 1)
        mixed = [round(low + part * (high - low)) for low, high in zip(*ends, strict=True)]
        colors.append("#" + "".join(f"{value:02x}" for value in mixed))
    return colors
