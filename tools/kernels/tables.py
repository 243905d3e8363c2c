"""Kernel times measured by NVIDIA, and decode steps and prefills of a model summed from them.

Reads the Parquet tables of AIConfigurator (`systems/data/<gpu>/`, Apache-2.0): matrix products,
attention, all-reduce; bf16 or fp8, heads of 128. Between measured shapes, times are interpolated
linearly in logarithms; outside of them the result is None. Needs pandas and pyarrow.

    step = layers * (4 products + attention + 3 elementwise) + head + (2 * layers + 1) all-reduces
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape

SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "A100-80": "a100_sxm", "GB200": "gb200"}
"""Folder, by GPU."""

ELEMENTWISE_EFFICIENCY = 0.8
ELEMENTWISE_LATENCY_S = 3e-6
"""AIConfigurator's assumptions for norms and activations, which it has no tables of (in its
`system_spec.yaml`: "nonofficial correction based on observations")."""


class Curve(NamedTuple):
    """Measured seconds by size, both as logarithms, in order of the size."""

    log_sizes: NDArray[np.float64]
    log_seconds: NDArray[np.float64]

    def at(self, size: float) -> float:
        """Seconds for a size within the table."""
        return math.exp(np.interp(math.log(size), self.log_sizes, self.log_seconds))

    def covers(self, size: float) -> bool:
        """Whether a size is within the table."""
        return bool(self.log_sizes[0] <= math.log(size) <= self.log_sizes[-1])

    def points(self) -> list[tuple[float, float]]:
        """Measured sizes and seconds."""
        return [
            (float(size), float(seconds))
            for size, seconds in zip(np.exp(self.log_sizes), np.exp(self.log_seconds), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """Measured seconds of one GPU's kernels."""

    gpu: GPU
    products: Mapping[tuple[int, int], Curve]
    """Seconds by rows, by (columns, inner width)."""
    head_products: Mapping[tuple[int, int], Curve]
    """The same in bf16, in which the head stays."""
    fp8: bool
    """Products and the cache are in fp8, and inputs of products are quantized."""
    widths: Sequence[int]
    """Measured numbers of columns, which are also those of inner widths."""
    decode_attention: Mapping[tuple[int, int], Mapping[int, Curve]]
    """Seconds by context, by (heads, key-value heads) and sequences."""
    prefill_attention: Mapping[tuple[int, int], Mapping[int, Curve]]
    """Seconds by length, by (heads, key-value heads) and sequences."""
    all_reduce: Mapping[int, Curve]
    """Seconds by bytes in a CUDA graph, by number of GPUs."""
    collectives: Mapping[tuple[str, int], Curve]
    """Seconds by bytes, by (NCCL operation, number of GPUs)."""


def read_kernel_tables(folder: Path, gpu: GPU, *, fp8: bool = False) -> KernelTables:
    """The tables of one GPU.

    Args:
        folder: AIConfigurator's `systems/data`.
        gpu: one of `SYSTEMS`.
        fp8: products with scales per token, and attention over a cache in fp8; prefill attention
            stays in bf16.

    Raises:
        ValueError: one line: the folder has no table of it.
    """
    system = folder / SYSTEMS[gpu.name]
    head = products = _read(system, "*gemm_perf.parquet", gemm_dtype="bfloat16")
    attention = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 128}
    cached = attention
    if fp8:
        products = _read(system, "*gemm_perf.parquet", gemm_dtype="fp8")
        cached = {**attention, "kv_cache_dtype": "fp8"}
    decode = _read(system, "*generation_attention_perf.parquet", **cached)
    prefill = _read(system, "*context_attention_perf.parquet", **attention)
    custom = _read(system, "*custom_allreduce_perf.parquet", backend="sglang_graph")
    nccl = _read(system, "*nccl*_perf.parquet", nccl_dtype="half")
    shapes = ["num_heads", "num_key_value_heads"]
    decode["context"] = decode["step"] + 1
    # Message sizes count numbers of 2 bytes.
    custom["bytes"], nccl["bytes"] = custom["message_size"] * 2, nccl["message_size"] * 2
    # Messages that were disturbed by something else on the machine took ten times as long.
    custom = custom[custom["latency"] < 8 * custom.groupby("bytes")["latency"].transform("min")]
    return KernelTables(
        gpu=gpu,
        products={key: _curve(rows, "m") for key, rows in products.groupby(["n", "k"])},
        head_products={key: _curve(rows, "m") for key, rows in head.groupby(["n", "k"])},
        fp8=fp8,
        widths=[int(one) for one in sorted(products["n"].unique())],
        decode_attention={
            key: {int(n): _curve(some, "context") for n, some in rows.groupby("batch_size")}
            for key, rows in decode.groupby(shapes)
        },
        prefill_attention={
            key: {int(n): _curve(some, "isl") for n, some in rows.groupby("batch_size")}
            for key, rows in prefill.groupby(shapes)
        },
        all_reduce={int(n): _curve(rows, "bytes") for n, rows in custom.groupby("num_gpus")},
        collectives={
            (str(name), int(n)): _curve(rows, "bytes")
            for (name, n), rows in nccl.groupby(["op_name", "num_gpus"])
        },
    )


def decode_step_s(
    tables: KernelTables,
    model: ModelShape,
    tensor_parallel: int,
    sequences: int,
    context_tokens: int,
) -> float | None:
    """Kernel seconds of one decode step, with `context_tokens` tokens of context per sequence."""
    attention = _attention_s(
        tables.decode_attention, model, tensor_parallel, sequences, context_tokens
    )
    if attention is None or not _reduces(tables, tensor_parallel):
        return None
    products = linear_layers_s(tables, model, tensor_parallel, sequences, sequences)
    others = _others_s(tables, model, tensor_parallel, sequences)
    return products + model.layers * attention + others


