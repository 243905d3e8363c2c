"""What the engines generate: the lengths of responses, and what becomes of them.

    event loop                        Responses
    StartGroup ... StartGroup         begin    generate under the version that the engines hold
    Resume                            go_on    continue under new weights; lengths may change
    a group is scored                 scores   rewards
    Train                             learn    before the simulated seconds of the step
    Drop, GroupFiltered               give_up

`simulator.run.draws.Draws` takes lengths from a distribution, which weights do not change. A real
model (`cosim`) generates tokens, and learns from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import GroupId, Train, Version
from areal_lab.runlog.records import Mode


class GroupDraws(NamedTuple):
    """The lengths of one group, and the random numbers of its latencies."""

    lengths: list[int]
    """Response tokens, one per sample."""
    tokens: NDArray[np.int64]
    """The same as an array: a batch joins arrays much faster than lists."""
    rewards_s: list[float] | None
    """Time to score each sample; None means no time."""
    tools_s: list[list[float]] | None
    """For each sample, the tool's time after each turn but the last."""
    turns: NDArray[np.int64] | None = None
    """Turns of each sample; None gives every one those of the system."""


class Scores(NamedTuple):
    """How the samples of a group ended, for the log and for dynamic sampling."""

    rewards: tuple[float, ...]
    """One per sample."""
    finish_reasons: tuple[str, ...]
    """One per sample."""
    masked: tuple[int, ...] = ()
    """Samples that have no loss."""


class Responses(Protocol):
    """What the engines of a simulated run generate; see the module docstring."""

    @property
    def mode(self) -> Mode:
        """The kind of run, for the header of its log."""
        ...

    @property
    def revised(self) -> bool:
        """Whether lengths depend on weights. If not, `begin` and `go_on` are never called."""
        ...

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """These groups start under `version`, all at this moment; also those that start over."""
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

    def give_up(self, group: GroupId) -> None:
        """A group is dropped, whether it has ended or not, or filtered when it is scored."""
        ...
