"""process.json, the pid file of a run folder: the process that runs it, and its phase.

    present(folder) ... --> alive while the process runs and has not written `ended`
    killed              --> the process is gone, or its id belongs to another one

The file alone proves nothing: a reader looks for the process (`identity_of`).

Recognize a process later, from another one: whether it is the same, and whether it runs.

    this machine and boot, this id namespace    start time of the id in /proc --> alive, or not
    the same host name, another boot            the machine was restarted     --> not alive
    otherwise (a shared disk, a container)      the id says nothing           --> unknown

An id alone does not identify a process, since ids are reused. The start time is in clock ticks
since the boot, which a change of the clock does not move.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from areal_lab.host.claim import PROCESS_FILE, Claim
from areal_lab.host.durable import replace_text
from areal_lab.host.foreign import Parsed, read_json, unreadable
from areal_lab.runlog.records import Seconds

FILE: Final = PROCESS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one machine."""

    host: str
    boot: str
    """Boot of the machine, with the namespace of its process ids."""
    pid: int
    started_ticks: int
    """Start time in clock ticks since the boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Content of process.json."""

    key: str
    """Random; requests name it, so none reaches a later run in the same folder."""
    process: ProcessIdentity
    started_s: Seconds
    """Seconds since the epoch."""
    phase: str
    """Phase of the run, as its display shows it."""
    phase_since_s: Seconds
    ended: bool = False

    @property
    def alive(self) -> bool | None:
        """True if the run continues; None if its machine cannot be seen from here."""
        return False if self.ended else is_alive(self.process)


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_STATE, _START_TICKS = 0, 19
"""Fields of /proc/ID/stat after the name of the program, which may contain anything."""
_ENDED: Final = ("Z", "X")


def is_alive(process: ProcessIdentity) -> bool | None:
    """Return whether the process runs; None if that cannot be seen from here."""
    boot = _boot()
    if not boot or process.boot != boot:
        restarted = process.boot.partition(" ")[0] != boot.partition(" ")[0]
        same_host = process.host == socket.gethostname()
        return False if boot and process.boot and same_host and restarted else None
    try:
        state, ticks = _stat(process.pid)
    except ProcessLookupError:
        return False
    return ticks == process.started_ticks and state not in _ENDED


def _boot() -> str:
    """Boot id of this machine; empty without one."""
    try:
        return f"{_BOOT.read_text().strip()} {_ID_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    fields = text[text.rindex(")") + 1 :].split()
    return fields[_STATE], int(fields[_START_TICKS])


_PRESENCE: Final = Parsed[Presence](Presence)


def new_presence(pid: int, phase: str) -> Presence:
    """Create the presence of a process of this machine, without writing it."""
    now_s = time.time()
    return Presence(
        key=secrets.token_hex(8),
        process=identity_of(pid),
        started_s=now_s,
        phase=phase,
        phase_since_s=now_s,
    )


def read_presence(folder: Path) -> Presence | None:
    """Read the pid file of a run; None if the folder has none, as in older runs."""
    file = folder / FILE
    try:
        return _PRESENCE(read_json(file))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise unreadable(file, error) from error


def write_presence(folder: Path, presence: Presence) -> None:
    """Write the file atomically: a reader sees the old or the new content."""
    replace_text(folder / FILE, json.dumps(asdict(presence), indent=2) + "\n")


def mark_ended(folder: Path) -> None:
    """Write that the run of this process has ended, if it could not do so itself. Idempotent."""
    presence = read_presence(folder)
    mine = presence is not None and presence.process == identity_of(os.getpid())
    if presence is not None and mine and not presence.ended:
        write_presence(folder, replace(presence, ended=True, phase_since_s=time.time()))


class Present:
    """The pid file of this process, from `enter` until `leave` or until another process enters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now: Presence | None = None

    @property
    def key(self) -> str:
        """See `Presence.key`."""
        assert self._now is not None, "enter comes first"
        return self._now.key

    @property
    def claim(self) -> Claim:
        """Claim of this process to the folder."""
        return Claim(self._folder, self.key)

    def enter(self, phase: str) -> None:
        """Write the file; the key stays if the process that started this one has written it."""
        found, mine = read_presence(self._folder), new_presence(os.getpid(), phase)
        if found is not None and found.process == mine.process and not found.ended:
            mine = replace(mine, key=found.key, started_s=found.started_s)
        self._write(mine)

    def phase(self, text: str) -> None:
        """Start another phase of the run."""
        if self._now is not None and not self._now.ended:
            self.claim.check()
            self._write(replace(self._now, phase=text, phase_since_s=time.time()))

    def leave(self) -> None:
        """Write the end of the run, for any reason. Idempotent; raises as `phase`."""
        if self._now is not None and not self._now.ended:
            self.claim.check()
            self._write(replace(self._now, ended=True, phase_since_s=time.time()))

    def _write(self, presence: Presence) -> None:
        write_presence(self._folder, presence)
        self._now = presence


def identity_of(pid: int) -> ProcessIdentity:
    """Identify a process of this machine, such as `os.getpid()`; ProcessLookupError if it has
    ended.
    """
    state, ticks = _stat(pid)
    if state in _ENDED:
        raise ProcessLookupError(f"process {pid} has ended")
    return ProcessIdentity(host=socket.gethostname(), boot=_boot(), pid=pid, started_ticks=ticks)
