"""Fits of the named trainers to the published steps, and their errors for rows left out.

    megatron     dense      hidden traffic                                   8 steps on H100
                 mixtures   time per layer with experts, and the share
                            of the peak that a GB200 reaches                 9 mixtures, 2 dense
                 plain      time per layer with experts, if nothing is
                            tuned: NCCL's all-to-all, no graphs              3 mixtures
                 fp8        speed-up of the layers' products                 9 steps on H100
    fsdp2        hidden traffic                          eager FSDP, sequences up to 8,192 tokens
    torchtitan   hidden traffic                          compiled FSDP2 on H100 and A100

Everything else is known from elsewhere: shares of the peak from kernel tables and papers, messages
from `communication`, layouts from the rows. `trainers.named` holds the results; tests repeat the
fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from simulator.costs.published.steps import PublishedStep, predicted_s, published_steps, shapes
from simulator.costs.trainers.named import (
    BENCHMARKED,
    BLACKWELL_EFFICIENCY,
    FSDP2,
    MEGATRON,
    TORCHTITAN,
)
from simulator.costs.training_speed import TrainerSpeed
from simulator.stats.least_squares import fit_positive

BLACKWELL: Final = "matrix_efficiency on Blackwell"
PLAIN: Final = "plain"
_LONGEST: Final = 4096
"""Tokens of llm-foundry's sequences that the fit of `fsdp2` takes: its attention kernel of 2023
computes more than the causal half, which dominates longer ones."""


class Fitted(NamedTuple):
    """Result of a fit."""

    values: Mapping[str, float]
    errors: Sequence[float]
    """Predicted / measured - 1, of each row."""
    left_out: Sequence[float]
    """The same, of each row by a fit without it; empty if not asked for."""

    @property
    def error(self) -> float:
        """Mean absolute relative error on rows that the fit did not see, or on those it saw."""
        return float(np.abs(self.left_out or self.errors).mean())


def fit_megatron(*, leave_out: bool = False) -> Fitted:
    """Hidden traffic of dense models on H100."""
    rows = [one for one in _rows("megatron") if one.gpu == "H100" and not _mixture(one)]
    return _fit(rows, lambda _: MEGATRON, {"hidden_traffic": 110.0}, leave_out=leave_out)


def fit_mixtures(*, leave_out: bool = False) -> Fitted:
    """Experts on H100 and GB200, and the products of a GB200."""
    rows = [one for one in _rows("megatron") if one.gpu == "GB200" or _mixture(one)]
    rows = [one for one in rows if one.note != PLAIN]
    # Traffic of experts in addition to that of dense layers would be fitted as none.
    start = {"expert_layer_s": 1e-3, BLACKWELL: 0.6}
    return _fit(rows, lambda _: BENCHMARKED, start, leave_out=leave_out)


def fit_plain(*, leave_out: bool = False) -> Fitted:
    """Time per layer with experts of mixtures that nothing was tuned for."""
    rows = [one for one in _rows("megatron") if one.note == PLAIN]
    return _fit(rows, lambda _: MEGATRON, {"expert_layer_s": 3e-3}, leave_out=leave_out)


def fit_fp8(*, leave_out: bool = False) -> Fitted:
    """Speed-up of the layers' products in fp8, with the layouts of the fits above."""
    rows = [one for one in published_steps() if one.precision == "fp8"]
    return _fit(rows, lambda _: BENCHMARKED, {"fp8_speedup": 1.5}, leave_out=leave_out)


def fit_fsdp2(*, leave_out: bool = False) -> Fitted:
    """Hidden traffic of eager FSDP, for dense models."""
    rows = [one for one in _rows("fsdp2") if not _mixture(one)]
    rows = [one for one in rows if one.source != "foundry" or one.tokens <= _LONGEST]
    return _fit(rows, lambda _: FSDP2, {"hidden_traffic": 140.0}, leave_out=leave_out)


def fit_torchtitan(*, leave_out: bool = False) -> Fitted:
    """Hidden traffic of compiled FSDP2."""
    rows = _rows("torchtitan")
    return _fit(rows, lambda _: TORCHTITAN, {"hidden_traffic": 150.0}, leave_out=leave_out)


def _rows(trainer: str) -> list[PublishedStep]:
    """Rows in bf16 without special schedules."""
    return [
        one
        for one in published_steps()
        if one.trainer == trainer and one.precision == "bf16" and not one.note.startswith("tuned")
    ]


def _mixture(step: PublishedStep) -> bool:
    return bool(shapes()[step.model].experts)


def _fit(
    rows: Sequence[PublishedStep],
    speed_of: Callable[[PublishedStep], TrainerSpeed],
    start: Mapping[str, float],
    *,
    leave_out: bool,
) -> Fitted:
    names = list(start)

    def seconds(values: Sequence[float], some: Sequence[PublishedStep]) -> list[float]:
        return [
            predicted_s(one, _changed(speed_of(one), dict(zip(names, values, strict=True)), one))
            for one in some
        ]

    def fitted(some: Sequence[PublishedStep]) -> tuple[float, ...]:
        measured = [one.seconds for one in some]
        found = fit_positive(
            lambda at: seconds(at, some), list(start.values()), measured, tolerance=1e-4
        )
        return found.values

    def errors(values: Sequence[float], some: Sequence[PublishedStep]) -> list[float]:
        return [
            predicted / one.seconds - 1
            for predicted, one in zip(seconds(values, some), some, strict=True)
        ]

    best = fitted(rows)
    left_out: list[float] = []
    if leave_out:
        for one in rows:
            others = [other for other in rows if other is not one]
            left_out += errors(fitted(others), [one])
    return Fitted(dict(zip(names, best, strict=True)), errors(best, rows), left_out)


def _changed(speed: TrainerSpeed, values: Mapping[str, float], step: PublishedStep) -> TrainerSpeed:
    """A speed with fitted values; that of Blackwell is the matrix efficiency on its GPUs."""
    own: dict[str, Any] = dict(values)
    on_blackwell = own.pop(BLACKWELL, None)
    if step.gpu in ("GB200", "B200"):
        own["matrix_efficiency"] = min(1.0, on_blackwell or BLACKWELL_EFFICIENCY)
    if "fp8_speedup" in own:
        own["fp8_speedup"] = float(np.clip(own["fp8_speedup"], 1, 2))
    return dataclasses.replace(speed, **own)
