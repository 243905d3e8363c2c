"""The address of an agent, measured on its node."""

from __future__ import annotations

import ipaddress
import socket


def address_of_agent(node: str, run: str) -> str:
    """Address for the agent of a node; empty if the agent has to measure it by connecting to the
    run.

    Ray's address of the node works if it is an address of this machine: other nodes have used it.
    In a container it may be an outside address, and a loopback address works only for a run on the
    same machine.
    """
    run_host = run.rpartition(":")[0]
    if _is_loopback(node) and not _is_loopback(run_host):
        return ""
    try:
        socket.create_server((node, 0)).close()
    except OSError:
        return ""
    return node


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
