"""What it costs to change between generation and training on the same GPUs.

    to training      the cache is given up; optimizer state comes back from the host
    to generation    optimizer state goes to the host; weights change layout into the engines

The host holds what does not fit beside the engines' cache: fp32 parameters and moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import WeightsConfig
from simulator.costs.training_memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from simulator.costs.weight_sync import sync_speed

PCIE_EFFICIENCY = 0.5
"""Assumed, not measured: 8 GPUs copy at a time, through the memory of one host. From pinned memory;
without it a colocated 0.6B trainer was seen to take 11 s for what would be 0.3 (vime issue 442,
2026-09-19)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """Seconds in which GPUs do neither."""

    to_training_s: float
    to_generation_s: float
    provenance: str = ""

    def __post_init__(self) -> None:
        for name in ("to_training_s", "to_generation_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, but must be >= 0")


def switch_cost(config: WeightsConfig, model: ModelShape, gpu: GPU, gpus: int) -> SwitchCost:
    """There and back, once per training step. A measured `switch_s` is the sum of both.

    Raises:
        ValueError: no GPUs.
    """
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs cannot switch; there must be at least 1")
    state_bytes = (OPTIMIZER_BYTES + WEIGHT_BYTES) * model.parameters / gpus
    copy_s = state_bytes / (PCIE_EFFICIENCY * gpu.pcie_bytes_per_s)
    reshard_s = sync_speed("reshard", mixture=bool(model.experts)).seconds(model.weight_bytes())
    if config.switch_s is None:
        return SwitchCost(
            to_training_s=copy_s,
            to_generation_s=copy_s + reshard_s,
            provenance=(
                "weights at the rate of published reshards (HybridFlow 2024-09; slime, verl "
                "2025-07), optimizer state over PCIe at half its rate"
            ),
        )
    share = config.switch_s / (2 * copy_s + reshard_s)
    return SwitchCost(
        to_training_s=share * copy_s,
        to_generation_s=share * (copy_s + reshard_s),
        provenance="weights.switch_s; both ways as the model has them",
    )
