"""Fit the coefficients of the cost model to measured kernels: `python -m tools.kernels`.

    Parquet tables --sum a model's layers--> points (data/*.csv) --fit--> kernel_coefficients.csv

With AIConfigurator's folder `systems/data` it does both steps (needs pandas and pyarrow), without
it only the second, on the points that are shipped with the simulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.coefficients import DATA, KernelCoefficients
from simulator.costs.engine_memory import cache_tokens
from tools.kernels.fit import COLLECTIVES, fit_gpu, held_out_errors
from tools.kernels.fp8 import MEASURED, fit_fp8, fp8_table, held_out_fp8_errors
from tools.kernels.points import (
    DecodePoint,
    LinearPoint,
    MessagePoint,
    PrefillPoint,
    write_points,
)
from tools.kernels.tables import (
    SYSTEMS,
    KernelTables,
    decode_step_s,
    linear_layers_s,
    prefill_s,
    read_kernel_tables,
)

MODELS = (
    *(("Qwen2.5-1.5B", 1, 0), ("Qwen2.5-7B", 1, 0), ("Qwen2.5-14B", 1, 0), ("Qwen2.5-32B", 4, 0)),
    *(("Qwen2.5-3B", 1, 1), ("Llama-3.1-8B", 1, 1), ("Qwen2.5-72B", 4, 1), ("Llama-3.1-70B", 8, 1)),
)
"""Name, tensor parallelism, and 1 if held out of the fit."""

TOKENS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
PREFILL_SEQUENCES = (1, 4, 16, 64)
LENGTHS = (64, 256, 1024, 2048, 4096, 8192, 16384)
MOST_TOKENS = 32768
"""Largest prefill: the largest measured matrix product."""
MEMORY_UTILIZATION = 0.9
"""Steps that need more memory than this are left out."""

_ABOUT = """{what}
Summed from kernel times measured by NVIDIA: AIConfigurator 0.12.0 (ai-dynamo/aiconfigurator,
2026-09), systems/data; Apache-2.0, (c) NVIDIA CORPORATION & AFFILIATES. SGLang 0.5.14 on H100 SXM,
H200 SXM and GB200, 0.5.10 on A100 SXM 80 GB; bf16. Written by python -m tools.kernels.
"""


_ABOUT_FP8 = """{what}
Summed from kernel times measured by NVIDIA: AIConfigurator 0.12.0 (ai-dynamo/aiconfigurator,
2026-09), systems/data; Apache-2.0, (c) NVIDIA CORPORATION & AFFILIATES. SGLang 0.5.14 on H100 SXM
and H200 SXM; products in fp8 with scales per token, a kernel that quantizes the input of each of
them, cache in fp8; head and prefill attention in bf16. Written by python -m tools.kernels.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the tables if a folder is given, fit, write the coefficients, and print their errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="AIConfigurator's systems/data; without it, fit the shipped points again",
    )
    parser.add_argument("--into", type=Path, default=DATA, help="folder to write into")
    options = parser.parse_args(arguments)
    try:
        points_from = None if options.folder is None else options.into
        if options.folder is not None:
            write_all_points(options.folder, options.into)
        fitted = {name: fit_gpu(name, points_from) for name in SYSTEMS}
    except ValueError as error:
        parser.error(str(error))
    options.into.mkdir(parents=True, exist_ok=True)
    path = options.into / "kernel_coefficients.csv"
    path.write_text(coefficients_table(fitted), encoding="utf-8")
    in_fp8 = {name: fit_fp8(name, points_from, fitted[name]) for name in MEASURED}
    (options.into / "fp8_coefficients.csv").write_text(
        fp8_table(in_fp8, _ABOUT_FP8.format(what="Fitted coefficients of fp8 kernels.")),
        encoding="utf-8",
    )
    for name, kernels in in_fp8.items():
        decode, prefill = held_out_fp8_errors(name, kernels, points_from)
        print(
            f"{name} fp8: decode {kernels.decode_error:.1%} (other models {decode:.1%}), "
            f"prefill {kernels.prefill_error:.1%} ({prefill:.1%})"
        )
    for name, known in fitted.items():
        decode, prefill = held_out_errors(name, known, points_from)
        print(
            f"{name:8} decode {known.decode_error:.1%} (other models {decode:.1%}), "
            f"prefill {known.prefill_error:.1%} ({prefill:.1%}), "
            f"all-reduce {known.links.error:.1%}, NCCL {known.links.nccl_error:.1%}"
        )
    print(f"wrote {path}")


