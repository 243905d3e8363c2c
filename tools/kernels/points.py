"""Points of the fit: summed kernel times, as rows of `data/*.csv`.

They are small enough to be shipped, so a test can repeat the fit and measure its error.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar, get_type_hints

from simulator.costs.coefficients import DATA, read_table


class LinearPoint(NamedTuple):
    """All matrix products of a forward pass."""

    gpu: str
    model: str
    tensor_parallel: int
    tokens: int
    seconds: float


class DecodePoint(NamedTuple):
    """All kernels of a decode step."""

    gpu: str
    model: str
    tensor_parallel: int
    sequences: int
    context_tokens: int
    """Of each sequence."""
    seconds: float
    held_out: int
    """1 if held out of the fit, as a different model."""


class PrefillPoint(NamedTuple):
    """All kernels of a prefill."""

    gpu: str
    model: str
    tensor_parallel: int
    sequences: int
    length_tokens: int
    seconds: float
    held_out: int


class MessagePoint(NamedTuple):
    """One collective between the GPUs of a node."""

    gpu: str
    operation: str
    """`engine_all_reduce`, or NCCL's `all_reduce`, `all_gather`, `reduce_scatter`."""
    gpus: int
    size_bytes: int
    seconds: float


class SpeedPoint(NamedTuple):
    """A published decode speed of a single sequence."""

    model: str
    gpu: str
    gpus: int
    engine: str
    input_tokens: int
    new_tokens: int
    tokens_per_s: float


Point = TypeVar("Point", LinearPoint, DecodePoint, PrefillPoint, MessagePoint, SpeedPoint)

TABLES: dict[type, str] = {
    LinearPoint: "linear_layers.csv",
    DecodePoint: "decode_steps.csv",
    PrefillPoint: "prefills.csv",
    MessagePoint: "messages.csv",
    SpeedPoint: "published_speeds.csv",
}
"""File in `data`, by kind of point."""


def read_points(kind: type[Point], folder: Path | None = None, *, fp8: bool = False) -> list[Point]:
    """The points of one kind.

    Args:
        kind: the record of a row.
        folder: folder of the tables; None uses the shipped ones.
        fp8: those of kernels in fp8.
    """
    types = get_type_hints(kind)
    return [
        kind(**{name: types[name](text) for name, text in row.items()})
        for row in read_table((folder or DATA) / file_name(kind, fp8=fp8))
    ]


def file_name(kind: type[Point], *, fp8: bool = False) -> str:
    """The file of one kind of points."""
    return f"fp8_{TABLES[kind]}" if fp8 else TABLES[kind]


def write_points(
    kind: type[Point], points: Iterable[Point], folder: Path, about: str, *, fp8: bool = False
) -> None:
    """Write the points of one kind, below comment lines with their source."""
    with (folder / file_name(kind, fp8=fp8)).open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in about.splitlines())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind._fields)
        for point in points:
            writer.writerow(f"{one:.4g}" if isinstance(one, float) else one for one in point)
