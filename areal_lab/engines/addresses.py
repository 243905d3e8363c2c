"""Addresses of servers that somebody else runs: what is wrong with one is said in one line."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

CONNECT_S = 5.0
"""For a connection to an address, before a run starts."""


class CannotAttach(ValueError):
    """An address does not lead to a server that this run can use; one line."""


def check_addresses(addresses: Sequence[str]) -> None:
    """Refuse what is no address, or leads nowhere.

    Raises:
        CannotAttach: for the first one.
    """
    for index, address in enumerate(addresses):
        parts = urlsplit(address)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or port is None or parts.path.strip("/"):
            raise CannotAttach(
                f"rollout.addresses has {address!r}, but an address is http://HOST:PORT"
            )
        if address.rstrip("/") in [other.rstrip("/") for other in addresses[:index]]:
            raise CannotAttach(f"rollout.addresses has {address} twice; each server once")
        try:
            socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CannotAttach(
                f"rollout.addresses: nothing answers at {address} ({reason}); start a server there "
                "(areal-lab engine serve), or leave it out"
            ) from error


def is_local(address: str) -> bool:
    """Whether a server is on this machine, so that it sees our shared memory."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
