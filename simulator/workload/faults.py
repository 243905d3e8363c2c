"""Faults: failures of nodes, and engines that are stragglers. Seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.config.schema import FaultsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailures:
    """Nodes fail independently, at a constant rate while they work."""

    mtbf_s: float
    """Mean time between failures of one node; infinity never fails."""
    detection_s: float
    """From the failure until the run notices."""
    restart_s: float
    """From then until the node works again."""

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """Seconds that one node works until it fails; infinite if it never does."""
        drawn = float(generator.standard_exponential())
        return math.inf if math.isinf(self.mtbf_s) else self.mtbf_s * drawn


def failures_from(config: FaultsConfig) -> NodeFailures | None:
    """The failures that a configuration asks for; None if nodes never fail."""
    failures = NodeFailures(
        mtbf_s=3600 * config.node_mtbf_h or math.inf,
        detection_s=config.detection_s,
        restart_s=config.restart_s,
    )
    return None if math.isinf(failures.mtbf_s) else failures


def engine_slowdowns(
    config: FaultsConfig, engines: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Factor by which each engine's steps take longer; 1 for most.

    The share times the number of engines is rounded up or down at random, so that its mean is
    exact; which engines are stragglers is random.
    """
    slowdowns = np.ones(engines)
    order = generator.permutation(engines)
    stragglers = math.floor(config.straggler_share * engines + float(generator.random()))
    slowdowns[order[:stragglers]] = config.straggler_slowdown
    return slowdowns
