"""Events and actions: input and output of the coordinator, as two closed unions.

    shell --(Event)--> Coordinator.handle --> (Action, ...) --> shell performs them, in order

A *group* is one prompt with all its samples; it is the unit of admission and of a training batch.
The coordinator assigns group ids in start order: group `n` is the n-th that started for the first
time. A *version* counts optimizer batches (not minibatches); the first weights of a run have
version 0, unless it was recovered. These records have no times; the log adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from areal_lab.control.drift import NOT_MEASURED

Version: TypeAlias = int
GroupId: TypeAlias = int
EngineId: TypeAlias = int

PROMPT_VERSION: Final[Version] = -1
"""Version of tokens that no policy of this run generated: prompts and observations."""
STARTS_OVER: Final[Version] = -1
"""Entry of `RunStarted.open_versions` for a group without tokens."""
RUN_ENDED: Final = "run ended"
"""`Drop.reason` of what is left when the last step is complete."""
RECYCLED: Final = "recycled"
"""`Drop.reason` of a late group whose prompt starts again, under the same number
(`rollout.on_late`)."""


# --- events: what happened -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Engines have the weights of `version` and accept work. The first event of every log."""

    engines: tuple[EngineId, ...]
    version: Version = 0
    next_group: GroupId = 0
    """First group id to assign. After a recovery it is positive, and the count of started groups
    starts at `version * batch_groups` plus the open groups."""
    open_groups: tuple[GroupId, ...] = ()
    """Groups below `next_group` to start again after a recovery, ascending (`control.frontier`)."""
    open_versions: tuple[Version, ...] = ()
    """Version with which each of them started if its tokens were kept, else `STARTS_OVER`."""
    open_attempts: tuple[int, ...] = ()
    """Number of starts of each of them, including this one if it starts over."""
    filtered: int = 0
    """Groups filtered before the recovery; likewise `dropped`, `restarted` and `unfilled`
    (`Counts`)."""
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
class SamplesEnded:
    """Further samples of a running group were generated: their slots are free, while others of the
    group run and before any is scored. An engine that is lost with `tokens_kept` leaves them whole.
    Expected if a group has several slots (`Limits.group_slots`)."""

    group: GroupId
    samples: int


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
    """True if its groups keep their tokens and continue with the version that they started with.
    Otherwise they start over, with the version that the engines have."""
    returns: bool = False
    """True if the engine is being restarted: `EngineJoined` follows, or this event again without
    `returns` when the restart fails. A run without engines waits for those that return."""


@dataclass(frozen=True, slots=True)
class EngineRetired:
    """The engine leaves the run because it is not needed: its groups continue elsewhere with their
    tokens, and no other group starts on it.
    """

    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new or restarted engine has the pushed version and accepts work."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class TrainStepDone:
    """The optimizer finished one batch; its weights are `version` and can be pushed.

    What it measured (`control.drift.Measured`) is here if the schedule reads it.
    """

    version: Version
    drift: float = NOT_MEASURED
    weight_deviation: float = NOT_MEASURED
    effective_share: float = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class TrainPartDone:
    """The optimizer finished a part of a batch (`Train.rest`); the others of the step follow."""

    version: Version
    """Version after the step."""


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """A batch that was given to the trainer comes back untrained (`Limits.weights_offered`), before
    weights of its step are offered: its groups wait for training again."""

    groups: tuple[GroupId, ...]
    """All of the batch."""
    lost: tuple[GroupId, ...] = ()
    """Those of them whose samples are lost: they start over."""


@dataclass(frozen=True, slots=True)
class WeightsOffered:
    """The program that trains has the weights of `version`, perhaps of the step whose end is told
    next (`Limits.weights_offered`); `PushWeights` follows as soon as the schedule permits it."""

    version: Version


@dataclass(frozen=True, slots=True)
class WeightsPushed:
    """Every engine reported `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointCopied:
    """The checkpoint of `version` is copied and written from the copy: the trainer may continue.

    `CheckpointDone` follows. A checkpoint that training waits for has that event alone."""

    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """The checkpoint of `version` is complete on disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish the running step, save, and end (Ctrl-C); also ends a pause."""


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

    Groups admitted before stay, so a lower bound applies to the lag of a group only after the
    groups that started under the higher one are trained on."""

    eta: float
    """Staleness bound in versions; `Schedule.eta`."""


Request: TypeAlias = StopRequested | PauseRequested | ResumeRequested | EtaRequested
"""Request of a person to a running training; `Coordinator.refusal` says which ones are refused."""

Event: TypeAlias = (
    RunStarted
    | SamplesEnded
    | GroupFinished
    | GroupFiltered
    | EngineLost
    | EngineRetired
    | EngineJoined
    | TrainPartDone
    | TrainStepDone
    | BatchReturned
    | WeightsOffered
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
    """Version of the engines at this decision; for a group that continues with its tokens, their
    version when it started. Its tokens may be newer, never older."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Pause generation on every engine; unfinished samples continue after `Resume`."""

    by_hand: bool = False
    """True if the reason is `PauseRequested`, not new weights or a training step."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume generation on every engine, with its current weights."""


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
    """Abort `group` if it runs, discard its result, and report nothing of it any more: with the
    reason `RECYCLED`, `StartGroup` of the same group follows, perhaps at once."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the trainer's `version`; then report `CheckpointDone(version)`, and
    before that, if training need not wait for it, `CheckpointCopied(version)`.
    """

    version: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing is in flight. The last action of every log."""

    reason: str
    """`"complete"`, `"stopped"` (on request), `"no engine left"` or, of dynamic sampling, `"too few
    groups to train on"`."""


Action: TypeAlias = StartGroup | Interrupt | Resume | Train | PushWeights | Drop | Save | Finish