def write_all_points(tables_folder: Path, folder: Path) -> None:
    """Sum models from kernel tables, and write the points that the fit reads."""
    tables = [read_kernel_tables(tables_folder, find_gpu(name)) for name in SYSTEMS]
    folder.mkdir(parents=True, exist_ok=True)

    def about(what: str) -> str:
        return _ABOUT.format(what=what)

    write_points(
        LinearPoint,
        [point for one in tables for point in _linear_points(one)],
        folder,
        about("Seconds of all matrix products of a forward pass, by tokens."),
    )
    write_points(
        DecodePoint,
        [point for one in tables for point in _decode_points(one)],
        folder,
        about("Seconds of all kernels of a decode step; context_tokens is of each sequence."),
    )
    write_points(
        PrefillPoint,
        [point for one in tables for point in _prefill_points(one)],
        folder,
        about("Seconds of all kernels of a prefill, by sequences of a length."),
    )
    write_points(
        MessagePoint,
        [point for one in tables for point in _message_points(one)],
        folder,
        about("Seconds of collectives within a node. engine_all_reduce is SGLang's, in a graph."),
    )

    fp8 = [read_kernel_tables(tables_folder, find_gpu(name), fp8=True) for name in MEASURED]
    about_fp8 = _ABOUT_FP8.format(
        what="Seconds of all kernels of a pass or step; see the bf16 table."
    )
    write_points(
        LinearPoint, [p for one in fp8 for p in _linear_points(one)], folder, about_fp8, fp8=True
    )
    write_points(
        DecodePoint, [p for one in fp8 for p in _decode_points(one)], folder, about_fp8, fp8=True
    )
    write_points(
        PrefillPoint, [p for one in fp8 for p in _prefill_points(one)], folder, about_fp8, fp8=True
    )


def coefficients_table(fitted: Mapping[str, KernelCoefficients]) -> str:
    """The text of `data/kernel_coefficients.csv`."""
    lines = [f"# {line}" for line in _ABOUT.format(what="Fitted coefficients.").splitlines()]
    lines += [
        "# Times are seconds, sizes bytes, all else shares; *_error is the mean absolute relative",
        "# error on the points of the fit. Meanings: simulator/costs/coefficients.py.",
        "gpu,coefficient,value",
    ]
    for name, known in fitted.items():
        for one in dataclasses.fields(known):
            if one.type == "float":
                lines.append(f"{name},{one.name},{getattr(known, one.name):.5g}")
        for one in dataclasses.fields(known.links):
            lines.append(f"{name},link_{one.name},{getattr(known.links, one.name):.5g}")
    return "\n".join(lines) + "\n"


def _linear_points(tables: KernelTables) -> Iterator[LinearPoint]:
    for (name, split, held_out), tokens in itertools.product(MODELS, TOKENS):
        if not held_out:
            seconds = linear_layers_s(tables, find_model(name), split, tokens, tokens)
            yield LinearPoint(tables.gpu.name, name, split, tokens, seconds)


def _decode_points(tables: KernelTables) -> Iterator[DecodePoint]:
    for (name, split, held_out), n, context in itertools.product(MODELS, SEQUENCES, CONTEXTS):
        if n * context > _cache_tokens(name, tables.gpu, split):
            continue
        seconds = decode_step_s(tables, find_model(name), split, n, context)
        if seconds is not None:
            yield DecodePoint(tables.gpu.name, name, split, n, context, seconds, held_out)


def _prefill_points(tables: KernelTables) -> Iterator[PrefillPoint]:
    for (name, split, held_out), n, length in itertools.product(MODELS, PREFILL_SEQUENCES, LENGTHS):
        if n * length > MOST_TOKENS:
            continue
        seconds = prefill_s(tables, find_model(name), split, n, length)
        if seconds is not None:
            yield PrefillPoint(tables.gpu.name, name, split, n, length, seconds, held_out)


def _message_points(tables: KernelTables) -> Iterator[MessagePoint]:
    """Every second or third message size; sizes are powers of two."""
    name = tables.gpu.name
    for gpus, curve in tables.all_reduce.items():
        for size, seconds in curve.points()[::2]:
            yield MessagePoint(name, "engine_all_reduce", gpus, round(size), seconds)
    for (operation, gpus), curve in tables.collectives.items():
        if operation in COLLECTIVES:
            for size, seconds in curve.points()[::3]:
                yield MessagePoint(name, operation, gpus, round(size), seconds)


def _cache_tokens(name: str, gpu: GPU, split: int) -> int:
    try:
        return cache_tokens(find_model(name), gpu, split, MEMORY_UTILIZATION)
    except ValueError:
        return 0


if __name__ == "__main__":
    main()
