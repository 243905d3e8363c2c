"""Fitted coefficients of kernels by GPU, with errors: how much slower than the data sheet they are.

    e_w, e_kv  seconds of a memory access / seconds at the peak bandwidth, >= 1
    efficiency FLOP/s reached / peak FLOP/s, <= 1
    *_error    mean absolute relative error of the formula on the points used for the fit

`python -m tools.kernels` writes them to `data/kernel_coefficients.csv`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

DATA = Path(__file__).parent / "data"
"""Folder of the tables that come with the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCoefficients:
    """Coefficients of messages between the GPUs of a node."""

    latency_s: float
    """Constant time of an engine's all-reduce, which is launched by a CUDA graph."""
    hop_s: float
    """Per GPU but the first."""
    one_shot_efficiency: float
    """Share of the peak rate while every GPU reads the tensors of all others (small messages)."""
    ring_latency_s: float
    """The same three in a ring (large messages)."""
    ring_hop_s: float
    ring_efficiency: float
    error: float
    """Error of the fit of the six above."""
    nccl_latency_s: float
    """Constant time of any NCCL collective."""
    nccl_hop_s: float
    """Per GPU but the first, and per pass: an all-reduce makes two, a gather or scatter one."""
    nccl_ramp_s: float
    """Time that large messages lose per pass before they reach the rate."""
    nccl_ramp_bytes: float
    """Message size that loses half of it."""
    nccl_efficiency: float
    nccl_error: float

    def __post_init__(self) -> None:
        _check_fields(self, efficiencies=("ring_efficiency", "nccl_efficiency"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCoefficients:
    """Coefficients of the kernels of one GPU."""

    weight_reading: float
    """e_w: time to read weights / time at the peak bandwidth."""
    cache_reading: float
    """e_kv: the same for keys and values."""
    layer_s: float
    """e_L: constant time per layer, of starting and ending kernels."""
    sequence_s: float
    """e_B: time per sequence of a decode step."""
    matrix_efficiency: float
    """Share of peak FLOP/s that large matrix products reach."""
    knee: float
    """p of `smooth_max` between reading and computing."""
    attention_efficiency: float
    """Share of peak FLOP/s that attention reaches in prefill, counting causal pairs only."""
    activation_traffic: float
    """Memory traffic of activations in prefill, in units of one pass at the peak bandwidth."""
    prefill_layer_s: float
    """Like `layer_s`, for prefill."""
    links: LinkCoefficients
    decode_error: float
    prefill_error: float
    provenance: str
    """Source of the numbers, for reports."""
    fitted: bool = True
    """False for typical values, or values of another GPU."""

    def __post_init__(self) -> None:
        _check_fields(self, efficiencies=("matrix_efficiency", "attention_efficiency"))
        if self.knee < 1:
            raise ValueError(f"knee is {self.knee}, but must be >= 1 (inf: hard maximum)")


@cache
def fitted_coefficients(path: Path | None = None) -> Mapping[str, KernelCoefficients]:
    """Coefficients of a table, by GPU.

    Args:
        path: a table in the format of `data/kernel_coefficients.csv`; None reads that file.

    Raises:
        ValueError: the table lacks a coefficient of a GPU, or has an impossible one.
    """
    source = path or DATA / "kernel_coefficients.csv"
    by_gpu: dict[str, dict[str, float]] = {}
    for row in read_table(source):
        by_gpu.setdefault(row["gpu"], {})[row["coefficient"]] = float(row["value"])
    return MappingProxyType(
        {gpu: coefficients_from(values, source.name) for gpu, values in by_gpu.items()}
    )


def coefficients_from(values: Mapping[str, float], source: str) -> KernelCoefficients:
    """Coefficients from their values by name; names for links begin with `link_`.

    Raises:
        ValueError: one is missing.
    """
    own = [one.name for one in dataclasses.fields(KernelCoefficients) if one.type == "float"]
    links = [one.name for one in dataclasses.fields(LinkCoefficients)]
    missing = {*own, *(f"link_{name}" for name in links)} - values.keys()
    if missing:
        raise ValueError(f"{source} has no {', '.join(sorted(missing))}; refit it")
    numbers: dict[str, Any] = {name: values[name] for name in own}
    return KernelCoefficients(
        **numbers,
        links=LinkCoefficients(**{name: values[f"link_{name}"] for name in links}),
        provenance=KERNEL_TABLES,
    )


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, without the lines that start with `#`, which give its source."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


KERNEL_TABLES = (
    "fitted to SGLang kernel times measured by NVIDIA (AIConfigurator 0.12.0, 2026-09: SGLang "
    "0.5.14 on H100 and H200, 0.5.10 on A100), summed over a model's layers; without the engine's "
    "CPU time"
)


def _check_fields(
    record: LinkCoefficients | KernelCoefficients, efficiencies: tuple[str, ...]
) -> None:
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if math.isnan(value) or value < 0 or (math.isinf(value) and one.name != "knee"):
            raise ValueError(f"{one.name} is {value}, but must be a number >= 0")
        if one.name in efficiencies and not 0 < value <= 1:
            raise ValueError(f"{one.name} is {value}, but must be in (0, 1]: a share of the peak")
