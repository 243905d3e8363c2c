"""process.json in a run folder: which process runs it, what it does before and after training.

    present(folder) ... --> alive while the process runs and has not written `ended`
    killed              --> the process is gone, or its id belongs to another one

The file alone proves nothing: who reads it looks for the process (`host.identity`).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from areal_lab.host.claim import PROCESS_FILE, Claim
from areal_lab.host.identity import ProcessIdentity, identity_of, is_alive

FILE: Final = PROCESS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """The content of process.json."""

    key: str
    """Random; requests name it, so that none reaches a later run in the same folder."""
    process: ProcessIdentity
    started_s: float
    """Seconds since the epoch."""
    phase: str
    """What the run does now, as its display says it."""
    phase_since_s: float
    ended: bool = False

    @property
    def alive(self) -> bool | None:
        """Whether the run continues; None if its machine cannot be seen from here."""
        return False if self.ended else is_alive(self.process)


def new_presence(pid: int, phase: str) -> Presence:
    """The presence of a process of this machine, not written yet.

    Raises:
        ProcessLookupError: if the process has ended.
    """
    now_s = time.time()
    return Presence(
        key=secrets.token_hex(8),
        process=identity_of(pid),
        started_s=now_s,
        phase=phase,
        phase_since_s=now_s,
    )


def read_presence(folder: Path) -> Presence | None:
    """The presence of a run; None if the folder has none, as those of older runs.

    Raises:
        ValueError: if the file cannot be read.
    """
    file = folder / FILE
    try:
        value: dict[str, Any] = json.loads(file.read_text())
        return Presence(**{**value, "process": ProcessIdentity(**value["process"])})
    except FileNotFoundError:
        return None
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def write_presence(folder: Path, presence: Presence) -> None:
    """Write the file in one piece: a reader sees the old or the new content."""
    temporary = folder / f".{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(presence), indent=2) + "\n")
    os.replace(temporary, folder / FILE)


def mark_ended(folder: Path) -> None:
    """Write that the run of this process has ended, if it could not do so itself. Idempotent."""
    presence = read_presence(folder)
    mine = presence is not None and presence.process == identity_of(os.getpid())
    if presence is not None and mine and not presence.ended:
        write_presence(folder, replace(presence, ended=True, phase_since_s=time.time()))


class Present:
    """This process runs the folder, from `enter` until `leave` or until another one enters."""

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
        """Of this process to the folder."""
        return Claim(self._folder, self.key)

    def enter(self, phase: str) -> None:
        """Write the file; the key stays if the process that started this one has written it."""
        found, mine = read_presence(self._folder), new_presence(os.getpid(), phase)
        if found is not None and found.process == mine.process and not found.ended:
            mine = replace(mine, key=found.key, started_s=found.started_s)
        self._write(mine)

    def phase(self, text: str) -> None:
        """The run begins another phase.

        Raises:
            RunTaken: another process has entered.
        """
        if self._now is not None and not self._now.ended:
            self.claim.check()
            self._write(replace(self._now, phase=text, phase_since_s=time.time()))

    def leave(self) -> None:
        """The run has ended, however it did. Idempotent; raises as `phase`."""
        if self._now is not None and not self._now.ended:
            self.claim.check()
            self._write(replace(self._now, ended=True, phase_since_s=time.time()))

    def _write(self, presence: Presence) -> None:
        write_presence(self._folder, presence)
        self._now = presence
