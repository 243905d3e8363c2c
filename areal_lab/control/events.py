"""Events and actions: the input and the output of the coordinator, as two closed unions.

    shell --(Event)--> Coordinator.handle --> (Action, ...) --> shell performs them, in order

A *group* is one prompt with all its samples; it is the unit of admission and of a training batch.
The coordinator assigns group ids in start order: group `n` is the n-th ever started. A *version*
counts optimizer batches (not minibatches); the first weights of a run have version 0, unless it was
recovered. These records have no times; the log adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

Version: TypeAlias = int
GroupId: TypeAlias = int
EngineId: TypeAlias = int

PROMPT_VERSION: Final[Version] = -1
"""The version of tokens that no policy of this run generated: prompts and observations."""
STARTS_OVER: Final[Version] = -1
"""In `RunStarted.open_versions`: the group has no tokens."""


# --- events: what happened -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The engines hold the weights of `version` and accept work. The first event of every log."""

    engines: tuple[EngineId, ...]
    version: Version = 0
    next_group: GroupId = 0
    """First group id to assign. After a recovery it is positive, and the count of started groups
    begins at `version * batch_groups` and the open groups."""
    open_groups: tuple[GroupId, ...] = ()
    """Groups below `next_group` to start again after a recovery, ascending (`control.frontier`)."""
    open_versions: tuple[Version, ...] = ()
    """Version with which each of them started if its tokens were kept, else `STARTS_OVER`."""
    open_attempts: tuple[int, ...] = ()
    """How often each of them was started, this time included if it starts over."""
    filtered: int = 0
    """Groups before the recovery; so `dropped`, `restarted` and `unfilled` (`Counts`)."""
    dropped: int = 0
    restarted: int = 0
    unfilled: int = 0
    train_steps: int = 0
    """Version at which the run is complete, if a recovery changed it; 0 keeps the limits'."""


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Every sample of the group ended and was scored; the group may be trained on."""

    group: GroupId
    head_version: Version
    """Oldest version among the generated tokens of the group, as the engine reported it."""
    tail_version: Version
    """Newest version among the generated tokens of the group."""


@dataclass(frozen=True, slots=True)
class GroupFiltered:
    """The group ended and must not be trained on; it does not count as started (eq. 3)."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone; its groups restart on another engine, or on it if it returns first."""

    engine: EngineId
    tokens_kept: bool = False
    """Whether its groups keep their tokens: then they continue, with the version they started with.
    Otherwise they start over, with the version that the engines hold."""
    returns: bool = False
    """Whether it is being restarted: `EngineJoined` follows, or this event again without `returns`
    when it is given up. A run without engines waits for those that return."""


@dataclass(frozen=True, slots=True)
class EngineRetired:
    """The engine leaves the run, because it is not needed: its groups continue elsewhere with their
    tokens, and no other starts on it."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new or restarted engine holds the pushed version and accepts work."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class TrainStepDone:
    """The optimizer finished one batch; its weights are `version` and can be pushed."""

    version: Version


@dataclass(frozen=True, slots=True)
class TrainPartDone:
    """The optimizer finished a part of a batch (`Train.rest`); the others of the step follow."""

    version: Version
    """That the step leads to."""


@dataclass(frozen=True, slots=True)
class WeightsPushed:
    """Every engine reported `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointCopied:
    """What the checkpoint of `version` is written from is a copy: the trainer may train meanwhile.

    `CheckpointDone` follows. A checkpoint that training waits for has that event alone."""

    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """The checkpoint of `version` is complete on disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish the step that runs, save, and end (Ctrl-C); also ends a pause."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Start no group and no training step, and interrupt generation, until `ResumeRequested`.

    A training step that runs ends, is saved if it is due, and its weights are pushed."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Continue after `PauseRequested` with everything that was kept."""


@dataclass(frozen=True, slots=True)
class EtaRequested:
    """Admit groups under another staleness bound from now on (eq. 3).

    What was admitted before stays, so a lower bound holds for the lag of a group only once the
    groups that started under the higher one are trained on."""

    eta: float
    """In versions; `Schedule.eta`."""


Request: TypeAlias = StopRequested | PauseRequested | ResumeRequested | EtaRequested
"""What a person asks of a running training; `Coordinator.refusal` says which cannot be done."""

Event: TypeAlias = (
    RunStarted
    | GroupFinished
    | GroupFiltered
    | EngineLost
    | EngineRetired
    | EngineJoined
    | TrainPartDone
    | TrainStepDone
    | WeightsPushed
    | CheckpointCopied
    | CheckpointDone
    | Request
)


# --- actions: what to do -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Generate all samples of `group` on `engine`; its prompt is number `group` of the source."""

    group: GroupId
    engine: EngineId
    version: Version
    """Version that the engines hold at this decision, or held when a group started that continues
    with its tokens; its tokens may be newer, never older."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Pause generation on every engine; unfinished samples continue after `Resume`."""

    by_hand: bool = False
    """Whether the reason is `PauseRequested`, and not new weights or a training step."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume generation on every engine, with the weights it now holds."""


@dataclass(frozen=True, slots=True)
class Train:
    """Train on exactly these groups, in this order; then report `TrainStepDone(version + 1)`, or
    `TrainPartDone(version + 1)` if groups of the same batch follow."""

    version: Version
    """The trainer's version before the step; the lag of a token is this minus its version."""
    groups: tuple[GroupId, ...]
    rest: int = 0
    """Groups of the same batch that further actions train on before there are new weights."""


@dataclass(frozen=True, slots=True)
class PushWeights:
    """Load `version` into every engine; then report `WeightsPushed(version)`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up `group`, finished or not: abort it if it runs, and report nothing."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the trainer's `version`; then report `CheckpointDone(version)`, and
    before that, if training need not wait for it, `CheckpointCopied(version)`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing is in flight. The last action of every log."""

    reason: str
    """`"complete"`, `"stopped"` (on request), `"no engine left"` or, of dynamic sampling, `"too few
    groups to train on"`."""


Action: TypeAlias = StartGroup | Interrupt | Resume | Train | PushWeights | Drop | Save | Finish
