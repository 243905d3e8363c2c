"""Ports and addresses of this machine: listening processes, free ports, local addresses."""

from __future__ import annotations

import ipaddress
import socket
from enum import Enum, auto
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from areal_lab.host.process_groups import members

_NEAR_S: Final = 600.0
"""Timeout of a connection to this machine."""
_ANY_PORT: Final = 9
"""Port of another machine; nothing is sent there."""


class Listener(Enum):
    """Process that listens on a port."""

    NONE = auto()
    GROUP = auto()
    OTHER = auto()


def listener_of(port: int) -> int | None:
    """Process that listens on this TCP port; None without one, or if it is another user's."""
    return next((process.pid for process in psutil.process_iter() if _listens(process, port)), None)


def who_listens(port: int, group: int) -> Listener:
    """Return whether no process, one of this process group, or another one listens on the port."""
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


def free_port(address: str) -> int:
    """Return a port of this address on which nothing listens now."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def connect_s(url: str, far_s: float) -> float:
    """Timeout of a connection to a server.

    On this machine no packets are lost: a connection that takes long means that the
    machine is busy.
    """
    try:
        host = urlsplit(url).hostname or ""
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    return max(far_s, _NEAR_S) if near else far_s


def address_towards(host: str) -> str:
    """IPv4 address of this machine from which it reaches another one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # sends nothing, but selects the interface
            return str(probe.getsockname()[0])
    except OSError as error:
        if _has_ipv6(host):
            raise ValueError(
                f"{host} has an IPv6 address only, but machines of a run reach each other by "
                "IPv4; use an IPv4 address of it"
            ) from error
        raise ValueError(f"this machine does not reach {host} ({error})") from error


def _has_ipv6(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET6))
    except OSError:
        return False


def name_of(process: int) -> str:
    """`4711 (python3)`, for display."""
    try:
        return f"{process} ({psutil.Process(process).name()})"
    except psutil.Error:
        return str(process)


def _listens(whose: Any, port: int) -> bool:
    """Return whether a process listens on the port; for the module `psutil`, whether any does."""
    try:
        connections = whose.net_connections("tcp")
    except psutil.Error:
        return False  # it has exited or is another user's
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
