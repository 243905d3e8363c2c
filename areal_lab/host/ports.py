"""Who listens on a port: told from /proc, so on Linux only."""

from __future__ import annotations

import os
from enum import Enum, auto
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"  # state TCP_LISTEN in /proc/net/tcp


class Listener(Enum):
    """Who listens."""

    NOBODY = auto()
    GROUP = auto()
    OTHER = auto()
    UNKNOWN = auto()
    """There is no /proc to tell."""


def listener_of(port: int) -> int | None:
    """A process that listens on this TCP port, as far as this user may know; None if none does."""
    inodes = _listening(port)
    if not inodes:
        return None
    for process in _PROC.iterdir():
        if process.name.isdigit() and not inodes.isdisjoint(_sockets(process)):
            return int(process.name)
    return None


def who_listens(port: int, group: int) -> Listener:
    """Whether a process of this process group listens on the port, or another one."""
    inodes = _listening(port)
    if inodes is None:
        return Listener.UNKNOWN
    if not inodes:
        return Listener.NOBODY
    for process in _PROC.iterdir():
        if not process.name.isdigit():
            continue
        try:
            if os.getpgid(int(process.name)) != group:
                continue
        except ProcessLookupError:
            continue
        if not inodes.isdisjoint(_sockets(process)):
            return Listener.GROUP
    return Listener.OTHER


def name_of(process: int) -> str:
    """`4711 (python3)`, for people."""
    try:
        return f"{process} ({(_PROC / str(process) / 'comm').read_text().strip()})"
    except OSError:
        return str(process)


def _listening(port: int) -> set[str] | None:
    """Inodes of the sockets that listen on the port; None where there is no such table."""
    inodes = set()
    tables = [_PROC / "net" / name for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return None
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _sockets(process: Path) -> set[str]:
    """Sockets that a process has open; empty if it is gone or another user's."""
    found = set()
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                found.add(os.readlink(descriptor))
            except OSError:
                continue  # closed just now
    except OSError:
        pass
    return found
