"""Frontier of a run: state in a checkpoint so that no group is lost or trained on twice.

    group 0 ........................................ next_group
          | trained, filtered or dropped |  open, with gaps  | never started

The prompt of a group is a function of its number, so there is no position in the data to restore:
a run that continues starts the open groups again, then `next_group`.

    Coordinator.frontier() --Frontier--> checkpoint --recovered_start--> RunStarted --> Coordinator
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from areal_lab.control.events import STARTS_OVER, EngineId, GroupId, RunStarted, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """Started group that was neither trained on nor filtered nor dropped."""

    group: GroupId
    version: Version
    """Version of the engines when it started."""
    attempts: int = 1
    """Number of starts; more than 1 after it started over."""
    finished: bool = False
    """True if the group has all its tokens and rewards and waits for training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Groups of a run at a checkpoint, and counts of those that ended without training."""

    version: Version
    """Version of the trainer; `version * batch_groups - unfilled` groups were trained on."""
    next_group: GroupId
    """First group that was never started."""
    open: tuple[OpenGroup, ...]
    """Open groups in ascending order."""
    eta: float
    """Staleness bound in force, in versions."""
    filtered: int = 0
    dropped: int = 0
    restarted: int = 0
    """Number of times that a group started over, without its tokens."""
    unfilled: int = 0
    """Places of smaller batches that no group took."""

    def __post_init__(self) -> None:
        groups = [one.group for one in self.open]
        if groups != sorted(set(groups) & set(range(self.next_group))):
            raise ValueError(
                f"the open groups are {groups}, but must ascend and lie from 0 to "
                f"{self.next_group - 1}: {self.next_group} is the next one"
            )
        late = [one.group for one in self.open if not 0 <= one.version <= self.version]
        if late:
            raise ValueError(
                f"open groups {late} started at another version than 0 to {self.version}, which is "
                "the trainer's"
            )


def recovered_start(
    frontier: Frontier,
    engines: tuple[EngineId, ...],
    kept: Collection[GroupId] = (),
    *,
    train_steps: int = 0,
) -> RunStarted:
    """First event of a run that continues from a checkpoint, on engines that have its version.

    Args:
        kept: open groups whose tokens were saved. They keep the version they started with; the
            others start over with the engines' version, and count as restarted.
        train_steps: another number of steps than the run had before; 0 keeps it.
    """
    if unknown := sorted(set(kept) - {one.group for one in frontier.open}):
        raise ValueError(f"groups {unknown} are kept, but are not open")
    return RunStarted(
        engines,
        frontier.version,
        frontier.next_group,
        open_groups=tuple(one.group for one in frontier.open),
        open_versions=tuple(
            one.version if one.group in kept else STARTS_OVER for one in frontier.open
        ),
        open_attempts=tuple(one.attempts + (one.group not in kept) for one in frontier.open),
        filtered=frontier.filtered,
        dropped=frontier.dropped,
        restarted=frontier.restarted + sum(one.group not in kept for one in frontier.open),
        unfilled=frontier.unfilled,
        train_steps=train_steps,
    )
