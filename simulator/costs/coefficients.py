"""Speed of kernels by GPU (fitted, related or typical), and the work of attention.

Duration of a matrix product: reading the weights or computing, with a smooth knee in between.

seconds
  |                    / computing: FLOPs / (peak * efficiency)
  |                  /
  |               _-'
  |___________--'        reading: bytes / (bandwidth / slack)
  +------------------------------ rows

Fitted coefficients of kernels by GPU, with errors: how much slower than the data sheet they are.

    e_w, e_kv  seconds of a memory access / seconds at the peak bandwidth, >= 1
    efficiency FLOP/s reached / peak FLOP/s, <= 1
    *_error    mean absolute relative error of the formula on the points used for the fit

`python -m tools.kernels` writes them to `data/kernel_coefficients.csv`.

Coefficients of every GPU: fitted, taken from a related GPU, or typical and uncertain.

H100, H200, A100-80, GB200       fitted to kernels measured on them
H800, H100-PCIe, A100-40         of a related GPU, with their own bandwidths
H20                              weight reading fitted to published speeds of one sequence
all others, and custom GPUs      data sheet with typical efficiencies: +-30 to 50 %

Work of attention by kind of layer: all pairs, the pairs of a window, or a state per token.

    full       (query, key) pairs: half of the square of a sequence
    window     at most `window.tokens` pairs per token
    linear     a state is read and changed once per token, whatever the context

The pairs of windows are an upper bound: tokens at the beginning of a sequence have fewer, a share
of window / (2 length).
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
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.weight_bytes import EngineNumbers


def smooth_max(first: float, second: float, sharpness: float) -> float:
    r"""The maximum of two times, smoothed: larger than it where they are close.

    $$ (a^p + b^p)^{1/p} $$

    Kernels near the knee reach neither the peak bandwidth nor the peak of the matrix units. An
    infinite p gives the hard maximum of a roofline, p = 1 the sum.

    Args:
        first: seconds, >= 0.
        second: seconds, >= 0.
        sharpness: p, >= 1.
    """
    large, small = (first, second) if first > second else (second, first)
    if small <= 0:
        return large
    # Computed from the ratio: a^p of microseconds would underflow for a sharp knee.
    return float(large * (1 + (small / large) ** sharpness) ** (1 / sharpness))


DATA = Path(__file__).parent / "data"
"""Folder of the tables that come with the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCoefficients:
    """Coefficients of messages between the GPUs of a node."""

    latency_s: float
    """Constant time of an engine's all-reduce, which is launched by a CUDA graph."""
    hop_s: float
    """Seconds per GPU but the first."""
    one_shot_efficiency: float
    """Share of the peak rate while every GPU reads the tensors of all others (small messages)."""
    ring_latency_s: float
    """The same three numbers for a ring (large messages)."""
    ring_hop_s: float
    ring_efficiency: float
    error: float
    """Error of the fit of the six above."""
    nccl_latency_s: float
    """Constant time of any NCCL collective."""
    nccl_hop_s: float
    """Seconds per GPU but the first, and per pass: an all-reduce makes two, a gather or scatter
    one."""
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
    """
    source = path or DATA / "kernel_coefficients.csv"
    by_gpu: dict[str, dict[str, float]] = {}
    for row in read_table(source):
        by_gpu.setdefault(row["gpu"], {})[row["coefficient"]] = float(row["value"])
    return MappingProxyType(
        {gpu: coefficients_from(values, source.name) for gpu, values in by_gpu.items()}
    )


def coefficients_from(values: Mapping[str, float], source: str) -> KernelCoefficients:
    """Coefficients from their values by name; names for links begin with `link_`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTime:
    """One published time, or range of times, of a CSV file."""

    low_s: float
    high_s: float
    source: str
    date: str
    why_not: str
    """Why fits exclude it; empty if they do not."""

    @property
    def seconds(self) -> float:
        """Middle of the range."""
        return (self.low_s + self.high_s) / 2


