"""Grouped products of experts against published times."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.costs.coefficients import DATA, read_table
from simulator.costs.layers import work
from simulator.costs.layers.work import grouped_s
from simulator.costs.typical_coefficients import kernel_coefficients
from simulator.stats.least_squares import fit_positive

ROWS = read_table(DATA / "grouped_products.csv")
LARGE = {"H20": 0.91, "H800": 0.73}
"""Shares of the fp8 peak that large products reach in the same benchmark (InferSim, 2025)."""


def predicted_us(row: dict[str, str]) -> float:
    """In fp8: one byte per weight, twice the FLOP/s."""
    gpu = find_gpu(row["gpu"])
    experts, hidden, width, tokens = (
        int(row[name]) for name in ("experts", "hidden", "width", "tokens")
    )
    weights = experts * hidden * 2 * width
    computing = 2 * weights * tokens / (LARGE[gpu.name] * 2 * gpu.flops_per_s)
    at = kernel_coefficients(gpu)
    reading = weights * at.weight_reading / gpu.memory_bytes_per_s
    return 1e6 * float(grouped_s(np.array(computing), np.array(reading)))


def test_few_and_many_tokens_per_expert_take_as_long_as_published() -> None:
    errors = [predicted_us(row) / float(row["microseconds"]) - 1 for row in ROWS]
    assert len(errors) == 53
    assert np.abs(errors).mean() < 0.045
    assert np.abs(errors).max() < 0.15


def test_sharpness_and_share_are_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(values) -> list[float]:
        monkeypatch.setattr(work, "GROUPED_SHARPNESS", values[0])
        monkeypatch.setattr(work, "GROUPED_SHARE", values[1])
        return [predicted_us(row) for row in ROWS]

    kept = work.GROUPED_SHARPNESS, work.GROUPED_SHARE
    found = fit_positive(predict, (1.5, 0.9), [float(row["microseconds"]) for row in ROWS])
    assert found.values == pytest.approx(kept, rel=0.02)
