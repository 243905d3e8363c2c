"""Addresses of servers that somebody else runs: what is wrong with one is said in one line."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import SplitResult, urlsplit

CONNECT_S = 5.0
"""For a connection to an address, before a run starts."""
_EXAMPLE: Final = "http://127.0.0.1:30000"


class CannotAttach(ValueError):
    """An address does not lead to a server that this run can use; one line."""


def check_addresses(addresses: Sequence[str]) -> None:
    """Refuse what is no address, or leads nowhere.

    Raises:
        CannotAttach: for the first one.
    """
    targets = [_host_and_port(address) for address in addresses]
    for index, address in enumerate(addresses):
        if address.rstrip("/") in [other.rstrip("/") for other in addresses[:index]]:
            raise CannotAttach(f"rollout.addresses has {address} twice; each server once")
    for address, target in zip(addresses, targets, strict=True):
        try:
            socket.create_connection(target, timeout=CONNECT_S).close()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CannotAttach(
                f"rollout.addresses: nothing answers at {address} ({reason}); start a server there "
                "(areal-lab engine serve), or leave it out"
            ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        CannotAttach: with what is wrong and an example.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        if fault := _fault(parts, host, port):
            raise ValueError(fault)
    except ValueError as error:
        raise CannotAttach(
            f"rollout.addresses has {address!r}, but an address is http://HOST:PORT, as in "
            f"{_EXAMPLE}: {str(error)[:1].lower()}{str(error)[1:]}"
        ) from error
    assert port is not None
    return host, port


def _fault(parts: SplitResult, host: str, port: int | None) -> str:
    """What is wrong with the parts of an address; empty if nothing is."""
    if parts.scheme != "http":
        return "it does not begin with http://"
    if not host:
        return "it has no host"
    if not port:
        return "it has no port" if port is None else "nothing listens on port 0"
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        return "it has more than a host and a port"
    try:
        host.encode("idna")  # as the system is asked for it; empty and overlong labels fail
    except UnicodeError:
        return f"no host is named {host!r}"
    return "" if host.isprintable() else f"no host is named {host!r}"


def is_local(address: str) -> bool:
    """Whether a server is on this machine, so that it sees our shared memory."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
