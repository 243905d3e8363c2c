"""Find the process that listens on a port, as far as this user may see."""

from __future__ import annotations

import socket
from enum import Enum, auto
from typing import Any

import psutil

from areal_lab.host.process_groups import members


class Listener(Enum):
    """Which process listens on a port."""

    NONE = auto()
    GROUP = auto()
    OTHER = auto()


def listener_of(port: int) -> int | None:
    """A process that listens on this TCP port; None if there is none or it is another user's."""
    return next((process.pid for process in psutil.process_iter() if _listens(process, port)), None)


def who_listens(port: int, group: int) -> Listener:
    """Whether no process, one of this process group, or another one listens on the port."""
    with socket.socket() as probe:
        # Much cheaper than checking every process. A port that is only bound can be bound again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return Listener.NONE
        except OSError:
            pass  # some process listens
    # An engine inherits its socket from us, so several processes may have it.
    if any(_listens(process, port) for process in members(group)):
        return Listener.GROUP
    return Listener.OTHER if _listens(psutil, port) else Listener.NONE


def name_of(process: int) -> str:
    """`4711 (python3)`, for display."""
    try:
        return f"{process} ({psutil.Process(process).name()})"
    except psutil.Error:
        return str(process)


def _listens(whose: Any, port: int) -> bool:
    """Whether a process listens on the port; for the module `psutil`, whether any does."""
    try:
        connections = whose.net_connections("tcp")
    except psutil.Error:
        return False  # it has exited or is another user's
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
