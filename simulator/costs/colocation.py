"""Cost of switching between generation and training on the same GPUs.

    to training      the cache is freed; optimizer state is copied back from the host
    to generation    optimizer state is copied to the host; weights are resharded for the engines

The host holds the state that does not fit next to the engines' cache: fp32 parameters and moments.
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
"""Assumed, not measured: 8 GPUs copy at the same time, through the memory of one host. For pinned
memory; without it a colocated 0.6B trainer took 11 s instead of 0.3 s (vime issue 442,
2026-09-19)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """Seconds in which GPUs neither generate nor train."""

    to_training_s: float
    to_generation_s: float
    provenance: str = ""

    def __post_init__(self) -> None:
        for name in ("to_training_s", "to_generation_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, but must be >= 0")


def switch_cost(config: WeightsConfig, model: ModelShape, gpu: GPU, gpus: int) -> SwitchCost:
    """To training and back, once per training step. A measured `switch_s` is the sum of both.

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
        provenance="weights.switch_s, divided between both ways as modeled",
    )
