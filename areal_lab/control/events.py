"""What happened and what to do: the two closed unions that the coordinator maps between.

    shell --(Event)--> Coordinator.handle --> (Action, ...) --> shell performs them, in order

A *group* is one prompt with all its samples; it is the unit of admission and of a training batch.
Group ids are handed out by the coordinator in start order: group `n` is the n-th ever started.
A *version* counts optimizer batches (not minibatches); the weights a run begins with have version 0
unless it was recovered. None of these records carries a time: the log's envelope does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

Version: TypeAlias = int
GroupId: TypeAlias = int
EngineId: TypeAlias = int

PROMPT_VERSION: Final[Version] = -1
"""The version of tokens that no policy of this run generated: prompts and observations."""


# --- events: what happened -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The engines hold the weights of `version` and accept work. The first event of every log."""

    engines: tuple[EngineId, ...]
    version: Version = 0
    next_group: GroupId = 0
    """First group id to hand out; positive after recovery, where the count of started groups
    begins again at `version * batch_groups`."""


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Every sample of the group ended and was rewarded; it may be trained on."""

    group: GroupId
    head_version: Version
    """Oldest version among the generated tokens of the group, as the engine reported it."""
    tail_version: Version
    """Newest version among the generated tokens of the group."""


@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """The group ended and is not to be trained on; it does not count as started (eq. 3)."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone; its groups start again elsewhere, or there, if it returns first."""

    engine: EngineId
    tokens_kept: bool = False
    """What its groups had generated is not lost with it: they go on from there, and keep the
    version they began with. Otherwise they begin anew, at the version that the engines hold."""
    returns: bool = False
    """It is being mended: `EngineJoined` follows, or this event again, without `returns`, when that
    is given up. A run without engines waits for those that return."""


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new or restarted engine holds the weights of the pushed version and accepts work."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class TrainStepDone:
    """The optimizer finished one batch; its weights are `version` and can be pushed."""

    version: Version


@dataclass(frozen=True, slots=True)
class WeightsPushed:
    """Every engine echoed `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """The checkpoint of `version` is complete on disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish the step that runs, save, and end (Ctrl-C)."""


Event: TypeAlias = (
    RunStarted
    | GroupFinished
    | GroupFiltered
    | EngineLost
    | EngineJoined
    | TrainStepDone
    | WeightsPushed
    | CheckpointDone
    | StopRequested
)


# --- actions: what to do -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Generate all samples of `group` on `engine`; its prompt is number `group` of the source."""

    group: GroupId
    engine: EngineId
    version: Version
    """Version the engines hold at this decision, or held when a group began that goes on with its
    tokens; the tokens may turn out newer, never older."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Pause generation on every engine; what is unfinished is kept and goes on after `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Let every engine generate again, under the weights it now holds."""


@dataclass(frozen=True, slots=True)
class Train:
    """Train on exactly these groups, in this order; answer with `TrainStepDone(version + 1)`."""

    version: Version
    """The trainer's version before the step; the lag of a token is this minus its version."""
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class PushWeights:
    """Bring every engine to `version`; answer with `WeightsPushed(version)`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Drop:
    """Give `group` up, finished or not: abort it if it runs, count it, and do not answer."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the trainer's `version`; answer with `CheckpointDone(version)`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing is in flight any more. The last action of every log."""

    reason: str
    """`"complete"`, `"stopped"` (asked to) or `"no engine left"`."""


Action: TypeAlias = StartGroup | Interrupt | Resume | Train | PushWeights | Drop | Save | Finish
