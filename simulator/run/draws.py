"""Common random numbers: draws that are the same for every system that is compared.

Under one seed, group n has the same response lengths and latencies for every schedule, cluster and
order of events: each stream is cut into blocks of groups, and each block has its own generator.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import GroupId
from simulator.run.system import System
from simulator.workload.streams import LENGTHS, REWARDS, TOOLS, stream


class GroupDraws(NamedTuple):
    """The random numbers of one group."""

    lengths: list[int]
    """Response tokens, one per sample."""
    tokens: NDArray[np.int64]
    """The same as an array: a batch joins arrays much faster than lists."""
    rewards_s: list[float] | None
    """Time to score each sample; None means no time."""
    tools_s: list[list[float]] | None
    """For each sample, the tool's time after each turn but the last."""


class Draws:
    """The draws of groups, made one training batch at a time; groups are asked for in order.

    A block is one batch, so that lengths drift by training step.
    """

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._seed = seed
        self._size = system.limits.batch_groups
        self._number = -1
        self._drawn: list[GroupDraws] = []

    def of(self, group: GroupId) -> GroupDraws:
        """The draws of `group`; an earlier block is computed again."""
        number, row = divmod(group, self._size)
        if number != self._number:
            self._number, self._drawn = number, self._draw(number)
        return self._drawn[row]

    def _draw(self, number: int) -> list[GroupDraws]:
        system, size, samples = self._system, self._size, self._system.samples
        tokens = system.lengths.draw(
            stream(self._seed, LENGTHS, number), size, samples, step=float(number)
        )
        rewards: Iterable[list[float] | None] = repeat(None, size)
        tools: Iterable[list[list[float]] | None] = repeat(None, size)
        if system.reward is not None:
            drawn = system.reward.draw(stream(self._seed, REWARDS, number), size * samples)
            rewards = drawn.reshape(size, samples).tolist()
        if system.tool is not None and system.turns > 1:
            pauses = system.turns - 1
            drawn = system.tool.draw(stream(self._seed, TOOLS, number), size * samples * pauses)
            tools = drawn.reshape(size, samples, pauses).tolist()
        return list(map(GroupDraws, tokens.tolist(), tokens, rewards, tools))
