"""Recognize a process later, from another one: is it still the same, and does it run?

    this machine and boot, this id namespace    start time of the id in /proc --> alive, or not
    the same host name, another boot            the machine was restarted     --> not alive
    otherwise (a shared disk, a container)      the id says nothing           --> unknown

An id alone does not identify a process, since ids are used again. The start time is in clock ticks
since the boot, which a change of the clock does not move.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_STATE, _START_TICKS = 0, 19
"""Fields of /proc/ID/stat after the name of the program, which may contain anything."""
_ENDED: Final = ("Z", "X")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one machine."""

    host: str
    boot: str
    """Of the machine, with the namespace of its process ids."""
    pid: int
    started_ticks: int
    """Since the boot."""


def identity_of(pid: int) -> ProcessIdentity:
    """Identify a process of this machine, such as `os.getpid()`.

    Raises:
        ProcessLookupError: if it has ended.
    """
    state, ticks = _stat(pid)
    if state in _ENDED:
        raise ProcessLookupError(f"process {pid} has ended")
    return ProcessIdentity(host=socket.gethostname(), boot=_boot(), pid=pid, started_ticks=ticks)


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether the process runs; None if that cannot be seen from here."""
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
    """Of this machine; empty if it does not say."""
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
