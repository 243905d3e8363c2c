"""Simulated seconds of a training step by part, so that each can be held against a printed one.

colocated       generation | log-probs | update | moving weights, switching
disaggregated   wait       | log-probs | update | moving weights            seen by the trainer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulator.costs.training_timing import PROXIMAL, REFERENCE
from simulator.run.pools import MOVING_WEIGHTS
from simulator.run.result import SimulationResult

LOGPROBS: Final = (PROXIMAL, REFERENCE)
PARTS_OF_A_STEP: Final = ("generation", "wait", "log-probs", "update", "moving")
_SHARED: Final = "all"
"""Pool of GPUs that generate and train in turn."""
_TRAINING: Final = ("training", "hybrid")
"""Pools that train beside others that generate: the first there is. Hybrid GPUs alone have no pool
of trainers."""


def seconds_of(result: SimulationResult) -> dict[str, float]:
    """Seconds per step by part, which sum to `step`.

    What the trainer does not spend on the batch or on weights is `generation` if the same GPUs
    generate, from the first prompt to the last response, and `wait` otherwise. `update` is all of
    training but the scoring passes.
    """
    shared = _SHARED in result.pools
    trains = _SHARED if shared else next(name for name in _TRAINING if name in result.pools)
    busy = result.pools[trains].busy
    seconds = {name: share * result.step_s for name, share in busy.items()}
    logprobs_s = sum(seconds.get(name, 0.0) for name in LOGPROBS)
    moving_s = sum(seconds.get(name, 0.0) for name in MOVING_WEIGHTS)
    rest_s = max(0.0, result.step_s - result.mean("train_s") - moving_s)
    return {
        "step": result.step_s,
        "generation": rest_s if shared else 0.0,
        "wait": 0.0 if shared else rest_s,
        "log-probs": logprobs_s,
        "update": result.mean("train_s") - logprobs_s,
        "moving": moving_s,
    }


def detail_of(result: SimulationResult) -> dict[str, float]:
    """Seconds per step by pool, and by activity or cause of idleness."""
    return {
        f"{pool}: {name}": share * result.step_s
        for pool, shares in result.pools.items()
        for name, share in {**shares.busy, **shares.idle}.items()
    }


def part(name: str) -> Callable[[SimulationResult], float]:
    """Seconds per step of one part."""
    return lambda result: seconds_of(result)[name]
