"""Published optimizer steps of pre-training, and what the cost model says about them.

data/trainer_steps.csv --> PublishedStep --TrainingCost with a TrainerSpeed--> seconds

How uneven experts are when nothing balances them: from steps with forced and with free routing.

TFLOP/s forced / TFLOP/s free = seconds with imbalance / seconds without     solved for it

Fits of the named trainers to the published steps, and their errors for rows left out.

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
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import MODELS
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig
from simulator.costs.coefficients import DATA, read_table
from simulator.costs.trainers import (
    BENCHMARKED,
    BLACKWELL_EFFICIENCY,
    FSDP2,
    MEGATRON,
    TORCHTITAN,
)
from simulator.costs.training import TrainingCost
from simulator.costs.training_speed import TrainerSpeed
from simulator.stats.least_squares import fit_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """One row of `data/trainer_steps.csv`, which explains its columns and lists the sources."""

    trainer: str
    version: str
    model: str
    gpu: str
    gpus: int
    tokens: int
    sequences: int
    micro_batch: int
    tensor: int
    pipeline: int
    chunks: int
    context: int
    expert: int
    again: float
    precision: str
    seconds: float
    source: str
    note: str

    @property
    def name(self) -> str:
        """Name for reports and tests."""
        layout = f"TP{self.tensor} PP{self.pipeline} CP{self.context} EP{self.expert}"
        return (
            f"{self.model}, {self.gpus} {self.gpu}, {self.tokens} tokens, {layout}, "
            f"{self.precision}, {self.source}"
        )


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """All rows."""
    kinds = {one.name: one.type for one in dataclasses.fields(PublishedStep)}
    convert = {"int": int, "float": float, "str": str}
    return tuple(
        PublishedStep(**{name: convert[str(kinds[name])](value) for name, value in row.items()})
        for row in read_table(DATA / "trainer_steps.csv")
    )


def steps_of(trainer: str, *, precision: str = "bf16") -> list[PublishedStep]:
    """Rows that a fit may use: not those with special schedules or kernels."""
    return [
        one
        for one in published_steps()
        if one.trainer == trainer
        and one.precision == precision
        and not one.note.startswith("tuned")
    ]


@cache
def shapes() -> dict[str, ModelShape]:
    """Shapes of the rows' models: those of `data/trainer_models.csv`, and the catalogue's."""
    own = {}
    for row in read_table(DATA / "trainer_models.csv"):
        numbers: dict[str, Any] = {
            name: int(value) for name, value in row.items() if name != "model"
        }
        tied, gated = bool(numbers.pop("tied")), bool(numbers.pop("gated"))
        if numbers["experts"]:
            numbers["moe_intermediate"] = numbers["intermediate"]
        own[row["model"]] = ModelShape(
            name=row["model"], tied_embeddings=tied, gated=gated, **numbers
        )
    return {**MODELS, **own}


@cache
def gpu_of(name: str) -> GPU:
    """The GPU of a row: of the catalogue, or Meta's H100 with slower memory and less power."""
    if name != "H100-500W":
        return find_gpu(name)
    return dataclasses.replace(
        find_gpu("H100"), memory_bytes=96 * 2**30, memory_bytes_per_s=2.4e12, power_w=500
    )


def cost_of(step: PublishedStep, speed: TrainerSpeed) -> TrainingCost:
    """The training cost with the layout of a row."""
    if step.note in ("copies", "plain"):
        speed = dataclasses.replace(speed, dispatch="copies")
    config = TrainerConfig(
        tensor_parallel=step.tensor,
        pipeline_parallel=step.pipeline,
        pipeline_chunks=step.chunks,
        context_parallel=step.context,
        expert_parallel=step.expert,
        precision="fp8" if step.precision == "fp8" else "bf16",
        micro_batch_tokens=step.micro_batch * step.tokens,
        activation_recompute=step.again > 0,
        proximal_logprobs=False,
    )
    return TrainingCost(
        config=config,
        model=shapes()[step.model],
        # The step ran, so its memory is not in question; a test compares the estimate.
        gpu=dataclasses.replace(gpu_of(step.gpu), memory_bytes=1e12),
        gpus=step.gpus,
        fully_sharded=speed.gathers,
        speed=speed,
        recomputed=step.again,
    )


def predicted_s(step: PublishedStep, speed: TrainerSpeed) -> float:
    """Seconds of the step."""
    return cost_of(step, speed).step([step.tokens] * step.sequences, minibatches=1).seconds


PAIRS: Final = (
    # tokens, context parallel, TFLOP/s with forced balance, and without
    (16_384, 1, 295, 237),
    (32_768, 2, 335, 277),
    (65_536, 4, 368, 320),
    (131_072, 8, 389, 357),
)
"""Qwen3-235B on 256 H100: TP 4, PP 8 in 4 chunks, EP 8, 256 sequences, MoE layers and norms
recomputed (yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md, long context, 2025)."""
_AGAIN: Final = 0.5
"""Share of a forward pass that is recomputed: what mixtures are of these models, about half."""


def implied_imbalance(tokens: int, context: int, forced: float, free: float) -> float:
    """Tokens of the busiest GPU's experts, relative to the mean, that explain one pair."""

    def seconds(imbalance: float) -> float:
        cost = TrainingCost(
            config=TrainerConfig(
                tensor_parallel=4,
                pipeline_parallel=8,
                pipeline_chunks=4,
                context_parallel=context,
                expert_parallel=8,
                micro_batch_tokens=tokens,
                proximal_logprobs=False,
            ),
            model=shapes()["Qwen3-235B-A22B"],
            gpu=dataclasses.replace(gpu_of("H100"), memory_bytes=1e12),
            gpus=256,
            speed=BENCHMARKED,
            imbalance=imbalance,
            recomputed=_AGAIN,
        )
        return cost.step([tokens] * 256, minibatches=1).seconds

    wanted = forced / free * seconds(1.0)
    low, high = 1.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return low


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
    """Error of each row by a fit without it; empty if not asked for."""

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
