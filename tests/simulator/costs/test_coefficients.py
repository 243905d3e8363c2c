"""Coefficients of GPUs, their fit, and the tables used for it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.coefficients import (
    DATA,
    MATRIX_EFFICIENCIES,
    KernelCoefficients,
    coefficients_from,
    fitted_coefficients,
    kernel_coefficients,
    read_table,
    smooth_max,
)
from simulator.stats.least_squares import fit_positive
from tools.kernels.__main__ import coefficients_table, main, write_all_points
from tools.kernels.fit import fit_gpu
from tools.kernels.points import (
    TABLES,
    DecodePoint,
    LinearPoint,
    SpeedPoint,
    read_points,
    write_points,
)
from tools.kernels.tables import (
    SYSTEMS,
    decode_step_s,
    linear_layers_s,
    prefill_s,
    read_kernel_tables,
)
from tools.pages.kernels import PAGE, page

# --- shipped numbers -----------------------------------------------------------------------------


def test_the_shipped_coefficients_are_a_fit_to_the_shipped_points() -> None:
    found, shipped = fit_gpu("H100"), fitted_coefficients()["H100"]
    for one in dataclasses.fields(KernelCoefficients):
        if one.type == "float":
            assert getattr(found, one.name) == pytest.approx(
                getattr(shipped, one.name), rel=1e-3
            ), one.name
    for one in dataclasses.fields(shipped.links):
        assert getattr(found.links, one.name) == pytest.approx(
            getattr(shipped.links, one.name), rel=1e-3
        ), one.name


def test_shipped_coefficients_are_plausible_for_kernels() -> None:
    assert list(fitted_coefficients()) == list(SYSTEMS)
    for known in fitted_coefficients().values():
        assert 1 < known.weight_reading < 1.4
        assert 1 < known.cache_reading < 2.1
        assert 20e-6 < known.layer_s < 80e-6
        assert 0 < known.sequence_s < 5e-6
        assert 0.44 < known.attention_efficiency < known.matrix_efficiency < 0.8
        assert 1.5 < known.knee < 4
        assert known.fitted
        assert "AIConfigurator" in known.provenance


def test_coefficients_of_every_gpu_are_between_measured_ones() -> None:
    measured = fitted_coefficients().values()
    for gpu in GPUS.values():
        known = kernel_coefficients(gpu)
        assert known.fitted == (gpu.name in SYSTEMS)
        if gpu.name == "H20":
            continue  # its weights were measured, and are read three times slower
        names = ["weight_reading", "cache_reading", "layer_s", "knee"]
        if gpu.name not in MATRIX_EFFICIENCIES:
            names += ["matrix_efficiency", "attention_efficiency"]
        for name in names:
            values = [getattr(one, name) for one in measured]
            assert min(values) <= getattr(known, name) <= max(values), (gpu.name, name)


def test_every_shipped_table_names_its_source() -> None:
    for name in (*TABLES.values(), "kernel_coefficients.csv"):
        text = (DATA / name).read_text(encoding="utf-8")
        first = [line for line in text.splitlines() if line.startswith("#")]
        assert any(
            "AIConfigurator 0.12.0" in line or "qwen.readthedocs.io" in line for line in first
        )
        assert len(text) < 50_000
    for row in read_table(DATA / "kernel_coefficients.csv"):
        assert math.isfinite(float(row["value"]))


def test_a_table_of_coefficients_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(coefficients_table(fitted_coefficients()), encoding="utf-8")
    assert fitted_coefficients(path) == fitted_coefficients()


def test_a_table_that_lacks_a_coefficient_is_refused() -> None:
    values = {"weight_reading": 1.2}
    with pytest.raises(ValueError, match=r"mine has no activation_traffic, .*; refit it"):
        coefficients_from(values, "mine")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_reading", -1.0, "weight_reading is -1.0, but must be a number >= 0"),
        ("layer_s", math.nan, "layer_s is nan, but must be a number >= 0"),
        ("cache_reading", math.inf, "cache_reading is inf, but must be a number >= 0"),
        ("matrix_efficiency", 1.2, r"matrix_efficiency is 1.2, but must be in \(0, 1\]"),
        ("attention_efficiency", 0.0, r"attention_efficiency is 0.0, but must be in \(0, 1\]"),
        ("knee", 0.5, "knee is 0.5, but must be >= 1"),
    ],
)
def test_impossible_coefficients_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fitted_coefficients()["H100"], **{name: value})


def test_points_survive_writing_and_reading(tmp_path: Path) -> None:
    points = [DecodePoint("H100", "Qwen2.5-7B", 1, 16, 1024, 0.006217, 0)]
    write_points(DecodePoint, points, tmp_path, "one line\nand another")
    assert read_points(DecodePoint, tmp_path) == points
    speeds = read_points(SpeedPoint)
    assert speeds[0] == SpeedPoint("Qwen2.5-1.5B", "A100-80", 1, "vLLM 0.6.3", 1, 2048, 183.3)


# --- sums over a model's layers ------------------------------------------------------------------

WIDTHS = (32, 512, 4096, 65536)
HEADS = ((8, 1), (12, 2), (16, 2), (24, 4), (32, 4), (32, 8), (40, 8), (10, 2), (20, 2))


def write_tables(
    folder: Path,
    product_ms: Callable[[float, float, float], float],
    decode_ms: Callable[[int, int, int, int], float],
    prefill_ms: Callable[[int, int, int, int], float],
    message_ms: Callable[[int, int], float],
) -> Path:
    """AIConfigurator's files with chosen times, for every GPU that it has."""
    rows = (1, 32, 128, 256, 512, 1024, 32768)
    products = [
        {"gemm_dtype": kind, "m": m, "n": n, "k": k, "latency": product_ms(m, n, k) * factor}
        for kind, factor in (("bfloat16", 1), ("fp8", 0.1))
        for m, n, k in itertools.product(rows, WIDTHS, WIDTHS)
    ]
    shapes = [
        {
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "head_dim": 128,
            "num_heads": heads,
            "num_key_value_heads": cached,
            "batch_size": batch,
        }
        for (heads, cached), batch in itertools.product(HEADS, (1, 4, 16, 64, 256))
    ]

    def attention(one: dict[str, object], milliseconds: Callable[..., float], n: int) -> float:
        return milliseconds(one["batch_size"], n, one["num_heads"], one["num_key_value_heads"])

    decode = [
        {**one, "step": n - 1, "latency": attention(one, decode_ms, n)}
        for one, n in itertools.product(shapes, (1, 1024, 32768))
    ]
    prefill = [
        {**one, "isl": n, "latency": attention(one, prefill_ms, n)}
        for one, n in itertools.product(shapes, (64, 1024, 16384))
    ]
    messages = [
        {"num_gpus": gpus, "message_size": size, "latency": message_ms(gpus, 2 * size)}
        for gpus, size in itertools.product((2, 4, 8), [2**power for power in range(8, 30)])
    ]
    for system in SYSTEMS.values():
        path = folder / system
        path.mkdir(parents=True)
        for name, table in (
            ("sglang_gemm_perf", products),
            ("sglang_generation_attention_perf", decode),
            ("sglang_context_attention_perf", prefill),
            (
                "sglang_custom_allreduce_perf",
                [{**one, "backend": "sglang_graph"} for one in messages],
            ),
            (
                "nccl_2_perf",
                [
                    {**one, "nccl_dtype": "half", "op_name": name}
                    for one in messages
                    for name in ("all_reduce", "all_gather", "reduce_scatter")
                ],
            ),
        ):
            pd.DataFrame(table).to_parquet(path / f"{name}.parquet")
    return folder


