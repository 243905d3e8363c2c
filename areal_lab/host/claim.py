"""Claim to a run folder: only the process that wrote process.json last may write into it.

    run on host a hangs ........................ wakes: RunTaken at its next write
                        resumed on host b: its key is in process.json from now on

A process that hangs on another machine cannot be seen to have ended, so its run may be continued
elsewhere, and it may wake up later. A write that had started when it hung is not stopped. Network
file systems may show it another process's file some seconds late.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROCESS_FILE: Final = "process.json"


class RunTaken(RuntimeError):
    """Another process continues the run; the message is one sentence that names it."""


@dataclass(slots=True)
class Claim:
    """Claim of a process to a run folder."""

    folder: Path
    key: str
    """Key of the process, in process.json (`live.presence`)."""
    _seen: tuple[int, int] = (0, 0)
    """File that was read last, by its inode and its time."""

    def check(self) -> None:
        """Return if the folder belongs to this process, or has no such file.

        Raises:
            RunTaken: it is another one's.
        """
        file = self.folder / PROCESS_FILE
        try:
            status = os.stat(file)
            seen = (status.st_ino, status.st_mtime_ns)
            if seen == self._seen:
                return
            found: dict[str, Any] = json.loads(file.read_text())
        except FileNotFoundError:
            return  # of an older version, or a folder of another host
        if found["key"] != self.key:
            process = found["process"]
            raise RunTaken(
                f"process {process['pid']} on host {process['host']} has continued the run "
                f"{self.folder}, which is no longer this process's; nothing more is written here"
            )
        self._seen = seen

    @property
    def taken(self) -> bool:
        """True if `check` would raise."""
        try:
            self.check()
        except RunTaken:
            return True
        return False


def claim_of(folder: Path) -> Claim:
    """Claim of the process that currently owns a run folder."""
    found: dict[str, Any] = json.loads((folder / PROCESS_FILE).read_text())
    return Claim(folder, found["key"])
