"""Fits of named trainers: repeated, and their errors on steps that they have not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from simulator.costs.published_steps import (
    BLACKWELL,
    PLAIN,
    Fitted,
    fit_fp8,
    fit_fsdp2,
    fit_megatron,
    fit_mixtures,
    fit_plain,
    fit_torchtitan,
    predicted_s,
    published_steps,
)
from simulator.costs.trainers import (
    BENCHMARKED,
    BLACKWELL_EFFICIENCY,
    FSDP2,
    MEGATRON,
    TORCHTITAN,
)


@pytest.mark.parametrize(
    ("fit", "kept", "error"),
    [
        (fit_megatron, {"hidden_traffic": MEGATRON.hidden_traffic}, 0.06),
        (fit_fsdp2, {"hidden_traffic": FSDP2.hidden_traffic}, 0.10),
        (fit_torchtitan, {"hidden_traffic": TORCHTITAN.hidden_traffic}, 0.03),
        (fit_plain, {"expert_layer_s": MEGATRON.expert_layer_s}, 0.05),
    ],
    ids=["megatron", "fsdp2", "torchtitan", "plain"],
)
def test_coefficients_are_fits_to_published_steps(
    fit: Callable[[], Fitted], kept: dict[str, float], error: float
) -> None:
    found = fit()
    assert kept == pytest.approx(dict(found.values), rel=2e-3)
    assert found.error < error


def test_mixtures_share_their_coefficients_on_h100_and_gb200() -> None:
    found = fit_mixtures()
    assert found.values["expert_layer_s"] == pytest.approx(BENCHMARKED.expert_layer_s, rel=2e-3)
    assert found.values[BLACKWELL] == pytest.approx(BLACKWELL_EFFICIENCY, rel=2e-3)
    assert found.error < 0.12


def test_untuned_mixtures_take_longer_than_those_of_recipes() -> None:
    tuned = dataclasses.replace(BENCHMARKED, dispatch="copies")
    on_blackwell = dataclasses.replace(tuned, matrix_efficiency=BLACKWELL_EFFICIENCY)
    ratios = [
        one.seconds / predicted_s(one, on_blackwell if one.gpu == "B200" else tuned)
        for one in published_steps()
        if one.note == PLAIN
    ]
    assert len(ratios) == 3
    assert all(1.2 < ratio < 2.4 for ratio in ratios)


def test_fp8_gains_less_than_twice_the_peak_suggests() -> None:
    """Whole steps are 1.25 to 1.53 times as fast in the same benchmarks."""
    found = fit_fp8()
    assert found.values["fp8_speedup"] == pytest.approx(MEGATRON.fp8_speedup, rel=2e-3)
    assert found.error < 0.09


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "error"),
    [
        (fit_megatron, MEGATRON.error),
        (fit_mixtures, BENCHMARKED.mixture_error),
        (fit_plain, MEGATRON.mixture_error),
        (fit_fsdp2, FSDP2.error),
        (fit_torchtitan, TORCHTITAN.error),
    ],
    ids=["megatron", "mixtures", "plain", "fsdp2", "torchtitan"],
)
def test_stated_errors_are_those_of_steps_left_out(
    fit: Callable[..., Fitted], error: float
) -> None:
    found = fit(leave_out=True)
    assert found.error == pytest.approx(error, abs=2e-3)
    assert np.abs(found.left_out).max() < 0.36