def constant(milliseconds: float) -> Callable[..., float]:
    return lambda *_: milliseconds


def test_a_step_is_the_sum_of_its_layers_kernels(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, constant(0.1), constant(0.02), constant(0.5), constant(0.003))
    gpu = find_gpu("H100")
    tables = read_kernel_tables(folder, gpu)
    model = find_model("Qwen2.5-7B")
    # Two norms of 4 widths and a gate of 3 inner widths, at 80 % of the bandwidth, plus 3 us each.
    moved = 16 * 2 * (2 * 4 * 3584 + 3 * 18944) / (0.8 * gpu.memory_bytes_per_s)
    layer_s = 4 * 0.1e-3 + 0.02e-3 + 3 * 3e-6 + moved
    head_s = 0.1e-3 * 152064 / 65536  # wider than any measured product
    step_s = decode_step_s(tables, model, 1, 16, 1024)
    assert step_s == pytest.approx(28 * layer_s + head_s, rel=1e-9)
    # Split over two: half of the gate, and 57 all-reduces.
    halved = 16 * 2 * (2 * 4 * 3584 + 3 * 18944 / 2) / (0.8 * gpu.memory_bytes_per_s)
    model = find_model("Qwen2.5-14B")
    halved = 16 * 2 * (2 * 4 * 5120 + 3 * 13824 / 4) / (0.8 * gpu.memory_bytes_per_s)
    split_s = 48 * (4 * 0.1e-3 + 0.02e-3 + 9e-6 + halved) + 0.1e-3 + 97 * 0.003e-3
    assert decode_step_s(tables, model, 4, 16, 1024) == pytest.approx(split_s, rel=1e-9)


