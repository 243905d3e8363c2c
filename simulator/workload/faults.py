"""What breaks and what is slow: failures of nodes, and engines that are stragglers. Seconds."""

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
    """From the failure until the run knows."""
    restart_s: float
    """From there until the node works again."""

    @property
    def availability(self) -> float:
        """Share of the time that a node works, in the long run."""
        if math.isinf(self.mtbf_s):
            return 1.0
        return self.mtbf_s / (self.mtbf_s + self.detection_s + self.restart_s)

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """Seconds of work of one node until it fails; infinite if it never does."""
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
    """How many times longer each engine's steps take; 1 for most.

    The number of stragglers is the share's, up to chance for the part of one engine that is left;
    which engines they are is chance.
    """
    slowdowns = np.ones(engines)
    order = generator.permutation(engines)
    stragglers = math.floor(config.straggler_share * engines + float(generator.random()))
    slowdowns[order[:stragglers]] = config.straggler_slowdown
    return slowdowns
