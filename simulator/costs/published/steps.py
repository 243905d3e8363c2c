"""Published optimizer steps of pre-training, and what the cost model says about them.

data/trainer_steps.csv --> PublishedStep --TrainingCost with a TrainerSpeed--> seconds
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import MODELS
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig
from simulator.costs.coefficients import DATA, read_table
from simulator.costs.training import TrainingCost
from simulator.costs.training_speed import TrainerSpeed


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
        """For reports and tests."""
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