def test_interpolation_between_measured_shapes_is_exact_for_power_laws(tmp_path: Path) -> None:
    """Straight lines in logarithms; heads of 28 lie between 24 and 32."""
    folder = write_tables(
        tmp_path,
        lambda m, n, k: 1e-3 * m**0.5 * n**0.7 * k**0.3,
        lambda batch, n, heads, _: 1e-3 * (batch * n) ** 0.9 * heads**0.2,
        lambda batch, n, heads, _: 1e-6 * batch * n**1.8 * heads,
        lambda _, size: 1e-3 * size**0.5,
    )
    tables = read_kernel_tables(folder, find_gpu("H200"))
    model = find_model("Qwen2.5-7B")

    def product_s(m: int, n: int, k: int) -> float:
        return 1e-6 * m**0.5 * n**0.7 * k**0.3

    head_s = product_s(100, 65536, 3584) * 152064 / 65536
    layer_s = (
        product_s(100, 4608, 3584)
        + product_s(100, 3584, 3584)
        + product_s(100, 37888, 3584)
        + product_s(100, 3584, 18944)
    )
    assert linear_layers_s(tables, model, 1, 100, 100) == pytest.approx(
        28 * layer_s + head_s, rel=1e-9
    )
    steps = [decode_step_s(tables, model, 1, 16, n) or 0.0 for n in (2000, 8000)]
    attention_s = 28 * 1e-6 * 28**0.2 * 16**0.9 * (8000**0.9 - 2000**0.9)
    assert steps[1] - steps[0] == pytest.approx(attention_s, rel=1e-9)
    # A prefill's head sees one token per sequence.
    reads = [prefill_s(tables, model, 1, batch, 4096 // batch) or 0.0 for batch in (1, 4)]
    head = [product_s(batch, 65536, 3584) * 152064 / 65536 for batch in (1, 4)]
    pairs = [28 * 1e-9 * 28 * batch * (4096 / batch) ** 1.8 for batch in (1, 4)]
    assert reads[1] - reads[0] == pytest.approx(head[1] - head[0] + pairs[1] - pairs[0], rel=1e-6)


def test_nothing_is_extrapolated_beyond_the_tables(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, constant(0.1), constant(0.02), constant(0.5), constant(0.003))
    tables = read_kernel_tables(folder, find_gpu("H100"))
    model = find_model("Qwen2.5-7B")
    assert decode_step_s(tables, model, 1, 16, 40_000) is None  # longer context
    assert decode_step_s(tables, model, 1, 17, 1024) is None  # other batch
    assert decode_step_s(tables, find_model("Llama-3.1-70B"), 1, 16, 1024) is None  # more heads
    assert prefill_s(tables, model, 1, 1, 32) is None


def test_a_disturbed_measurement_of_a_message_is_ignored(tmp_path: Path) -> None:
    folder = write_tables(
        tmp_path,
        constant(0.1),
        constant(0.02),
        constant(0.5),
        lambda gpus, size: 0.05 if (gpus, size) == (8, 2**15) else 0.003,
    )
    curves = read_kernel_tables(folder, find_gpu("H100")).all_reduce
    assert [len(curves[gpus].points()) for gpus in (2, 4, 8)] == [22, 22, 21]


def test_the_fit_recovers_the_coefficients_that_made_the_kernel_times(tmp_path: Path) -> None:
    """Kernel times computed from the formulas."""
    gpu = find_gpu("H100")
    flops, bandwidth, link = gpu.flops_per_s, gpu.memory_bytes_per_s, gpu.nvlink_bytes_per_s

    def message_s(gpus: int, size: int) -> float:
        one_shot = 2e-6 + 1e-7 * (gpus - 1) + (gpus - 1) * size / link / 0.5
        return min(one_shot, 6e-6 + 3e-7 * (gpus - 1) + 2 * (gpus - 1) / gpus * size / link / 0.8)

    tables = write_tables(
        tmp_path / "tables",
        lambda m, n, k: (
            1e3 * smooth_max(1.25 * 2 * n * k / bandwidth, 2 * m * n * k / flops / 0.7, 3)
        ),
        lambda batch, n, _, cached: 1e3 * (1e-5 + 1.3 * batch * n * cached * 512 / bandwidth),
        lambda batch, n, heads, _: 1e3 * batch * n * (n + 1) / 2 * heads * 512 / flops / 0.5,
        lambda gpus, size: 1e3 * message_s(gpus, size),
    )
    points = tmp_path / "points"
    write_all_points(tables, points)
    found = fit_gpu("H100", points)
    assert found.matrix_efficiency == pytest.approx(0.7, rel=0.1)
    assert found.weight_reading == pytest.approx(1.25, rel=0.1)
    assert found.cache_reading == pytest.approx(1.3, rel=0.1)
    assert found.attention_efficiency == pytest.approx(0.5, rel=0.1)
    assert found.layer_s == pytest.approx(10e-6 + 9e-6, rel=0.3)
    assert found.links.ring_efficiency == pytest.approx(0.8, rel=0.05)
    assert found.decode_error < 0.05
    assert found.prefill_error < 0.05
    linear = [point for point in read_points(LinearPoint, points) if point.gpu == "H100"]
    assert {point.model for point in linear} == {f"Qwen2.5-{n}B" for n in ("1.5", "7", "14", "32")}


def test_a_folder_without_tables_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--into", str(tmp_path)])
    assert stop.value.code == 2
    assert "has no *gemm_perf.parquet; use AIConfigurator's folder" in capsys.readouterr().err


# --- least squares, and the knee -----------------------------------------------------------------


def test_least_squares_finds_a_line_through_exact_points() -> None:
    places = np.array([1.0, 2.0, 5.0, 10.0])
    found = fit_positive(lambda v: v[0] + v[1] * places, (1.0, 1.0), 3.0 + 0.01 * places)
    assert found.values == pytest.approx((3.0, 0.01), rel=1e-4)
    assert found.error < 1e-6


def test_least_squares_minimizes_the_relative_error() -> None:
    """The constant closest to 1 and 100 is 50.5 by absolute, about 1 by relative squares."""
    found = fit_positive(lambda v: [v[0], v[0]], (5.0,), [1.0, 100.0])
    assert found.values[0] == pytest.approx((1 + 1 / 100) / (1 + 1 / 100**2), rel=1e-4)
    assert found.relative_error == pytest.approx([0.00990, -0.98990], abs=1e-4)


def test_a_coefficient_that_would_be_negative_becomes_zero() -> None:
    places = np.array([1.0, 2.0, 3.0, 4.0])
    found = fit_positive(lambda v: v[0] * places + v[1], (1.0, 1.0), 2 * places - 0.5)
    assert found.values[1] < 1e-3


@pytest.mark.parametrize(
    ("start", "measured", "message"),
    [
        ((1.0,), [], "measured is empty; there is nothing to fit"),
        ((1.0, 1.0), [1.0], "1 points cannot determine 2 parameters"),
        ((1.0,), [1.0, 0.0], "measured holds 0.0, but every value must be finite and > 0"),
        ((1.0,), [1.0, math.nan], "measured holds nan"),
        ((-1.0,), [1.0], "start holds -1.0"),
    ],
)
def test_points_that_do_not_determine_the_coefficients_are_refused(
    start: tuple[float, ...], measured: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_positive(lambda v: [v[0]] * len(measured), start, measured)


def test_the_smooth_maximum_exceeds_the_maximum_only_near_the_knee() -> None:
    assert smooth_max(3.0, 4.0, 2) == pytest.approx(5.0)
    assert smooth_max(4.0, 3.0, 2) == pytest.approx(5.0)
    assert smooth_max(1.0, 1.0, 1) == pytest.approx(2.0)
    assert smooth_max(1e-6, 1.0, 3) == pytest.approx(1.0)
    assert smooth_max(2.0, 7.0, math.inf) == 7.0
    assert smooth_max(0.0, 2.0, 3) == smooth_max(2.0, 0.0, 3) == 2.0
    assert smooth_max(1e-200, 2e-200, 3) == pytest.approx(1e-200 * 9 ** (1 / 3))


# --- the page, and what is loaded ----------------------------------------------------------------


def test_the_page_about_kernels_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"
    for gpu in GPUS:
        assert f"| {gpu} |" in page()


def test_costs_and_their_fit_load_neither_pandas_nor_torch() -> None:
    script = (
        "import sys, tools.kernels.__main__; "
        "print(sorted({'matplotlib', 'pandas', 'pyarrow', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
