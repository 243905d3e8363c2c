"""Who listens on a port, as far as this user may know."""

from __future__ import annotations

import socket
from enum import Enum, auto
from typing import Any

import psutil

from areal_lab.host.processes import members


class Listener(Enum):
    """Who listens."""

    NOBODY = auto()
    GROUP = auto()
    OTHER = auto()


def listener_of(port: int) -> int | None:
    """A process that listens on this TCP port; None if none does, or it is another user's."""
    return next((process.pid for process in psutil.process_iter() if _listens(process, port)), None)


def who_listens(port: int, group: int) -> Listener:
    """Whether a process of this process group listens on the port, or another one."""
    with socket.socket() as probe:
        # Much cheaper than a look at every process. A port that is only bound can be bound again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return Listener.NOBODY
        except OSError:
            pass  # somebody listens
    # An engine inherits its socket from us, so it is not enough to ask which process has it.
    if any(_listens(process, port) for process in members(group)):
        return Listener.GROUP
    return Listener.OTHER if _listens(psutil, port) else Listener.NOBODY


def name_of(process: int) -> str:
    """`4711 (python3)`, for people."""
    try:
        return f"{process} ({psutil.Process(process).name()})"
    except psutil.Error:
        return str(process)


def _listens(whose: Any, port: int) -> bool:
    """Whether a process listens on the port; of the module `psutil`, whether any does."""
    try:
        connections = whose.net_connections("tcp")
    except psutil.Error:
        return False  # it is gone or another user's
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
