"""What a run does and waits for, from its log: the coordinator decides again what it decided there.

events.jsonl --new lines--> Follower (a Coordinator, handles the events) --> Snapshot

So no question to the run is needed, a run that was killed can be looked at as well, and one program
of decisions says what is waited for, in the run and here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from areal_lab.control.coordinator import Counts
from areal_lab.control.events import EngineId, EngineJoined, EngineLost, Finish, RunStarted
from areal_lab.control.ranks import AnyCoordinator, coordinator_of
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    RunHeader,
    decode,
)
from areal_lab.runlog.replay import limits_from_fields

State: TypeAlias = Literal["starting", "training", "paused", "ending", "ended", "killed"]

_READ: tuple[str, ...] = ('{"kind":"run"', '{"kind":"event"', '{"kind":"action"', '{"kind":"group"')
"""Beginnings of the lines that count here; a log has many more spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    state: State
    """`starting` until training begins; `paused` by hand, though a step that was begun may still
    end; `ending` after a stop or the last step; `killed` if the process is gone and had not ended.
    """
    alive: bool | None
    """Whether the process runs; None if its machine cannot be seen from here."""
    phase: str
    """What the run does before and after training, as its display says it."""
    waiting_for: str
    """During training; empty otherwise."""
    step: int
    """Training steps that are done: the version of the trainer."""
    total_steps: int | None
    """None for a run without an end, or before the log begins."""
    eta: float | None
    """The staleness bound in force, in versions."""
    paused: bool
    counts: Counts | None
    """Groups and versions; None before training."""
    engine_loads: dict[EngineId, int]
    """Running groups of each engine that is alive."""
    lost_engines: tuple[EngineId, ...]
    generated_tokens: int
    """Of groups that ended."""
    status: str
    """Why the run ended, from `Finish` or summary.json; empty while it continues."""
    error: str
    """What ended a run that failed, or why the log cannot be followed; else empty."""

    def __str__(self) -> str:
        """The state in one line."""
        parts = [self.state if not self.status else f"{self.state} ({self.status})"]
        if self.alive is None:
            parts[0] += ", as far as can be seen from this machine"
        if self.state == "starting":
            parts.append(self.phase)
        if self.counts is not None:
            of = "" if self.total_steps is None else f" of {self.total_steps}"
            parts.append(f"step {self.step}{of}")
        if self.waiting_for and self.alive is not False:
            parts.append(f"waits for {self.waiting_for}")
        if self.eta is not None:
            parts.append(f"eta {self.eta:g}")
        if self.counts is not None:
            counts = self.counts
            gone = counts.filtered + counts.dropped
            parts.append(
                f"groups: {counts.in_flight} in flight, {counts.finished} ready, "
                f"{counts.trained} trained, {gone} filtered or dropped"
            )
        if self.lost_engines:
            parts.append(f"engines lost: {', '.join(map(str, self.lost_engines))}")
        if self.error:
            parts.append(self.error.splitlines()[0])
        return "; ".join(parts)


@dataclass(slots=True)
class Follower:
    """Handles the events of a log as they are appended."""

    events: Path = field(default_factory=Path)
    """The log, which may not exist yet."""
    coordinator: AnyCoordinator | None = None
    generated_tokens: int = 0
    lost: set[EngineId] = field(default_factory=set)
    begun: bool = False
    """Whether training has begun."""
    finished: str = ""
    """The reason of `Finish`."""
    problem: str = ""
    """Why the log is not followed any further."""
    _position: int = 0
    _inode: int = 0

    def refresh(self) -> None:
        """Read what was appended; all of it, if a run that continued has cut its log."""
        try:
            self._begin_again_if_cut()
            if self.problem:
                return
            found = read_appended(self.events, self._position)
            self._position = found.end
            for line in found.lines:
                if line.startswith(_READ):
                    self.follow(decode(line))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self.problem = f"{self.events} cannot be followed: {error}"

    def _begin_again_if_cut(self) -> None:
        inode = self.events.stat().st_ino
        if self._inode not in (0, inode):
            self.coordinator, self.generated_tokens, self._position = None, 0, 0
            self.begun, self.finished, self.problem = False, "", ""
            self.lost.clear()
        self._inode = inode

    def follow(self, record: Record) -> None:
        """Handle one record, the next one of the log.

        Raises:
            ValueError: if no coordinator could have written it.
        """
        match record:
            case RunHeader():
                self.coordinator = coordinator_of(limits_from_fields(record.limits))
            case EventRecord(event=event):
                assert self.coordinator is not None, "the header is the first line"
                if self.begun and isinstance(event, RunStarted):  # it continues after its end
                    self.coordinator = coordinator_of(self.coordinator.limits)
                    self.lost.clear()
                    self.finished = ""
                self.coordinator.handle(event)
                self.begun = True
                if isinstance(event, EngineLost):
                    self.lost.add(event.engine)
                elif isinstance(event, EngineJoined):
                    self.lost.discard(event.engine)
            case ActionRecord(action=Finish(reason)):
                self.finished = reason
            case GroupRecord():
                self.generated_tokens += sum(n for sample in record.segments for _, n in sample)
            case _:
                pass

    def snapshot(
        self, *, alive: bool | None, ended: bool, phase: str = "", status: str = "", error: str = ""
    ) -> Snapshot:
        """The run as far as it was followed.

        Args:
            alive: whether its process runs.
            ended: whether it has come to an end; without, a process that is gone was killed.
            phase: as in `Snapshot`.
            status: of its summary.json, if there is one.
            error: what ended it, if that is known.
        """
        coordinator = self.coordinator
        begun = coordinator if self.begun else None
        state = self._state(alive=alive, ended=ended)
        goes_on = begun is not None and state in ("training", "paused")
        return Snapshot(
            state=state,
            alive=alive,
            phase=phase,
            waiting_for=begun.waiting_for() if begun and goes_on else "",
            step=begun.counts.trained_version if begun else 0,
            total_steps=coordinator.limits.train_steps if coordinator else None,
            eta=coordinator.limits.schedule.eta if coordinator else None,
            paused=bool(begun and begun.paused),
            counts=begun.counts if begun else None,
            engine_loads=begun.engine_loads if begun else {},
            lost_engines=tuple(sorted(self.lost)),
            generated_tokens=self.generated_tokens,
            status=(status or self.finished) if state in ("ending", "ended", "killed") else "",
            error=error or self.problem,
        )

    def _state(self, *, alive: bool | None, ended: bool) -> State:
        if alive is False:
            return "ended" if ended else "killed"
        if not self.begun or self.coordinator is None:
            return "starting"
        if self.finished or self.coordinator.ending:
            return "ending"
        return "paused" if self.coordinator.paused else "training"


def snapshot_of(log: Log) -> Snapshot:
    """What a run did and waited for when its log ended here (`Log.until`), as if it went on.

    Raises:
        ValueError: if the log does not replay.
    """
    follower = Follower()
    for record in (log.header, *log.records):
        follower.follow(record)
    over = bool(follower.finished)
    return follower.snapshot(alive=not over, ended=over)