KERNEL_TABLES = (
    "fitted to SGLang kernel times measured by NVIDIA (AIConfigurator 0.12.0, 2026-09: SGLang "
    "0.5.14 on H100, H200 and GB200, 0.5.10 on A100), summed over a model's layers; without the "
    "engine's CPU time"
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


RELATIVES: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "H800": ("H100", 0.0, "the same chip and memory; its slower NVLink was not measured"),
        "H100-PCIe": ("H100", 0.15, "fewer units, slower memory, no NVLink"),
        "A100-40": ("A100-80", 0.1, "slower memory"),
        "B200": ("GB200", 0.1, "the same chips with a tenth less power, in servers of 8"),
        "GB300": ("GB200", 0.15, "more memory and power; its kernels were not measured"),
        "B300": ("GB200", 0.15, "more memory, in servers of 8; its kernels were not measured"),
    }
)
"""Related GPUs, by GPU: the related GPU, the least error, and why its coefficients apply."""

UNCERTAINTY: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("L40S", "RTX-4090", "RTX-5090"), 0.4),
    }
)
"""Error of the typical coefficients; 0.5 for all others, which run different kernels.

A serving simulator fitted to the H100 alone (BLIS, inference-sim, 2026) missed an unseen A100 by
16 % and an unseen L40S by 13 % end to end; the errors here are larger.
"""

MATRIX_EFFICIENCY = 0.75
"""Share of the peak that large matrix products reach. Published best shapes: 794 of 989 TFLOP/s on
the H100 (fitted here: 0.751), 1,745 of 2,250 on the B200, 1,822 of 2,500 on the GB200, and 1,769 of
2,250 on the B300 (S. Bekman, ml-engineering, as quoted on 2026-08-17)."""

MATRIX_EFFICIENCIES: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "MI300X": (
            0.5,
            "708 of 1,307 TFLOP/s for the best shape (AMD, 2025-02), 45 % of the peak in "
            "arXiv:2510.27583 (2025-10)",
        ),
        "MI325X": (
            0.55,
            "831 of 1,307 TFLOP/s for the best shape, 616 for those of DeepSeek-V3 (AMD, "
            "2026-10-06)",
        ),
        "MI355X": (
            0.55,
            "as the MI325X; unverified: 1,610 of 2,517 TFLOP/s for the best shape (HipKittens, "
            "2025)",
        ),
        "TPU-v6e": (MATRIX_EFFICIENCY, "689 of 918 TFLOP/s (yangwhale/gpu-tpu-pedia, 2026-02-09)"),
        "TPU7x": (
            MATRIX_EFFICIENCY,
            "1,517 of 2,307 TFLOP/s with the host's time, above 90 % without it "
            "(yangwhale/gpu-tpu-pedia, 2026-02-10)",
        ),
    }
)
"""Share of the peak of published matrix products, and the source, by accelerator.

AMD's chips lower their clock under load: their peak is that of a clock that they do not keep. The
share is between the best shape and the shapes of a model."""

ATTENTION_SHARE = 0.55 / 0.75
"""Speed of attention in prefill, as a fraction of that of large matrix products."""

H20_WEIGHT_READING = 2.72
H20_LAYER_S = 60e-6
"""Least squares on Qwen3's five published speeds of a single sequence
(`data/published_speeds.csv`): step = e_w * weights / bandwidth + e_L * layers, mean error 3.2 %; a
test repeats the fit."""


def reached_share(gpu: GPU) -> float:
    """Speed of large matrix products, as a share of the peak, relative to that of most GPUs."""
    efficiency, _ = MATRIX_EFFICIENCIES.get(gpu.name, (MATRIX_EFFICIENCY, ""))
    return efficiency / MATRIX_EFFICIENCY


@cache
def kernel_coefficients(gpu: GPU) -> KernelCoefficients:
    """Coefficients of a GPU: fitted, of a related GPU, or typical with a large error."""
    fitted = fitted_coefficients()
    if gpu.name in fitted:
        return fitted[gpu.name]
    if gpu.name in RELATIVES:
        relative, least_error, why = RELATIVES[gpu.name]
        known = fitted[relative]
        return dataclasses.replace(
            known,
            decode_error=max(known.decode_error, least_error),
            prefill_error=max(known.prefill_error, least_error),
            provenance=f"like the {relative} ({why}): {known.provenance}",
            fitted=False,
        )
    typical = _typical(gpu.name, UNCERTAINTY.get(gpu.name, 0.5))
    if gpu.name != "H20":
        return typical
    return dataclasses.replace(
        typical,
        weight_reading=H20_WEIGHT_READING,
        layer_s=H20_LAYER_S,
        decode_error=0.3,
        prefill_error=0.3,
        provenance=(
            "weight reading fitted to Qwen3's published speeds on one H20 (SGLang 0.4.6.post1, one "
            "sequence, 2025-05), a third of the peak bandwidth because it has few compute units; "
            "everything else, and larger batches, from the data sheet with typical efficiencies: "
            "+-30 %"
        ),
    )


