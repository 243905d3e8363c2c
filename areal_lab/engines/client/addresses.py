"""Check the addresses of servers that the run does not start; each problem is one line."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import SplitResult, urlsplit

from areal_lab.engines.keys import KEY_VARIABLE

CONNECT_S = 5.0
"""Timeout of the test connection before a run starts."""
_EXAMPLE: Final = "http://127.0.0.1:30000"


class CannotAttach(ValueError):
    """The run cannot use the server at an address; the message is one line."""


def check_addresses(addresses: Sequence[str]) -> None:
    """Check that each address is well-formed and accepts connections."""
    targets = [_host_and_port(address) for address in addresses]
    for index, address in enumerate(addresses):
        if address.rstrip("/") in [other.rstrip("/") for other in addresses[:index]]:
            raise CannotAttach(f"rollout.addresses has {address} twice; list each server once")
    for address, target in zip(addresses, targets, strict=True):
        try:
            socket.create_connection(target, timeout=CONNECT_S).close()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CannotAttach(
                f"rollout.addresses: nothing responds at {address} ({reason}); start a server "
                "there (areal-lab engine serve), or remove the address"
            ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        if parts.username is not None:
            raise ValueError(
                f"it has a key; set {KEY_VARIABLE} to it, which nothing writes to a file"
            )
        if fault := _fault(parts, host, port):
            raise ValueError(fault)
    except ValueError as error:
        raise CannotAttach(
            f"rollout.addresses has {without_key(address)!r}, but an address is "
            f"http://HOST:PORT, as in {_EXAMPLE}: {str(error)[:1].lower()}{str(error)[1:]}"
        ) from error
    assert port is not None
    return host, port


def _fault(parts: SplitResult, host: str, port: int | None) -> str:
    """The problem with the parts of an address; empty without one."""
    if parts.scheme != "http":
        return "it does not begin with http://"
    if not host:
        return "it has no host"
    if not port:
        return "it has no port" if port is None else "nothing listens on port 0"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "it has more than a host and a port"
    try:
        host.encode("idna")  # as in a DNS query; empty and overlong labels fail
    except UnicodeError:
        return f"no host is named {host!r}"
    return "" if host.isprintable() else f"no host is named {host!r}"


def without_key(address: str) -> str:
    """Address for display, without the part before an @, which may be a key."""
    scheme, separator, rest = address.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def port_of(address: str) -> int:
    """Port of a checked address."""
    return _host_and_port(address)[1]


def is_local(address: str) -> bool:
    """Return whether a server is on this machine and can read its shared memory."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
