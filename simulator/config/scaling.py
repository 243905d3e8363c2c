"""Settings of a simulated number of engines that changes while the run continues."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from areal_lab.config.record import About
from areal_lab.config.scaling import ScalingConfig


class SimulatedScalingConfig(ScalingConfig):
    """Engines join and leave while the run continues; the first are on `cluster.rollout_gpus`."""

    startup_s: Annotated[float, Ge(0), Le(86_400), About(hint="at most a day")] = 120.0
    """From the decision until a new engine loads its weights; its GPUs are paid for."""