def _typical(name: str, error: float) -> KernelCoefficients:
    """Rounded coefficients of A100, H100 and H200, for a GPU without measurements."""
    efficiency, measured = MATRIX_EFFICIENCIES.get(name, (MATRIX_EFFICIENCY, ""))
    known = f"matrix products: {measured}; nothing else was measured" if measured else ""
    return KernelCoefficients(
        weight_reading=1.25,
        cache_reading=1.4,
        layer_s=45e-6,
        sequence_s=2e-6,
        matrix_efficiency=efficiency,
        knee=2.4,
        attention_efficiency=ATTENTION_SHARE * efficiency,
        activation_traffic=1.6,
        prefill_layer_s=45e-6,
        links=LinkCoefficients(
            latency_s=4e-6,
            hop_s=0.15e-6,
            one_shot_efficiency=0.6,
            ring_latency_s=6e-6,
            ring_hop_s=0.6e-6,
            ring_efficiency=0.7,
            error=error,
            nccl_latency_s=7e-6,
            nccl_hop_s=0.9e-6,
            nccl_ramp_s=30e-6,
            nccl_ramp_bytes=5e6,
            nccl_efficiency=0.7,
            nccl_error=error,
        ),
        decode_error=error,
        prefill_error=error,
        provenance=(
            f"data sheet of the {name} with efficiencies typical of A100, H100 and H200; "
            f"{known or 'no measurements'}: +-{error:.0%}"
        ),
        fitted=False,
    )


Values = NDArray[np.float64]

STATE_EFFICIENCY: Final = 0.0296
"""Share of the bf16 peak that linear attention reaches over many tokens, in FLOPs token by token.

Least squares on 24 times of chunked kernels with their convolution, 8,192 to 32,768 tokens, 16 to
64 heads of 128 on an H100 (`data/linear_attention.csv`: AIConfigurator 0.12.0, SGLang 0.5.14), mean
error 16 %; a test repeats the fit. Assumed for training too.
"""


def plain(model: ModelShape) -> bool:
    """Return whether a model has only layers of the kind whose kernels were summed for the fits."""
    others = (model.latent, model.window, model.linear)
    return model.experts == 0 and all(one is None for one in others)


def pair_flops(model: ModelShape, tokens: float | Values, pairs: float | Values) -> float | Values:
    """FLOPs of attention over keys in a forward pass, full and with windows."""
    flops = model.attention_flops(1) * pairs
    if model.window is not None:
        flops = flops + model.window_flops() * np.minimum(pairs, model.window.tokens * tokens)
    return flops


def attention_flops(
    model: ModelShape, tokens: float | Values, pairs: float | Values
) -> float | Values:
    """FLOPs of attention in a forward pass, with those of states."""
    flops = pair_flops(model, tokens, pairs)
    if model.linear is not None:
        flops = flops + model.linear.flops_per_token() * tokens
    return flops


def states_s(model: ModelShape, tokens: float | Values, peak_flops_per_s: float) -> float | Values:
    """Seconds of states in a forward pass over many tokens; 0 without them."""
    if model.linear is None:
        return 0.0 * tokens
    return model.linear.flops_per_token() * tokens / (STATE_EFFICIENCY * peak_flops_per_s)


def sequence_read_s(
    model: ModelShape,
    gpu: GPU,
    at: KernelCoefficients,
    numbers: EngineNumbers,
    tensor_parallel: int,
) -> float:
    """Seconds of a decode step for the windows and states of one sequence.

    Windows are read, states read and written, at the share of the bandwidth that reading keys and
    values reaches. The windows of a sequence that is shorter than them count as full.
    """
    windows = numbers.window_bytes(model) / model.cache_shards(tensor_parallel)
    states = 2 * model.state_bytes() / tensor_parallel
    return at.cache_reading * (windows + states) / gpu.memory_bytes_per_s


def sequence_bytes(model: ModelShape, numbers: EngineNumbers, tensor_parallel: int) -> float:
    """Memory of one sequence on one GPU that does not grow with its context."""
    windows = numbers.window_bytes(model) / model.cache_shards(tensor_parallel)
    return windows + model.state_bytes() / tensor_parallel
