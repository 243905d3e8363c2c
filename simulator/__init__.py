"""What a cluster does under asynchronous reinforcement learning, in simulated seconds.

    config = simulator.SimulationConfig(model="R1-Distill-Qwen-1.5B")
    result = simulator.simulate(config)          one seed: rows per step, shares of time, lags
    many = simulator.replicate(config)           all seeds: 95 % intervals

Names are loaded when they are first used; none of them loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.check import check_config as check_config
    from simulator.check import problems as problems
    from simulator.config import SimulationConfig as SimulationConfig
    from simulator.hardware import GPU as GPU
    from simulator.hardware import GPUS as GPUS
    from simulator.hardware import find_gpu as find_gpu
    from simulator.model_shape import MODELS as MODELS
    from simulator.model_shape import ModelShape as ModelShape
    from simulator.model_shape import find_model as find_model
    from simulator.result import Replicated as Replicated
    from simulator.result import SimulationResult as SimulationResult
    from simulator.run import run_system as run_system
    from simulator.simulation import build as build
    from simulator.simulation import replicate as replicate
    from simulator.simulation import simulate as simulate
    from simulator.statistics import Estimate as Estimate
    from simulator.statistics import estimate as estimate
    from simulator.system import System as System

_HOMES = {
    # simulate
    "SimulationConfig": "simulator.config",
    "simulate": "simulator.simulation",
    "replicate": "simulator.simulation",
    "SimulationResult": "simulator.result",
    "Replicated": "simulator.result",
    "Estimate": "simulator.statistics",
    "estimate": "simulator.statistics",
    # check and build
    "check_config": "simulator.check",
    "problems": "simulator.check",
    "build": "simulator.simulation",
    "System": "simulator.system",
    "run_system": "simulator.run",
    # hardware and models
    "GPU": "simulator.hardware",
    "GPUS": "simulator.hardware",
    "find_gpu": "simulator.hardware",
    "MODELS": "simulator.model_shape",
    "ModelShape": "simulator.model_shape",
    "find_model": "simulator.model_shape",
}

__all__ = [  # noqa: PLE0604 - the table above is the one list of names
    *_HOMES
]


def __getattr__(name: str) -> object:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted(_HOMES)
