"""Common random numbers: draws that are the same for every system that is compared.

Under one seed, group n has the same response lengths and latencies for every schedule, cluster and
order of events: each stream is cut into blocks of groups, and each block has its own generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import GroupId, Train, Version
from areal_lab.runlog.records import Mode
from simulator.run.responses import GroupDraws, Scores
from simulator.run.system import System
from simulator.workload.streams import EQUAL_REWARDS, LENGTHS, REWARDS, TOOLS, TURNS, stream

_MOST_BLOCKS: Final = 8
"""Blocks that are kept at most."""


class Draws:
    """The draws of groups, made one training batch at a time; groups are asked for in order.

    A block is one batch, so that lengths drift by training step. Responses have a length but no
    content: every reward is 0, but for the first response of a group whose rewards differ.
    """

    mode: Final[Mode] = "simulate"
    revised: Final = False

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._seed = seed
        self._size = system.limits.batch_groups
        # Ranks without a controller ask for groups of several batches in turn.
        self._kept = 1 if system.limits.ranks == 1 else _MOST_BLOCKS
        self._blocks: dict[int, list[GroupDraws]] = {}

    def of(self, group: GroupId) -> GroupDraws:
        """The draws of `group`; an earlier block is computed again."""
        number, row = divmod(group, self._size)
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) == self._kept:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[number] = self._draw(number)
        return block[row]

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """Nothing: lengths do not depend on weights."""

    def go_on(self, done: Mapping[GroupId, Sequence[int]], version: Version) -> None:
        """Nothing."""

    def scores(self, group: GroupId, lengths: Sequence[int]) -> Scores:
        """Rewards of 0 and, unless they are all equal, a 1; samples of the maximum length were
        cut."""
        cut, rewards = self._system.max_tokens, [0.0] * len(lengths)
        share = self._system.equal_rewards_share
        if share is not None:
            rewards[0] = float(stream(self._seed, EQUAL_REWARDS, group).random() >= share)
        return Scores(
            tuple(rewards),
            tuple("length" if cut is not None and tokens >= cut else "stop" for tokens in lengths),
        )

    def learn(self, train: Train) -> None:
        """Nothing."""

    def give_up(self, group: GroupId) -> None:
        """Nothing."""

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
        turns: Iterable[NDArray[np.int64] | None] = repeat(None, size)
        if system.turn_counts is not None:
            counts = system.turn_counts.draw(stream(self._seed, TURNS, number), size * samples)
            turns = counts.reshape(size, samples)
        return list(map(GroupDraws, tokens.tolist(), tokens, rewards, tools, turns))
