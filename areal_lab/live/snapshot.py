"""State of a run and the reason why it waits, computed from its log by replaying its decisions.

events.jsonl --new lines--> Follower (a Coordinator, handles the events) --> Snapshot

So the run does not have to be asked, killed runs can be inspected too, and the same code determines
the reason for waiting in the run and here.
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
"""Prefixes of the lines that count here; a log has many more spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a run at one moment."""

    state: State
    """`starting` until training begins; `paused` manually, though a running step may still end;
    `ending` after a stop or the last step; `killed` if the process is gone without having ended."""
    alive: bool | None
    """True if the process runs; None if its machine cannot be seen from here."""
    phase: str
    """Phase before and after training, as the run's display shows it."""
    waiting_for: str
    """Reason for waiting during training; empty otherwise."""
    step: int
    """Number of complete training steps: the version of the trainer."""
    total_steps: int | None
    """None for a run without an end, or before the log begins."""
    eta: float | None
    """Current staleness bound, in versions."""
    paused: bool
    counts: Counts | None
    """Groups and versions; None before training."""
    engine_loads: dict[EngineId, int]
    """Running groups of each engine that is alive."""
    lost_engines: tuple[EngineId, ...]
    generated_tokens: int
    """Tokens of groups that ended."""
    status: str
    """Why the run ended, from `Finish` or summary.json; empty while it continues."""
    error: str
    """Why a run failed, or why the log cannot be followed; else empty."""

    def __str__(self) -> str:
        """Format the state in one line."""
        parts = [self.state if not self.status else f"{self.state} ({self.status})"]
        if self.alive is None:
            parts[0] += ", as far as can be seen from this machine"
        if self.state == "starting":
            parts.append(self.phase)
        if self.counts is not None or self.step:
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
    """Handle the events of a log as they are appended."""

    events: Path = field(default_factory=Path)
    """Path of the log, which may not exist yet."""
    coordinator: AnyCoordinator | None = None
    generated_tokens: int = 0
    lost: set[EngineId] = field(default_factory=set)
    begun: bool = False
    """True once training has started."""
    finished: str = ""
    """Reason of `Finish`."""
    problem: str = ""
    """Reason why the log is no longer followed."""
    _position: int = 0
    _inode: int = 0

    def refresh(self) -> None:
        """Read new lines; the whole log, if a continued run has cut it."""
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
        """Handle the next record of the log."""
        match record:
            case RunHeader():
                self.coordinator = coordinator_of(limits_from_fields(record.limits))
            case EventRecord(event=event):
                if self.coordinator is None:
                    raise ValueError("the first line of a log must be its run header (kind run)")
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
        self,
        *,
        alive: bool | None,
        ended: bool,
        phase: str = "",
        status: str = "",
        error: str = "",
        step: int | None = None,
    ) -> Snapshot:
        """State of the run as far as it was followed.

        Args:
            ended: whether it has come to an end; without, a process that is gone was killed.
            step: of a run without a log, once it trains.
        """
        coordinator = self.coordinator
        begun = coordinator if self.begun else None
        state = self._state(alive=alive, ended=ended)
        if state == "starting" and step is not None:
            state = "training"
        goes_on = begun is not None and state in ("training", "paused")
        return Snapshot(
            state=state,
            alive=alive,
            phase=phase,
            waiting_for=begun.waiting_for() if begun and goes_on else "",
            step=begun.counts.trained_version if begun else step or 0,
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
    """Return the state of a run at the end of its log (`Log.until`), as if it were still
    running.
    """
    follower = Follower()
    for record in (log.header, *log.records):
        follower.follow(record)
    over = bool(follower.finished)
    return follower.snapshot(alive=not over, ended=over)
