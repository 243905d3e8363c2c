"""Responses of the simulated engines: their lengths, rewards, and what learns from them.

    event loop                        Responses
    StartGroup ... StartGroup         begin    generate under the version that the engines hold
    Resume                            go_on    continue under new weights; lengths may change
    a group is scored                 scores   rewards
    Train                             learn    before the simulated seconds of the step
    Drop, GroupFiltered               give_up

`Draws` takes lengths from a distribution, which weights do not change. A real model (`cosim`)
generates tokens, and learns from them.

Common random numbers: under one seed, group n has the same response lengths and latencies for every
schedule, cluster and order of events. Each stream is cut into blocks of groups, and each block has
its own generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.drift import Measured
from areal_lab.control.events import GroupId, Train, Version
from areal_lab.runlog.records import Mode
from simulator.config.schema import WorkloadConfig
from simulator.run.system import System
from simulator.workload.randomness import EQUAL_REWARDS, LENGTHS, REWARDS, TOOLS, TURNS, stream


class GroupDraws(NamedTuple):
    """The lengths of one group, and the random numbers of its latencies."""

    lengths: list[int]
    """Response tokens, one per sample."""
    tokens: NDArray[np.int64]
    """The lengths as an array: a batch joins arrays much faster than lists."""
    rewards_s: list[float] | None
    """Time to score each sample; None means no time."""
    tools_s: list[list[float]] | None
    """The tool's time for each sample, after each turn but the last."""
    turns: NDArray[np.int64] | None = None
    """Turns of each sample; None gives every one those of the workload."""

    def read_from_tools(self, workload: WorkloadConfig) -> NDArray[np.int64]:
        """Tokens that tools add to each sample; one of few tokens has few turns."""
        turns = workload.most_turns if self.turns is None else self.turns
        return workload.tool_tokens * (np.minimum(turns, self.tokens) - 1)


class Scores(NamedTuple):
    """Rewards and finish reasons of a group, for the log and for dynamic sampling."""

    rewards: tuple[float, ...]
    """One per sample."""
    finish_reasons: tuple[str, ...]
    """One per sample."""
    masked: tuple[int, ...] = ()
    """Samples that have no loss."""


class Responses(Protocol):
    """Source of the responses of a simulated run; see the module docstring."""

    @property
    def mode(self) -> Mode:
        """The kind of run, for the header of its log."""
        ...

    @property
    def revised(self) -> bool:
        """True if lengths depend on weights. If not, `begin` and `go_on` are never called."""
        ...

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """Start these groups under `version`, all at this moment; also those that start over."""
        ...

    def of(self, group: GroupId) -> GroupDraws:
        """The lengths and latencies of a group, as they are now."""
        ...

    def go_on(self, done: Mapping[GroupId, Sequence[int]], version: Version) -> None:
        """Groups that were interrupted continue under `version`; afterwards `of` has their lengths.

        Args:
            done: tokens of each sample so far, of all unfinished groups on working engines.
        """
        ...

    def scores(self, group: GroupId, lengths: Sequence[int]) -> Scores:
        """The rewards of a group whose samples have ended with these lengths."""
        ...

    def learn(self, train: Train) -> None:
        """A training step begins."""
        ...

    def measured(self, lag: float) -> Measured:
        """What the training step that ends measured, on tokens of this mean lag."""
        ...

    def give_up(self, group: GroupId) -> None:
        """A group is dropped, whether it has ended or not, or filtered when it is scored."""
        ...


_MOST_BLOCKS: Final = 8
"""Blocks that are kept at most."""


class Draws:
    """Random lengths and latencies of groups, made one training batch at a time; groups are asked
    for in order.

    A block is one batch, so that lengths drift by training step. Responses have a length but no
    content: every reward is 0, but for the first response of a group whose rewards differ.
    """

    mode: Final[Mode] = "simulate"
    revised: Final = False

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._seed = seed
        self._size = system.limits.batch_groups
        # Ranks without a controller ask for groups of several batches in turn, as a run does that
        # starts prompts again.
        limits = system.limits
        one = limits.ranks == 1 and limits.order.on_late != "recycle"
        self._kept = 1 if one else _MOST_BLOCKS
        self._blocks: dict[int, list[GroupDraws]] = {}

    def of(self, group: GroupId) -> GroupDraws:
        """Lengths and latencies of `group`; an earlier block is computed again."""
        number, row = divmod(group, self._size)
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) == self._kept:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[number] = self._draw(number)
        return block[row]

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """Do nothing: lengths do not depend on weights."""

    def go_on(self, done: Mapping[GroupId, Sequence[int]], version: Version) -> None:
        """Do nothing."""

    def scores(self, group: GroupId, lengths: Sequence[int]) -> Scores:
        """Rewards of 0 and, unless they are all equal, a 1; samples of the maximum length were
        cut."""
        workload, rewards = self._system.workload, [0.0] * len(lengths)
        if share := workload.equal_rewards_share:
            rewards[0] = float(stream(self._seed, EQUAL_REWARDS, group).random() >= share)
        cut = workload.answers.max_tokens
        return Scores(
            tuple(rewards),
            tuple("length" if tokens >= cut else "stop" for tokens in lengths),
        )

    def learn(self, train: Train) -> None:
        """Do nothing."""

    def measured(self, lag: float) -> Measured:
        """Drift by the law of the system."""
        return Measured(drift=self._system.drift.at(lag))

    def give_up(self, group: GroupId) -> None:
        """Do nothing."""

    def lengths(self, number: int) -> NDArray[np.int64]:
        """Lengths of the groups of batch `number`: [groups, samples]."""
        system, generator = self._system, stream(self._seed, LENGTHS, number)
        samples = system.workload.samples_per_prompt
        return system.lengths.draw(generator, self._size, samples, step=float(number))

    def _draw(self, number: int) -> list[GroupDraws]:
        system, size = self._system, self._size
        samples, turns_most = system.workload.samples_per_prompt, system.workload.most_turns
        tokens = self.lengths(number)
        rewards: Iterable[list[float] | None] = repeat(None, size)
        tools: Iterable[list[list[float]] | None] = repeat(None, size)
        if system.reward is not None:
            drawn = system.reward.draw(stream(self._seed, REWARDS, number), size * samples)
            rewards = drawn.reshape(size, samples).tolist()
        if system.tool is not None and turns_most > 1:
            pauses = turns_most - 1
            drawn = system.tool.draw(stream(self._seed, TOOLS, number), size * samples * pauses)
            tools = drawn.reshape(size, samples, pauses).tolist()
        turns: Iterable[NDArray[np.int64] | None] = repeat(None, size)
        if system.turn_counts is not None:
            counts = system.turn_counts.draw(stream(self._seed, TURNS, number), size * samples)
            turns = counts.reshape(size, samples)
        return list(map(GroupDraws, tokens.tolist(), tokens, rewards, tools, turns))