def prefill_s(
    tables: KernelTables, model: ModelShape, tensor_parallel: int, sequences: int, length: int
) -> float | None:
    """Kernel seconds of a prefill; only the last token of each sequence passes the head."""
    attention = _attention_s(tables.prefill_attention, model, tensor_parallel, sequences, length)
    if attention is None or not _reduces(tables, tensor_parallel):
        return None
    tokens = sequences * length
    products = linear_layers_s(tables, model, tensor_parallel, tokens, sequences)
    return products + model.layers * attention + _others_s(tables, model, tensor_parallel, tokens)


def linear_layers_s(
    tables: KernelTables, model: ModelShape, tensor_parallel: int, rows: int, head_rows: int
) -> float:
    """Matrix products of a forward pass of `rows` tokens; `head_rows` of them pass the head."""
    split = tensor_parallel
    heads = model.heads * model.head_dim // split
    cached = 2 * max(1, model.kv_heads // split) * model.head_dim
    inner, products = model.intermediate // split, tables.products
    shapes = (
        *((heads + cached, model.hidden), (model.hidden, heads)),
        *((2 * inner, model.hidden), (model.hidden, inner)),
    )
    layer = sum(_product_s(tables, products, rows, *shape) for shape in shapes)
    if tables.fp8:
        layer += sum(_elementwise_s(tables.gpu, rows * width) for _, width in shapes)
    columns = model.vocabulary // split
    head = _product_s(tables, tables.head_products, head_rows, columns, model.hidden)
    return model.layers * layer + head


def _reduces(tables: KernelTables, split: int) -> bool:
    """Whether all-reduces of this many GPUs were measured; nodes of a GB200 have four."""
    return split == 1 or split in tables.all_reduce


def _others_s(tables: KernelTables, model: ModelShape, split: int, tokens: int) -> float:
    """Norms, activations and all-reduces."""
    inner = model.intermediate // split
    per_layer = 2 * _elementwise_s(tables.gpu, tokens * 4 * model.hidden)
    per_layer += _elementwise_s(tables.gpu, tokens * 3 * inner)
    if split == 1:
        return model.layers * per_layer
    curve = tables.all_reduce[split]
    message = tokens * model.hidden * 2
    # After attention, after the MLP, and once after the embedding.
    return model.layers * per_layer + (2 * model.layers + 1) * curve.at(message)


def _elementwise_s(gpu: GPU, numbers: int) -> float:
    rate = gpu.memory_bytes_per_s * ELEMENTWISE_EFFICIENCY
    return ELEMENTWISE_LATENCY_S + 2 * numbers / rate


def _product_s(
    tables: KernelTables,
    products: Mapping[tuple[int, int], Curve],
    rows: int,
    columns: int,
    inner: int,
) -> float:
    """[rows, inner] x [inner, columns], interpolated between the four nearest measured shapes."""
    widths = tables.widths
    # The head is wider than any measured product; times of wide products are proportional to width.
    factor = max(1.0, columns / widths[-1])
    logs = 0.0
    for width, width_share in _neighbors(widths, min(columns, widths[-1])):
        for depth, depth_share in _neighbors(widths, inner):
            seconds = products[width, depth].at(rows)
            logs += width_share * depth_share * math.log(seconds)
    return factor * math.exp(logs)


def _attention_s(
    tables: Mapping[tuple[int, int], Mapping[int, Curve]],
    model: ModelShape,
    split: int,
    sequences: int,
    tokens: int,
) -> float | None:
    """Attention of one layer, interpolated for numbers of heads that were not measured."""
    heads, kv_heads = model.heads // split, max(1, model.kv_heads // split)
    known = sorted(
        one
        for one, cached in tables
        if cached == kv_heads
        and sequences in tables[one, cached]
        and tables[one, cached][sequences].covers(tokens)
        # With equal numbers of key and query heads, a different kernel runs.
        and (one > cached or heads == kv_heads)
    )
    if not known or not known[0] <= heads <= known[-1]:
        return None
    logs = 0.0
    for one, share in _neighbors(known, heads):
        logs += share * math.log(tables[one, kv_heads][sequences].at(tokens))
    return math.exp(logs)


def _neighbors(known: Sequence[int], wanted: int) -> list[tuple[int, float]]:
    """The known numbers around `wanted`, with weights that interpolate its logarithm."""
    place = bisect.bisect_left(known, wanted)
    if known[place] == wanted:
        return [(wanted, 1.0)]
    below, above = known[place - 1], known[place]
    share = math.log(wanted / below) / math.log(above / below)
    return [(below, 1 - share), (above, share)]


def _curve(rows: Any, by: str) -> Curve:
    mean = rows.groupby(by)["latency"].mean()  # milliseconds
    return Curve(np.log(mean.index.to_numpy(np.float64)), np.log(mean.to_numpy(np.float64) / 1e3))


def _read(system: Path, pattern: str, **wanted: object) -> Any:
    """The newest table of one kind, with only the wanted rows."""
    import pandas

    paths = sorted(system.rglob(pattern))
    if not paths:
        raise ValueError(
            f"{system} has no {pattern}; use AIConfigurator's folder systems/data, which contains "
            f"{', '.join(SYSTEMS.values())}"
        )
    rows = pandas.read_parquet(paths[-1])
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    if "window_size" in rows:
        rows = rows[rows["window_size"] == 0]
    return rows.copy()
